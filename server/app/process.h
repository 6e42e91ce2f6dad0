// SPDX-License-Identifier: Apache-2.0
// What holds for the whole process of a server, whatever its flags: what main does first (PrepareProcess),
// how freed memory goes back to the system (BoundFreedMemory, GiveBackFreedMemory), gRPC's reflection service
// (SetReflection), what asks the process to stop (StopEvents, StartWatch), how a process ends that does not
// end by itself (EndWithin), and what the service manager hears of all that (ServiceManager).
#ifndef LOSSD_SERVER_APP_PROCESS_H_
#define LOSSD_SERVER_APP_PROCESS_H_

#include <grpcpp/server_builder.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "server/rpc/workers.h"

namespace lossd::app {

// Bounds freed memory (BoundFreedMemory), makes writes to what is closed or full fail instead of ending the
// process, and sets what NCCL reads from the environment (kernels/device_choice.h). To be called first,
// before there are other threads.
void PrepareProcess();

// Bounds the memory that the process keeps after it has freed it.
//
// glibc's allocator has many arenas, each for some of the threads, and adapts to what is freed: once a block
// of some MiB has been freed, blocks of up to that size come from the arenas, and an arena gives back nothing
// below twice as much. Heads and buffers of a few MiB come and go on all threads. So in time each arena keeps
// what all threads need at once, and resident memory grows with traffic, although the memory in use does not
// grow.
//
// From now on, a block of at least 8 MiB is mapped by itself, and unmapped when it is freed; there are at
// most 8 arenas, and each gives back what is free at its end beyond 8 MiB. Buffers of messages are below both
// limits, because mapping each of them anew makes reads and writes of tensors slower. To be called before
// there are other threads. Does nothing to an allocator other than glibc's, such as a sanitizer's.
void BoundFreedMemory();

// If more than 16 MiB are free in all arenas together, gives back what is free between blocks in use.
// (glibc's malloc_trim leaves the ends of arenas, which are 64 MiB together at most.) That takes about 0.2 ms
// for each MiB; allocations wait that are from the arena at hand, an eighth of it. Thread-safe.
void GiveBackFreedMemory();

// The time that a drain may take beyond its timeout.
inline constexpr absl::Duration kGrace = absl::Seconds(10);
// The time that rank 0 may take, after its drain, to end the other ranks.
inline constexpr absl::Duration kWorkerGrace = absl::Seconds(10);
// The time that the process may take after the drain to give back what it has: other ranks of the process may
// wait for 20 seconds.
inline constexpr absl::Duration kFarewell = absl::Seconds(30);

// Ends the process with `status` after `limit`, with a line in the log that says that `what` does not end,
// unless the process has ended by then. A thread of the process may wait for a device that is lost, or for a
// reason that is not known. Thread-safe.
void EndWithin(absl::Duration limit, int status, std::string what);

// Gives the server gRPC's reflection service, which says which services a server has, once or not at all. The
// reflection service does not check who calls.
void SetReflection(bool wanted, grpc::ServerBuilder* builder);

// What ends the process. StopEvents hands out signals and the loss of the device as events. StartWatch ends a
// process that was asked to stop and whose start does not end.

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

// ServiceManager tells the service manager that has started the process, such as systemd for a unit with
// Type=notify, when the process serves, that it is alive and that it ends. It speaks the protocol of
// sd_notify(3): datagrams to a Unix socket.
//
//   manager->Ready("serving");
//   KeepAlive keep_alive(manager.get(), [&] { return server->Live(); });
//   ...
//   manager->Stopping("draining", limit);
//
// Without NOTIFY_SOCKET nothing is sent and nothing costs anything. The protocol is spoken here instead of by
// libsystemd, which brings six more libraries (of compression and cryptography, mostly) into the process.
//
// Thread-safe.

class ServiceManager {
 public:
  // What the environment says: NOTIFY_SOCKET (a path, or "@" and a name in the abstract namespace), and
  // WATCHDOG_USEC and WATCHDOG_PID, whether this process is to say regularly that it is alive.
  // INVALID_ARGUMENT naming the variable and its value.
  static absl::StatusOr<std::unique_ptr<ServiceManager>> FromEnvironment();

  // The manager ends the process if it does not hear for so long that the process is alive; infinite: it does
  // not ask for that.
  absl::Duration watchdog() const { return watchdog_; }

  // `status` is a line for people, which `systemctl status` shows.
  void Ready(const std::string& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // The process ends, and takes `limit` for that at the most.
  void Stopping(const std::string& status, absl::Duration limit) ABSL_LOCKS_EXCLUDED(mutex_);
  // The process is alive, with the status of the last of these two calls.
  void Alive() ABSL_LOCKS_EXCLUDED(mutex_);
  void NotAlive(absl::string_view why);

 private:
  ServiceManager(std::string address, absl::Duration watchdog)
      : address_(std::move(address)), watchdog_(watchdog) {}
  void Send(const std::string& message);

  const std::string address_;  // empty: there is none
  const absl::Duration watchdog_;
  absl::Mutex mutex_;
  std::string status_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> failed_{false};  // and the log says so
};

// Says that the process is alive, twice in the time of the watchdog, as long as `live` says so; and why not
// when it does not. Nothing without a watchdog.
class KeepAlive {
 public:
  // `live` is called on a thread of this object until that goes, and is quick. `manager` outlives the object.
  KeepAlive(ServiceManager* manager, absl::AnyInvocable<absl::Status()> live);

 private:
  std::optional<rpc::Periodic> thread_;
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_PROCESS_H_
