// SPDX-License-Identifier: Apache-2.0
// Settings of the gRPC connection between the leader and a worker, for both ends: the largest message, the
// time after which a silent end counts as lost, and the secret that admits a rank. LocalAddressFor finds the
// address at which other hosts reach this host. ThreadQueue passes messages between two threads of a rank.
//
// The functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_RANKS_CHANNEL_H_
#define LOSSD_SERVER_RANKS_CHANNEL_H_

#include <grpcpp/server_builder.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/channel_arguments.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::ranks {

struct ChannelLimits {
  int64_t slice_bytes = 0;  // the most bytes of a slice's hidden states
  // An end that answers no ping for this long counts as lost.
  absl::Duration silence = absl::Seconds(30);
};

// A hidden state of a teacher may be at most this many times as large as a hidden state of the student.
inline constexpr int64_t kMostTeacherHidden = 16;

// The size of the largest message: a slice with every optional input or result of its rows, or one row of a
// tensor.
int64_t MaxMessageBytes(const ChannelLimits& limits);

void Configure(const ChannelLimits& limits, grpc::ServerBuilder* builder);
grpc::ChannelArguments ArgumentsOf(const ChannelLimits& limits);

// A random, unused name for an abstract Unix socket, at which workers in the leader's own process connect.
// gRPC's in-process channel is not used: it aborts the program when a call begins while the server ends.
std::string NewLocalName();

// The client sends the secret as metadata. CheckSecret returns UNAUTHENTICATED if the client's secret differs
// from `secret`. The time that the comparison takes does not depend on which bytes differ. An empty `secret`
// admits every client.
void AddSecret(const std::string& secret, grpc::ClientContext* context);
absl::Status CheckSecret(const std::string& secret, const grpc::ServerContext& context);

// The address of this host from which packets to `host` are sent. If `host` is this host, the result is an
// address that other hosts can reach. The result is a loopback address only if `host` is a loopback address.
// UNAVAILABLE if the name cannot be resolved.
absl::StatusOr<std::string> LocalAddressFor(const std::string& host);

// The name of this host, for people; "unknown" if the system does not report a name.
std::string HostName();

// An unbounded queue of messages from one thread to another. Thread-safe.
template <typename Message>
class ThreadQueue {
 public:
  void Push(Message message) {
    absl::MutexLock lock(&mutex_);
    messages_.push_back(std::move(message));
  }
  void Close() {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
  }
  // Waits for a message. nullopt once the queue is closed; the messages still in the queue are dropped.
  std::optional<Message> Pop() {
    absl::MutexLock lock(&mutex_);
    const auto news = [this] {
      mutex_.AssertHeld();
      return closed_ || !messages_.empty();
    };
    mutex_.Await(absl::Condition(&news));
    if (closed_) return std::nullopt;
    Message message = std::move(messages_.front());
    messages_.pop_front();
    return message;
  }

 private:
  absl::Mutex mutex_;
  std::deque<Message> messages_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_CHANNEL_H_
