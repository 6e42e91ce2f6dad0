// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/kernels/hopper/gradient_gemm.h"

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::cuda::hopper::gradient_gemm_test {
namespace {

constexpr int64_t kGuard = 64;  // elements past C that nothing may touch
constexpr float kGuardValue = 1.5f;

struct Case {
  int64_t rows, inner, columns;
  bool transpose_a;
  DType input, output;
  int clusters;
};

class ProductTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    LOSSD_SKIP_WITHOUT_HOPPER_GPU();
    const Case& c = GetParam();
    a_ = Normal(c.rows * c.inner);
    b_ = Normal(c.inner * c.columns);
    std::normal_distribution<float> normal;
    for (int64_t r = 0; r < c.rows; ++r) factors_.push_back(normal(random_));
    before_ = std::vector<float>(c.rows * c.columns);
    for (float& x : before_) x = 10.0f * normal(random_);
    Reference();
  }

  std::vector<uint16_t> Normal(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<uint16_t> values(count);
    for (uint16_t& x : values) x = Encode(GetParam().input, normal(random_));
    return values;
  }

  // A B in double, and the sums of magnitudes that its rounding errors go with.
  void Reference() {
    const Case& c = GetParam();
    std::vector<double> b;
    for (uint16_t bits : b_) b.push_back(Decode(c.input, bits));
    product_.assign(c.rows * c.columns, 0.0);
    size_.assign(c.rows * c.columns, 0.0);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t k = 0; k < c.inner; ++k) {
        const double a = Decode(c.input, a_[c.transpose_a ? k * c.rows + r : r * c.inner + k]);
        for (int64_t j = 0; j < c.columns; ++j) {
          product_[r * c.columns + j] += a * b[k * c.columns + j];
          size_[r * c.columns + j] += std::fabs(a * b[k * c.columns + j]);
        }
      }
    }
  }

  // C after one launch, which found `start` there; guard included.
  template <typename T>
  std::vector<T> Launch(const std::vector<T>& start, bool with_factors, bool add, float scale) {
    const Case& c = GetParam();
    const OnDevice<uint16_t> a(a_), b(b_);
    const OnDevice<float> factors(factors_);
    const OnDevice<T> out(start);
    const OnDevice<uint8_t> scratch(std::vector<uint8_t>(kGradientGemmScratchBytes, 0xff));
    GradientGemmParams p;
    p.transpose_a = c.transpose_a;
    p.a = a.get();
    p.b = b.get();
    p.input = c.input;
    p.c = out.get();
    p.output = c.output;
    p.add = add;
    p.rows = c.rows;
    p.columns = c.columns;
    p.inner = c.inner;
    p.scale = scale;
    if (with_factors) p.factors = factors.get();
    p.scratch = scratch.get();
    p.order = &order_;
    EXPECT_EQ(LaunchGradientGemm(p, PlanGradientGemm(c.rows, c.columns, c.inner, c.clusters), nullptr),
              cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return out.Read();
  }

  void Run(bool with_factors, bool add, float scale) {
    const Case& c = GetParam();
    if (add && c.output != DType::kFloat32) GTEST_SKIP() << "only fp32 is added to";
    const int64_t count = c.rows * c.columns;
    std::vector<double> got;
    if (c.output == DType::kFloat32) {
      std::vector<float> start = before_;
      if (!add) start.assign(count, std::numeric_limits<float>::quiet_NaN());
      start.resize(count + kGuard, kGuardValue);
      const std::vector<float> out = Launch(start, with_factors, add, scale);
      EXPECT_EQ(out, Launch(start, with_factors, add, scale)) << "not the same twice";
      got.assign(out.begin(), out.end());
    } else {
      std::vector<uint16_t> start(count, 0x7fff);
      start.resize(count + kGuard, Encode(c.output, kGuardValue));
      for (uint16_t bits : Launch(start, with_factors, add, scale)) got.push_back(Decode(c.output, bits));
    }
    double rounding = 0.0;
    if (c.output == DType::kBFloat16) rounding = 0x1p-8;
    if (c.output == DType::kFloat16) rounding = 0x1p-11;
    for (int64_t i = 0; i < count; ++i) {
      const double factor =
          static_cast<double>(scale) * static_cast<double>(with_factors ? factors_[i / c.columns] : 1.0f);
      const double want = factor * product_[i] + (add ? static_cast<double>(before_[i]) : 0.0);
      const double tolerance = 3e-6 * std::fabs(factor) * size_[i] + rounding * std::fabs(want) + 3e-6;
      ASSERT_NEAR(got[i], want, tolerance) << "row " << i / c.columns << " column " << i % c.columns;
    }
    for (int64_t i = count; i < count + kGuard; ++i) ASSERT_EQ(got[i], static_cast<double>(kGuardValue));
  }

  kernels::testing::Rng random_ = kernels::testing::FreshRng();
  const ClusterOrder order_ = FindClusterOrder();
  std::vector<uint16_t> a_, b_;
  std::vector<float> factors_, before_;
  std::vector<double> product_, size_;
};

TEST_P(ProductTest, Stores) { Run(false, false, 1.0f); }
TEST_P(ProductTest, StoresTimesFactors) { Run(true, false, -0.25f); }
TEST_P(ProductTest, Adds) { Run(false, true, 0.5f); }

std::string CaseName(const ::testing::TestParamInfo<Case>& test) {
  const Case& c = test.param;
  return std::to_string(c.rows) + "x" + std::to_string(c.inner) + "x" + std::to_string(c.columns) +
         (c.transpose_a ? "_t_" : "_") + std::string(Name(c.input)) + "_" + std::string(Name(c.output)) +
         "_" + std::to_string(c.clusters);
}

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBf16 = DType::kBFloat16;

// The dimension that is not contiguous in any operand is odd; rows of the results in several panels, tiles
// in several segments, and both; more tiles than a whole grid takes at once.
INSTANTIATE_TEST_SUITE_P(
    Shapes, ProductTest,
    ::testing::Values(Case{1, 8, 8, false, kBf16, kBf16, 3}, Case{8, 1, 8, true, kBf16, kF32, 3},
                      Case{257, 520, 328, false, kBf16, kBf16, 3}, Case{520, 257, 328, true, kBf16, kF32, 3},
                      Case{131, 8000, 200, false, kBf16, kBf16, 5},
                      Case{601, 2056, 264, false, kBf16, kBf16, 4},
                      Case{136, 4001, 264, true, kBf16, kF32, 7}, Case{1032, 333, 520, true, kBf16, kF32, 4},
                      Case{257, 520, 328, false, kF16, kF16, 3}, Case{601, 2056, 264, false, kF16, kF32, 4},
                      Case{520, 2049, 328, true, kF16, kF32, 4}, Case{300, 264, 40, false, kBf16, kF32, 66},
                      Case{4104, 24, 2056, true, kBf16, kF32, 66}, Case{520, 130, 328, true, kF16, kF32, 4},
                      Case{1000, 640, 264, true, kBf16, kF32, 5}, Case{1000, 641, 264, true, kBf16, kF32, 5}),
    CaseName);

TEST(Product, RefusesWhatItCannotStore) {
  GradientGemmParams p;
  p.rows = p.columns = p.inner = 8;
  p.input = DType::kFloat32;
  EXPECT_NE(LaunchGradientGemm(p, PlanGradientGemm(8, 8, 8, 1), nullptr), cudaSuccess);
}

}  // namespace
}  // namespace lossd::kernels::cuda::hopper::gradient_gemm_test
