// SPDX-License-Identifier: Apache-2.0
// How well rows have the softmax that they were made after.
#ifndef LOSSD_KERNELS_DATA_PROFILE_CHECK_H_
#define LOSSD_KERNELS_DATA_PROFILE_CHECK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/data/softmax_profile.h"

namespace lossd::data {

// Sums over rows that are added one by one. Not thread-safe.
class ProfileCheck {
 public:
  explicit ProfileCheck(const SoftmaxProfile& profile);

  // Logits of a row [V] in nats, and its target.
  void Add(absl::Span<const float> logits, int32_t target);

  // Of what the rows have, over what the profile has; 1 is perfect. Means over rows, for each threshold.
  struct Ratio {
    double threshold = 0.0;
    double candidates = 0.0;  // classes with at least this probability
    double tail_mass = 0.0;   // probability of the others
  };
  std::vector<Ratio> Ratios() const;
  double loss() const;  // mean, nats

  // A table of both, one line a threshold.
  std::string Text() const;

 private:
  const SoftmaxProfile& profile_;
  int64_t rows_ = 0;
  double loss_ = 0.0;
  std::vector<double> candidates_;  // sums, for each threshold
  std::vector<double> tail_mass_;
};

}  // namespace lossd::data

#endif  // LOSSD_KERNELS_DATA_PROFILE_CHECK_H_
