// SPDX-License-Identifier: Apache-2.0
// Every set of row loops that this processor can run, against the C library in double.
#include "kernels/cpu/row_loops.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::row_loops_test {
namespace {

constexpr int64_t kLengths[] = {0, 1, 2, 3, 7, 15, 16, 17, 33, 1023, 1024, 1025, 5000};

std::vector<float> Draw(Rng& rng, int64_t n, float low, float high) {
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = Uniform(rng, low, high);
  return values;
}

class RowLoopsTest : public ::testing::TestWithParam<const RowLoops*> {
 protected:
  const RowLoops& loops() const { return *GetParam(); }
  Rng rng_ = FreshRng();
};

TEST_P(RowLoopsTest, ExpIsAccurateAllOverItsRange) {
  std::vector<float> z = Draw(rng_, 100000, -87.0f, 0.0f);
  z.insert(z.end(), {0.0f, -0.0f, -1e-8f, -0.34657359f, -0.3465736f, -86.99999f});
  std::vector<float> e = z;
  loops().exp_sum_in_place(e.data(), 0.0f, static_cast<int64_t>(e.size()));
  for (size_t i = 0; i < z.size(); ++i) {
    const double want = std::exp(double{z[i]});
    EXPECT_NEAR(e[i], want, 2e-7 * want) << z[i];
  }
}

TEST_P(RowLoopsTest, ExpOfExtremes) {
  std::vector<float> z = {-87.5f, -200.0f, -3e38f, -std::numeric_limits<float>::infinity(), NAN};
  EXPECT_TRUE(std::isnan(loops().exp_sum(z.data(), 0.0f, 5)));
  loops().exp_sum_in_place(z.data(), 0.0f, 5);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(z[static_cast<size_t>(i)], 0.0f);
  EXPECT_TRUE(std::isnan(z[4]));
}

TEST_P(RowLoopsTest, SumsOfManyTermsStayAccurate) {
  const std::vector<float> z = Draw(rng_, 1000003, -12.0f, 0.0f);
  const std::vector<float> u = Draw(rng_, 1000003, 0.0f, 2.0f);
  double sum = 0.0, moment = 0.0, centred = 0.0, weighted = 0.0;
  for (size_t i = 0; i < z.size(); ++i) {
    const double d = double{z[i]} - 0.5;
    sum += std::exp(d);
    moment += std::exp(d) * d;
    centred += d;
    weighted += double{u[i]} * d;
  }
  const auto n = static_cast<int64_t>(z.size());
  EXPECT_NEAR(loops().exp_sum(z.data(), 0.5f, n), sum, 1e-6 * sum);
  EXPECT_NEAR(loops().exp_moment(z.data(), 0.5f, n), moment, 1e-6 * std::fabs(moment));
  EXPECT_NEAR(loops().centred_sum(z.data(), nullptr, 0.5f, n), centred, 1e-6 * std::fabs(centred));
  EXPECT_NEAR(loops().centred_sum(z.data(), u.data(), 0.5f, n), weighted, 1e-6 * std::fabs(weighted));
}

TEST_P(RowLoopsTest, SoftcapIsAccurateInTheSmallAndInTheLarge) {
  std::vector<float> s = Draw(rng_, 20000, -100.0f, 100.0f);
  for (float small : Draw(rng_, 20000, -1e-3f, 1e-3f)) s.push_back(small);
  std::vector<float> z = s;
  EXPECT_TRUE(loops().softcap(z.data(), 30.0f, static_cast<int64_t>(z.size())));
  for (size_t i = 0; i < s.size(); ++i) {
    const double want = 30.0 * std::tanh(double{s[i]} / 30.0);
    EXPECT_NEAR(z[i], want, 5e-7 * std::fabs(want)) << s[i];
  }
}

TEST_P(RowLoopsTest, SoftcapReportsWhatIsNotFinite) {
  for (float bad : {INFINITY, -INFINITY, NAN}) {
    std::vector<float> z = Draw(rng_, 37, -1.0f, 1.0f);
    z[static_cast<size_t>(UniformInt(rng_, 0, 36))] = bad;
    EXPECT_FALSE(loops().softcap(z.data(), 5.0f, 37));
  }
}

TEST_P(RowLoopsTest, AllFiniteFindsWhatIsNotAnywhere) {
  for (int64_t n : kLengths) {
    std::vector<float> z = Draw(rng_, n, -1e38f, 1e38f);
    EXPECT_TRUE(loops().all_finite(z.data(), n)) << n;
    for (float bad : {INFINITY, -INFINITY, NAN}) {
      if (n == 0) continue;
      std::vector<float> spoilt = z;
      spoilt[static_cast<size_t>(UniformInt(rng_, 0, n - 1))] = bad;
      EXPECT_FALSE(loops().all_finite(spoilt.data(), n)) << n;
    }
  }
}

// A class with probability 0 adds nothing, whatever the other terms are.
TEST_P(RowLoopsTest, MasksAddNothing) {
  std::vector<float> z = Draw(rng_, 37, -5.0f, 0.0f);
  const double moment = loops().exp_moment(z.data(), 0.0f, 37);
  z.insert(z.begin() + 20, 3, -INFINITY);
  EXPECT_NEAR(loops().exp_moment(z.data(), 0.0f, 40), moment, 1e-6 * std::fabs(moment));
  LogitGradientTerms terms;
  terms.inverse_total = 0.1f;
  terms.log_total = 2.3f;
  terms.slope = 1.5f;
  terms.entropy_slope = -0.75f;
  terms.entropy = 1.0f;
  loops().gradient_from_logits(z.data(), nullptr, terms, 40);
  for (size_t i = 0; i < z.size(); ++i) {
    EXPECT_TRUE(std::isfinite(z[i])) << i;
    if (i >= 20 && i < 23) {
      EXPECT_EQ(z[i], 0.0f) << i;
    }
  }
  z[5] = NAN;
  EXPECT_TRUE(std::isnan(loops().exp_moment(z.data(), 0.0f, 40)));
}

TEST_P(RowLoopsTest, MaxAndFindAtAnyLength) {
  for (int64_t n : kLengths) {
    std::vector<float> z = Draw(rng_, n, -5.0f, -1.0f);
    if (n == 0) {
      EXPECT_EQ(loops().max(z.data(), 0), -INFINITY);
      EXPECT_EQ(loops().find(z.data(), 0.0f, 0), -1);
      continue;
    }
    const auto top = std::max_element(z.begin(), z.end());
    EXPECT_EQ(loops().max(z.data(), n), *top);
    EXPECT_EQ(loops().find(z.data(), *top, n), top - z.begin());
    EXPECT_EQ(loops().find(z.data(), 1.0f, n), -1);
  }
}

TEST_P(RowLoopsTest, ElementwiseLoopsAtAnyLength) {
  for (int64_t n : kLengths) {
    const std::vector<float> x = Draw(rng_, n, 0.0f, 1.0f);
    const std::vector<float> u = Draw(rng_, n, 0.0f, 1.0f);
    std::vector<float> sum = x, from_exp = x, weighted = x;
    loops().add_scaled(sum.data(), u.data(), 0.5f, n);
    loops().gradient_from_exp(from_exp.data(), nullptr, 2.0f, 0.25f, n);
    loops().gradient_from_exp(weighted.data(), u.data(), 2.0f, 0.25f, n);
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_NEAR(sum[i], x[i] + 0.5f * u[i], 1e-6f);
      EXPECT_NEAR(from_exp[i], 2.0f * x[i] - 0.25f, 1e-6f);
      EXPECT_NEAR(weighted[i], 2.0f * x[i] - 0.25f * u[i], 1e-6f);
    }
  }
}

TEST_P(RowLoopsTest, DropTakesWhatIsBelowTheThreshold) {
  constexpr float kThreshold = 0.3f;
  for (int64_t n : kLengths) {
    const std::vector<float> z = Draw(rng_, n, -4.0f, 0.0f);
    std::vector<float> e = z;
    loops().exp_sum_in_place(e.data(), 0.0f, n);
    std::vector<float> kept_e = e, kept_z = z;
    double want = 0.0;
    for (float value : e) want += value < kThreshold ? double{value} : 0.0;
    EXPECT_NEAR(loops().drop_exp(kept_e.data(), kThreshold, n), want, 1e-6 * want);
    EXPECT_NEAR(loops().drop_logits(kept_z.data(), 0.0f, kThreshold, n), want, 1e-6 * want);
    loops().exp_sum_in_place(kept_z.data(), 0.0f, n);
    for (size_t i = 0; i < e.size(); ++i) EXPECT_EQ(kept_e[i], e[i] < kThreshold ? 0.0f : e[i]);
    EXPECT_EQ(kept_z, kept_e);
  }
}

INSTANTIATE_TEST_SUITE_P(All, RowLoopsTest, ::testing::ValuesIn(AvailableRowLoops()),
                         [](const auto& set) { return set.param->instruction_set; });

TEST(SelectRowLoopsTest, TakesTheWidest) { EXPECT_EQ(&SelectRowLoops(), AvailableRowLoops().back()); }

}  // namespace
}  // namespace lossd::kernels::testing::row_loops_test
