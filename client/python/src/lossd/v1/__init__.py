# SPDX-License-Identifier: Apache-2.0
"""The modules that are made when the package is built: the messages of the protocol, which proto/lossd/v1/*.proto documents;
descriptions.py, the classes of the server's descriptions; library.py, the functions of liblossd.so."""
