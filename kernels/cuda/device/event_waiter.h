// SPDX-License-Identifier: Apache-2.0
// Waits for events of one GPU without taking CPU time, and comes back although an event never happens.
//
// cudaEventSynchronize sleeps until the GPU's interrupt but has no limit, and cudaEventQuery has to be called
// again and again: a thread that asks every 50 us takes a tenth of a core and more for each GPU. So a thread
// of the object's own sleeps in cudaEventSynchronize, and the thread that waits sleeps until that one says
// so, or until it is time to look for errors.
//
// Thread-safe; waits of several threads take turns.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_EVENT_WAITER_H_
#define LOSSD_KERNELS_CUDA_DEVICE_EVENT_WAITER_H_

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::kernels::cuda {

// How long a thread that can only ask again and again sleeps after it has waited for `waited`: it asks
// without a pause for kSpin, and then sleeps so that what it waits for is noticed at most a tenth of the time
// late, kShortestPause where that is more and kLongestPause at most.
inline constexpr absl::Duration kSpin = absl::Microseconds(20);
inline constexpr absl::Duration kShortestPause = absl::Microseconds(50);
inline constexpr absl::Duration kLongestPause = absl::Microseconds(500);
absl::Duration PauseAfter(absl::Duration waited);

class EventWaiter {
 public:
  // Returns when the event has happened, or with what keeps it from happening.
  using Synchronize = std::function<cudaError_t(cudaEvent_t)>;

  // `device`: the events' GPU.
  explicit EventWaiter(int device, Synchronize synchronize = cudaEventSynchronize);
  // A thread that does not come back from an event is left behind: its GPU is lost then.
  ~EventWaiter();
  EventWaiter(const EventWaiter&) = delete;
  EventWaiter& operator=(const EventWaiter&) = delete;

  // Waits until the event has happened, and returns what Synchronize said. Every `period` until then `look`
  // is called, and an error that it returns ends the wait; then the event may go when Settle says so.
  absl::StatusOr<cudaError_t> Wait(cudaEvent_t event, absl::Duration period,
                                   absl::FunctionRef<absl::Status()> look) ABSL_LOCKS_EXCLUDED(turn_);
  // Waits until the thread is at no event, a second at most. False: it still is.
  bool Settle();

 private:
  struct State;
  static void Run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;  // the thread's too
  absl::Mutex turn_;                    // of the threads that wait
  std::thread thread_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_EVENT_WAITER_H_
