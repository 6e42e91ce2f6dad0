#include "server/rpc/call_registry.h"

#include <algorithm>

#include "absl/time/clock.h"

namespace lossd::rpc {

CallRegistry::CallRegistry(size_t max_calls, absl::Duration send_timeout)
    : max_calls_(max_calls), send_timeout_(send_timeout), watchdog_([this] { Watch(); }) {}

CallRegistry::~CallRegistry() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  watchdog_.join();
}

bool CallRegistry::Add(WatchedCall* call) {
  absl::MutexLock lock(&mutex_);
  return calls_.size() < max_calls_ && calls_.insert(call).second;
}

void CallRegistry::Remove(WatchedCall* call) {
  absl::MutexLock lock(&mutex_);
  calls_.erase(call);
}

bool CallRegistry::WaitUntilEmpty(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithDeadline(absl::Condition(this, &CallRegistry::Empty), deadline);
}

void CallRegistry::Watch() {
  const absl::Duration pause = std::max(send_timeout_ / 8, absl::Milliseconds(10));
  absl::MutexLock lock(&mutex_);
  while (!mutex_.AwaitWithTimeout(absl::Condition(&stopping_), pause)) {
    const absl::Time limit = absl::Now() - send_timeout_;
    for (WatchedCall* call : calls_) call->CancelIfStuck(limit);
  }
}

}  // namespace lossd::rpc
