// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/executor.h"

#include "kernels/clocks/clock.h"
#include "kernels/clocks/waits.h"

namespace lossd::client::internal {

Executor::Executor() : thread_([this] { Run(); }) {}

Executor::~Executor() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
}

void Executor::PostAt(absl::Time when, Task task) {
  absl::MutexLock lock(&mu_);
  tasks_.emplace(Key(when, posted_++), std::move(task));
}

void Executor::RunOrPost(Task task) {
  {
    absl::MutexLock lock(&mu_);
    if (running_ || elsewhere_ || Ready()) {
      tasks_.emplace(Key(absl::InfinitePast(), posted_++), std::move(task));
      return;
    }
    elsewhere_ = true;
  }
  task();
  task = nullptr;  // as on the other thread, nothing of it is left when the next one begins
  absl::MutexLock lock(&mu_);
  elsewhere_ = false;
}

bool Executor::Ready() const {
  if (stopping_) return true;
  return !tasks_.empty() && tasks_.begin()->first.first <= clocks::SteadyNow();
}

void Executor::Run() {
  const auto alone = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !elsewhere_; };
  while (true) {
    Task task;
    {
      absl::MutexLock lock(&mu_);
      running_ = false;
      const absl::Time due = tasks_.empty() ? absl::InfiniteFuture() : tasks_.begin()->first.first;
      if (!Ready()) {
        // Wakes for a task that is due earlier than the first one so far, at the latest when that is due.
        const uint64_t posted = posted_;
        auto changed = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || posted_ != posted; };
        clocks::AwaitUntil(mu_, absl::Condition(&changed), due);
        continue;
      }
      if (elsewhere_) {
        mu_.Await(absl::Condition(&alone));
        continue;
      }
      if (tasks_.empty() || tasks_.begin()->first.first > clocks::SteadyNow())
        return;  // stopping, nothing due
      running_ = true;
      task = std::move(tasks_.begin()->second);
      tasks_.erase(tasks_.begin());
    }
    task();
  }
}

}  // namespace lossd::client::internal
