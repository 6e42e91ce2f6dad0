// SPDX-License-Identifier: Apache-2.0
#include "kernels/data/logit_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace lossd::data {
namespace {

// At the rank where candidates and normal part meet, this share of the classes above is of the normal part.
constexpr double kNormalShare = 0.8;
// The normal part has the profile's probability at this rank, or at a quarter of the classes. Of a large
// vocabulary more classes are near the end, so that it must not be above the profile there.
constexpr double kAnchorRank = 2048.0;
constexpr double kLargeVocab = 65536.0;
constexpr double kLargeAnchorRank = 4096.0;
constexpr double kLargestMeetingRank = 512.0;
// The candidates' part of the squared length of a hidden state, at most.
constexpr double kCandidateShare = 0.9;
constexpr double kDeviationRange[] = {0.2, 9.0};
constexpr int kBisections = 30;

// The normal part: how many classes have a logit above a value.
class NormalPart {
 public:
  NormalPart(const ClassLogits& classes, double deviation) : classes_(classes), deviation_(deviation) {}

  double CountAbove(double logit) const {
    double count = 0.0;
    for (size_t i = 0; i < classes_.values.size(); ++i) {
      count +=
          classes_.counts[i] * 0.5 * std::erfc((logit - classes_.values[i]) / (deviation_ * std::sqrt(2.0)));
    }
    return count;
  }

  // The logit that `count` classes are expected to exceed.
  double LogitOf(double count) const {
    double low = -100.0, high = 100.0;
    for (int i = 0; i < kBisections; ++i) {
      const double middle = 0.5 * (low + high);
      (CountAbove(middle) > count ? low : high) = middle;
    }
    return 0.5 * (low + high);
  }

 private:
  const ClassLogits& classes_;
  const double deviation_;
};

double At(const std::vector<double>& log_p, double rank) {
  const size_t index = static_cast<size_t>(std::max(1.0, rank)) - 1;
  return log_p[std::min(index, log_p.size() - 1)];
}

// The deviation with which the normal part falls as the profile does between two ranks.
double FitDeviation(const std::vector<double>& log_p, const ClassLogits& classes, double meeting,
                    double anchor) {
  const double fall = At(log_p, meeting) - At(log_p, anchor);
  double low = kDeviationRange[0], high = kDeviationRange[1];
  for (int i = 0; i < kBisections / 2; ++i) {
    const double middle = 0.5 * (low + high);
    const NormalPart part(classes, middle);
    (part.LogitOf(kNormalShare * meeting) - part.LogitOf(anchor) < fall ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

// The logits of candidates: at each of them, candidates and normal part together reach the rank that the
// profile has there.
std::vector<double> FitCandidates(const std::vector<double>& log_p, const NormalPart& part, double shift,
                                  double meeting) {
  std::vector<double> candidates;
  double missing = 0.0;  // of the classes that the profile has above, how many the normal part has not
  for (double rank = 1.0; rank <= 3.0 * meeting; ++rank) {
    const double logit = At(log_p, rank) - shift;
    missing = std::max(missing, rank - part.CountAbove(logit));
    while (static_cast<double>(candidates.size()) + 0.5 <= missing) candidates.push_back(logit);
  }
  return candidates;
}

}  // namespace

LogitModel FitLogits(const std::vector<double>& log_p, const ClassLogits& classes, int64_t hidden_size) {
  const double vocab = std::accumulate(classes.counts.begin(), classes.counts.end(), 0.0);
  const double anchor = vocab > kLargeVocab ? kLargeAnchorRank : std::min(kAnchorRank, vocab / 4.0);
  LogitModel model;
  for (double meeting = kLargestMeetingRank; meeting >= 4.0; meeting /= std::sqrt(2.0)) {
    if (6.0 * meeting > anchor) continue;
    model.deviation = FitDeviation(log_p, classes, meeting, anchor);
    const NormalPart part(classes, model.deviation);
    model.shift = At(log_p, anchor) - part.LogitOf(anchor);
    model.candidates = FitCandidates(log_p, part, model.shift, meeting);
    double squares = 0.0;
    for (double logit : model.candidates) squares += logit * logit;
    const double dimensions = static_cast<double>(hidden_size);
    if (static_cast<double>(model.candidates.size()) < dimensions / 4.0 &&
        squares <= kCandidateShare * dimensions * model.deviation * model.deviation) {
      break;
    }
  }
  return model;
}

}  // namespace lossd::data
