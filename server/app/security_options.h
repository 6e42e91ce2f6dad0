// SPDX-License-Identifier: Apache-2.0
// What a server's flags say about encryption and about who may do what.
#ifndef LOSSD_SERVER_APP_SECURITY_OPTIONS_H_
#define LOSSD_SERVER_APP_SECURITY_OPTIONS_H_

#include <string>

namespace lossd::app {

// Paths; empty: none. docs/security.md describes the files.
struct SecurityOptions {
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;
  std::string role_file;
  std::string token_file;
  bool insecure = false;    // allow addresses beyond the loopback without TLS, or without asking who calls
  bool http_tls = false;    // HTTP over TLS, with the same certificate
  bool http_token = false;  // HTTP wants a reader's token, except for the health paths
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_SECURITY_OPTIONS_H_
