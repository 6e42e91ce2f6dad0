// SPDX-License-Identifier: Apache-2.0
#include "kernels/data/real_rows.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <random>
#include <thread>
#include <unordered_set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/data/softmax_profile.h"

namespace lossd::data {
namespace {

// The share of the logarithm of a class's popularity that is in its own logit. The remaining popularity comes
// from how often the class is a candidate. The value was found by comparison with a real model: there, the
// 1,024 classes with the most probability below 2^-9 to 2^-12 in each row have 43 to 57 % of that
// probability.
constexpr double kPopularityShare = 0.85;
constexpr int64_t kLeastHiddenSize = 64;
constexpr int64_t kLeastVocabSize = 1024;
constexpr int kModels = 21;
constexpr int64_t kClassSamples = 150;

// A sample of popularity ranks, spaced logarithmically. Each stands for the ranks up to the next one.
ClassLogits Sample(const std::vector<double>& by_rank) {
  ClassLogits sample;
  const int64_t vocab = static_cast<int64_t>(by_rank.size());
  const double ratio = std::log(static_cast<double>(vocab + 1));
  int64_t begin = 0;
  for (int64_t i = 1; i <= kClassSamples && begin < vocab; ++i) {
    const double end = std::exp(ratio * static_cast<double>(i) / static_cast<double>(kClassSamples)) - 1.0;
    const int64_t next = i == kClassSamples ? vocab : std::min(vocab, static_cast<int64_t>(end));
    if (next <= begin) continue;
    sample.values.push_back(by_rank[static_cast<size_t>((begin + next - 1) / 2)]);
    sample.counts.push_back(static_cast<double>(next - begin));
    begin = next;
  }
  return sample;
}

}  // namespace

absl::StatusOr<RealRows> RealRows::Create(int64_t rows, int64_t hidden_size, int64_t vocab_size,
                                          uint64_t seed) {
  if (rows < 0 || hidden_size < kLeastHiddenSize || vocab_size < kLeastVocabSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("real data needs a hidden size of at least ", kLeastHiddenSize, " and ", kLeastVocabSize,
                     " classes, got ", rows, " rows of ", hidden_size, " and ", vocab_size, " classes"));
  }
  return RealRows(rows, hidden_size, vocab_size, seed);
}

RealRows::RealRows(int64_t rows, int64_t hidden_size, int64_t vocab_size, uint64_t seed)
    : hidden_size_(hidden_size), seed_(seed) {
  const SoftmaxProfile& profile = RealProfile();
  std::mt19937_64 random(seed);

  const std::vector<double> popularity = Popularity(profile, vocab_size);
  std::vector<double> own_logit;
  for (double p : popularity) own_logit.push_back(kPopularityShare * std::log(p));
  const double mean =
      std::accumulate(own_logit.begin(), own_logit.end(), 0.0) / static_cast<double>(vocab_size);
  for (double& logit : own_logit) logit -= mean;

  class_of_.resize(static_cast<size_t>(vocab_size));
  std::iota(class_of_.begin(), class_of_.end(), 0);
  std::shuffle(class_of_.begin(), class_of_.end(), random);
  class_logits_.resize(static_cast<size_t>(vocab_size));
  double sum = 0.0, sum_own = 0.0;
  for (size_t rank = 0; rank < class_of_.size(); ++rank) {
    class_logits_[static_cast<size_t>(class_of_[rank])] = static_cast<float>(own_logit[rank]);
    cumulative_.push_back(sum += popularity[rank]);
    cumulative_own_.push_back(sum_own += std::exp(own_logit[rank]));
  }

  for (int64_t i = 0; i < rows; ++i) {
    quantiles_.push_back((static_cast<double>(i) + 0.5) / static_cast<double>(rows));
  }
  std::shuffle(quantiles_.begin(), quantiles_.end(), random);

  const ClassLogits sample = Sample(own_logit);
  for (int i = 0; i < kModels; ++i) {
    const double quantile = static_cast<double>(i) / (kModels - 1);
    models_.push_back(FitLogits(LogProbabilities(profile, quantile), sample, hidden_size));
  }
}

int64_t RealRows::most_candidates() const {
  size_t most = 0;
  for (const LogitModel& model : models_) most = std::max(most, model.candidates.size());
  return static_cast<int64_t>(most) + 1;  // plus the target
}

const LogitModel& RealRows::ModelOf(int64_t row) const {
  return models_[static_cast<size_t>(std::lround(quantiles_[static_cast<size_t>(row)] * (kModels - 1)))];
}

int32_t RealRows::DrawClass(const std::vector<double>& cumulative, double uniform) const {
  const auto it = std::upper_bound(cumulative.begin(), cumulative.end(), uniform * cumulative.back());
  const size_t rank = std::min(static_cast<size_t>(it - cumulative.begin()), cumulative.size() - 1);
  return class_of_[rank];
}

// Classes are drawn with probabilities proportional to exp(own logit + noise). So the noise of a drawn class
// has the mean deviation^2 instead of 0.
int32_t RealRows::AddTargetOfTail(const LogitModel& model, const std::unordered_set<int32_t>& candidates,
                                  std::mt19937_64& random, Row& row) const {
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  std::normal_distribution<double> noise(model.deviation * model.deviation, model.deviation);
  int32_t target = 0;
  do {
    target = DrawClass(cumulative_own_, uniform(random));
  } while (candidates.contains(target));
  row.classes.push_back(target);
  row.logits.push_back(class_logits_[static_cast<size_t>(target)] + static_cast<float>(noise(random)));
  return target;
}

RealRows::Row RealRows::row(int64_t index) const {
  const LogitModel& model = ModelOf(index);
  std::mt19937_64 random(seed_ ^ (0x9e3779b97f4a7c15u * (static_cast<uint64_t>(index) + 1)));
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  Row row;
  std::unordered_set<int32_t> drawn;
  while (row.classes.size() < model.candidates.size()) {
    const int32_t candidate = DrawClass(cumulative_, uniform(random));
    if (drawn.insert(candidate).second) row.classes.push_back(candidate);
  }
  double squares = 0.0;
  double place = uniform(random);
  row.target = -1;
  for (size_t i = 0; i < row.classes.size(); ++i) {
    const double logit = model.candidates[i];
    row.logits.push_back(static_cast<float>(logit));
    const double moved = logit - double{class_logits_[static_cast<size_t>(row.classes[i])]};
    squares += moved * moved;
    place -= std::exp(logit + model.shift);
    if (place < 0.0 && row.target < 0) row.target = row.classes[i];
  }
  if (row.target < 0) {
    row.target = AddTargetOfTail(model, drawn, random, row);
    const double moved = double{row.logits.back()} - double{class_logits_[static_cast<size_t>(row.target)]};
    squares += moved * moved;
  }
  const double dimensions = static_cast<double>(hidden_size_ - 1);
  const double total = dimensions * model.deviation * model.deviation;
  row.noise = static_cast<float>(std::sqrt(std::max(0.0, total - squares)));
  return row;
}

namespace {

uint64_t Mix(uint64_t x) {  // a bijection of 64 bits
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdu;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53u;
  return x ^ (x >> 33);
}

enum class Stream : uint64_t { kWeight = 1, kHidden = 2 };

// Fills out[0, count) with normal noise of this length. The result depends only on the arguments.
void FillNoise(uint64_t seed, Stream stream, int64_t row, int64_t count, float length, float* out) {
  const uint64_t key = Mix(Mix(seed ^ (static_cast<uint64_t>(stream) << 60)) + static_cast<uint64_t>(row));
  float squares = 0.0f;
  for (int64_t i = 0; i < count; i += 2) {
    const uint64_t bits = Mix(key + static_cast<uint64_t>(i));
    const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
    const float angle = 2.0f * std::numbers::pi_v<float> * (static_cast<float>(bits & 0xffffff) * 0x1p-24f);
    const float radius = std::sqrt(-2.0f * std::log(u));
    out[i] = radius * std::cos(angle);
    squares += out[i] * out[i];
    if (i + 1 == count) break;
    out[i + 1] = radius * std::sin(angle);
    squares += out[i + 1] * out[i + 1];
  }
  const float scale = length / std::sqrt(squares);
  for (int64_t i = 0; i < count; ++i) out[i] *= scale;
}

void FillWeightRow(const RealRows& rows, int64_t row, float* out) {
  out[0] = rows.class_logits()[static_cast<size_t>(row)] / static_cast<float>(RealRows::kShared);
  FillNoise(rows.seed(), Stream::kWeight, row, rows.hidden_size() - 1, 1.0f, out + 1);
}

float Dot(const float* a, const float* b, int64_t count) {
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// Moves `hidden` [D], within the span of the candidates' weight rows [K, D], until it has the wanted logits
// [K]. Does not change element 0, which all hidden states share.
void MoveTo(const std::vector<float>& logits, const std::vector<float>& weight, int64_t hidden_size,
            float* hidden) {
  const int64_t count = static_cast<int64_t>(logits.size());
  std::vector<float> missing(logits.size());
  for (int move = 0; move < kMoves; ++move) {
    for (int64_t c = 0; c < count; ++c) {
      missing[static_cast<size_t>(c)] =
          kMovePart * (logits[static_cast<size_t>(c)] -
                       Dot(&weight[static_cast<size_t>(c * hidden_size)], hidden, hidden_size));
    }
    for (int64_t c = 0; c < count; ++c) {
      const float* const row = &weight[static_cast<size_t>(c * hidden_size)];
      for (int64_t i = 1; i < hidden_size; ++i) hidden[i] += missing[static_cast<size_t>(c)] * row[i];
    }
  }
}

}  // namespace

void FillWeight(const RealRows& rows, int64_t begin, int64_t end, float* out) {
  for (int64_t row = begin; row < end; ++row)
    FillWeightRow(rows, row, out + (row - begin) * rows.hidden_size());
}

void FillHidden(const RealRows& rows, int64_t begin, int64_t end, float* out, int32_t* targets) {
  const int64_t d = rows.hidden_size();
  std::vector<float> weight;
  for (int64_t index = begin; index < end; ++index) {
    const RealRows::Row row = rows.row(index);
    weight.resize(row.classes.size() * static_cast<size_t>(d));
    for (size_t c = 0; c < row.classes.size(); ++c) {
      FillWeightRow(rows, row.classes[c], &weight[c * static_cast<size_t>(d)]);
    }
    float* const hidden = out + (index - begin) * d;
    hidden[0] = static_cast<float>(RealRows::kShared);
    FillNoise(rows.seed(), Stream::kHidden, index, d - 1, row.noise, hidden + 1);
    MoveTo(row.logits, weight, d, hidden);
    targets[index - begin] = row.target;
  }
}

RealData MakeRealData(const RealRows& rows) {
  const int64_t d = rows.hidden_size();
  RealData data;
  data.hidden.resize(static_cast<size_t>(rows.rows() * d));
  data.weight.resize(static_cast<size_t>(rows.vocab_size() * d));
  data.targets.resize(static_cast<size_t>(rows.rows()));
  InParallel(0, rows.vocab_size(), [&](int64_t begin, int64_t end) {
    FillWeight(rows, begin, end, data.weight.data() + begin * d);
  });
  InParallel(0, rows.rows(), [&](int64_t begin, int64_t end) {
    FillHidden(rows, begin, end, data.hidden.data() + begin * d, data.targets.data() + begin);
  });
  return data;
}

RealArrays ToArrays(const RealRows& rows) {
  RealArrays arrays;
  arrays.most = rows.most_candidates();
  for (float logit : rows.class_logits()) {
    arrays.first_elements.push_back(logit / static_cast<float>(RealRows::kShared));
  }
  for (int64_t i = 0; i < rows.rows(); ++i) {
    RealRows::Row row = rows.row(i);
    arrays.counts.push_back(static_cast<int32_t>(row.classes.size()));
    row.classes.resize(static_cast<size_t>(arrays.most));
    row.logits.resize(static_cast<size_t>(arrays.most));
    arrays.classes.insert(arrays.classes.end(), row.classes.begin(), row.classes.end());
    arrays.logits.insert(arrays.logits.end(), row.logits.begin(), row.logits.end());
    arrays.noise.push_back(row.noise);
    arrays.targets.push_back(row.target);
  }
  return arrays;
}

void InParallel(int64_t begin, int64_t end, absl::FunctionRef<void(int64_t from, int64_t to)> work) {
  const int64_t threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 64);
  std::vector<std::jthread> running;
  for (int64_t t = 0; t < threads; ++t) {
    running.emplace_back([work, from = begin + (end - begin) * t / threads,
                          to = begin + (end - begin) * (t + 1) / threads] { work(from, to); });
  }
}

}  // namespace lossd::data
