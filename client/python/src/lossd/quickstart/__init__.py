# SPDX-License-Identifier: Apache-2.0
"""`python -m lossd.quickstart`: trains a tiny language model through a server of its own, in about a minute."""
