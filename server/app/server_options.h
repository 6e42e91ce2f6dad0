// SPDX-License-Identifier: Apache-2.0
// What a server's flags say of several processes that are one server (docs/scaling.md).
#ifndef LOSSD_SERVER_APP_SERVER_OPTIONS_H_
#define LOSSD_SERVER_APP_SERVER_OPTIONS_H_

#include <functional>
#include <string>

#include "absl/time/time.h"
#include "server/ranks/start.h"

namespace lossd::app {

struct RankOptions {
  ranks::Launch launch;  // one rank: this process alone
  std::string
      listen;  // rank 0 waits for the others there, "host:port"; empty: follows from the leader's address
  std::string
      host;  // an address of this host that the other ranks reach; empty: that of the way to the leader
  // What carries sums and exchanges between the ranks (kernels::BackendChoice).
  std::string collectives = "auto";
  // Rows lie in memory that rank 0 shares with the ranks of its host; else they travel in messages.
  bool shared_memory = true;
  std::string secret_file;  // what admits a rank; empty: nothing
  std::string ca;           // authorities of the leader's certificate, a PEM file; empty: no TLS
  std::string worker_http;  // of the other ranks, as ServerOptions::http; empty: none
  absl::Duration timeout = absl::Minutes(5);             // for all ranks to come together
  absl::Duration silence_timeout = absl::Seconds(30);    // a rank that answers no ping for so long is lost
  absl::Duration collective_timeout = absl::Minutes(1);  // for the other ranks to do their part of a sum

  // Of rank 0. Whether to stop waiting for the others; and called when one of the others was asked to stop,
  // on a thread of the server's, once.
  std::function<bool()> stop_requested = [] { return false; };
  std::function<void()> on_leaving = [] {};

  bool several() const { return launch.ranks > 1; }
};

// What a server's flags say about encryption and about who may do what.

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

#endif  // LOSSD_SERVER_APP_SERVER_OPTIONS_H_
