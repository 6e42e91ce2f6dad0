// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/retry.h"

#include <algorithm>
#include <cmath>

#include "absl/random/random.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/errors/payload.h"
#include "proto/wire/status_details.h"

namespace lossd::client::internal {

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
