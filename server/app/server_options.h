// SPDX-License-Identifier: Apache-2.0
// Two groups of a server's options: RankOptions for several processes that are one server (docs/scaling.md),
// and SecurityOptions for encryption and for who may do what (docs/security.md). ServerOptions (server.h) has
// both. The file is shorter than 60 lines because three headers include it, and security.h needs no Server.
#ifndef LOSSD_SERVER_APP_SERVER_OPTIONS_H_
#define LOSSD_SERVER_APP_SERVER_OPTIONS_H_

#include <functional>
#include <string>

#include "absl/time/time.h"
#include "server/ranks/start.h"

namespace lossd::app {

// This process as one of several that are one server.
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

  // For rank 0. `stop_requested` says whether rank 0 stops waiting for the other ranks. `on_leaving` is
  // called when another rank was asked to stop, on a thread of the server, once.
  std::function<bool()> stop_requested = [] { return false; };
  std::function<void()> on_leaving = [] {};

  bool several() const { return launch.ranks > 1; }
};

// Encryption, and who may do what. The texts are paths of files, which docs/security.md describes; empty:
// none.
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
