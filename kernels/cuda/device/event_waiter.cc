// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device/event_waiter.h"

#include <pthread.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/waits.h"

namespace lossd::kernels::cuda {
namespace {

// How long the end of an object, or of a wait that failed, waits for the thread.
constexpr absl::Duration kPatience = absl::Seconds(1);

}  // namespace

absl::Duration PauseAfter(absl::Duration waited) {
  return waited < kSpin ? absl::ZeroDuration() : std::clamp(waited / 10, kShortestPause, kLongestPause);
}

struct EventWaiter::State {
  State(int of_device, Synchronize with) : device(of_device), synchronize(std::move(with)) {}

  const int device;
  const Synchronize synchronize;
  absl::Mutex mutex;
  std::optional<cudaEvent_t> event ABSL_GUARDED_BY(mutex);  // that the thread has or is to wait for
  cudaError_t result ABSL_GUARDED_BY(mutex) = cudaSuccess;  // of the last event
  bool ending ABSL_GUARDED_BY(mutex) = false;

  bool IsIdle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return !event.has_value(); }
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return ending || event.has_value(); }
};

EventWaiter::EventWaiter(int device, Synchronize synchronize)
    : state_(std::make_shared<State>(device, std::move(synchronize))),
      thread_([state = state_] { Run(state); }) {}

EventWaiter::~EventWaiter() {
  {
    absl::MutexLock lock(&state_->mutex);
    state_->ending = true;
  }
  Settle() ? thread_.join() : thread_.detach();
}

bool EventWaiter::Settle() {
  absl::MutexLock lock(&state_->mutex);
  return clocks::AwaitFor(state_->mutex, absl::Condition(state_.get(), &State::IsIdle), kPatience);
}

void EventWaiter::Run(const std::shared_ptr<State>& state) {
  pthread_setname_np(pthread_self(), absl::StrCat("lossd-event-", state->device).substr(0, 15).c_str());
  bool entered = false;
  absl::MutexLock lock(&state->mutex);
  while (true) {
    state->mutex.Await(absl::Condition(state.get(), &State::HasNews));
    if (state->IsIdle()) return;
    const cudaEvent_t event = *state->event;
    state->mutex.Unlock();
    if (!entered) entered = cudaSetDevice(state->device) == cudaSuccess;
    const cudaError_t result = state->synchronize(event);
    state->mutex.Lock();
    state->result = result;
    state->event.reset();
  }
}

absl::StatusOr<cudaError_t> EventWaiter::Wait(cudaEvent_t event, absl::Duration period,
                                              absl::FunctionRef<absl::Status()> look) {
  absl::MutexLock turn(&turn_);
  absl::MutexLock lock(&state_->mutex);
  const auto until_idle = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mutex) -> absl::Status {
    while (!clocks::AwaitFor(state_->mutex, absl::Condition(state_.get(), &State::IsIdle), period)) {
      state_->mutex.Unlock();
      absl::Status status = look();
      state_->mutex.Lock();
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  };
  // The thread may still be at an event that nobody waits for any more.
  if (absl::Status status = until_idle(); !status.ok()) return status;
  state_->event = event;
  if (absl::Status status = until_idle(); !status.ok()) return status;
  return state_->result;
}

}  // namespace lossd::kernels::cuda
