// SPDX-License-Identifier: Apache-2.0
// Tests of head.h: the head and its initial values.
#include "server/head/head.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/server/head/checkpoint_fixture.h"

// ---- Head ----

namespace lossd::head::head_test {
namespace {

using kernels::DType;
using kernels::Param;
using kernels::Role;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr kernels::TensorId kWeight{Param::kWeight, Role::kValue};

TEST(HeadTest, TensorNames) {
  EXPECT_EQ(TensorName(kWeight), "weight");
  EXPECT_EQ(TensorName({Param::kWeight, Role::kMoment1}), "weight.moment1");
  EXPECT_EQ(TensorName({Param::kNormGain, Role::kMoment2}), "norm.gain.moment2");
  EXPECT_EQ(TensorName({Param::kBias, Role::kGradient}), "bias.gradient");
}

TEST(HeadTest, PassesRowsThrough) {
  const kernels::HeadConfig config{.hidden_size = 3, .vocab_size = 4};
  Head head("lm", std::make_unique<MemoryKernels>(config));
  EXPECT_EQ(head.name(), "lm");
  EXPECT_EQ(head.config(), config);
  const float rows[6] = {1, 2, 3, 4, 5, 6};
  uint8_t bytes[24];
  std::memcpy(bytes, rows, sizeof(bytes));
  ASSERT_TRUE(head.WriteRows(kWeight, 1, 2, DType::kFloat32, bytes).ok());
  EXPECT_THAT(static_cast<MemoryKernels&>(head.kernels()).tensor(kWeight),
              ElementsAre(0, 0, 0, 1, 2, 3, 4, 5, 6, 0, 0, 0));
  uint8_t read[12];
  ASSERT_TRUE(head.ReadRows(kWeight, 2, 1, DType::kFloat32, absl::MakeSpan(read)).ok());
  EXPECT_EQ(std::memcmp(read, bytes + 12, 12), 0);
}

TEST(HeadTest, ErrorsNameHeadAndTensor) {
  Head head("lm", std::make_unique<MemoryKernels>(kernels::HeadConfig{.hidden_size = 3, .vocab_size = 4}));
  uint8_t bytes[24] = {};
  const auto code = [&](kernels::TensorId id, int64_t begin, int64_t rows, size_t size) {
    const absl::Status read =
        head.ReadRows(id, begin, rows, DType::kFloat32, absl::MakeSpan(bytes).first(size));
    const absl::Status write =
        head.WriteRows(id, begin, rows, DType::kFloat32, absl::MakeSpan(bytes).first(size));
    EXPECT_EQ(read, write);
    EXPECT_THAT(std::string(read.message()), HasSubstr("head 'lm', tensor " + TensorName(id)));
    return read.code();
  };
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(code({Param::kBias, Role::kValue}, 0, 1, 4), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(kWeight, 3, 2, 24), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(code(kWeight, -1, 2, 24), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(code(kWeight, 1, kMax, 24), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(code(kWeight, 0, 2, 23), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(head.ReadRows(kWeight, 0, 4, DType::kFloat16, absl::MakeSpan(bytes)).code(),
            absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace lossd::head::head_test

// ---- Initializer ----

namespace lossd::head::initializer_test {
namespace {

using kernels::Param;
using testing::ElementsAre;

std::vector<float> Draw(uint64_t seed, Param param, int64_t first, size_t count, float bound) {
  std::vector<float> values(count);
  FillUniform(seed, param, first, bound, absl::MakeSpan(values));
  return values;
}

// Sample correlation of two equally long samples.
double Correlation(const std::vector<float>& a, const std::vector<float>& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += double{a[i]} * b[i];
    aa += double{a[i]} * a[i];
    bb += double{b[i]} * b[i];
  }
  return ab / std::sqrt(aa * bb);
}

// Computed with a program of a few lines in another language, from the definition in the header.
TEST(InitializerTest, FixedValues) {
  EXPECT_THAT(Draw(0, Param::kWeight, 0, 4, 1.0f),
              ElementsAre(-0x1.71f62ap-1f, 0x1.e26896p-1f, -0x1.c6ff8cp-2f, 0x1.9c4372p-1f));
  EXPECT_THAT(Draw(12345678901234567u, Param::kWeight, 0, 4, 1.0f),
              ElementsAre(-0x1.d1ea52p-1f, 0x1.cf006ap-1f, -0x1.63a4e6p-1f, -0x1.55ee58p-3f));
  EXPECT_THAT(Draw(0, Param::kBias, 0, 4, 1.0f),
              ElementsAre(-0x1.43bf82p-1f, 0x1.003124p-2f, -0x1.6d381p-4f, 0x1.f651aap-1f));
  EXPECT_THAT(Draw(7, Param::kWeight, int64_t{1} << 40, 4, KaimingBound(4096)),
              ElementsAre(-0x1.8c820ap-7f, 0x1.e5f6ap-11f, 0x1.69d032p-7f, 0x1.f75e1p-10f));
}

TEST(InitializerTest, Bounds) {
  EXPECT_EQ(KaimingBound(1), 1.0f);
  EXPECT_EQ(KaimingBound(4096), 0.015625f);
  EXPECT_NEAR(KaimingBound(768), std::sqrt(6.0 / (6.0 * 768)), 1e-9);
}

TEST(InitializerTest, AnyPartCanBeDrawnAlone) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const std::vector<float> whole = Draw(seed, Param::kWeight, 0, 10000, 0.1f);
  for (int round = 0; round < 200; ++round) {
    const size_t begin = random() % whole.size();
    const size_t count = random() % (whole.size() - begin + 1);
    const std::vector<float> part = Draw(seed, Param::kWeight, static_cast<int64_t>(begin), count, 0.1f);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + static_cast<std::ptrdiff_t>(begin)));
  }
}

// Mean, variance, extremes and a chi-square over 100 bins, each within five standard deviations of what
// a uniform distribution has; the seeds are fixed, so this cannot fail by chance.
TEST(InitializerTest, IsUniform) {
  constexpr size_t kCount = 1000000;
  constexpr int kBins = 100;
  const float bound = KaimingBound(1000);
  for (uint64_t seed = 0; seed < 5; ++seed) {
    const std::vector<float> values = Draw(seed, Param::kWeight, 0, kCount, bound);
    double sum = 0, squares = 0;
    std::vector<double> bins(kBins);
    for (const float value : values) {
      ASSERT_LE(std::abs(value), bound);
      const double unit = double{value} / bound;
      sum += unit;
      squares += unit * unit;
      ++bins[static_cast<size_t>(std::min<double>((unit + 1) / 2 * kBins, kBins - 1))];
    }
    EXPECT_NEAR(sum / kCount, 0.0, 5 * std::sqrt(1.0 / 3 / kCount));
    EXPECT_NEAR(squares / kCount, 1.0 / 3, 5 * std::sqrt(4.0 / 45 / kCount));
    double chi_square = 0;
    for (const double bin : bins)
      chi_square += std::pow(bin - 1.0 * kCount / kBins, 2) / (1.0 * kCount / kBins);
    EXPECT_NEAR(chi_square, kBins - 1, 5 * std::sqrt(2.0 * (kBins - 1)));
  }
}

TEST(InitializerTest, StreamsAreIndependent) {
  constexpr size_t kCount = 100000;
  const double limit = 5 / std::sqrt(kCount);
  const std::vector<float> base = Draw(1, Param::kWeight, 0, kCount, 1.0f);
  EXPECT_LT(std::abs(Correlation(base, Draw(2, Param::kWeight, 0, kCount, 1.0f))), limit);
  EXPECT_LT(std::abs(Correlation(base, Draw(1, Param::kBias, 0, kCount, 1.0f))), limit);
  EXPECT_LT(std::abs(Correlation(base, Draw(1, Param::kWeight, 1, kCount, 1.0f))), limit);
  EXPECT_LT(std::abs(Correlation(base, Draw(1, Param::kWeight, 768, kCount, 1.0f))), limit);
}

}  // namespace
}  // namespace lossd::head::initializer_test
