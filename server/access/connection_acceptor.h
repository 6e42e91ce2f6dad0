// SPDX-License-Identifier: Apache-2.0
// ConnectionAcceptor accepts connections on a thread of its own and hands them to a library that reads them
// by itself: gRPC or the HTTP server. GrpcTaker is the function that hands a connection to gRPC.
//
// Where a reader does not know descriptors and the kernel cannot keep them out, connections of other users
// over Unix sockets go through a relay (closer.h). Connections of the server's own user and of root never do:
// these users could do worse.
//
// Thread-safe, but for Start and Stop.
#ifndef LOSSD_SERVER_ACCESS_CONNECTION_ACCEPTOR_H_
#define LOSSD_SERVER_ACCESS_CONNECTION_ACCEPTOR_H_

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <sys/eventfd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "server/access/closer.h"
#include "server/access/entrance.h"

namespace lossd::access {

class ConnectionAcceptor {
 public:
  // Gets a connection: the descriptor of the listening socket, and its own, which it closes.
  using Take = std::function<void(int listener, int connection)>;

  ConnectionAcceptor(std::vector<ListeningSocket> listeners, EntranceOptions options)
      : entrance_(std::move(listeners), std::move(options)) {}
  ~ConnectionAcceptor();
  ConnectionAcceptor(const ConnectionAcceptor&) = delete;
  ConnectionAcceptor& operator=(const ConnectionAcceptor&) = delete;

  // Call once. `thread_name`: as debuggers show it; at most 15 characters.
  void Start(const char* thread_name, Take take);
  // Accepts nothing more, and closes the listening sockets. Later calls do nothing.
  void Stop();
  // The reader is about to close a connection (EntranceOptions::oldest_makes_room).
  void Closing(int connection) { entrance_.Closing(connection); }
  // Whose a connection is (Entrance).
  std::string NameAt(absl::string_view loopback_address) const { return entrance_.NameAt(loopback_address); }
  std::string NameOf(int connection) const { return entrance_.NameOf(connection); }
  // Connections that are open.
  int64_t connections() { return entrance_.connections(); }
  // How long ago the thread last had nothing to do or ended something. Zero before Start and after Stop. At
  // any time.
  absl::Duration Silence() const { return runs_ ? beat_.Silence() : absl::ZeroDuration(); }

 private:
  void Run();
  void Accept(int listener);

  Entrance entrance_;
  const wire::OwnedDescriptor wake_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  Take take_;
  std::unique_ptr<Relay> relay_;  // of the thread, made when it is needed
  clocks::Heartbeat beat_;
  std::atomic<bool> runs_{false};
  std::thread thread_;
};

// Hands accepted connections to the gRPC server that `builder` builds, as soon as the server is there.
// Otherwise gRPC would accept as many connections as come. The credentials outlive the server. Stateless;
// thread-safe.
ConnectionAcceptor::Take GrpcTaker(grpc::ServerBuilder* builder,
                                   const std::shared_ptr<grpc::ServerCredentials>& credentials);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_CONNECTION_ACCEPTOR_H_
