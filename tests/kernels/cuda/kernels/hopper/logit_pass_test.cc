// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/kernels/hopper/logit_pass.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::cuda::hopper::logit_pass_test {
namespace {

constexpr double kLog2EDouble = 1.4426950408889634;
constexpr float kPoison = 12345.0f;

struct Case {
  int64_t rows, inner, vocab;
  DType dtype;
};

class LogitPassTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    LOSSD_SKIP_WITHOUT_HOPPER_GPU();
    const Case& c = GetParam();
    padded_vocab_ = (c.vocab + 7) / 8 * 8;
    padded_inner_ = (c.inner + 7) / 8 * 8;
    tiles_ = VocabTiles(c.vocab);
    ld_ = (c.rows + kRowTile - 1) / kRowTile * kRowTile;
    hidden_ = Matrix(c.rows, 1.0f);
    weight_ = Matrix(c.vocab, 3.0f / std::sqrt(static_cast<float>(c.inner)));
    weight_.resize(padded_vocab_ * padded_inner_, 0);
    for (int64_t r = 0; r < c.rows; ++r) {
      const int64_t edges[] = {0, c.vocab - 1, std::min<int64_t>(c.vocab - 1, kVocabTile - 1),
                               std::min<int64_t>(c.vocab - 1, kVocabTile)};
      targets_.push_back(static_cast<int32_t>(r < 4 ? edges[r] : random_() % c.vocab));
    }
    logits_.resize(c.rows * c.vocab);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t v = 0; v < c.vocab; ++v) {
        double sum = 0.0;
        for (int64_t k = 0; k < c.inner; ++k) {
          sum += Decode(c.dtype, hidden_[r * padded_inner_ + k]) *
                 Decode(c.dtype, weight_[v * padded_inner_ + k]);
        }
        logits_[r * c.vocab + v] = sum;
      }
    }
  }

  std::vector<uint16_t> Matrix(int64_t rows, float deviation) {
    std::normal_distribution<float> normal(0.0f, deviation);
    std::vector<uint16_t> values(rows * padded_inner_, 0);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < GetParam().inner; ++k) {
        values[r * padded_inner_ + k] = Encode(GetParam().dtype, normal(random_));
      }
    }
    return values;
  }

  // What every run reads, on the device.
  struct Operands {
    explicit Operands(const LogitPassTest& of)
        : test(of), hidden(of.hidden_), weight(of.weight_), targets(of.targets_) {}
    LogitOperands Logits(float scale) const {
      return {.hidden = hidden.get(),
              .weight = weight.get(),
              .dtype = GetParam().dtype,
              .inner = test.padded_inner_,
              .rows = GetParam().rows,
              .classes = GetParam().vocab,
              .padded_classes = test.padded_vocab_,
              .form = {.scale = scale},
              .targets = targets.get()};
    }

    const LogitPassTest& test;
    OnDevice<uint16_t> hidden, weight;
    OnDevice<int32_t> targets;
  };

  // Poisoned statistics for a run to fill.
  struct Statistics {
    explicit Statistics(const LogitPassTest& of)
        : ld(of.ld_),
          max(std::vector<float>(of.tiles_ * ld, kPoison)),
          sum(std::vector<float>(of.tiles_ * ld, kPoison)),
          target(std::vector<float>(ld, kPoison)),
          arg(std::vector<uint8_t>(of.tiles_ * ld, 77)) {}
    TilePartials Partials() const { return {ld, max.get(), sum.get(), nullptr, arg.get(), target.get()}; }

    int64_t ld;
    OnDevice<float> max, sum, target;
    OnDevice<uint8_t> arg;
  };

  // Of each row, 5 above its target's exponent.
  std::vector<float> References(float scale) const {
    const double f = static_cast<double>(scale) * kLog2EDouble;
    std::vector<float> references;
    for (int64_t r = 0; r < GetParam().rows; ++r) {
      references.push_back(static_cast<float>(f * logits_[r * GetParam().vocab + targets_[r]] + 5.0));
    }
    return references;
  }

  // Runs the pass with or without stored exponentials and compares everything it writes.
  void Run(bool store, float scale) {
    const Case& c = GetParam();
    const Operands operands(*this);
    const Statistics statistics(*this);
    const OnDevice<uint16_t> out(std::vector<uint16_t>(c.rows * padded_vocab_ + 64, 0x7fc1));
    const std::vector<float> references = References(scale);
    // Every other row's maxima are wanted whatever they are; of the others only those above the target.
    std::vector<float> thresholds(c.rows);
    for (int64_t r = 0; r < c.rows; ++r) {
      thresholds[r] = r % 2 == 0 ? -std::numeric_limits<float>::infinity()
                                 : static_cast<float>(logits_[r * c.vocab + targets_[r]]);
    }
    const OnDevice<float> reference(references), threshold(thresholds);
    const ClusterOrder order = FindClusterOrder();
    const OnDevice<uint32_t> claimed(std::vector<uint32_t>(kMostClusters, 0));
    const StatisticsPass pass = {
        {reference.get(), threshold.get()}, statistics.Partials(), AllPanels{&order, claimed.get()}};
    const LogitOperands logits = operands.Logits(scale);
    ASSERT_EQ(store ? LaunchLogitPass(logits, ExponentialsPass{pass, out.get()}, 3, nullptr)
                    : LaunchLogitPass(logits, pass, 3, nullptr),
              cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto maxes = statistics.max.Read(), sums = statistics.sum.Read();
    const auto target_logits = statistics.target.Read();
    const auto args = statistics.arg.Read();
    const auto exponentials = out.Read();
    for (int64_t r = 0; r < c.rows; ++r) {
      ASSERT_NEAR(target_logits[r], logits_[r * c.vocab + targets_[r]], 1e-4) << "row " << r;
      for (int64_t t = 0; t < tiles_; ++t) {
        CheckTile(r, t, maxes[t * ld_ + r], sums[t * ld_ + r], args[t * ld_ + r], references[r],
                  thresholds[r], scale);
      }
      if (store) CheckStored(r, exponentials, references[r], scale);
    }
    for (size_t i = c.rows * padded_vocab_; i < exponentials.size(); ++i) ASSERT_EQ(exponentials[i], 0x7fc1);
  }

  // Runs the pass for a block of classes with rules of every kind and compares the gradient it writes.
  void RunGradients(float scale) {
    const Case& c = GetParam();
    const int64_t first = c.vocab > kVocabTile ? kVocabTile - 8 : 0;
    const int64_t classes = std::min<int64_t>(c.vocab - first, 2 * kVocabTile + 3);
    const int64_t padded = (classes + 7) / 8 * 8;
    const std::vector<float> references = References(scale);
    std::vector<GradientRule> rules(c.rows, GradientRule{});
    for (int64_t r = 0; r < c.rows; ++r) {
      if (r % 5 == 4) continue;  // adds nothing
      rules[r].softmax = (r % 2 == 0 ? 1.0f : -1.0f) * (0.25f + static_cast<float>(r % 3));
      rules[r].reference = references[r];
      rules[r].target = -0.75f - static_cast<float>(r % 4);
      rules[r].valid = true;
    }
    const Operands operands(*this);
    const OnDevice<GradientRule> device_rules(rules);
    const OnDevice<uint16_t> out(std::vector<uint16_t>(c.rows * padded + 64, 0x7fc1));
    LogitOperands block = operands.Logits(scale);
    block.weight = operands.weight.get() + first * padded_inner_;
    block.classes = classes;
    block.padded_classes = padded;
    block.first_class = first;
    ASSERT_EQ(LaunchLogitPass(block, GradientPass{device_rules.get(), out.get()}, 3, nullptr), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto gradients = out.Read();
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t v = 0; v < padded; ++v) {
        const double value = Decode(c.dtype, gradients[r * padded + v]);
        double want = 0.0;
        if (first + v == targets_[r]) {
          want = static_cast<double>(rules[r].target);
        } else if (v < classes) {
          const double logit = logits_[r * c.vocab + first + v] * static_cast<double>(scale) * kLog2EDouble;
          want = static_cast<double>(rules[r].softmax) *
                 std::exp2(logit - static_cast<double>(rules[r].reference));
        }
        if (c.dtype == DType::kFloat16) want = std::clamp(want, -65504.0, 65504.0);
        ASSERT_NEAR(value, want, 0.0045 * std::fabs(want) + 1e-7) << "row " << r << " class " << first + v;
      }
    }
    for (size_t i = c.rows * padded; i < gradients.size(); ++i) ASSERT_EQ(gradients[i], 0x7fc1);
  }

  // Runs the pass with lists, and again for what it has left out, with complete sums and the first panel to
  // be listed anew; every class that reaches epsilon is then listed once, and in the first panel hardly
  // another.
  void RunLists(float scale, float epsilon, int32_t capacity) {
    const Case& c = GetParam();
    const double f = static_cast<double>(scale) * kLog2EDouble;
    const std::vector<float> references = References(scale);
    std::vector<float> sums(c.rows);
    for (int64_t r = 0; r < c.rows; ++r) {
      double sum = 0.0;
      for (int64_t v = 0; v < c.vocab; ++v) {
        sum += std::exp2(logits_[r * c.vocab + v] * f - static_cast<double>(references[r]));
      }
      sums[r] = static_cast<float>(sum);
    }
    const Operands operands(*this);
    const Statistics statistics(*this);
    const OnDevice<float> reference(references),
        threshold(std::vector<float>(c.rows, std::numeric_limits<float>::infinity()));
    const OnDevice<float> bound(std::vector<float>(c.rows, 0x1p-5f)), total(sums);
    const OnDevice<int32_t> counts(std::vector<int32_t>(c.rows, 0)), counts_again(counts.Read());
    constexpr Candidate kNoEntry = {-7, kPoison};
    const OnDevice<Candidate> entries(std::vector<Candidate>(c.rows * capacity + 1, kNoEntry)),
        entries_again(entries.Read());
    std::vector<int32_t> marks(1 + Panels(c.rows), 0);
    marks[1] = 1;
    const OnDevice<int32_t> anew(marks);
    const LogitOperands logits = operands.Logits(scale);
    const float log2_epsilon = std::log2(epsilon);
    const ListingPass listing = {{reference.get(), threshold.get()},
                                 statistics.Partials(),
                                 {entries.get(), capacity, counts.get(), bound.get(), log2_epsilon},
                                 {}};
    ASSERT_EQ(LaunchLogitPass(logits, listing, 3, nullptr), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto partial_sums = statistics.sum.Read(), bounds = bound.Read();
    const SecondListingPass second = {
        {reference.get(),
         statistics.target.get(),
         {entries_again.get(), capacity, counts_again.get(), total.get(), log2_epsilon}},
        anew.get()};
    ASSERT_EQ(LaunchLogitPass(logits, second, 3, nullptr), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(statistics.sum.Read(), partial_sums) << "the second pass has no statistics";
    EXPECT_EQ(total.Read(), sums);
    const auto count = counts.Read(), count_again = counts_again.Read();
    const auto entry = entries.Read(), entry_again = entries_again.Read();
    EXPECT_EQ(entry.back().column, kNoEntry.column);
    for (int64_t r = 0; r < c.rows; ++r) {
      ASSERT_NEAR(bounds[r] / sums[r], 1.0, 1e-3) << "row " << r;
      std::vector<Candidate> found;
      const auto take = [&](const std::vector<Candidate>& from, int32_t listed) {
        for (int32_t i = 0; i < std::min(listed, capacity); ++i) found.push_back(from[r * capacity + i]);
      };
      if (r >= kPanelRows) take(entry, count[r]);  // of the first panel everything is in the second list
      take(entry_again, count_again[r]);
      const bool complete = count[r] <= capacity && count_again[r] <= capacity;
      std::vector<int> times(c.vocab, 0);
      for (const Candidate& candidate : found) {
        ASSERT_GE(candidate.column, 0);
        ASSERT_LT(candidate.column, c.vocab);
        ++times[candidate.column];
        ASSERT_NEAR(candidate.z, logits_[r * c.vocab + candidate.column], 1e-4);
      }
      for (int64_t v = 0; v < c.vocab; ++v) {
        const double share = std::exp2(logits_[r * c.vocab + v] * f - static_cast<double>(references[r])) /
                             static_cast<double>(sums[r]);
        ASSERT_LE(times[v], v == targets_[r] ? 0 : 1) << "row " << r << " class " << v;
        if (v == targets_[r] || !complete) continue;
        if (share >= static_cast<double>(epsilon)) {
          ASSERT_EQ(times[v], 1) << "row " << r << " class " << v;
        }
        if (r < kPanelRows && share < 0.97 * static_cast<double>(epsilon)) {
          ASSERT_EQ(times[v], 0) << "row " << r << " class " << v;
        }
      }
    }
  }

  void CheckTile(int64_t r, int64_t t, float max, float sum, int arg, float reference, float threshold,
                 float scale) {
    const Case& c = GetParam();
    const int64_t begin = t * kVocabTile, end = std::min(c.vocab, begin + kVocabTile);
    double want_max = -std::numeric_limits<double>::infinity();
    for (int64_t v = begin; v < end; ++v) {
      if (v != targets_[r]) want_max = std::max(want_max, logits_[r * c.vocab + v]);
    }
    double want_sum = 0.0;
    const double f = static_cast<double>(scale) * kLog2EDouble;
    for (int64_t v = begin; v < end; ++v) {
      if (v != targets_[r])
        want_sum += std::exp2(logits_[r * c.vocab + v] * f - static_cast<double>(reference));
    }
    if (want_sum == 0.0) {
      ASSERT_EQ(sum, 0.0f);
    } else {
      ASSERT_NEAR(sum / want_sum, 1.0, 3e-4) << "row " << r << " tile " << t;
    }
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    if (std::isinf(want_max) || (max == kNone && want_max < static_cast<double>(threshold) + 1e-4)) {
      ASSERT_EQ(max, kNone);
      return;
    }
    ASSERT_NEAR(max, want_max, 1e-4) << "row " << r << " tile " << t;
    ASSERT_LT(begin + arg, end);
    ASSERT_NEAR(logits_[r * c.vocab + begin + arg], want_max, 2e-4) << "row " << r << " tile " << t;
  }

  void CheckStored(int64_t r, const std::vector<uint16_t>& stored, float reference, float scale) {
    const Case& c = GetParam();
    for (int64_t v = 0; v < padded_vocab_; ++v) {
      const double value = Decode(DType::kBFloat16, stored[r * padded_vocab_ + v]);
      if (v >= c.vocab || v == targets_[r]) {
        ASSERT_EQ(value, 0.0) << "row " << r << " class " << v;
      } else {
        const double want = std::exp2(logits_[r * c.vocab + v] * static_cast<double>(scale) * kLog2EDouble -
                                      static_cast<double>(reference));
        ASSERT_NEAR(value / want, 1.0, 0.0045) << "row " << r << " class " << v;
      }
    }
  }

  kernels::testing::Rng random_ = kernels::testing::FreshRng();
  int64_t padded_vocab_ = 0, padded_inner_ = 0, tiles_ = 0, ld_ = 0;
  std::vector<uint16_t> hidden_, weight_;
  std::vector<int32_t> targets_;
  std::vector<double> logits_;
};

TEST_P(LogitPassTest, Statistics) { Run(false, 1.0f); }
TEST_P(LogitPassTest, StatisticsScaled) { Run(false, 0.25f); }
TEST_P(LogitPassTest, StoredExponentials) {
  if (GetParam().dtype == DType::kFloat16) GTEST_SKIP() << "fp16 has too narrow a range";
  Run(true, 1.5f);
}

TEST_P(LogitPassTest, GradientsOfABlockOfClasses) {
  RunGradients(1.0f);
  RunGradients(0.25f);
}

TEST_P(LogitPassTest, ListsOfCandidates) {
  RunLists(1.0f, 0x1p-7f, 1024);
  RunLists(0.5f, 0x1p-12f, 4096);
  RunLists(1.0f, 0x1p-12f, 3);  // too few
}

std::string CaseName(const ::testing::TestParamInfo<Case>& test) {
  const Case& c = test.param;
  return std::to_string(c.rows) + "x" + std::to_string(c.inner) + "x" + std::to_string(c.vocab) +
         (c.dtype == DType::kBFloat16 ? "bf16" : "fp16");
}

INSTANTIATE_TEST_SUITE_P(Shapes, LogitPassTest,
                         ::testing::Values(Case{1, 8, 8, DType::kBFloat16}, Case{3, 5, 1, DType::kBFloat16},
                                           Case{257, 127, 513, DType::kBFloat16},
                                           Case{130, 72, 300, DType::kFloat16},
                                           Case{384, 200, 1000, DType::kBFloat16},
                                           Case{64, 513, 257, DType::kFloat16},
                                           Case{700, 328, 2049, DType::kBFloat16}),
                         CaseName);

}  // namespace
}  // namespace lossd::kernels::cuda::hopper::logit_pass_test
