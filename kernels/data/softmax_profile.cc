// SPDX-License-Identifier: Apache-2.0
#include "kernels/data/softmax_profile.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "kernels/data/real_profile_json.h"
#include "nlohmann/json.hpp"

namespace lossd::data {
namespace {

// Averages of log p lose some of the probability of flat rows. This much (nats) is added to log p, from
// nothing at rank 1 to all of it at kFullRank, and the sum made 1 again: found by comparison with the
// thresholds.
constexpr double kTailGain = 0.06;
constexpr double kFullRank = 64.0;

std::vector<double> Logs(const std::vector<double>& values) {
  std::vector<double> logs;
  for (double value : values) logs.push_back(std::log(value));
  return logs;
}

// The piecewise linear function through (xs, ys), of an x within the xs or beyond (constant there).
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
  // Group g stands for the quantile (g + 1/2) / groups; half a step beyond the first and the last it goes on.
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

}  // namespace lossd::data
