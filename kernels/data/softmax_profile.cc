// SPDX-License-Identifier: Apache-2.0
#include "kernels/data/softmax_profile.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "absl/strings/str_format.h"
#include "kernels/data/real_profile_json.h"
#include "nlohmann/json.hpp"

namespace lossd::data {
namespace {

// Averages of log p lose some of the probability of flat rows. To correct this, up to kTailGain (nats) is
// added to log p, rising from 0 at rank 1 to kTailGain at kFullRank, and the probabilities are normalized
// again. The values were found by comparison with the thresholds.
constexpr double kTailGain = 0.06;
constexpr double kFullRank = 64.0;

std::vector<double> Logs(const std::vector<double>& values) {
  std::vector<double> logs;
  for (double value : values) logs.push_back(std::log(value));
  return logs;
}

// The value at x of the piecewise linear function through (xs, ys). It is constant beyond the first and the
// last of xs.
double Interpolate(const std::vector<double>& xs, const std::vector<double>& ys, double x) {
  const auto above = std::upper_bound(xs.begin(), xs.end(), x);
  if (above == xs.begin()) return ys.front();
  if (above == xs.end()) return ys.back();
  const size_t i = static_cast<size_t>(above - xs.begin());
  return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1]);
}

SoftmaxProfile Parse() {
  const nlohmann::json json = nlohmann::json::parse(kRealProfileJson);
  SoftmaxProfile profile;
  profile.what = json.at("what").get<std::string>();
  profile.ranks = json.at("ranks").get<std::vector<double>>();
  for (const nlohmann::json& group : json.at("groups")) {
    std::vector<double> log_p = group.at("log2_p").get<std::vector<double>>();
    for (double& value : log_p) value *= std::log(2.0);
    profile.group_log_p.push_back(std::move(log_p));
  }
  profile.popularity_ranks = json.at("class_popularity").at("rank").get<std::vector<double>>();
  profile.popularity = json.at("class_popularity").at("mean_p").get<std::vector<double>>();
  const nlohmann::json& checks = json.at("checks");
  for (const nlohmann::json& text : checks.at("threshold")) {  // "2^-8"
    profile.thresholds.push_back(std::exp2(std::atof(text.get<std::string>().c_str() + 2)));
  }
  profile.candidates = checks.at("mean_candidates_per_row").get<std::vector<double>>();
  profile.tail_mass = checks.at("mean_tail_mass").get<std::vector<double>>();
  profile.loss = checks.at("loss_nats").get<double>();
  return profile;
}

}  // namespace

const SoftmaxProfile& RealProfile() {
  static const SoftmaxProfile* const profile = new SoftmaxProfile(Parse());
  return *profile;
}

std::vector<double> LogProbabilities(const SoftmaxProfile& profile, double u) {
  // Group g stands for the quantile (g + 1/2) / groups. Values half a step beyond the first and the last
  // group are extrapolated.
  const double groups = static_cast<double>(profile.group_log_p.size());
  const double at = u * groups - 0.5;
  const double lower = std::clamp(std::floor(at), 0.0, groups - 2.0);
  const double weight = at - lower;
  const std::vector<double>& below = profile.group_log_p[static_cast<size_t>(lower)];
  const std::vector<double>& above = profile.group_log_p[static_cast<size_t>(lower) + 1];
  std::vector<double> mixed;
  for (size_t i = 0; i < below.size(); ++i) mixed.push_back(below[i] * (1.0 - weight) + above[i] * weight);

  const std::vector<double> log_ranks = Logs(profile.ranks);
  std::vector<double> log_p;
  double sum = 0.0;
  for (double rank = 1.0; rank <= profile.ranks.back(); ++rank) {
    const double log_rank = std::log(rank);
    const double gain = kTailGain * std::min(1.0, log_rank / std::log(kFullRank));
    log_p.push_back(Interpolate(log_ranks, mixed, log_rank) + gain);
    sum += std::exp(log_p.back());
  }
  for (double& value : log_p) value -= std::log(sum);
  return log_p;
}

std::vector<double> Popularity(const SoftmaxProfile& profile, int64_t vocab) {
  const std::vector<double> log_ranks = Logs(profile.popularity_ranks);
  const std::vector<double> log_p = Logs(profile.popularity);
  const size_t last = log_ranks.size() - 1;
  const double slope = (log_p[last] - log_p[last - 1]) / (log_ranks[last] - log_ranks[last - 1]);
  std::vector<double> popularity;
  for (int64_t rank = 1; rank <= vocab; ++rank) {
    const double log_rank = std::log(static_cast<double>(rank));
    const double beyond = std::max(0.0, log_rank - log_ranks[last]);
    popularity.push_back(std::exp(Interpolate(log_ranks, log_p, log_rank) + slope * beyond));
  }
  const double sum = std::accumulate(popularity.begin(), popularity.end(), 0.0);
  for (double& p : popularity) p /= sum;
  return popularity;
}

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

namespace {

// At the rank where candidates and normal part meet, the normal part has this share of the classes with
// larger logits.
constexpr double kNormalShare = 0.8;
// The normal part has the profile's probability at this rank, or at a quarter of the classes if that is
// smaller. A vocabulary above kLargeVocab has more classes near the end, where the normal part must not
// exceed the profile, so its anchor is kLargeAnchorRank.
constexpr double kAnchorRank = 2048.0;
constexpr double kLargeVocab = 65536.0;
constexpr double kLargeAnchorRank = 4096.0;
constexpr double kLargestMeetingRank = 512.0;
// The largest part of the squared length of a hidden state that candidates may take.
constexpr double kCandidateShare = 0.9;
constexpr double kDeviationRange[] = {0.2, 9.0};
constexpr int kBisections = 30;

// The normal part of the logits: the expected number of classes with a logit above a value.
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

// The deviation with which the normal part falls by as much as the profile between two ranks.
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

// Chooses the logits of the candidates so that, at each of them, candidates and normal part together have as
// many classes above as the profile.
std::vector<double> FitCandidates(const std::vector<double>& log_p, const NormalPart& part, double shift,
                                  double meeting) {
  std::vector<double> candidates;
  double missing = 0.0;  // how many of the profile's classes above a logit the normal part lacks
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
