// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/payload_holds.h"

#include <utility>

namespace lossd::client::internal {

absl::AnyInvocable<void()> PayloadHolds::Take() {
  absl::MutexLock lock(&mu_);
  ++held_;
  return [self = shared_from_this()] { self->GiveBack(); };
}

void PayloadHolds::GiveBack() {
  absl::AnyInvocable<void()> task;
  {
    absl::MutexLock lock(&mu_);
    if (--held_ == 0) task = std::exchange(task_, nullptr);
  }
  if (task) task();
}

void PayloadHolds::WhenFree(absl::AnyInvocable<void()> task) {
  {
    absl::MutexLock lock(&mu_);
    if (held_ > 0) {
      task_ = std::move(task);
      return;
    }
  }
  task();
}

bool PayloadHolds::free() {
  absl::MutexLock lock(&mu_);
  return held_ == 0;
}

void PayloadHolds::WaitUntilFree() {
  auto free = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return held_ == 0; };
  absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&free));
}

}  // namespace lossd::client::internal
