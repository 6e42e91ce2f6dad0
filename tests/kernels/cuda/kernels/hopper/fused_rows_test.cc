// SPDX-License-Identifier: Apache-2.0
// The kernels around the logit pass, on a Hopper GPU: gradients of rows with an upstream gradient of their
// entropy, and lists of candidates.
#include "kernels/cuda/kernels/hopper/fused_rows.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/kernels/hopper/fused_loss.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::cuda::hopper::fused_rows_test {
namespace {

// ---- gradients of the entropy ----

constexpr DType kBf16 = DType::kBFloat16;
constexpr uint16_t kUntouched = 0x7fc1;

struct Case {
  std::string name;
  int64_t rows, inner, vocab;
  float softcap = 0.0f;
  bool bias = false;
  float scale = 1.0f;
  float deviation = 3.0f;  // of logits
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// Rows of a case with upstream gradients of every kind, the fused pass over them, and what it has to be.
class EntropyGradientTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    LOSSD_SKIP_WITHOUT_HOPPER_GPU();
    const Case& c = GetParam();
    inner_ = (c.inner + 7) / 8 * 8;
    ld_ = (c.vocab + 7) / 8 * 8;
    const float deviation = c.deviation / std::fabs(c.scale) / std::sqrt(static_cast<float>(c.inner));
    hidden_ = Matrix(c.rows, c.rows, 1.0f);
    weight_ = Matrix(c.vocab, ld_, deviation);
    bias_.assign(static_cast<size_t>(ld_), 0.0f);
    for (int64_t v = 0; c.bias && v < c.vocab; ++v) bias_[v] = kernels::testing::Uniform(random_, -1, 1);
    for (int64_t r = 0; r < c.rows; ++r) AddRow(r);
  }

  std::vector<uint16_t> Matrix(int64_t rows, int64_t padded_rows, float deviation) {
    std::normal_distribution<float> normal(0.0f, deviation);
    std::vector<uint16_t> values(static_cast<size_t>(padded_rows * inner_), 0);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < GetParam().inner; ++k) values[r * inner_ + k] = Encode(kBf16, normal(random_));
    }
    return values;
  }

  double Dot(int64_t row, int64_t v) const {
    double sum = 0.0;
    for (int64_t k = 0; k < inner_; ++k) {
      sum += Decode(kBf16, hidden_[row * inner_ + k]) * Decode(kBf16, weight_[v * inner_ + k]);
    }
    return sum;
  }

  // Every ninth row is so long that the losses of some rows are beyond what one pass can tell.
  void AddRow(int64_t row) {
    const Case& c = GetParam();
    if (row % 9 == 8 && c.softcap == 0.0f) {
      for (int64_t k = 0; k < c.inner; ++k) {
        uint16_t& x = hidden_[row * inner_ + k];
        x = Encode(kBf16, 16.0f * static_cast<float>(Decode(kBf16, x)));
      }
    }
    targets_.push_back(static_cast<int32_t>(row % 7 == 0 ? c.vocab - 1 : random_() % c.vocab));
    target_dots_.push_back(static_cast<float>(Dot(row, targets_.back())));
    const float entropies[] = {0.0f, 1.0f, -1.0f, 0.0f, -30.0f, 0.01f};
    coef_loss_.push_back(row % 5 == 3 ? 0.0f : kernels::testing::Uniform(random_, -1, 1));
    coef_lse_.push_back(row % 4 == 1 ? kernels::testing::Uniform(random_, -1, 1) : 0.0f);
    coef_entropy_.push_back(entropies[random_() % 6]);
  }

  struct Output {
    std::vector<uint16_t> elements;  // [rows, ld]
    std::vector<float> factors, entropy, loss;

    double At(int64_t row, int64_t v, int64_t ld) const {
      return static_cast<double>(factors[row]) * Decode(kBf16, elements[row * ld + v]);
    }
  };

  LossTerms Terms(const float* bias, bool any_coef_entropy) const {
    const Case& c = GetParam();
    LossTerms terms;
    terms.vocab = c.vocab;
    terms.bias = c.bias ? bias : nullptr;
    terms.class_weight_sum = static_cast<float>(c.vocab);
    terms.scale = c.scale;
    terms.softcap = c.softcap;
    terms.want_entropy = true;  // the general form whether any_coef_entropy or not
    terms.any_coef_entropy = any_coef_entropy;
    return terms;
  }

  Output Run(const std::vector<float>& coef_entropy) const {
    const Case& c = GetParam();
    const OnDevice<uint16_t> hidden(hidden_), weight(weight_),
        elements(std::vector<uint16_t>(static_cast<size_t>(c.rows * ld_ + 64), kUntouched));
    const OnDevice<float> bias(bias_), dots(target_dots_), coef_loss(coef_loss_), coef_lse(coef_lse_),
        coef(coef_entropy), weights(std::vector<float>(static_cast<size_t>(c.rows), 1.0f)),
        outputs(std::vector<float>(static_cast<size_t>(5 * c.rows), 0.0f));
    const OnDevice<int32_t> targets(targets_), argmax(std::vector<int32_t>(static_cast<size_t>(c.rows), 0));
    const OnDevice<uint8_t> memory(std::vector<uint8_t>(size_t{8} << 20, 0xff));
    FusedLossParams p;
    Carver carver(memory.get());
    p.rows = FusedRows::Carve(carver, c.rows);
    p.rows.partials = TilePartials::Carve(carver, c.rows, c.vocab);
    EXPECT_LE(carver.used(), int64_t{8} << 20);
    p.operands = {hidden.get(), weight.get(), kBf16, inner_, ld_};
    const bool any = std::any_of(coef_entropy.begin(), coef_entropy.end(), [](float x) { return x != 0; });
    p.terms = Terms(bias.get(), any);
    p.in = {.rows = c.rows,
            .padded_rows = c.rows,
            .targets = targets.get(),
            .target_dots = dots.get(),
            .weights = weights.get(),
            .coef_loss = coef_loss.get(),
            .coef_lse = coef_lse.get(),
            .coef_entropy = coef.get()};
    float* const out = outputs.get();
    p.out = {out, out + c.rows, out + 2 * c.rows, out + 3 * c.rows, out + 4 * c.rows, argmax.get()};
    EXPECT_EQ(LaunchFusedExponentials(p, elements.get(), 3, nullptr), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    Output result;
    result.elements = elements.Read();
    for (size_t i = static_cast<size_t>(c.rows * ld_); i < result.elements.size(); ++i) {
      EXPECT_EQ(result.elements[i], kUntouched);
    }
    result.factors.resize(static_cast<size_t>(c.rows));
    EXPECT_EQ(cudaMemcpy(result.factors.data(), p.rows.factor, result.factors.size() * sizeof(float),
                         cudaMemcpyDefault),
              cudaSuccess);
    const std::vector<float> all = outputs.Read();
    result.loss.assign(all.begin(), all.begin() + c.rows);
    result.entropy.assign(all.begin() + 3 * c.rows, all.begin() + 4 * c.rows);
    return result;
  }

  // dL/ds of a row over the scale, element by element, and what may be off.
  void CheckRow(int64_t row, const Output& got) const {
    const Case& c = GetParam();
    const auto cap = static_cast<double>(c.softcap);
    std::vector<double> z(static_cast<size_t>(c.vocab)), slope(z.size(), 1.0);
    double max = -std::numeric_limits<double>::infinity(), sum = 0.0, entropy = 0.0;
    for (int64_t v = 0; v < c.vocab; ++v) {
      z[v] = static_cast<double>(c.scale) * (Dot(row, v) + static_cast<double>(bias_[v]));
      if (cap > 0.0) {
        const double s = z[v];
        z[v] = cap * std::tanh(s / cap);
        slope[v] = std::pow(std::cosh(s / cap), -2.0);
      }
      max = std::max(max, z[v]);
    }
    for (const double logit : z) sum += std::exp(logit - max);
    const double lse = max + std::log(sum);
    for (const double logit : z) entropy -= std::exp(logit - lse) * (logit - lse);
    const double coef_loss = static_cast<double>(coef_loss_[row]);
    const double coef = static_cast<double>(coef_entropy_[row]);
    const double softmax = coef_loss + static_cast<double>(coef_lse_[row]);
    ASSERT_NEAR(got.entropy[row], entropy, 2e-5 * (1.0 + std::fabs(max))) << "row " << row;
    for (int64_t v = 0; v < ld_; ++v) {
      const double value = got.At(row, v, ld_);
      if (v >= c.vocab) {
        ASSERT_EQ(value, 0.0) << "row " << row << " padding column " << v;
        continue;
      }
      const double log_p = z[v] - lse, p = std::exp(log_p);
      double want = p * (softmax - coef * (log_p + entropy));
      if (v == targets_[row]) want += coef_loss * (std::expm1(log_p) - p);
      // Roundings to bf16: of the exponential, of the slope, and of the result. Those of exponents are of
      // fp32.
      const double terms = p * (std::fabs(softmax) + std::fabs(coef) * (std::fabs(log_p + entropy) + 1.0));
      const double target_terms = v == targets_[row] ? std::fabs(coef_loss) : 0.0;
      const double rounding =
          0.008 * terms + 0.0045 * std::fabs(want) + 1e-5 * (1.0 + std::fabs(max)) * (terms + target_terms);
      ASSERT_NEAR(value, want * slope[v], rounding * slope[v] + 1e-17)
          << "row " << row << " class " << v << " of " << targets_[row] << " log p " << log_p << " slope "
          << slope[v] << " coefficients " << softmax << " " << coef;
    }
  }

  kernels::testing::Rng random_ = kernels::testing::FreshRng();
  int64_t inner_ = 0, ld_ = 0;
  std::vector<uint16_t> hidden_, weight_;
  std::vector<float> bias_, target_dots_, coef_loss_, coef_lse_, coef_entropy_;
  std::vector<int32_t> targets_;
};

TEST_P(EntropyGradientTest, IsThatOfEveryElement) {
  const Output got = Run(coef_entropy_);
  for (int64_t r = 0; r < GetParam().rows; ++r) {
    CheckRow(r, got);
    if (HasFatalFailure()) return;
  }
}

// To the bit, whatever the other rows of the chunk have.
TEST_P(EntropyGradientTest, LeavesOtherRowsAsTheyAre) {
  const Output mixed = Run(coef_entropy_);
  const Output without = Run(std::vector<float>(coef_entropy_.size(), 0.0f));
  EXPECT_EQ(mixed.loss, without.loss);
  EXPECT_EQ(mixed.entropy, without.entropy);
  for (int64_t r = 0; r < GetParam().rows; ++r) {
    if (coef_entropy_[r] != 0.0f) continue;
    ASSERT_EQ(mixed.factors[r], without.factors[r]) << "row " << r;
    const auto begin = mixed.elements.begin() + r * ld_;
    ASSERT_TRUE(std::equal(begin, begin + ld_, without.elements.begin() + r * ld_)) << "row " << r;
  }
}

TEST_P(EntropyGradientTest, IsZeroInRowsThatAreNotFinite) {
  coef_entropy_.back() = 1.0f;
  coef_entropy_.front() = -1.0f;
  target_dots_.back() = std::numeric_limits<float>::quiet_NaN();
  const Output got = Run(coef_entropy_);
  const int64_t last = GetParam().rows - 1;
  for (int64_t v = 0; v < ld_; ++v) ASSERT_EQ(got.At(last, v, ld_), 0.0) << "class " << v;
  if (last > 0) CheckRow(0, got);
}

TEST_P(EntropyGradientTest, IsTheSameBitsAgain) {
  const Output first = Run(coef_entropy_), again = Run(coef_entropy_);
  EXPECT_EQ(first.elements, again.elements);
  EXPECT_EQ(first.factors, again.factors);
}

const Case kCases[] = {
    {"OneClass", 3, 8, 1},
    {"OneRow", 1, 24, 77},
    {"Plain", 257, 127, 513},
    {"Wide", 20, 40, 9001},
    {"Bias", 130, 72, 300, 0.0f, true, 0.5f},
    {"NegativeScale", 64, 40, 257, 0.0f, true, -0.7f},
    {"Capped", 257, 72, 513, 6.0f, true},
    {"CappedAndScaled", 40, 40, 300, 30.0f, false, 2.0f, 20.0f},
    {"Saturated", 130, 72, 300, 4.0f, true, 1.0f, 16.0f},
    {"Flat", 33, 40, 300, 0.0f, false, 1.0f, 0.01f},
};

INSTANTIATE_TEST_SUITE_P(Cases, EntropyGradientTest, ::testing::ValuesIn(kCases),
                         [](const ::testing::TestParamInfo<Case>& test) { return test.param.name; });

// ---- lists ----

constexpr int64_t kRows = 300;  // two panels
constexpr int64_t kVocab = 2 * kVocabTile;
constexpr int64_t kInner = 8;
constexpr float kEpsilon = 0x1p-10f;

// Rows with the same logits, listed with room for `capacity` classes each.
class Lists {
 public:
  Lists(const std::vector<float>& logits, int32_t target, int32_t capacity)
      : hidden_(Hidden()),
        weight_(Weight(logits)),
        targets_(std::vector<int32_t>(kRows, target)),
        target_dots_(std::vector<float>(
            kRows, static_cast<float>(Decode(DType::kBFloat16, Encode(DType::kBFloat16, logits[target]))))),
        ones_(std::vector<float>(kRows, 1.0f)),
        outputs_(std::vector<float>(5 * kRows, 0.0f)),
        argmax_(std::vector<int32_t>(kRows, 0)),
        memory_(std::vector<uint8_t>(int64_t{8} << 20, 0xff)) {
    Carver carver(memory_.get());
    rows_ = FusedRows::Carve(carver, kRows);
    rows_.partials = TilePartials::Carve(carver, kRows, kVocab);
    lists_ = CandidateLists::Carve(carver, kRows, kVocab, capacity);
    lists_.log2_epsilon = std::log2(kEpsilon);
    EXPECT_LE(carver.used(), int64_t{8} << 20);
  }

  void Run() const {
    FusedLossParams p;
    p.operands = {hidden_.get(), weight_.get(), DType::kBFloat16, kInner, kVocab};
    p.terms.vocab = kVocab;
    p.terms.class_weight_sum = static_cast<float>(kVocab);
    p.in.rows = p.in.padded_rows = kRows;
    p.in.targets = targets_.get();
    p.in.target_dots = target_dots_.get();
    p.in.weights = p.in.coef_loss = p.in.coef_lse = p.in.coef_entropy = ones_.get();
    float** const outputs[] = {&p.out.loss, &p.out.z_loss_part, &p.out.lse, &p.out.entropy,
                               &p.out.target_logprob};
    for (int i = 0; i < 5; ++i) *outputs[i] = outputs_.get() + i * kRows;
    p.out.argmax = argmax_.get();
    p.rows = rows_;
    ASSERT_EQ(LaunchFusedCandidates(p, lists_, 2, nullptr), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  std::vector<int32_t> Counts() const { return Read(lists_.counts, kRows); }
  std::set<int32_t> Columns(int64_t row, int32_t count) const {
    std::set<int32_t> columns;
    for (const Candidate& c : Read(lists_.entries + row * lists_.capacity, count)) columns.insert(c.column);
    return columns;
  }

 private:
  template <typename T>
  static std::vector<T> Read(const T* from, int64_t count) {
    std::vector<T> values(static_cast<size_t>(count));
    EXPECT_EQ(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDefault), cudaSuccess);
    return values;
  }
  // x = (1, 0, ...), so that the logits are the first column of W.
  static std::vector<uint16_t> Hidden() {
    std::vector<uint16_t> hidden(kRows * kInner, 0);
    for (int64_t r = 0; r < kRows; ++r) hidden[r * kInner] = Encode(DType::kBFloat16, 1.0f);
    return hidden;
  }
  static std::vector<uint16_t> Weight(const std::vector<float>& logits) {
    std::vector<uint16_t> weight(kVocab * kInner, 0);
    for (int64_t v = 0; v < kVocab; ++v) weight[v * kInner] = Encode(DType::kBFloat16, logits[v]);
    return weight;
  }

  OnDevice<uint16_t> hidden_, weight_;
  OnDevice<int32_t> targets_;
  OnDevice<float> target_dots_, ones_, outputs_;
  OnDevice<int32_t> argmax_;
  OnDevice<uint8_t> memory_;
  FusedRows rows_;
  CandidateLists lists_;
};

// Of two tiles the first is listed when the sums are known, and the second as the pass goes by, when the
// other half of the sum may be missing: with what does not reach epsilon in the end its list has no room for
// the first tile's.
class FusedLists : public ::testing::Test {
 protected:
  static constexpr int32_t kTarget = 3;
  static constexpr int32_t kCandidates = 61;  // in both tiles together

  void SetUp() override {
    LOSSD_SKIP_WITHOUT_HOPPER_GPU();
    logits_.assign(kVocab, -30.0f);
    logits_[kTarget] = std::log(0.4f);
    for (int i = 0; i < 30; ++i) AddCandidate(8 * i, 0.1f / 30.0f);
    AddCandidate(kVocabTile, 0.3f);
    for (int i = 1; i <= 30; ++i) AddCandidate(kVocabTile + 8 * i, 0.2f / 30.0f);
    for (int i = 1; i <= 20; ++i) logits_[kVocabTile + 8 * i + 1] = std::log(0.7f * kEpsilon);
  }

  void AddCandidate(int64_t column, float p) {
    candidates_.insert(static_cast<int32_t>(column));
    logits_[column] = std::log(p);
  }

  std::vector<float> logits_;
  std::set<int32_t> candidates_;
};

TEST_F(FusedLists, AreCompleteIfThereIsRoomForWhatReachesEpsilon) {
  ASSERT_EQ(candidates_.size(), kCandidates);
  for (const int32_t capacity : {kCandidates, kCandidates + 10, kCandidates + 100}) {
    const Lists lists(logits_, kTarget, capacity);
    lists.Run();
    const std::vector<int32_t> counts = lists.Counts();
    for (int64_t r = 0; r < kRows; ++r) {
      ASSERT_LE(counts[r], capacity) << "row " << r;
      const std::set<int32_t> columns = lists.Columns(r, counts[r]);
      ASSERT_EQ(static_cast<int32_t>(columns.size()), counts[r]) << "row " << r;
      ASSERT_TRUE(std::includes(columns.begin(), columns.end(), candidates_.begin(), candidates_.end()))
          << "row " << r;
    }
  }
}

TEST_F(FusedLists, SayThatThereIsNot) {
  const Lists lists(logits_, kTarget, kCandidates - 1);
  lists.Run();
  for (const int32_t count : lists.Counts()) ASSERT_EQ(count, kCandidates);
}

}  // namespace
}  // namespace lossd::kernels::cuda::hopper::fused_rows_test
