# SPDX-License-Identifier: Apache-2.0
"""What is made when the package is built: the messages of the protocol, whose manual is proto/lossd/v1/*.proto; descriptions.py,
classes for those with which the server describes something; library.py, the functions of liblossd.so."""
