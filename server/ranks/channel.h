// SPDX-License-Identifier: Apache-2.0
// What both ends of the ranks' connection agree on: sizes of messages, how soon a silent end counts as lost,
// and the secret that admits a rank. LocalAddressFor finds the address at which other hosts reach this one,
// and ThreadQueue passes messages between two threads of a rank.
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
  // An end that answers no ping for so long is lost.
  absl::Duration silence = absl::Seconds(30);
};

// How many times as large as the student's a hidden state of a teacher may be.
inline constexpr int64_t kMostTeacherHidden = 16;

// The largest message: a slice with all that its rows may have, or a row of a tensor.
int64_t MaxMessageBytes(const ChannelLimits& limits);

void Configure(const ChannelLimits& limits, grpc::ServerBuilder* builder);
grpc::ChannelArguments ArgumentsOf(const ChannelLimits& limits);

// A random name that nobody has yet, for an abstract Unix socket where a leader takes workers of its own
// process, since gRPC's channel within a process ends the program when a call begins while the server ends.
std::string NewLocalName();

// The secret travels as metadata. UNAUTHENTICATED if it is not this one; the time does not depend on where
// they differ. An empty secret admits everybody.
void AddSecret(const std::string& secret, grpc::ClientContext* context);
absl::Status CheckSecret(const std::string& secret, const grpc::ServerContext& context);

// The address of this host from which `host` is reached; of `host` itself, where that is this one, an address
// that others reach. A loopback address only if `host` is one. UNAVAILABLE if the name cannot be resolved.
absl::StatusOr<std::string> LocalAddressFor(const std::string& host);

// What this host is called, for people; "unknown" if the system does not say.
std::string HostName();

// Messages between two threads. Thread-safe.
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
  // nullopt once it is closed; what is left is dropped.
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
