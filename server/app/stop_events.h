// What ends the server: a signal, or the loss of the device.
//
// Thread-safe. One object per process, made before any other thread, since it blocks the signals for all
// threads that start later.
#ifndef LOSSD_SERVER_APP_STOP_EVENTS_H_
#define LOSSD_SERVER_APP_STOP_EVENTS_H_

namespace lossd::app {

class StopEvents {
 public:
  struct Event {
    int signal = 0;  // SIGTERM or SIGINT; 0: the device is lost
  };

  StopEvents();
  ~StopEvents();
  StopEvents(const StopEvents&) = delete;
  StopEvents& operator=(const StopEvents&) = delete;

  // May be called on any thread; does not block.
  void NotifyDeviceLost();
  // The next event. An event is handed out once.
  Event Wait();
  // The next signal.
  int WaitForSignal();

 private:
  const int signals_;      // a signalfd
  const int device_lost_;  // an eventfd
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_STOP_EVENTS_H_
