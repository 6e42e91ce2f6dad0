// SPDX-License-Identifier: Apache-2.0
// Helpers for threads and streams whose work depends on other GPUs. EventWaiter waits for an event, and
// returns even if the event never happens. EnqueueWatch notices threads that hang while they enqueue.
// StreamTimer measures how long a stream exchanges data.
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

// Notices that a thread hangs while it enqueues the work of a chunk. A call of the driver may wait until the
// GPU has done earlier work (cuBLASLt's first use of a kernel has been seen to do so). If that work is an
// exchange in which another GPU takes no part, the thread itself cannot notice that the exchange takes too
// long.
class EnqueueWatch {
 public:
  // `on_late` is called once, on the object's own thread, when an interval of During has lasted for `limit`.
  EnqueueWatch(absl::Duration limit, std::function<void()> on_late);
  ~EnqueueWatch();
  EnqueueWatch(const EnqueueWatch&) = delete;
  EnqueueWatch& operator=(const EnqueueWatch&) = delete;

  // Begins an interval, which ends when the result is destroyed.
  [[nodiscard]] auto During() {
    return absl::MakeCleanup([this, key = Begin()] { End(key); });
  }

 private:
  int64_t Begin() ABSL_LOCKS_EXCLUDED(mutex_);
  void End(int64_t key) ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits. True when an interval has lasted for `limit`, false when the object ends.
  bool AwaitLate() ABSL_LOCKS_EXCLUDED(mutex_);
  bool UnderWay() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_ || !begun_.empty(); }

  const absl::Duration limit_;
  const std::function<void()> on_late_;
  absl::Mutex mutex_;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, absl::Time> begun_ ABSL_GUARDED_BY(mutex_);  // oldest first
  std::thread thread_;
};

// How long a thread that polls sleeps before it asks again, if it has waited for `waited` so far. It does not
// sleep until kSpin has passed. Then it sleeps a tenth of `waited`, but at least kShortestPause and at most
// kLongestPause.
inline constexpr absl::Duration kSpin = absl::Microseconds(20);
inline constexpr absl::Duration kShortestPause = absl::Microseconds(50);
inline constexpr absl::Duration kLongestPause = absl::Microseconds(500);
absl::Duration PauseAfter(absl::Duration waited);

// Waits for events of one GPU without using CPU time, and returns even if an event never happens.
//
// cudaEventSynchronize sleeps until the GPU's interrupt, but has no time limit. cudaEventQuery has to be
// called again and again: a thread that asks every 50 us takes a tenth of a core and more for each GPU. So
// the object's own thread sleeps in cudaEventSynchronize. The thread that calls Wait sleeps until that thread
// reports the event, or until it is time to look for errors. Waits of several threads take turns.
class EventWaiter {
 public:
  // Returns when the event has happened, or the error that keeps it from happening.
  using Synchronize = std::function<cudaError_t(cudaEvent_t)>;

  // `device`: the GPU of the events.
  explicit EventWaiter(int device, Synchronize synchronize = cudaEventSynchronize);
  // If the object's thread does not return from an event, it is left behind: the GPU is lost then.
  ~EventWaiter();
  EventWaiter(const EventWaiter&) = delete;
  EventWaiter& operator=(const EventWaiter&) = delete;

  // Waits until the event has happened, and returns the result of Synchronize. Meanwhile calls `look` every
  // `period`; an error that `look` returns ends the wait. The event may then be destroyed only after Settle
  // has returned true.
  absl::StatusOr<cudaError_t> Wait(cudaEvent_t event, absl::Duration period,
                                   absl::FunctionRef<absl::Status()> look) ABSL_LOCKS_EXCLUDED(turn_);
  // Waits, at most a second, until the object's thread waits for no event. False if it still does.
  bool Settle();

 private:
  struct State;
  static void Run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;  // shared with the thread
  absl::Mutex turn_;                    // held by the thread that waits
  std::thread thread_;
};

// Measures how long a stream exchanges data with other GPUs, by events around the exchanges.
class StreamTimer {
 public:
  // The most exchanges that are timed at once; further ones are not counted.
  static constexpr size_t kMostUnderWay = 256;

  // `clocks` outlive the object. The stream's device is current in all threads that call.
  explicit StreamTimer(ExchangeClocks* clocks) : clocks_(clocks) {}
  ~StreamTimer();
  StreamTimer(const StreamTimer&) = delete;
  StreamTimer& operator=(const StreamTimer&) = delete;

  // Calls `enqueue`, and counts the time that the stream takes for the work that it enqueues. Work that
  // cannot be timed is enqueued all the same.
  absl::Status Time(ExchangeKind kind, cudaStream_t stream, absl::FunctionRef<absl::Status()> enqueue)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Adds the times of exchanges that have ended to the clocks. Does not wait.
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
  // False if there is no pair: kMostUnderWay exchanges are under way, or the device has failed.
  bool Take(Pair* pair) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CollectEnded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ExchangeClocks* const clocks_;
  absl::Mutex mutex_;
  std::vector<Pair> free_ ABSL_GUARDED_BY(mutex_);
  std::deque<UnderWay> under_way_ ABSL_GUARDED_BY(mutex_);  // in the order of the stream
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_EVENT_WAITER_H_
