// What ends the server: a signal, or the loss of the device.
//
// Signals are waited for with sigwait. Libraries may have made threads before main that do not block them; a
// signal goes to such a thread, and ends the process, unless another thread waits for it in this way.
//
// Thread-safe, but for Wait, which belongs to the thread that made the object. One object per process, made
// before any other thread of the program, since it blocks the signals for all threads that start later.
#ifndef LOSSD_SERVER_APP_STOP_EVENTS_H_
#define LOSSD_SERVER_APP_STOP_EVENTS_H_

#include <pthread.h>
#include <signal.h>

#include <atomic>

namespace lossd::app {

class StopEvents {
 public:
  struct Event {
    int signal = 0;        // SIGTERM or SIGINT; 0: the device is lost
    bool of_rank = false;  // NotifyStop, and no signal yet
  };

  StopEvents();
  StopEvents(const StopEvents&) = delete;
  StopEvents& operator=(const StopEvents&) = delete;

  // May be called on any thread; does not block. To be called once.
  void NotifyDeviceLost();
  // Another rank was asked to stop: an event as of SIGTERM. Where a launcher asks all ranks, SIGTERM follows,
  // and may come at any time from now on. May be called on any thread; does not block.
  void NotifyStop();
  // Whether a signal waits to be handed out.
  bool Pending() const;
  // The next event. An event is handed out once.
  Event Wait();
  // The next signal.
  int WaitForSignal();

 private:
  const pthread_t waiter_;
  sigset_t signals_;
  std::atomic<bool> device_lost_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_STOP_EVENTS_H_
