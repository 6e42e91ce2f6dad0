// SPDX-License-Identifier: Apache-2.0
#include "server/engine/fair_share.h"

#include <algorithm>

namespace lossd::engine {

FairShare::Answer FairShare::Check(absl::string_view holder, int64_t amount) const {
  const int64_t left = capacity_ - used_ - amount;
  if (left < 0) return Answer::kFull;
  const int64_t has = held(holder);
  if (holder.empty() || has == 0 || share_ >= 1.0) return Answer::kYes;
  const auto most = static_cast<int64_t>(share_ * static_cast<double>(capacity_));
  return has + amount <= std::min(most, left) ? Answer::kYes : Answer::kOverShare;
}

FairShare::Answer FairShare::Take(absl::string_view holder, int64_t amount) {
  const Answer answer = Check(holder, amount);
  if (answer != Answer::kYes || amount == 0) return answer;
  used_ += amount;
  if (const auto it = held_.find(holder); it != held_.end()) {
    it->second += amount;
  } else {
    held_.emplace(std::string(holder), amount);
  }
  return answer;
}

void FairShare::Give(absl::string_view holder, int64_t amount) {
  if (amount == 0) return;
  used_ -= amount;
  const auto it = held_.find(holder);
  it->second -= amount;
  if (it->second == 0) held_.erase(it);
}

int64_t FairShare::held(absl::string_view holder) const {
  const auto it = held_.find(holder);
  return it == held_.end() ? 0 : it->second;
}

}  // namespace lossd::engine
