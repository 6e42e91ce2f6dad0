// SPDX-License-Identifier: Apache-2.0
// Time of threads and streams at work that depends on other GPUs: a wait for an event that comes back
// although the event never happens (EventWaiter), a watch over threads that enqueue (EnqueueWatch), and the
// time that a stream exchanges (StreamTimer).
//
// All three classes are thread-safe.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_EVENT_WAITER_H_
#define LOSSD_KERNELS_CUDA_DEVICE_EVENT_WAITER_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/exchange_times.h"

namespace lossd::kernels::cuda {

// Notices that a thread does not come back from enqueueing the work of a chunk. A call of the driver may wait
// until the GPU has done what was enqueued before (cuBLASLt's first use of a kernel has been seen to). If
// that work is an exchange which another GPU stays away from, no thread is left to see that it takes too
// long.
class EnqueueWatch {
 public:
  // `on_late` is called once, on a thread of the object's own, when something has been under way for `limit`.
  EnqueueWatch(absl::Duration limit, std::function<void()> on_late);
  ~EnqueueWatch();
  EnqueueWatch(const EnqueueWatch&) = delete;
  EnqueueWatch& operator=(const EnqueueWatch&) = delete;

  // It is under way until the result ends.
  [[nodiscard]] auto During() {
    return absl::MakeCleanup([this, key = Begin()] { End(key); });
  }

 private:
  int64_t Begin() ABSL_LOCKS_EXCLUDED(mutex_);
  void End(int64_t key) ABSL_LOCKS_EXCLUDED(mutex_);
  // True once something has been under way for `limit`, false when the object ends.
  bool AwaitLate() ABSL_LOCKS_EXCLUDED(mutex_);
  bool UnderWay() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_ || !begun_.empty(); }

  const absl::Duration limit_;
  const std::function<void()> on_late_;
  absl::Mutex mutex_;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, absl::Time> begun_ ABSL_GUARDED_BY(mutex_);  // in the order of their beginning
  std::thread thread_;
};

// How long a thread that can only ask again and again sleeps after it has waited for `waited`: it asks
// without a pause for kSpin, and then sleeps so that what it waits for is noticed at most a tenth of the time
// late, kShortestPause where that is more and kLongestPause at most.
inline constexpr absl::Duration kSpin = absl::Microseconds(20);
inline constexpr absl::Duration kShortestPause = absl::Microseconds(50);
inline constexpr absl::Duration kLongestPause = absl::Microseconds(500);
absl::Duration PauseAfter(absl::Duration waited);

// Waits for events of one GPU without taking CPU time, and comes back although an event never happens.
//
// cudaEventSynchronize sleeps until the GPU's interrupt but has no limit, and cudaEventQuery has to be called
// again and again: a thread that asks every 50 us takes a tenth of a core and more for each GPU. So a thread
// of the object's own sleeps in cudaEventSynchronize, and the thread that waits sleeps until that one says
// so, or until it is time to look for errors. Waits of several threads take turns.
class EventWaiter {
 public:
  // Returns when the event has happened, or with what keeps it from happening.
  using Synchronize = std::function<cudaError_t(cudaEvent_t)>;

  // `device`: the events' GPU.
  explicit EventWaiter(int device, Synchronize synchronize = cudaEventSynchronize);
  // A thread that does not come back from an event is left behind: its GPU is lost then.
  ~EventWaiter();
  EventWaiter(const EventWaiter&) = delete;
  EventWaiter& operator=(const EventWaiter&) = delete;

  // Waits until the event has happened, and returns what Synchronize said. Every `period` until then `look`
  // is called, and an error that it returns ends the wait; then the event may go when Settle says so.
  absl::StatusOr<cudaError_t> Wait(cudaEvent_t event, absl::Duration period,
                                   absl::FunctionRef<absl::Status()> look) ABSL_LOCKS_EXCLUDED(turn_);
  // Waits until the thread is at no event, a second at most. False: it still is.
  bool Settle();

 private:
  struct State;
  static void Run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;  // the thread's too
  absl::Mutex turn_;                    // of the threads that wait
  std::thread thread_;
};

// How long a stream exchanges with other GPUs, from events around the exchanges.
class StreamTimer {
 public:
  // Exchanges whose end is still to come; of more, the time is not counted.
  static constexpr size_t kMostUnderWay = 256;

  // `clocks` outlive the object. The device is that of the threads that call.
  explicit StreamTimer(ExchangeClocks* clocks) : clocks_(clocks) {}
  ~StreamTimer();
  StreamTimer(const StreamTimer&) = delete;
  StreamTimer& operator=(const StreamTimer&) = delete;

  // Calls `enqueue`, and counts the time that the stream is at what it enqueues. What cannot be timed is
  // enqueued all the same.
  absl::Status Time(ExchangeKind kind, cudaStream_t stream, absl::FunctionRef<absl::Status()> enqueue)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Adds what has ended to the clocks. Waits for nothing.
  void Collect() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Pair {
    cudaEvent_t begin = nullptr, end = nullptr;
  };
  struct UnderWay {
    ExchangeKind kind;
    Pair events;
  };
  static bool Create(Pair* pair);
  // False if there is none: of kMostUnderWay all are under way, or the device has failed.
  bool Take(Pair* pair) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CollectEnded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ExchangeClocks* const clocks_;
  absl::Mutex mutex_;
  std::vector<Pair> free_ ABSL_GUARDED_BY(mutex_);
  std::deque<UnderWay> under_way_ ABSL_GUARDED_BY(mutex_);  // in the order of the stream
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_EVENT_WAITER_H_
