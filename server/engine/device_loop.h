// SPDX-License-Identifier: Apache-2.0
// The threads and the clock of an engine. DeviceLoop is the device thread. Notifier is the thread that calls
// stream observers. Runtime gives both their threads, their waits and the time. MutexUnlock releases the
// engine's lock for a scope.
//
// A test replaces Runtime, so that the test decides which thread runs next.
#ifndef LOSSD_SERVER_ENGINE_DEVICE_LOOP_H_
#define LOSSD_SERVER_ENGINE_DEVICE_LOOP_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

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

// Runtime is what an engine needs from the operating system: threads for its loops, a way to wait, and the
// time. A server uses SystemRuntime. The simulation (tests/server/engine/simulation) uses a scheduler
// instead, which decides what happens next.
//
// Thread-safe.
class Runtime {
 public:
  // Work that an engine does in the background. A runtime calls either Run once, or RunSome again and again,
  // one call at a time, until it returns kEnded.
  class Loop {
   public:
    enum class Progress : uint8_t { kWorked, kIdle, kEnded };

    virtual ~Loop() = default;
    // Does all work. Returns when the loop has been stopped and nothing is left to do.
    virtual void Run() = 0;
    // Does the next piece of work. kIdle: there is none, and there will be none before HasNews returns true.
    virtual Progress RunSome() = 0;
    // True if new work may have come since RunSome returned kIdle.
    virtual bool HasNews() = 0;
  };

  virtual ~Runtime() = default;
  // Starts a loop, which must exist until it has ended. Returns a function that waits for that end; call it
  // once.
  virtual absl::AnyInvocable<void()> Start(Loop* loop) = 0;
  // Blocks until `done` has been notified.
  virtual void Wait(const absl::Notification& done) = 0;
  // Whether the thread that calls may do the work of a loop now, in the place of the loop's own thread.
  virtual bool MayHelp() = 0;
  // The time of the steady clock (Now) and of the wall clock (WallNow), as in kernels/clocks/clock.h.
  virtual absl::Time Now() = 0;
  virtual absl::Time WallNow() = 0;
};

// The runtime of a server: a thread for each loop, and the system's clocks. Lives as long as the process.
Runtime* SystemRuntime();

// The chunks that are under way on the device, over all heads.
struct DeviceLoad {
  int chunks = 0;           // chunks launched and not yet done
  int max_chunks = 1;       // the most chunks that the backend takes at a time
  int without_results = 0;  // of `chunks`, those that accumulate and have no results yet
  bool accepts_chunk() const { return chunks < max_chunks; }
};

// Whether a piece of work needs values of a head that lives in host memory (kernels/teacher_pool.h), and
// where these values are now.
enum class ValuesAre : uint8_t {
  kHome,  // the work needs no such values, or there is no work
  kHere,  // the values are on the device
  kAway,  // the values have to be copied to the device first
};

// The most times that work whose values are away is passed over: by chunks of the same head (schedule.h), and
// by work of other heads.
inline constexpr int kMostPassedOver = 8;

// DeviceLoop is the device thread of an engine, the only thread that touches the backend and the heads. It
// first runs tasks, which belong to no head, in the order of their submission. If there are none, it asks the
// sources of work, which are the heads, in turn. It knows neither slices nor operations: work is a closure.
//
// While some source has work whose values from host memory are on the device, sources whose values are away
// lose their turn, each at most kMostPassedOver times in a row. Other sources keep their turn.
//
// Threads. The loop shares the engine's lock with the sources. Members under "Locked" are called with the
// lock held, all others without it. Tasks and work run without the lock.
// Lifetime. The mutex outlives the loop. A started loop must be stopped and joined before it is destroyed.
class DeviceLoop final : public Runtime::Loop {
 public:
  using Work = absl::AnyInvocable<void()>;

  // A source of work. The sources take turns in the order of their names.
  class Source {
   public:
    virtual ~Source() = default;
    // Takes the next piece of work; null if nothing can be done now. Called on the device thread with the
    // lock held.
    virtual Work TakeWork(const DeviceLoad& load) = 0;
    // Where the values are that the next piece of work needs; kHome if nothing can be done now. Called like
    // TakeWork.
    virtual ValuesAre Values(const DeviceLoad& load) { return ValuesAre::kHome; }
  };

  // `runtime` outlives the loop.
  DeviceLoop(absl::Mutex* mutex, int max_chunks, Runtime* runtime = SystemRuntime());
  ~DeviceLoop() override;
  DeviceLoop(const DeviceLoop&) = delete;
  DeviceLoop& operator=(const DeviceLoop&) = delete;

  void Start();
  // Waits for the end of the loop, after Stop.
  void Join();
  // The time since the thread last looked for work, or a chunk left the device. While nothing is on the
  // device and nothing runs, it is about kDeviceBeat at most. Never blocks.
  absl::Duration Silence() const { return heartbeat_.Silence(); }
  // Runs `task` on the device thread and blocks until it has run. UNAVAILABLE if the loop was stopped; `task`
  // then does not run.
  absl::Status Run(absl::FunctionRef<void()> task) ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- Locked ----
  void Add(std::string name, std::shared_ptr<Source> source);
  void Remove(absl::string_view name);
  // Wakes the thread, because a source may have work now.
  void Wake();
  // Refuses tasks from now on. When no source has work and no chunk is on the device, the loop runs `last`,
  // releases the sources and ends.
  void Stop(Work last);
  bool stopping() const;
  // Tell the loop of each chunk: it was launched, it has results, it has left the device. `accumulates` is
  // the same in both calls.
  void OnLaunched(bool accumulates);
  void OnResults(bool accumulates);
  void OnLeft();
  const DeviceLoad& load() const;
  // Whether the calling thread is the loop's.
  bool IsThisThread() const { return thread_ == std::this_thread::get_id(); }
  // For how long in all, since the loop was made, work has run or a chunk has been on the device.
  absl::Duration BusyTime() const;

 private:
  void Run() override ABSL_LOCKS_EXCLUDED(mutex_);
  Progress RunSome() override ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasNews() override ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs the next piece of work, with the lock released meanwhile. If the loop has been stopped and none is
  // left, runs Stop's `last`.
  Progress RunNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Signal() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Work NextWork() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The next work of the sources, in turn. `passing`: sources whose values are away lose their turn.
  Work NextOfSources(bool passing) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Adds the time since the last call to busy_, if the device was busy. Called before works_ or load_.chunks
  // changes.
  void CountTime() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Mutex* const mutex_;
  Runtime* const runtime_;
  std::atomic<std::thread::id> thread_;  // that runs the loop
  clocks::Heartbeat heartbeat_;
  absl::CondVar wake_;
  bool news_ ABSL_GUARDED_BY(mutex_) = false;  // true if Signal was called since there was nothing to do
  std::deque<Work> tasks_ ABSL_GUARDED_BY(mutex_);
  struct Entry {
    std::shared_ptr<Source> source;
    int passed_over = 0;  // turns lost since its last turn
  };
  std::map<std::string, Entry, std::less<>> sources_ ABSL_GUARDED_BY(mutex_);
  std::string last_served_ ABSL_GUARDED_BY(mutex_);
  DeviceLoad load_ ABSL_GUARDED_BY(mutex_);
  bool works_ ABSL_GUARDED_BY(mutex_) = false;   // the thread runs a piece of work
  absl::Duration busy_ ABSL_GUARDED_BY(mutex_);  // BusyTime() at the time counted_
  absl::Time counted_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Work last_ ABSL_GUARDED_BY(mutex_);
  absl::AnyInvocable<void()> join_;
};

// Notifier calls stream observers, one event at a time, on a thread of its own, or on the thread that brings
// results of the device. So neither the device thread nor a caller of the engine waits for an observer, and
// no lock is held while an observer runs.
//
// Thread-safe. The queue is bounded, because each event belongs to a slice in a staging buffer or to an open
// stream.
class Notifier final : public Runtime::Loop {
 public:
  using Event = absl::AnyInvocable<void()>;

  // `runtime` outlives the notifier.
  explicit Notifier(Runtime* runtime);
  // Runs the queued events, then joins the thread.
  ~Notifier() override;

  // Queues an event. Events run in the order of Post, and one after another.
  void Post(Event event) ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs the queued events on this thread, unless another thread is running some: then that one also runs
  // these. So events are delivered without the time of waking the notifier's thread. Call it without a lock,
  // on a thread that nothing waits for. Does nothing if the runtime lets no thread do so.
  void RunQueued() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() override ABSL_LOCKS_EXCLUDED(mutex_);
  Progress RunSome() override ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasNews() override ABSL_LOCKS_EXCLUDED(mutex_);
  // Runs the events that are queued now, with the lock released meanwhile. The caller goes on until the queue
  // is empty.
  void RunBatch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Runtime* const runtime_;
  absl::Mutex mutex_;
  absl::CondVar changed_;  // events came, or the end, or `running_` became false after the end
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;  // a thread runs events
  bool news_ ABSL_GUARDED_BY(mutex_) = false;     // events came, or the end, since the queue was last read
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  absl::AnyInvocable<void()> join_;
};

}  // namespace lossd::engine

// Abseil's annotation for unlocking does not say in which mode the mutex was held. A scope that takes the
// mutex again has to say it.
#if ABSL_HAVE_ATTRIBUTE(release_capability)
#define LOSSD_RELEASES_EXCLUSIVE_LOCK(mutex) __attribute__((release_capability(mutex)))
#else
#define LOSSD_RELEASES_EXCLUSIVE_LOCK(mutex)
#endif

namespace lossd::engine {

// MutexUnlock is the opposite of absl::MutexLock: it releases a mutex that this thread holds, and takes it
// again at the end of the scope.
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
