// SPDX-License-Identifier: Apache-2.0
// Pulse finds out whether gRPC's threads answer. The server keeps a connection to itself, and Pulse asks gRPC
// for a sign of life over it every second. The question goes the way that clients' calls go, through the
// threads that read and write connections.
//
// Pulse is thread-safe.
#ifndef LOSSD_SERVER_RPC_PULSE_H_
#define LOSSD_SERVER_RPC_PULSE_H_

#include <grpcpp/server_builder.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "kernels/exchange_times.h"
#include "proto/wire/region_packets.h"

namespace lossd::rpc {

// Runs a function on a thread of its own, again and again, until destroyed.
class Periodic {
 public:
  // The first run is after one `pause`. `run` must be quick: the destructor waits for it.
  Periodic(absl::Duration pause, absl::AnyInvocable<void()> run)
      : thread_([this, pause, run = std::move(run)]() mutable {
          while (!stopping_.AwaitFor(pause)) run();
        }) {}
  ~Periodic() {
    stopping_.Notify();
    thread_.join();
  }

 private:
  clocks::Event stopping_;
  std::thread thread_;
};

class Pulse {
 public:
  // Gives the builder a way to take the connection. Before the server is built.
  explicit Pulse(grpc::ServerBuilder* builder);

  // Once the server is there.
  void Start();
  // Before it shuts down; later calls do nothing. Silence is zero from then on.
  void Stop();

  // How long gRPC has not answered.
  absl::Duration Silence() const { return watched_ ? beat_.Silence() : absl::ZeroDuration(); }

 private:
  bool Connect();
  void Ask();
  void ReadAnswers();

  const std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> taker_;
  wire::OwnedDescriptor socket_;
  std::string unread_;  // of a frame that has not come as a whole
  int unanswered_ = 0;  // questions
  std::atomic<bool> watched_{false};
  kernels::Heartbeat beat_;
  std::optional<Periodic> thread_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_PULSE_H_
