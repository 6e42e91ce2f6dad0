// SPDX-License-Identifier: Apache-2.0
// How long at least one of several things has been under way. Thread-safe.
#ifndef LOSSD_KERNELS_BUSY_CLOCK_H_
#define LOSSD_KERNELS_BUSY_CLOCK_H_

#include <chrono>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::kernels {

class BusyClock {
 public:
  using Clock = std::chrono::steady_clock;
  // `now`: of the clock, for tests.
  void Begin(Clock::time_point now = Clock::now()) {
    absl::MutexLock lock(&mutex_);
    if (under_way_++ == 0) since_ = now;
  }
  // After a Begin.
  void End(Clock::time_point now = Clock::now()) {
    absl::MutexLock lock(&mutex_);
    if (--under_way_ == 0) total_ += now - since_;
  }
  // What has taken `time`, and is over; at no time when something else was under way.
  void Add(Clock::duration time) {
    absl::MutexLock lock(&mutex_);
    total_ += time;
  }
  // What is under way counts until now.
  absl::Duration Total(Clock::time_point now = Clock::now()) const {
    absl::MutexLock lock(&mutex_);
    return absl::FromChrono(under_way_ == 0 ? total_ : total_ + (now - since_));
  }

 private:
  mutable absl::Mutex mutex_;
  int under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  Clock::time_point since_ ABSL_GUARDED_BY(mutex_);
  Clock::duration total_ ABSL_GUARDED_BY(mutex_) = Clock::duration::zero();
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_BUSY_CLOCK_H_
