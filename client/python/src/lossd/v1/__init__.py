# SPDX-License-Identifier: Apache-2.0
"""Messages of the protocol, package lossd.v1, and descriptions.py, the classes of those with which the server describes something;
generated from proto/lossd/v1/*.proto, which are their manual."""
