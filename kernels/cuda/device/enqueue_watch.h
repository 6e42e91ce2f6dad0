// SPDX-License-Identifier: Apache-2.0
// Notices that a thread does not come back from enqueueing the work of a chunk. A call of the driver may wait
// until the GPU has done what was enqueued before (cuBLASLt's first use of a kernel has been seen to), and if
// that is an exchange which another GPU stays away from, no thread is left to see that it takes too long.
//
// Thread-safe.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_ENQUEUE_WATCH_H_
#define LOSSD_KERNELS_CUDA_DEVICE_ENQUEUE_WATCH_H_

#include <cstdint>
#include <functional>
#include <map>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::kernels::cuda {

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

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_ENQUEUE_WATCH_H_
