// SPDX-License-Identifier: Apache-2.0
// The program's clocks, and waits that end at a time of a clock. Everything that waits, measures or expires
// goes by the steady clock, which nobody sets. The wall clock is for what people read, for dates that came
// from outside (certificates), and for comparing with times that files have. scripts/check-clocks (a test)
// finds code that asks the system past this file.
//
// All functions and classes are thread-safe.
#ifndef LOSSD_KERNELS_CLOCKS_CLOCK_H_
#define LOSSD_KERNELS_CLOCKS_CLOCK_H_

#include <atomic>
#include <chrono>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::clocks {

// Goes forward by a second each second. Two of its times may be compared and subtracted; one alone says
// nothing to people.
absl::Time SteadyNow();

// What a clock on the wall shows. It may jump, in both directions.
absl::Time WallNow();

// What the wall clock shows, or showed, at a time of the steady clock, as it is set now. Infinite times stay.
absl::Time OnTheWall(absl::Time steady);

// For tests: the wall clock of this process is set by so much. The last call counts; zero undoes it.
void SetWallClockForTesting(absl::Duration ahead);

// AwaitUntil, AwaitFor and WaitFor end at a time of the steady clock. The waits of absl::Mutex end at a time
// of the wall clock: when that is set back by two hours, a wait of a second takes two hours and a second.
//
// One thread of the process rings for all waits that have an end; it begins with the first of them. A wait
// costs two short locks more than one of absl::Mutex. An end is met within some milliseconds, and later while
// another thread holds the mutex.

// Waits, without the mutex, until `condition` is true or SteadyNow() reaches `deadline`. Returns whether the
// condition is true; the mutex is held in either case.
bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition, absl::Time deadline)
    ABSL_SHARED_LOCKS_REQUIRED(mutex);
// The same with a time from now. Negative: only asks.
bool AwaitFor(absl::Mutex& mutex, const absl::Condition& condition, absl::Duration timeout)
    ABSL_SHARED_LOCKS_REQUIRED(mutex);

// Waits, without the mutex, until `changed` is signalled or the time has passed; may return earlier.
void WaitFor(absl::CondVar& changed, absl::Mutex& mutex, absl::Duration timeout)
    ABSL_SHARED_LOCKS_REQUIRED(mutex);

// Something that happens once.
class Event {
 public:
  void Notify() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    happened_ = true;
  }
  bool happened() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return happened_;
  }
  // Whether it has happened within this time.
  bool AwaitFor(absl::Duration timeout) const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return clocks::AwaitFor(mutex_, absl::Condition(&happened_), timeout);
  }

 private:
  mutable absl::Mutex mutex_;
  bool happened_ ABSL_GUARDED_BY(mutex_) = false;
};

// A sign of life: one side beats whenever it makes progress, and the other side asks how long ago that was.
// Neither member blocks.
class Heartbeat {
 public:
  void Beat() { last_ = Clock::now(); }
  // Since the last beat, or since this object began.
  absl::Duration Silence() const { return absl::FromChrono(Clock::now() - last_.load()); }

 private:
  using Clock = std::chrono::steady_clock;  // does not jump when the time of day is set
  std::atomic<Clock::time_point> last_ = Clock::now();
};

}  // namespace lossd::clocks

#endif  // LOSSD_KERNELS_CLOCKS_CLOCK_H_
