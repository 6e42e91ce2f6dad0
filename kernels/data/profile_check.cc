// SPDX-License-Identifier: Apache-2.0
#include "kernels/data/profile_check.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"

namespace lossd::data {

ProfileCheck::ProfileCheck(const SoftmaxProfile& profile)
    : profile_(profile), candidates_(profile.thresholds.size()), tail_mass_(profile.thresholds.size()) {}

void ProfileCheck::Add(absl::Span<const float> logits, int32_t target) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0.0;
  for (float logit : logits) sum += std::exp(double{logit} - top);
  const double lse = top + std::log(sum);
  for (float logit : logits) {
    const double p = std::exp(double{logit} - lse);
    for (size_t i = 0; i < profile_.thresholds.size(); ++i) {
      if (p >= profile_.thresholds[i]) {
        candidates_[i] += 1.0;
      } else {
        tail_mass_[i] += p;
      }
    }
  }
  loss_ += lse - double{logits[static_cast<size_t>(target)]};
  ++rows_;
}

std::vector<ProfileCheck::Ratio> ProfileCheck::Ratios() const {
  std::vector<Ratio> ratios;
  const double rows = static_cast<double>(rows_);
  for (size_t i = 0; i < profile_.thresholds.size(); ++i) {
    ratios.push_back({.threshold = profile_.thresholds[i],
                      .candidates = candidates_[i] / rows / profile_.candidates[i],
                      .tail_mass = tail_mass_[i] / rows / profile_.tail_mass[i]});
  }
  return ratios;
}

double ProfileCheck::loss() const { return loss_ / static_cast<double>(rows_); }

std::string ProfileCheck::Text() const {
  std::string text = "threshold  classes a row (profile)   probability below (profile)\n";
  const std::vector<Ratio> ratios = Ratios();
  for (size_t i = 0; i < ratios.size(); ++i) {
    absl::StrAppendFormat(
        &text, "2^%-7.0f  %9.1f (%7.1f) %5.2f   %10.4f (%8.4f) %5.2f\n", std::log2(ratios[i].threshold),
        ratios[i].candidates * profile_.candidates[i], profile_.candidates[i], ratios[i].candidates,
        ratios[i].tail_mass * profile_.tail_mass[i], profile_.tail_mass[i], ratios[i].tail_mass);
  }
  absl::StrAppendFormat(&text, "loss       %9.3f (%7.3f) nats, %d rows\n", loss(), profile_.loss, rows_);
  return text;
}

}  // namespace lossd::data
