// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device/enqueue_watch.h"

#include <utility>

#include "kernels/clocks/clock.h"
#include "kernels/clocks/waits.h"

namespace lossd::kernels::cuda {

EnqueueWatch::EnqueueWatch(absl::Duration limit, std::function<void()> on_late)
    : limit_(limit), on_late_(std::move(on_late)), thread_([this] {
        if (AwaitLate()) on_late_();
      }) {}

EnqueueWatch::~EnqueueWatch() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  thread_.join();
}

int64_t EnqueueWatch::Begin() {
  absl::MutexLock lock(&mutex_);
  begun_.emplace(next_, clocks::SteadyNow());
  return next_++;
}

void EnqueueWatch::End(int64_t key) {
  absl::MutexLock lock(&mutex_);
  begun_.erase(key);
}

bool EnqueueWatch::AwaitLate() {
  absl::MutexLock lock(&mutex_);
  for (;;) {
    mutex_.Await(absl::Condition(this, &EnqueueWatch::UnderWay));
    if (ending_) return false;
    const auto [key, begun] = *begun_.begin();
    // Until the first of them has ended, or it is late.
    const auto over = [this, key = key]()
                          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_ || !begun_.contains(key); };
    if (!clocks::AwaitUntil(mutex_, absl::Condition(&over), begun + limit_)) return true;
  }
}

}  // namespace lossd::kernels::cuda
