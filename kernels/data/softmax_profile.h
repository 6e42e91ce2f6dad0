// SPDX-License-Identifier: Apache-2.0
// What the softmax of a trained language model looks like: measured figures that data for tests and
// benchmarks are made after. Probabilities are natural unless a name says otherwise.
#ifndef LOSSD_KERNELS_DATA_SOFTMAX_PROFILE_H_
#define LOSSD_KERNELS_DATA_SOFTMAX_PROFILE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace lossd::data {

// Immutable, so thread-safe. All lists run along what is named first.
struct SoftmaxProfile {
  std::string what;  // which model and text

  // Ranks at which log p is known: 1 (the most probable class of a row) to the number of classes.
  std::vector<double> ranks;
  // Rows in groups of equal size by entropy, the smallest first; in each the mean of log p (nats) at `ranks`.
  std::vector<std::vector<double>> group_log_p;

  // Mean probability over all rows of the class whose mean is the popularity_ranks[i]-th largest.
  std::vector<double> popularity_ranks;
  std::vector<double> popularity;

  // For each threshold: how many classes of a row reach it, and the probability of the others; means over
  // rows.
  std::vector<double> thresholds;
  std::vector<double> candidates;
  std::vector<double> tail_mass;
  double loss = 0.0;  // mean, nats
};

// The profile of real_profile.json beside this file, which is part of the program.
const SoftmaxProfile& RealProfile();

// log p by rank (entry r - 1 for rank r) of the row whose entropy is that of the quantile `u` in [0, 1] of
// all rows; the probabilities sum to 1. Between the groups' means and their ranks it is interpolated.
std::vector<double> LogProbabilities(const SoftmaxProfile& profile, double u);

// Mean probabilities of `vocab` classes, the most popular first; they sum to 1. Beyond the last known rank
// they fall by the same power of the rank as before it.
std::vector<double> Popularity(const SoftmaxProfile& profile, int64_t vocab);

}  // namespace lossd::data

#endif  // LOSSD_KERNELS_DATA_SOFTMAX_PROFILE_H_
