// SPDX-License-Identifier: Apache-2.0
// How long a stream is at exchanges with other GPUs, from events around them.
//
// Thread-safe.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_STREAM_TIMER_H_
#define LOSSD_KERNELS_CUDA_DEVICE_STREAM_TIMER_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <deque>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "kernels/exchange_times.h"

namespace lossd::kernels::cuda {

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

#endif  // LOSSD_KERNELS_CUDA_DEVICE_STREAM_TIMER_H_
