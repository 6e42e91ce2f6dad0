// SPDX-License-Identifier: Apache-2.0
// The program's clocks, and waits with a deadline. Waits, measurements and timeouts use the steady clock,
// which cannot be set. The wall clock is for times that people read, for dates from outside (certificates),
// and for comparisons with the times of files. scripts/check-clocks (a test) finds code that uses the
// system's clocks instead of this file.
//
// All functions and classes are thread-safe.
#ifndef LOSSD_KERNELS_CLOCKS_CLOCK_H_
#define LOSSD_KERNELS_CLOCKS_CLOCK_H_

#include <atomic>
#include <chrono>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::clocks {

// The steady clock: it advances by a second each second. Compare and subtract its times; a single one has no
// meaning for people.
absl::Time SteadyNow();

// The wall clock: date and time of day. It may jump in both directions.
absl::Time WallNow();

// Converts a time of the steady clock to the wall clock as it is set now. Infinite times stay infinite.
absl::Time OnTheWall(absl::Time steady);

// For tests: sets the wall clock of this process ahead. The last call counts; zero undoes it.
void SetWallClockForTesting(absl::Duration ahead);

// AwaitUntil, AwaitFor and WaitFor end at a time of the steady clock. Use them in place of the waits of
// absl::Mutex, which end at a time of the wall clock: if that is set back by two hours, a wait of one second
// takes two hours and one second.
//
// One thread of the process, which the first wait starts, ends all waits in time. A wait locks two more short
// locks than a wait of absl::Mutex. It ends within some milliseconds of its deadline, or later if another
// thread holds the mutex.

// Waits, without the mutex, until `condition` is true or SteadyNow() reaches `deadline`. Returns whether the
// condition is true; the mutex is held in either case.
bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition, absl::Time deadline)
    ABSL_SHARED_LOCKS_REQUIRED(mutex);
// The same, with a timeout from now on. If it is not positive, only evaluates the condition.
bool AwaitFor(absl::Mutex& mutex, const absl::Condition& condition, absl::Duration timeout)
    ABSL_SHARED_LOCKS_REQUIRED(mutex);

// Waits, without the mutex, until `changed` is signalled or the timeout has passed. May return earlier.
void WaitFor(absl::CondVar& changed, absl::Mutex& mutex, absl::Duration timeout)
    ABSL_SHARED_LOCKS_REQUIRED(mutex);

// Calls `happened` again and again, at least once, without sleeping, until it returns true, but for 0.2 ms at
// most. Returns whether it has returned true. Use it before a wait that sleeps, for what often happens within
// that time: a thread that sleeps continues tens of microseconds later.
bool AskBeforeSleeping(absl::FunctionRef<bool()> happened);

// For programs and libraries, at their start: locks are taken without a search for cycles in their order.
// Abseil searches at every lock if it was compiled for debugging, as Debian's packages are, in one graph that
// all threads share. The search takes up to a quarter of the time of a short call. Test programs keep it,
// since they do not call this function.
void TakeLocksWithoutSearch();

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
  // Waits for the event. Returns whether it has happened within this time.
  bool AwaitFor(absl::Duration timeout) const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return clocks::AwaitFor(mutex_, absl::Condition(&happened_), timeout);
  }

 private:
  mutable absl::Mutex mutex_;
  bool happened_ ABSL_GUARDED_BY(mutex_) = false;
};

// A sign of life: one thread calls Beat when it makes progress, and another asks by Silence how long ago that
// was. Both functions do not block.
class Heartbeat {
 public:
  void Beat() { last_ = Clock::now(); }
  // The time since the last Beat, or since the construction.
  absl::Duration Silence() const { return absl::FromChrono(Clock::now() - last_.load()); }

 private:
  using Clock = std::chrono::steady_clock;  // does not jump when the wall clock is set
  std::atomic<Clock::time_point> last_ = Clock::now();
};

}  // namespace lossd::clocks

#endif  // LOSSD_KERNELS_CLOCKS_CLOCK_H_
