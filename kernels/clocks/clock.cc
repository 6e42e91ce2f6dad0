// SPDX-License-Identifier: Apache-2.0
#include "kernels/clocks/clock.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>

#include "absl/time/clock.h"

namespace lossd::clocks {
namespace {

std::atomic<int64_t> wall_ahead_ns{0};

}  // namespace

absl::Time SteadyNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

absl::Time WallNow() {
  return absl::Now() + absl::Nanoseconds(wall_ahead_ns.load(std::memory_order_relaxed));
}

absl::Time OnTheWall(absl::Time steady) {
  if (steady == absl::InfiniteFuture() || steady == absl::InfinitePast()) return steady;
  return WallNow() + (steady - SteadyNow());
}

void SetWallClockForTesting(absl::Duration ahead) { wall_ahead_ns = absl::ToInt64Nanoseconds(ahead); }

namespace {

using Steady = std::chrono::steady_clock;

constexpr auto kAgain = std::chrono::milliseconds(1);  // pause before Ring is tried again
constexpr absl::Duration kLongest = absl::Hours(24 * 365);

// A wait that has a deadline.
struct Alarm {
  absl::Mutex* mutex = nullptr;
  absl::CondVar* changed = nullptr;  // null: the wait's condition reads `rang`
  bool rang = false;                 // guarded by `mutex`
};

// The thread that ends waits at their deadlines. It never waits for the mutex of an alarm, so it can ring
// while it holds its own mutex. Hence, once Remove has returned, the alarm is not used any more. Never
// destroyed, because threads may wait until the process ends.
class Bell {
 public:
  static Bell& Get() {
    static Bell* const bell = new Bell();
    return *bell;
  }

  using Place = std::multimap<Steady::time_point, Alarm*>::iterator;

  Place Add(Alarm* alarm, absl::Duration timeout) {
    const auto due = Steady::now() + absl::ToChronoNanoseconds(timeout);
    const std::lock_guard<std::mutex> lock(mutex_);
    const Place place = alarms_.emplace(due, alarm);
    if (place == alarms_.begin()) earlier_.notify_one();
    return place;
  }
  // Removes `alarm`, for which Add has returned `place`.
  void Remove(Place place, const Alarm& alarm) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!alarm.rang) alarms_.erase(place);
  }

 private:
  Bell() {
    std::thread([this] { Run(); }).detach();
  }

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      if (alarms_.empty()) {
        earlier_.wait(lock);
      } else if (alarms_.begin()->first > Steady::now()) {
        const Steady::time_point due = alarms_.begin()->first;  // a copy: the alarm may be removed meanwhile
        earlier_.wait_until(lock, due);
      } else if (RingDue()) {
        earlier_.wait_for(lock, kAgain);
      }
    }
  }

  // Rings all alarms that are due. Returns whether some are left, because other threads hold their mutexes.
  bool RingDue() {
    bool some_left = false;
    const auto now = Steady::now();
    for (auto it = alarms_.begin(); it != alarms_.end() && it->first <= now;) {
      if (Ring(*it->second)) {
        it = alarms_.erase(it);
      } else {
        some_left = true;
        ++it;
      }
    }
    return some_left;
  }

  static bool Ring(Alarm& alarm) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (!alarm.mutex->TryLock()) return false;
    alarm.rang = true;
    if (alarm.changed != nullptr) alarm.changed->SignalAll();
    alarm.mutex->Unlock();
    return true;
  }

  std::mutex mutex_;
  std::condition_variable earlier_;
  std::multimap<Steady::time_point, Alarm*> alarms_;
};

// Adds an alarm for its lifetime. The destructor runs with the alarm's mutex held, so `rang` cannot change
// while Remove reads it.
class Rung {
 public:
  Rung(Alarm* alarm, absl::Duration timeout) : alarm_(alarm), place_(Bell::Get().Add(alarm, timeout)) {}
  ~Rung() { Bell::Get().Remove(place_, *alarm_); }

 private:
  Alarm* const alarm_;
  const Bell::Place place_;
};

}  // namespace

bool AwaitFor(absl::Mutex& mutex, const absl::Condition& condition, absl::Duration timeout) {
  if (condition.Eval()) return true;
  if (timeout <= absl::ZeroDuration()) return false;
  if (timeout > kLongest) {
    mutex.Await(condition);
    return true;
  }
  Alarm alarm{.mutex = &mutex};
  const Rung rung(&alarm, timeout);
  const auto over = [&] { return alarm.rang || condition.Eval(); };
  mutex.Await(absl::Condition(&over));
  return condition.Eval();
}

bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition, absl::Time deadline) {
  return AwaitFor(mutex, condition, deadline - SteadyNow());
}

void WaitFor(absl::CondVar& changed, absl::Mutex& mutex, absl::Duration timeout) {
  if (timeout <= absl::ZeroDuration()) return;
  if (timeout > kLongest) return changed.Wait(&mutex);
  Alarm alarm{.mutex = &mutex, .changed = &changed};
  const Rung rung(&alarm, timeout);
  changed.Wait(&mutex);
}

void TakeLocksWithoutSearch() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }

bool AskBeforeSleeping(absl::FunctionRef<bool()> happened) {
  constexpr auto kAsked = std::chrono::microseconds(200);
  constexpr auto kPause = std::chrono::microseconds(2);  // a query of a GPU's driver takes about as long
  Steady::time_point now = Steady::now();
  const Steady::time_point end = now + kAsked;
  while (!happened()) {
    if (now >= end) return false;
    const Steady::time_point again = now + kPause;
    while (now < again) now = Steady::now();
  }
  return true;
}

}  // namespace lossd::clocks
