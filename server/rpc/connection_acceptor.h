// SPDX-License-Identifier: Apache-2.0
// Accepts the connections of a gRPC server, so that their number is bounded, in all and per address, or
// per user where they come over a Unix socket. gRPC itself takes as many as come.
//
// Hands each accepted connection to gRPC (grpc::experimental::ExternalConnectionAcceptor). One beyond a limit
// is closed at once, before any memory is spent on it; those that are open stay. Connections end without a
// word to this class: it asks the kernel whether a descriptor is still the connection it was.
//
// Thread-safe, but for Start and Stop.
#ifndef LOSSD_SERVER_RPC_CONNECTION_ACCEPTOR_H_
#define LOSSD_SERVER_RPC_CONNECTION_ACCEPTOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/rpc/listening_socket.h"

namespace lossd::rpc {

struct ConnectionLimits {
  int64_t in_all = 512;
  int64_t per_address = 128;
  absl::Duration dead_peer_timeout = absl::Seconds(20);  // data sent and not acknowledged for so long ends it
  // A connection was closed because of the limit that this flag sets. On the acceptor's thread.
  std::function<void(absl::string_view flag, absl::string_view address)> on_refused =
      [](absl::string_view, absl::string_view) {};
};

class ConnectionAcceptor {
 public:
  // Gets a connection: the descriptor of the listening socket, and its own.
  using Take = std::function<void(int listener, int connection)>;

  ConnectionAcceptor(std::vector<ListeningSocket> listeners, const ConnectionLimits& limits);
  ~ConnectionAcceptor();
  ConnectionAcceptor(const ConnectionAcceptor&) = delete;
  ConnectionAcceptor& operator=(const ConnectionAcceptor&) = delete;

  // Call once.
  void Start(Take take);
  // Accepts nothing more. Later calls do nothing.
  void Stop();
  // Connections that are open.
  int64_t connections() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Connection {
    uint64_t inode = 0;  // of the socket
    std::string address;
  };

  void Run();
  void AcceptFrom(int listener);
  // The flag of the limit that keeps a connection out; "": none does.
  absl::string_view Admit(int descriptor, const std::string& address) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::string_view LimitReached(const std::string& address) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ForgetClosed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::vector<ListeningSocket> listeners_;
  const ConnectionLimits limits_;
  const int wake_;  // an eventfd
  Take take_;
  std::thread thread_;

  absl::Mutex mutex_;
  std::map<int, Connection> connections_ ABSL_GUARDED_BY(mutex_);  // by descriptor, which is gRPC's
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CONNECTION_ACCEPTOR_H_
