// SPDX-License-Identifier: Apache-2.0
// ConnectionAcceptor accepts connections on a thread of its own and hands them to a library that reads them
// by itself: gRPC or the HTTP server. GrpcTaker is the function that hands a connection to gRPC.
//
// If the kernel cannot keep descriptors out of Unix sockets, connections of other users go through a relay
// (closer.h), because the libraries do not expect descriptors. Connections of the server's own user and of
// root do not, because these users could harm the server anyway.
//
// Thread-safe, except for Start and Stop.
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
  // Takes a connection and closes it in the end. `listener` and `connection` are the descriptors of the
  // listening socket and of the connection.
  using Take = std::function<void(int listener, int connection)>;

  ConnectionAcceptor(std::vector<ListeningSocket> listeners, EntranceOptions options)
      : entrance_(std::move(listeners), std::move(options)) {}
  ~ConnectionAcceptor();
  ConnectionAcceptor(const ConnectionAcceptor&) = delete;
  ConnectionAcceptor& operator=(const ConnectionAcceptor&) = delete;

  // Starts the thread. Call once. `thread_name`: the name that debuggers show, at most 15 characters.
  void Start(const char* thread_name, Take take);
  // Stops accepting, and closes the listening sockets. Later calls do nothing.
  void Stop();
  // Call before the reader closes a connection, if EntranceOptions::oldest_makes_room.
  void Closing(int connection) { entrance_.Closing(connection); }
  // The owner of a connection (Entrance::NameAt, Entrance::NameOf).
  std::string NameAt(absl::string_view loopback_address) const { return entrance_.NameAt(loopback_address); }
  std::string NameOf(int connection) const { return entrance_.NameOf(connection); }
  // The number of open connections.
  int64_t connections() { return entrance_.connections(); }
  // How long ago the thread last gave a sign of life: it was idle, or had ended a piece of work. Zero before
  // Start and after Stop. May be called at any time.
  absl::Duration Silence() const { return runs_ ? beat_.Silence() : absl::ZeroDuration(); }

 private:
  void Run();
  void Accept(int listener);

  Entrance entrance_;
  const wire::OwnedDescriptor wake_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  Take take_;
  std::unique_ptr<Relay> relay_;  // used by the thread, which makes it when needed
  clocks::Heartbeat beat_;
  std::atomic<bool> runs_{false};
  std::thread thread_;
};

// Returns a function that hands accepted connections to the gRPC server that `builder` builds, once the
// server exists. (If gRPC accepted connections itself, their number would not be bounded.) The credentials
// outlive the server. Stateless; thread-safe.
ConnectionAcceptor::Take GrpcTaker(grpc::ServerBuilder* builder,
                                   const std::shared_ptr<grpc::ServerCredentials>& credentials);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_CONNECTION_ACCEPTOR_H_
