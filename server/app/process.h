// SPDX-License-Identifier: Apache-2.0
// Functions and classes for the whole process of a server:
// - PrepareProcess: settings that main makes first.
// - BoundFreedMemory, GiveBackFreedMemory: return freed memory to the system.
// - SetReflection: gRPC's reflection service.
// - StopEvents, StartWatch: signals, and other events that end the server.
// - EndWithin: ends a process that does not end by itself.
// - ServiceManager: tells systemd about the state of the process.
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

// Prepares the process of a server. Raises the limit of open files, and bounds freed memory
// (BoundFreedMemory). Ignores SIGPIPE and SIGXFSZ, so that a write to a closed connection or a full disk
// fails instead of ending the process. Sets environment variables for NCCL (kernels/device_choice.h). Call
// first, before there are other threads.
void PrepareProcess();

// Bounds the freed memory that the process keeps.
//
// The problem: glibc's allocator has many arenas, each for some of the threads, and adapts to the sizes of
// freed blocks. Once a block of some MiB has been freed, blocks of up to that size come from the arenas, and
// an arena returns free memory at its end only beyond twice that size. Heads and buffers of a few MiB come
// and go on all threads. So in time each arena keeps as much as all threads need at once, and resident memory
// grows although the memory in use does not.
//
// After this call, a block of at least 8 MiB is mapped by itself, and unmapped when it is freed. There are at
// most 8 arenas, and each returns free memory at its end beyond 8 MiB. Buffers of messages are smaller than
// both limits, because mapping a new block for each of them would slow down reads and writes of tensors. Call
// before there are other threads. Has no effect on an allocator other than glibc's, such as a sanitizer's.
void BoundFreedMemory();

// If more than 16 MiB are free in all arenas together, returns the free memory between used blocks to the
// system. (glibc's malloc_trim keeps the ends of arenas, at most 64 MiB together.) This takes about 0.2 ms
// for each MiB. It handles one arena after another, and allocations from that arena wait meanwhile, about an
// eighth of the time. Thread-safe.
void GiveBackFreedMemory();

// The time that a drain may take beyond its timeout.
inline constexpr absl::Duration kGrace = absl::Seconds(10);
// The time that rank 0 may take, after its drain, to end the other ranks.
inline constexpr absl::Duration kWorkerGrace = absl::Seconds(10);
// The time that the process may take after the drain to free its resources. Other ranks of the process may
// take 20 seconds of it.
inline constexpr absl::Duration kFarewell = absl::Seconds(30);

// Ends the process with `status` after `limit`, unless it has ended before, and logs that `what` does not
// end. It is for threads that wait forever, for example for a lost device. Thread-safe.
void EndWithin(absl::Duration limit, int status, std::string what);

// Adds gRPC's reflection service to the server, or removes it. The service tells any caller, without
// authentication, which services the server has.
void SetReflection(bool wanted, grpc::ServerBuilder* builder);

// Events that end the process. StopEvents hands out signals and the loss of the device as events. StartWatch
// ends a process that was asked to stop while its start hangs.

// How often a thread that waits for something else checks for a signal.
inline constexpr absl::Duration kSignalPoll = absl::Milliseconds(200);

// The events that end a server: a signal, or the loss of the device.
//
// SIGTERM and SIGINT are handled from the construction of the object on. Libraries have threads that do not
// block signals (OpenBLAS starts its threads before main), so any thread may get a signal. The handler passes
// the signal to a thread of this object, which hands it out.
//
// Thread-safe. There is one object per process. Make it before any other thread of the program, because it
// blocks the signals for all threads that start later. After its destruction the signals are ignored, because
// the process is ending.
class StopEvents {
 public:
  struct Event {
    int signal = 0;        // SIGTERM or SIGINT; 0: the device is lost
    bool of_rank = false;  // from NotifyStop, not a signal of this process
  };

  StopEvents();
  ~StopEvents();
  StopEvents(const StopEvents&) = delete;
  StopEvents& operator=(const StopEvents&) = delete;

  // Adds the event that the device is lost. Does not block.
  void NotifyDeviceLost() { Push({}); }
  // Adds an event like SIGTERM, because another rank was asked to stop. If a launcher stops all ranks, a
  // SIGTERM to this process follows. Does not block.
  void NotifyStop();
  // The first signal that has not been handed out; 0: there is none.
  int Pending() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for such a signal; 0 if none comes within `limit`.
  int AwaitPending(absl::Duration limit) const ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for the next event. An event is handed out once.
  Event Wait() ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits for the next signal. Drops other events before it.
  int WaitForSignal();

 private:
  void Push(Event event) ABSL_LOCKS_EXCLUDED(mutex_);
  int FirstSignal() const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Reads the signals that the handler has written to the pipe, until the end.
  void Read();

  int pipe_ = -1;  // the read end of the pipe
  mutable absl::Mutex mutex_;
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);
  std::thread reader_;
};

// Ends the process if it gets a signal to stop while its start hangs. The start may wait for a device, for
// other ranks or for a large checkpoint, and no other thread takes the signal meanwhile. Watches until the
// object is destroyed. Thread-compatible.
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

// ServiceManager informs the service manager that has started the process, such as systemd for a unit with
// Type=notify: that the process is ready, that it is alive, and that it ends. It uses the protocol of
// sd_notify(3), which is datagrams to a Unix socket.
//
//   manager->Ready("serving");
//   KeepAlive keep_alive(manager.get(), [&] { return server->Live(); });
//   ...
//   manager->Stopping("draining", limit);
//
// Without NOTIFY_SOCKET it sends nothing. It implements the protocol itself, because libsystemd would load
// six more libraries (mostly for compression and cryptography) into the process.
//
// Thread-safe.

class ServiceManager {
 public:
  // Reads the environment: NOTIFY_SOCKET (a path, or "@" and a name in the abstract namespace), and
  // WATCHDOG_USEC and WATCHDOG_PID, which ask the process to report regularly that it is alive.
  // INVALID_ARGUMENT naming the variable and its value.
  static absl::StatusOr<std::unique_ptr<ServiceManager>> FromEnvironment();

  // The service manager ends the process if Alive is not called for this long. Infinite: there is no
  // watchdog.
  absl::Duration watchdog() const { return watchdog_; }

  // `status` is a line for people, which `systemctl status` shows.
  void Ready(const std::string& status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Reports that the process is ending, and takes at most `limit`.
  void Stopping(const std::string& status, absl::Duration limit) ABSL_LOCKS_EXCLUDED(mutex_);
  // Reports that the process is alive, with the status of the last call of Ready or Stopping.
  void Alive() ABSL_LOCKS_EXCLUDED(mutex_);
  void NotAlive(absl::string_view why);

 private:
  ServiceManager(std::string address, absl::Duration watchdog)
      : address_(std::move(address)), watchdog_(watchdog) {}
  void Send(const std::string& message);

  const std::string address_;  // empty: no service manager
  const absl::Duration watchdog_;
  absl::Mutex mutex_;
  std::string status_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> failed_{false};  // a send has failed, and was logged
};

// Calls Alive twice in each period of the watchdog while `live` returns OK, and otherwise NotAlive with the
// reason. Does nothing if there is no watchdog.
class KeepAlive {
 public:
  // `live` is called on a thread of this object until the object is destroyed; it must be quick. `manager`
  // outlives the object.
  KeepAlive(ServiceManager* manager, absl::AnyInvocable<absl::Status()> live);

 private:
  std::optional<rpc::Periodic> thread_;
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_PROCESS_H_
