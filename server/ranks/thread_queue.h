// SPDX-License-Identifier: Apache-2.0
// Messages between two threads. Thread-safe.
#ifndef LOSSD_SERVER_RANKS_THREAD_QUEUE_H_
#define LOSSD_SERVER_RANKS_THREAD_QUEUE_H_

#include <deque>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace lossd::ranks {

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

#endif  // LOSSD_SERVER_RANKS_THREAD_QUEUE_H_
