// SPDX-License-Identifier: Apache-2.0
#include "server/log/line_budget.h"

#include <algorithm>
#include <utility>

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

std::optional<int64_t> LineBudgets::Take(absl::string_view name) {
  absl::MutexLock lock(&mutex_);
  auto found = holders_.find(name);
  if (found == holders_.end()) {
    found = holders_.emplace(std::string(name), Holder{std::make_unique<LineBudget>(at_once_, now_)}).first;
    found->second.place = order_.insert(order_.end(), found->first);
    if (holders_.size() > kMostHolders) {
      holders_.erase(order_.front());
      order_.pop_front();
    }
  }
  Holder& holder = found->second;
  order_.splice(order_.end(), order_, holder.place);
  const std::optional<int64_t> own = holder.budget->Take();
  if (!own.has_value()) return std::nullopt;
  holder.left_out_by_all += *own;
  if (!all_.Take().has_value()) {
    ++holder.left_out_by_all;
    return std::nullopt;
  }
  return std::exchange(holder.left_out_by_all, 0);
}

}  // namespace lossd::log
