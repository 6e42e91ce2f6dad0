// SPDX-License-Identifier: Apache-2.0
#include "server/access/connection_acceptor.h"

#include <poll.h>
#include <pthread.h>

#include <cerrno>

namespace lossd::access {
namespace {

constexpr absl::Duration kBeat = absl::Seconds(1);

}  // namespace

ConnectionAcceptor::~ConnectionAcceptor() { Stop(); }

void ConnectionAcceptor::Start(const char* thread_name, Take take) {
  take_ = std::move(take);
  beat_.Beat();
  runs_ = true;
  thread_ = std::thread([this, thread_name] {
    pthread_setname_np(pthread_self(), thread_name);
    Run();
  });
}

void ConnectionAcceptor::Stop() {
  runs_ = false;
  if (thread_.joinable()) {
    eventfd_write(wake_.get(), 1);
    thread_.join();
  }
  entrance_.CloseListeners();
}

void ConnectionAcceptor::Run() {
  while (true) {
    std::vector<pollfd> ready = {{.fd = wake_.get(), .events = POLLIN}};
    const absl::Duration wait = entrance_.AddTo(&ready) ? kBeat : Entrance::kBehind;
    if (poll(ready.data(), ready.size(), static_cast<int>(absl::ToInt64Milliseconds(wait))) < 0) {
      if (errno != EINTR) return;
      continue;
    }
    beat_.Beat();
    if (ready.front().revents != 0) return;
    for (size_t i = 1; i < ready.size(); ++i) {
      if (ready[i].revents != 0) Accept(ready[i].fd);
    }
  }
}

void ConnectionAcceptor::Accept(int listener) {
  std::optional<Connection> connection = entrance_.Accept(listener);
  if (!connection.has_value()) return;
  if (BringsDescriptors(*connection) && !IsOwnUser(connection->peer)) {
    if (relay_ == nullptr) relay_ = std::make_unique<Relay>();
    connection->socket = relay_->Stand(std::move(connection->socket));
    if (!connection->socket) return;
  }
  take_(listener, connection->socket.Release());
}

ConnectionAcceptor::Take GrpcTaker(grpc::ServerBuilder* builder,
                                   const std::shared_ptr<grpc::ServerCredentials>& credentials) {
  const std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> taker =
      builder->experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials);
  return [taker](int listener, int connection) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters accepted;
    accepted.listener_fd = listener;
    accepted.fd = connection;
    taker->HandleNewConnection(&accepted);
  };
}

}  // namespace lossd::access
