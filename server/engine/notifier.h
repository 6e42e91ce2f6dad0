// SPDX-License-Identifier: Apache-2.0
// Calls stream observers, one event at a time, on a thread of its own: neither the device thread nor a
// caller of the engine ever waits for an observer, and no lock is held while one runs.
//
// Thread-safe. The queue is bounded by what causes events: slices in staging buffers and open streams.
#ifndef LOSSD_SERVER_ENGINE_NOTIFIER_H_
#define LOSSD_SERVER_ENGINE_NOTIFIER_H_

#include <deque>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/runtime.h"

namespace lossd::engine {

class Notifier final : public Runtime::Loop {
 public:
  using Event = absl::AnyInvocable<void()>;

  // `runtime` outlives the notifier.
  explicit Notifier(Runtime* runtime);
  // Runs what is queued, then joins.
  ~Notifier() override;

  // Events run in the order of Post and are destroyed on the notifier's thread.
  void Post(Event event) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() override ABSL_LOCKS_EXCLUDED(mutex_);
  Progress RunSome() override ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasNews() override ABSL_LOCKS_EXCLUDED(mutex_);
  // What is queued, removed.
  std::deque<Event> TakeQueued() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex mutex_;
  absl::CondVar posted_;
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);
  bool news_ ABSL_GUARDED_BY(mutex_) = false;  // since the queue was last looked at
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::AnyInvocable<void()> join_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_NOTIFIER_H_
