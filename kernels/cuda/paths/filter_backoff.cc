// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/filter_backoff.h"

#include <algorithm>

namespace lossd::kernels::cuda {

bool FilterBackoff::Next(const LossOptions& options) {
  if (options != options_) *this = FilterBackoff();
  options_ = options;
  if (Paused() && ++without_trial_ < kFilterPatience) return false;
  without_trial_ = 0;
  return true;
}

void FilterBackoff::Note(const LossOptions& options, Decision decision) {
  if (options != options_) return;
  const bool exact = decision != Decision::kAsPlanned;
  exact_in_a_row_ = exact ? std::min(exact_in_a_row_ + 1, kFilterPatience) : 0;
}

}  // namespace lossd::kernels::cuda
