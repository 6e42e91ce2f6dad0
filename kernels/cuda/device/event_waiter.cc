// SPDX-License-Identifier: Apache-2.0
// EnqueueWatch, EventWaiter and StreamTimer (event_waiter.h).
#include "kernels/cuda/device/event_waiter.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"

namespace lossd::kernels::cuda {

EnqueueWatch::EnqueueWatch(absl::Duration limit, std::function<void()> on_late)
    : limit_(limit), on_late_(std::move(on_late)), thread_([this] {
        if (AwaitLate()) on_late_();
      }) {}

EnqueueWatch::~EnqueueWatch() {
  {
    absl::MutexLock lock(&mutex_);
    ending_ = true;
  }
  thread_.join();
}

int64_t EnqueueWatch::Begin() {
  absl::MutexLock lock(&mutex_);
  begun_.emplace(next_, clocks::SteadyNow());
  return next_++;
}

void EnqueueWatch::End(int64_t key) {
  absl::MutexLock lock(&mutex_);
  begun_.erase(key);
}

bool EnqueueWatch::AwaitLate() {
  absl::MutexLock lock(&mutex_);
  for (;;) {
    mutex_.Await(absl::Condition(this, &EnqueueWatch::UnderWay));
    if (ending_) return false;
    const auto [key, begun] = *begun_.begin();
    // Wait until the oldest interval has ended, or is late.
    const auto over = [this, key = key]()
                          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ending_ || !begun_.contains(key); };
    if (!clocks::AwaitUntil(mutex_, absl::Condition(&over), begun + limit_)) return true;
  }
}

namespace {

// How long the destructor, or Settle after a wait that failed, waits for the thread.
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
  std::optional<cudaEvent_t> event ABSL_GUARDED_BY(mutex);  // the thread waits for it, or is about to
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

// The lock is not held while the thread waits for the event.
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
  // The thread may still wait for an event of an earlier call that has returned.
  if (absl::Status status = until_idle(); !status.ok()) return status;
  state_->event = event;
  if (absl::Status status = until_idle(); !status.ok()) return status;
  return state_->result;
}

namespace {

BusyClock::Clock::duration FromMilliseconds(float milliseconds) {
  return std::chrono::duration_cast<BusyClock::Clock::duration>(
      std::chrono::duration<float, std::milli>(milliseconds));
}

// A timer's failure is not reported. Its error must not stay the last error of this thread, because code that
// launches kernels would find it there.
bool Succeeds(cudaError_t result) {
  if (result != cudaSuccess) cudaGetLastError();
  return result == cudaSuccess;
}

}  // namespace

StreamTimer::~StreamTimer() {
  for (const UnderWay& one : under_way_) free_.push_back(one.events);
  for (const Pair& pair : free_) {
    cudaEventDestroy(pair.begin);
    cudaEventDestroy(pair.end);
  }
}

bool StreamTimer::Create(Pair* pair) {
  if (!Succeeds(cudaEventCreate(&pair->begin))) return false;
  if (Succeeds(cudaEventCreate(&pair->end))) return true;
  cudaEventDestroy(pair->begin);
  *pair = Pair();
  return false;
}

bool StreamTimer::Take(Pair* pair) {
  CollectEnded();
  if (!free_.empty()) {
    *pair = free_.back();
    free_.pop_back();
    return true;
  }
  return under_way_.size() < kMostUnderWay && Create(pair);
}

// The lock is not held while `enqueue` runs, because it may take long (EnqueueWatch).
absl::Status StreamTimer::Time(ExchangeKind kind, cudaStream_t stream,
                               absl::FunctionRef<absl::Status()> enqueue) {
  Pair events;
  bool timed = false;
  {
    absl::MutexLock lock(&mutex_);
    timed = Take(&events);
  }
  if (timed) timed = Succeeds(cudaEventRecord(events.begin, stream));
  absl::Status status = enqueue();
  if (timed) timed = Succeeds(cudaEventRecord(events.end, stream));
  absl::MutexLock lock(&mutex_);
  if (timed) {
    under_way_.push_back({kind, events});
  } else if (events.begin != nullptr) {
    free_.push_back(events);
  }
  return status;
}

void StreamTimer::Collect() {
  absl::MutexLock lock(&mutex_);
  CollectEnded();
}

void StreamTimer::CollectEnded() {
  while (!under_way_.empty() && Succeeds(cudaEventQuery(under_way_.front().events.end))) {
    const UnderWay& first = under_way_.front();
    float milliseconds = 0.0f;
    if (Succeeds(cudaEventElapsedTime(&milliseconds, first.events.begin, first.events.end))) {
      clocks_->of(first.kind).Add(FromMilliseconds(milliseconds));
    }
    free_.push_back(first.events);
    under_way_.pop_front();
  }
}

}  // namespace lossd::kernels::cuda
