// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/core.h"

#include <algorithm>
#include <cmath>

#include "absl/random/random.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "proto/wire/status_details.h"

namespace lossd::client::internal {

// ---- Executor ----

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

// ---- Repeats ----

double Jitter() {
  thread_local absl::BitGen random;
  return absl::Uniform(random, 0.8, 1.2);
}

namespace {

// In the message of a status that gRPC makes for a message beyond a limit of one side.
constexpr absl::string_view kTooLarge = "essage larger than max";

bool MayRepeat(const absl::Status& status, Repeat repeat) {
  if (IsTransient(status)) return true;
  return repeat == Repeat::kIfTransientOrAborted && status.code() == absl::StatusCode::kAborted &&
         !RestartOf(status).has_value() && !IsStepDiscarded(status);
}

}  // namespace

bool IsTransient(const absl::Status& status) {
  if (absl::IsUnavailable(status)) return true;
  return absl::IsResourceExhausted(status) && !wire::GetErrorDetail(status).has_value() &&
         !absl::StrContains(status.message(), kTooLarge);
}

std::optional<absl::Duration> WaitBeforeRepeat(const RetryOptions& options, const absl::Status& status,
                                               int attempt, absl::Duration left, double jitter,
                                               Repeat repeat) {
  if (!MayRepeat(status, repeat) || attempt >= options.max_attempts) return std::nullopt;
  const double growth = std::pow(4.0, std::clamp(attempt - 1, 0, 16));
  const absl::Duration wait = std::min(options.initial_backoff * growth, options.max_backoff) * jitter;
  if (wait >= left) return std::nullopt;
  return wait;
}

absl::Status WithAttempts(const absl::Status& status, int attempts) {
  if (attempts < 2) return status;
  const bool repeatable = MayRepeat(status, Repeat::kIfTransientOrAborted);
  return errors::WithMessage(
      status, absl::StrCat(status.message(), "; tried ", attempts, " times",
                           repeatable ? "" : ", and an earlier attempt may have taken effect"));
}

}  // namespace lossd::client::internal
