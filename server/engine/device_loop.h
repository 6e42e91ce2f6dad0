// SPDX-License-Identifier: Apache-2.0
// The engine's own threads and its clock. DeviceLoop is the device thread, Notifier is the thread that calls
// stream observers, and Runtime is where both get their threads, their waits and the time from. MutexUnlock
// releases the engine's lock for a scope.
//
// A test replaces Runtime to decide itself which thread goes on next.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_LOOP_H_
#define LOSSD_SERVER_ENGINE_DEVICE_LOOP_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/base/attributes.h"
#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"

namespace lossd::engine {

// What an engine needs of the system besides a device: threads for its loops, a way to wait, and the time. A
// server uses the threads and clocks of the operating system (SystemRuntime). The simulation
// (tests/server/engine/simulation) has a scheduler in its place, which decides what happens next.
//
// Thread-safe.
class Runtime {
 public:
  // Work of the engine's own that goes on beside its callers. Whoever runs a loop calls either Run, or, one
  // call at a time, RunSome until it returns kEnded.
  class Loop {
   public:
    enum class Progress : uint8_t { kWorked, kIdle, kEnded };

    virtual ~Loop() = default;
    // Returns when the loop has been stopped and nothing is left to do.
    virtual void Run() = 0;
    // Does what is to be done next. kIdle: there is nothing, and there will be nothing before HasNews.
    virtual Progress RunSome() = 0;
    // True if there may be something to do that was not there when RunSome returned kIdle.
    virtual bool HasNews() = 0;
  };

  virtual ~Runtime() = default;
  // Lets a loop, which outlives its run, run from now on. Returns what waits for its end, to be called once.
  virtual absl::AnyInvocable<void()> Start(Loop* loop) = 0;
  // Blocks until `done` has been notified.
  virtual void Wait(const absl::Notification& done) = 0;
  // The time of the steady clock, and that of the wall clock (kernels/clocks/clock.h).
  virtual absl::Time Now() = 0;
  virtual absl::Time WallNow() = 0;
};

// A thread for each loop, and the system's clock. Lives as long as the process.
Runtime* SystemRuntime();

// What is under way on the device, over all heads.
struct DeviceLoad {
  int chunks = 0;           // launched, not yet done
  int max_chunks = 1;       // that the backend takes
  int without_results = 0;  // of `chunks`, those that accumulate and whose results are still to come
  bool accepts_chunk() const { return chunks < max_chunks; }
};

// Whether work needs values of a head that lives in host memory (kernels/teacher_pool.h), and where they are.
enum class ValuesAre : uint8_t {
  kHome,  // it needs none, or there is no work
  kHere,  // on the device
  kAway,  // they have to be copied to the device first
};

// Work whose values are away is passed over so many times at most: by chunks of the same head (schedule.h),
// and by work of other heads.
inline constexpr int kMostPassedOver = 8;

// The device thread of an engine: the only thread that touches the backend and the heads. It runs tasks that
// belong to no head in the order of their submission, before anything else, and otherwise asks the sources of
// work, which are the heads, in turn. It knows neither slices nor operations: work is a closure.
//
// While a source has work whose values from host memory are on the device, sources whose values are away lose
// their turn, each at most kMostPassedOver times in a row. Other sources keep theirs.
//
// Threads. The loop shares the engine's lock with the sources. Members that say "locked" are called with the
// lock held, all others without it. Tasks and work run without the lock.
// Lifetime. The mutex outlives the loop. A started loop has to be stopped and joined before it is destroyed.
class DeviceLoop final : public Runtime::Loop {
 public:
  using Work = absl::AnyInvocable<void()>;

  // Where work comes from. The sources take turns in the order of their names.
  class Source {
   public:
    virtual ~Source() = default;
    // The next thing to do, or null if nothing can be done now. Called locked, on the device thread.
    virtual Work TakeWork(const DeviceLoad& load) = 0;
    // Where the values are that it needs; kHome if nothing can be done now. Likewise.
    virtual ValuesAre Values(const DeviceLoad& load) { return ValuesAre::kHome; }
  };

  // `runtime` outlives the loop.
  DeviceLoop(absl::Mutex* mutex, int max_chunks, Runtime* runtime = SystemRuntime());
  ~DeviceLoop() override;
  DeviceLoop(const DeviceLoop&) = delete;
  DeviceLoop& operator=(const DeviceLoop&) = delete;

  void Start();
  // Waits until the loop, which has been stopped, has nothing left to do.
  void Join();
  // How long ago the thread last came round to look for work, or a chunk left the device. While nothing is on
  // the device and nothing runs, about kDeviceBeat at most. Never blocks.
  absl::Duration Silence() const { return heartbeat_.Silence(); }
  // Blocks until `task` has run on the device thread. UNAVAILABLE, without running it, if the loop was
  // stopped.
  absl::Status Run(absl::FunctionRef<void()> task) ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- Locked ----
  void Add(std::string name, std::shared_ptr<Source> source);
  void Remove(absl::string_view name);
  // A source may have work now.
  void Wake();
  // From now on tasks are refused. The loop ends when no source has work and no chunk is on the device; then
  // it runs `last` and lets go of the sources.
  void Stop(Work last);
  bool stopping() const;
  // The life of a chunk; `accumulates` is the same in both calls.
  void OnLaunched(bool accumulates);
  void OnResults(bool accumulates);
  void OnLeft();
  // How long, since the loop was made, work has run or a chunk has been on the device.
  absl::Duration BusyTime() const;

 private:
  void Run() override ABSL_LOCKS_EXCLUDED(mutex_);
  Progress RunSome() override ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasNews() override ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs the next piece of work, with the lock released meanwhile; after the last one, what Stop was given.
  Progress RunNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Signal() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Work NextWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of the sources in turn. `passing`: those whose values are away lose their turn.
  Work NextOfSources(bool passing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called when work begins, ends, or a chunk comes or goes, before that is noted.
  void CountTime() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex* const mutex_;
  Runtime* const runtime_;
  clocks::Heartbeat heartbeat_;
  absl::CondVar wake_;
  bool news_ ABSL_GUARDED_BY(mutex_) = false;  // since there was nothing to do
  std::deque<Work> tasks_ ABSL_GUARDED_BY(mutex_);
  struct Entry {
    std::shared_ptr<Source> source;
    int passed_over = 0;  // turns that it has lost since its last one
  };
  std::map<std::string, Entry, std::less<>> sources_ ABSL_GUARDED_BY(mutex_);
  std::string last_served_ ABSL_GUARDED_BY(mutex_);
  DeviceLoad load_ ABSL_GUARDED_BY(mutex_);
  bool works_ ABSL_GUARDED_BY(mutex_) = false;   // the thread
  absl::Duration busy_ ABSL_GUARDED_BY(mutex_);  // until counted_
  absl::Time counted_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Work last_ ABSL_GUARDED_BY(mutex_);
  absl::AnyInvocable<void()> join_;
};

// Calls stream observers, one event at a time, on a thread of its own: neither the device thread nor a
// caller of the engine ever waits for an observer, and no lock is held while one runs.
//
// Thread-safe. The queue is bounded by what causes events: slices in staging buffers and open streams.
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

// Abseil's annotation for unlocking leaves open in which mode the mutex was held; a scope has to know, to
// take it again.
#if ABSL_HAVE_ATTRIBUTE(release_capability)
#define LOSSD_RELEASES_EXCLUSIVE_LOCK(mutex) __attribute__((release_capability(mutex)))
#else
#define LOSSD_RELEASES_EXCLUSIVE_LOCK(mutex)
#endif

namespace lossd::engine {

// The opposite of absl::MutexLock: releases a mutex that the scope holds and takes it again at the scope's
// end.
class ABSL_SCOPED_LOCKABLE MutexUnlock {
 public:
  // `mutex` is held by this thread and outlives the scope.
  explicit MutexUnlock(absl::Mutex* mutex) LOSSD_RELEASES_EXCLUSIVE_LOCK(mutex) : mutex_(mutex) {
    mutex_->Unlock();
  }
  ~MutexUnlock() ABSL_UNLOCK_FUNCTION() { mutex_->Lock(); }
  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;

 private:
  absl::Mutex* const mutex_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEVICE_LOOP_H_
