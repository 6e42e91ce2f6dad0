// SPDX-License-Identifier: Apache-2.0
#include "server/log/line_budget.h"

#include <algorithm>

namespace lossd::log {

std::optional<int64_t> LineBudget::Take() {
  const absl::Time now = now_();
  absl::MutexLock lock(&mutex_);
  if (refilled_ == absl::InfinitePast() || now < refilled_) refilled_ = now;
  const int64_t seconds = absl::ToInt64Seconds(now - refilled_);
  if (seconds > 0) {
    lines_ = std::min(at_once_, lines_ + std::min(at_once_, seconds));
    refilled_ += absl::Seconds(seconds);
  }
  if (lines_ == 0) {
    ++left_out_;
    return std::nullopt;
  }
  --lines_;
  return std::exchange(left_out_, 0);
}

}  // namespace lossd::log
