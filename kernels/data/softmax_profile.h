// SPDX-License-Identifier: Apache-2.0
// What the softmax of a trained language model looks like: measured figures that data for tests and
// benchmarks are made after (SoftmaxProfile), logits that have such a softmax (FitLogits), and a check of how
// well rows have it (ProfileCheck). Probabilities are natural unless a name says otherwise. Functions are
// pure and thread-safe.
#ifndef LOSSD_KERNELS_DATA_SOFTMAX_PROFILE_H_
#define LOSSD_KERNELS_DATA_SOFTMAX_PROFILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

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

// Says how well rows have the softmax that they were made after: sums over rows that are added one by one.
// Not thread-safe.
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

// Logits of a row with a wanted softmax, although a hidden state has far fewer dimensions than there are
// classes: a few candidates get the logits that they need, and all other classes share one normal
// distribution, which random weight rows give by themselves. In nats, up to a constant that the softmax does
// not see.
struct LogitModel {
  // Of the normal part of the logit of a class that is not a candidate; its mean is the class's own logit.
  double deviation = 0.0;
  // Of the candidates, the largest first.
  std::vector<double> candidates;
  // log p of a class with logit z is z + shift.
  double shift = 0.0;
};

// The classes' own logits, as far as the fit needs them: values with the number of classes that each stands
// for.
struct ClassLogits {
  std::vector<double> values;
  std::vector<double> counts;
};

// Fits a row with the probabilities exp(log_p[rank - 1]) for hidden states of `hidden_size` dimensions. The
// candidates are as many as a hidden state of that size has room for, fewer than hidden_size / 4.
LogitModel FitLogits(const std::vector<double>& log_p, const ClassLogits& classes, int64_t hidden_size);

}  // namespace lossd::data

#endif  // LOSSD_KERNELS_DATA_SOFTMAX_PROFILE_H_
