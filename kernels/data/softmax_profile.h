// SPDX-License-Identifier: Apache-2.0
// The shape of the softmax of a trained language model. SoftmaxProfile has measured figures, from which data
// for tests and benchmarks are made. FitLogits makes logits with such a softmax, and ProfileCheck checks how
// well rows match it. Probabilities are not logarithms unless a name says so. Functions are pure and
// thread-safe.
#ifndef LOSSD_KERNELS_DATA_SOFTMAX_PROFILE_H_
#define LOSSD_KERNELS_DATA_SOFTMAX_PROFILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"

namespace lossd::data {

// The measured figures. Immutable, so thread-safe. The lists after `ranks`, `popularity_ranks` and
// `thresholds` have an entry for each of their entries.
struct SoftmaxProfile {
  std::string what;  // the measured model and text

  // The ranks at which log p is known, from 1 (the most probable class of a row) to the number of classes.
  std::vector<double> ranks;
  // The rows are divided by entropy into groups of equal size, the smallest entropy first. Each group has the
  // mean of log p (nats) at `ranks`.
  std::vector<std::vector<double>> group_log_p;

  // The popularity of a class is its mean probability over all rows. popularity[i] is the popularity of the
  // class with the popularity_ranks[i]-th largest one.
  std::vector<double> popularity_ranks;
  std::vector<double> popularity;

  // For each threshold, as means over rows: the number of classes with at least this probability, and the
  // probability of all other classes.
  std::vector<double> thresholds;
  std::vector<double> candidates;
  std::vector<double> tail_mass;
  double loss = 0.0;  // mean, nats
};

// The profile of real_profile.json in this folder, which is built into the program.
const SoftmaxProfile& RealProfile();

// log p by rank (entry r - 1 for rank r) of a row whose entropy is at the quantile `u` in [0, 1] of all rows.
// The probabilities sum to 1. Values are interpolated between groups and between ranks.
std::vector<double> LogProbabilities(const SoftmaxProfile& profile, double u);

// The popularities of `vocab` classes, the most popular class first; they sum to 1. Beyond the last known
// rank they fall by the same power of the rank as before it.
std::vector<double> Popularity(const SoftmaxProfile& profile, int64_t vocab);

// Checks how well rows match the softmax of a profile. Rows are added one by one. Not thread-safe.
class ProfileCheck {
 public:
  explicit ProfileCheck(const SoftmaxProfile& profile);

  // Logits of a row [V] in nats, and its target.
  void Add(absl::Span<const float> logits, int32_t target);

  // The means over the added rows divided by the values of the profile, for one threshold. 1 is perfect.
  struct Ratio {
    double threshold = 0.0;
    double candidates = 0.0;  // classes with at least this probability
    double tail_mass = 0.0;   // probability of all other classes
  };
  std::vector<Ratio> Ratios() const;
  double loss() const;  // mean, nats

  // A table of the rows' and the profile's values, with a line for each threshold.
  std::string Text() const;

 private:
  const SoftmaxProfile& profile_;
  int64_t rows_ = 0;
  double loss_ = 0.0;
  std::vector<double> candidates_;  // sums, for each threshold
  std::vector<double> tail_mass_;
};

// A model of the logits of a row with a wanted softmax. A hidden state has far fewer dimensions than there
// are classes, so it cannot choose all logits. A few candidates get the logits that they need. The logits of
// all other classes have one normal distribution, which random weight rows produce. In nats, up to a constant
// that does not change the softmax.
struct LogitModel {
  // The standard deviation of the logit of a class that is not a candidate. Its mean is the class's own
  // logit.
  double deviation = 0.0;
  // The logits of the candidates, the largest first.
  std::vector<double> candidates;
  // log p of a class with logit z is z + shift.
  double shift = 0.0;
};

// The classes' own logits, in the form that the fit needs: values, each with the number of classes that it
// stands for.
struct ClassLogits {
  std::vector<double> values;
  std::vector<double> counts;
};

// Fits the logits of a row with the probabilities exp(log_p[rank - 1]), for hidden states of `hidden_size`
// dimensions. The number of candidates is what a hidden state of that size has room for; it is less than
// hidden_size / 4.
LogitModel FitLogits(const std::vector<double>& log_p, const ClassLogits& classes, int64_t hidden_size);

}  // namespace lossd::data

#endif  // LOSSD_KERNELS_DATA_SOFTMAX_PROFILE_H_
