# SPDX-License-Identifier: Apache-2.0
"""The version of this package."""

from importlib import metadata

VERSION: str = metadata.version("lossd")
