// SPDX-License-Identifier: Apache-2.0
// What ends the process. StopEvents hands out signals and the loss of the device as events. StartWatch ends a
// process that was asked to stop and whose start does not end.
#ifndef LOSSD_SERVER_APP_STOP_EVENTS_H_
#define LOSSD_SERVER_APP_STOP_EVENTS_H_

#include <deque>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"

namespace lossd::app {

// How often a thread that also waits for something else looks for a signal.
inline constexpr absl::Duration kSignalPoll = absl::Milliseconds(200);

// The events that end a server: a signal, or the loss of the device.
//
// SIGTERM and SIGINT are handled from the moment when the object is made. Libraries have threads that do not
// block the signals (OpenBLAS makes its own before main), so a signal may come to any thread. The handler
// passes the signal on to a thread of this object, which hands it out.
//
// Thread-safe. One object per process, made before any other thread of the program, because it blocks the
// signals for all threads that start later. After the end of the object the signals are ignored: the process
// ends.
class StopEvents {
 public:
  struct Event {
    int signal = 0;        // SIGTERM or SIGINT; 0: the device is lost
    bool of_rank = false;  // NotifyStop, and no signal yet
  };

  StopEvents();
  ~StopEvents();
  StopEvents(const StopEvents&) = delete;
  StopEvents& operator=(const StopEvents&) = delete;

  // Does not block.
  void NotifyDeviceLost() { Push({}); }
  // Another rank was asked to stop: an event as of SIGTERM. Where a launcher asks all ranks, SIGTERM follows.
  // Does not block.
  void NotifyStop();
  // The signal that waits to be handed out; 0: none does.
  int Pending() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The same, once there is one; 0 after `limit`.
  int AwaitPending(absl::Duration limit) const ABSL_LOCKS_EXCLUDED(mutex_);
  // The next event. An event is handed out once.
  Event Wait() ABSL_LOCKS_EXCLUDED(mutex_);
  // The next signal; other events before it are dropped.
  int WaitForSignal();

 private:
  void Push(Event event) ABSL_LOCKS_EXCLUDED(mutex_);
  int FirstSignal() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // What the handler has written, until the end.
  void Read();

  int pipe_ = -1;  // its end for reading
  mutable absl::Mutex mutex_;
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);
  std::thread reader_;
};

// Ends the process when it was asked to stop and its start does not end: while the start waits for a device,
// for other ranks or for a large checkpoint, no other thread takes the signal. Watches until the object is
// destroyed. Thread-compatible.
class StartWatch {
 public:
  // `events` outlives the object.
  explicit StartWatch(const StopEvents* events);
  ~StartWatch();
  StartWatch(const StartWatch&) = delete;
  StartWatch& operator=(const StartWatch&) = delete;

 private:
  void Watch();

  const StopEvents* const events_;
  clocks::Event started_;
  std::thread thread_;
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_STOP_EVENTS_H_
