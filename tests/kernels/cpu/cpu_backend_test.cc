// SPDX-License-Identifier: Apache-2.0
// Tests of the CPU backend: what it promises beyond the contract, options, limits and threads; and its loops,
// the sampling of a row, conversions, and the threads that run them.
#include "kernels/cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "Eigen/Core"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/row_loops.h"
#include "kernels/cpu/row_loss.h"
#include "kernels/cpu/threads_and_memory.h"
#include "kernels/errors/field_error.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/problem.h"
#include "tests/support/fake_host.h"

namespace lossd::kernels::testing::cpu_backend_test {
namespace {

using ::testing::HasSubstr;

HeadConfig Config(int64_t hidden_size, int64_t vocab_size) {
  HeadConfig config;
  config.hidden_size = hidden_size;
  config.vocab_size = vocab_size;
  return config;
}

std::unique_ptr<Backend> MakeBackend(const CpuBackendOptions& options) {
  auto backend = CreateCpuBackend(options);
  EXPECT_TRUE(backend.ok()) << backend.status();
  return *std::move(backend);
}

TEST(CpuBackendTest, RefusesOptionsOutOfRangeByName) {
  const auto message = [](const CpuBackendOptions& options) {
    const absl::Status status = CreateCpuBackend(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message({.threads = -1}), HasSubstr("threads must be in [0, 1024], got -1"));
  EXPECT_THAT(message({.workspace_bytes = 0}), HasSubstr("workspace_bytes must be >= 1, got 0"));
  EXPECT_THAT(message({.memory_limit_bytes = -5}), HasSubstr("memory_limit_bytes must be >= 0, got -5"));
}

TEST(CpuBackendTest, InfoSaysWhatItRunsOn) {
  const BackendInfo info = MakeBackend({.threads = 2})->info();
  EXPECT_EQ(info.name, "cpu");
  EXPECT_THAT(info.device, HasSubstr("2 threads, OpenBLAS"));
}

TEST(CpuBackendTest, WorkspaceBoundsTheChunkRows) {
  for (int64_t workspace : {int64_t{3000}, int64_t{100} << 10, int64_t{1} << 20, int64_t{1} << 30}) {
    const auto backend = MakeBackend({.threads = 1, .workspace_bytes = workspace});
    auto head = backend->CreateHead(Config(16, 500));
    ASSERT_TRUE(head.ok()) << head.status();
    const int64_t held = (*head)->memory()[MemoryKind::kWorkspace];
    const int64_t rows = (*head)->chunk_rows();
    EXPECT_LE(held, workspace);
    EXPECT_LE(rows, 4096);
    const bool one_more_would_fit = held + held / rows + 256 <= workspace;
    EXPECT_TRUE(!one_more_would_fit || rows == 4096) << rows << " rows in " << held << " of " << workspace;
  }
}

TEST(CpuBackendTest, RefusesAHeadWhoseRowDoesNotFitTheWorkspace) {
  const auto backend = MakeBackend({.threads = 1, .workspace_bytes = 1999});
  const absl::Status status = backend->CreateHead(Config(16, 500)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr(" of workspace, workspace_bytes is 1999 bytes"));
  EXPECT_EQ(backend->memory().current.Total(), 0);
}

TEST(CpuBackendTest, MemoryLimitRefusesWithThePlan) {
  const auto unlimited = MakeBackend({.threads = 1, .workspace_bytes = 1 << 20});
  const int64_t one = unlimited->PlanHead(Config(16, 500))->Total();
  const auto backend =
      MakeBackend({.threads = 1, .workspace_bytes = 1 << 20, .memory_limit_bytes = one + 1000});
  auto first = backend->CreateHead(Config(16, 500));
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status second = backend->CreateHead(Config(16, 500)).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(second.message()), HasSubstr("weights 31.2 KiB"));
  EXPECT_THAT(std::string(second.message()),
              HasSubstr(absl::StrCat(errors::ExactBytes(one), " of the limit of ",
                                     errors::ExactBytes(one + 1000), " are in use")));
  EXPECT_EQ(backend->AllocateStaging(1001).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(backend->AllocateStaging(std::numeric_limits<int64_t>::max()).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(backend->AllocateStaging(1000).ok());
  EXPECT_EQ(backend->memory().current.Total(), one);
  EXPECT_EQ(backend->memory().peak_total, one + 1000);
  first->reset();
  EXPECT_EQ(backend->memory().current.Total(), 0);
  EXPECT_TRUE(backend->CreateHead(Config(16, 500)).ok());
}

TEST(CpuBackendTest, PlannedHostMemoryCountsTowardsTheLimit) {
  const auto backend = MakeBackend({.threads = 1, .memory_limit_bytes = 1000});
  EXPECT_EQ(backend->PlanHostMemory(MemoryKind::kLedger, 1001).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(backend->memory().current.Total(), 0);
  EXPECT_TRUE(backend->PlanHostMemory(MemoryKind::kLedger, 600).ok());
  EXPECT_EQ(backend->PlanHostMemory(MemoryKind::kLedger, 600).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(backend->memory().current[MemoryKind::kLedger], 600);
}

constexpr int64_t kMib = int64_t{1} << 20;

TEST(CpuBackendTest, HeadsBeyondTheHostsMemoryAreRefusedBeforeTheyAreAllocated) {
  const test::FakeHost host;
  host.SetAvailable(100 * kMib);
  const auto backend = MakeBackend(
      {.threads = 1, .workspace_bytes = kMib, .memory_reserve_bytes = 40 * kMib, .host_root = host.root()});
  const absl::Status large =
      backend->CreateHead(Config(8192, 500'000)).status();  // does not fit any workspace
  EXPECT_EQ(large.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(backend->AllocateStaging(61 * kMib).status().code(), absl::StatusCode::kResourceExhausted);
  const HeadConfig config = Config(64, 100'000);
  const auto larger = MakeBackend({.threads = 1,
                                   .workspace_bytes = 16 * kMib,
                                   .memory_reserve_bytes = 40 * kMib,
                                   .host_root = host.root()});
  ASSERT_GT(larger->PlanHead(config)->Total(), 60 * kMib);
  const absl::Status status = larger->CreateHead(config).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  for (const char* text :
       {" MiB): ", "the system has 100 MiB available", "memory_reserve_bytes keeps 40.0 MiB free"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
  EXPECT_EQ(larger->memory().current.Total(), 0);
  host.SetAvailable(larger->PlanHead(config)->Total() + 41 * kMib);
  EXPECT_TRUE(larger->CreateHead(config).ok());
}

// Memory that was promised and is not written yet looks free to the system.
TEST(CpuBackendTest, TwoCreationsCannotHaveTheSameMemory) {
  const test::FakeHost host;
  host.SetAvailable(100 * kMib);
  MemoryAccounting accounting(0, HostMemory(host.root()), 0);
  MemoryBytes bytes;
  bytes[MemoryKind::kWeights] = 60 * kMib;
  host.SetStatus("RssAnon", 1000 * kMib);  // of something else
  auto first = accounting.Reserve("a head", bytes, /*filled_at_once=*/true);
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status second = accounting.Reserve("a head", bytes, /*filled_at_once=*/true).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(second.message()), HasSubstr("60.0 MiB are promised and not yet in use"));
  EXPECT_EQ(accounting.stats().current.Total(), 60 * kMib);
  host.SetAvailable(40 * kMib);
  first->MarkResident();
  EXPECT_FALSE(accounting.Reserve("a head", bytes, true).ok());
  host.SetAvailable(61 * kMib);
  EXPECT_TRUE(accounting.Reserve("a head", bytes, true).ok());
  EXPECT_TRUE(accounting.Reserve("a head", bytes, true).ok()) << "the one before was given back";
  // Staging memory is written later: what of it is not resident is promised.
  host.SetAvailable(100 * kMib);
  host.SetStatus("RssAnon", 70 * kMib);
  auto staging = accounting.Reserve("staging", bytes);
  ASSERT_TRUE(staging.ok());
  EXPECT_FALSE(accounting.Reserve("a head", bytes, true).ok()) << "120 MiB are promised, 70 are resident";
  host.SetStatus("RssAnon", 120 * kMib);
  EXPECT_TRUE(accounting.Reserve("a head", bytes, true).ok());
}

TEST(CpuBackendTest, AnyNumberOfThreadsGivesTheSameResults) {
  Rng rng = FreshRng();
  for (int threads : {1, 2, 5}) {
    const auto backend = MakeBackend({.threads = threads});
    RunAndCompare(*backend,
                  {MakeProblem(RandomSpec(150, 70, 900, DType::kBFloat16, DType::kFloat32, rng), rng)});
  }
}

// More rows than one block of logits (8 MiB), so that a chunk takes several passes.
TEST(CpuBackendTest, LargeVocabularies) {
  Rng rng = FreshRng();
  const auto backend = MakeBackend({.threads = 2});
  ProblemSpec spec = RandomSpec(150, 3, 20011, DType::kFloat32, DType::kFloat32, rng);
  RunAndCompare(*backend, {MakeProblem(spec, rng)});
  spec = RandomSpec(3, 2, 1000003, DType::kFloat32, DType::kFloat32, rng);
  RunAndCompare(*backend, {MakeProblem(spec, rng)});
}

// Other backends may estimate these sums from what they have taken. This one has them.
TEST(CpuBackendTest, SumsUpTheErrorAndTheSquareOfSampledGradientsExactly) {
  Rng rng = FreshRng();
  const auto backend = MakeBackend({.threads = 2});
  for (const Gradients gradients : {Gradients::kSampled, Gradients::kAuto}) {
    for (const float softcap : {0.0f, 8.0f}) {
      ProblemSpec spec;
      spec.config = Config(24, 500);
      spec.slice_rows = {30, 7};
      spec.options = {
          .softcap = softcap, .gradients = gradients, .sample_threshold = 0.02f, .max_gradient_error = 10.0f};
      const Problem problem = MakeProblem(spec, rng);
      SCOPED_TRACE(Describe(problem));
      const auto head = MakeHead(*backend, problem);
      ASSERT_NE(head, nullptr);
      const ChunkRun run = RunChunk(*head, problem);
      ASSERT_EQ(run.gradients, Gradients::kSampled);
      for (size_t i = 0; i < problem.slices.size(); ++i) {
        const auto want = reference::Compute(ReferenceHead(problem), problem.options,
                                             ReferenceRows(problem.slices[i]), nullptr);
        const double variance =
            std::accumulate(want.sampling_variance.begin(), want.sampling_variance.end(), 0.0);
        const double square =
            std::accumulate(want.squared_gradient.begin(), want.squared_gradient.end(), 0.0);
        EXPECT_NEAR(run.slices[i].sums.sampling_variance, variance, 1e-4 * variance);
        EXPECT_NEAR(run.slices[i].sums.squared_gradient, square, 1e-4 * square);
      }
    }
  }
}

// ---- Row loops ----
// Every set of row loops that this processor can run, against the C library in double.

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

// ---- Row sampling ----

constexpr int64_t kClasses = 10'007;

// Sizes from far above the threshold to far below, zeros among them, of both signs.
std::vector<float> Gradient(float threshold) {
  std::vector<float> gradient(kClasses);
  for (int64_t v = 0; v < kClasses; ++v) {
    float size = threshold * std::exp2(3.0f - 0.002f * static_cast<float>((v * 7919) % kClasses));
    if (v % 7 == 0) size = 0.0f;
    gradient[static_cast<size_t>(v)] = v % 5 == 0 ? -size : size;
  }
  return gradient;
}

TEST(RowSampler, TakesWhatThePointsFallOn) {
  for (const float threshold : {1e-30f, 0x1p-10f, 1.0f, 1e30f}) {
    for (const float omega : {0.0f, 0.3f, 0x1.fffffep-1f}) {
      const std::vector<float> gradient = Gradient(threshold);
      std::vector<float> got = gradient;
      RowSampler sampler(omega, threshold);
      sampler.Sample(got.data(), 4000);  // in two parts, as around a target
      sampler.Sample(got.data() + 4000, kClasses - 4000);
      double end = 0.0, variance = 0.0, square = 0.0;
      for (size_t v = 0; v < gradient.size(); ++v) {
        const double size = std::fabs(double{gradient[v]});
        square += size * size;
        const double begin = end;
        end += std::min(1.0, size / double{threshold});
        if (size >= double{threshold}) {
          ASSERT_EQ(got[v], gradient[v]) << v;
          continue;
        }
        variance += size * (double{threshold} - size);
        ASSERT_TRUE(got[v] == 0.0f || got[v] == std::copysign(threshold, gradient[v])) << v;
        const double point =
            omega + std::max(omega == 0.0f ? 1.0 : 0.0, std::floor(begin - omega + 1e-9) + 1.0);
        const double first = begin < double{omega} ? double{omega} : point;
        if (std::fabs(first - end) < 1e-6) continue;
        ASSERT_EQ(got[v] != 0.0f, size > 0.0 && first < end) << v << " at " << omega;
      }
      EXPECT_NEAR(sampler.variance(), variance, 1e-9 * variance);
      EXPECT_NEAR(sampler.square(), square, 1e-9 * square);
    }
  }
}

// The sum of what is taken is that of the sizes, but for less than one class: the points are evenly spaced.
TEST(RowSampler, KeepsTheSumOfARow) {
  for (const float omega : {0.0f, 0.25f, 0.7f}) {
    std::vector<float> gradient(kClasses, 0.013f);
    RowSampler sampler(omega, 1.0f);
    sampler.Sample(gradient.data(), kClasses);
    double sum = 0.0;
    for (const float g : gradient) sum += double{g};
    EXPECT_NEAR(sum, 0.013 * kClasses, 1.001);
  }
}

TEST(RowSampler, ThresholdZeroLeavesAll) {
  std::vector<float> gradient = Gradient(1.0f);
  const std::vector<float> before = gradient;
  RowSampler sampler(0.5f, 0.0f);
  sampler.Sample(gradient.data(), kClasses);
  EXPECT_EQ(gradient, before);
  EXPECT_EQ(sampler.variance(), 0.0);
}

// Classes so narrow that they hardly move a float, together half as wide as the distance of the points: half
// of all rows take one.
TEST(RowSampler, CountsTheNarrowestClasses) {
  constexpr int64_t kNarrow = int64_t{1} << 18;
  int64_t count = 0;
  for (const float omega : {0.125f, 0.375f, 0.625f, 0.875f}) {
    RowSampler sampler(omega, 1.0f);
    for (int part = 0; part < 64; ++part) {
      std::vector<float> narrow(kNarrow, 0x1p-25f);
      sampler.Sample(narrow.data(), kNarrow);
      count += kNarrow - std::count(narrow.begin(), narrow.end(), 0.0f);
    }
  }
  EXPECT_EQ(count, 2);
}

// ---- Conversions ----

// Every 16-bit pattern widens as Eigen's types do and narrows back to itself.
template <typename T>
void CheckAllPatterns(DType dtype) {
  std::vector<uint16_t> bits(1 << 16);
  for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
  std::vector<float> values(bits.size());
  std::vector<uint16_t> back(bits.size());
  ToFloat(dtype, bits.data(), 1 << 16, values.data());
  FromFloat(dtype, values.data(), 1 << 16, back.data());
  for (size_t i = 0; i < bits.size(); ++i) {
    const float want = static_cast<float>(std::bit_cast<T>(bits[i]));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(values[i])) << i;
      EXPECT_TRUE(std::isnan(static_cast<float>(std::bit_cast<T>(back[i])))) << i;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(values[i]), std::bit_cast<uint32_t>(want)) << i;
      EXPECT_EQ(back[i], bits[i]);
    }
  }
}

// fp32 patterns all over the range, at an odd address.
void CheckNarrowing(DType dtype, Rng& rng) {
  std::vector<float> values = {
      0.0f,      -0.0f,           65519.0f,       65520.0f,       65535.99f,       65536.0f,  1e30f,
      0x1p-14f,  0x1p-24f,        0x1.8p-25f,     0x1p-25f,       0x1.000002p-25f, 0x1p-149f, INFINITY,
      -INFINITY, 0x1.ffffffp-15f, 1.00048828125f, 1.00146484375f, 3.3895314e38f,   3.4e38f};
  for (int i = 0; i < 200000; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(rng()));
    if (!std::isnan(value)) values.push_back(value);
    values.push_back(std::ldexp(Uniform(rng, -1.0f, 1.0f), static_cast<int>(UniformInt(rng, -30, 20))));
  }
  const std::vector<uint8_t> want = Encode(dtype, values);
  std::vector<uint8_t> got(want.size() + 1);
  FromFloat(dtype, values.data(), static_cast<int64_t>(values.size()), got.data() + 1);
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(got[2 * i + 1], want[2 * i]) << values[i];
    EXPECT_EQ(got[2 * i + 2], want[2 * i + 1]) << values[i];
  }
}

TEST(ConvertTest, Float16) {
  Rng rng = FreshRng();
  CheckAllPatterns<Eigen::half>(DType::kFloat16);
  CheckNarrowing(DType::kFloat16, rng);
}

TEST(ConvertTest, BFloat16) {
  Rng rng = FreshRng();
  CheckAllPatterns<Eigen::bfloat16>(DType::kBFloat16);
  CheckNarrowing(DType::kBFloat16, rng);
}

TEST(ConvertTest, NanStaysNan) {
  const float payloads[] = {std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0xffffffffu), NAN};
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    uint8_t bytes[12];
    float back[3];
    FromFloat(dtype, payloads, 3, bytes);
    ToFloat(dtype, bytes, 3, back);
    for (float value : back) EXPECT_TRUE(std::isnan(value)) << Name(dtype);
  }
}

// ---- Parallel for ----

TEST(ThreadPoolTest, CoversEveryIndexOnce) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (int64_t n : {0, 1, 2, 7, 8, 9, 1000}) {
      for (int64_t grain : {0, 1, 3, 5000}) {
        std::vector<int> hits(static_cast<size_t>(n), 0);
        std::atomic<int> calls = 0;
        pool.ParallelFor(n, grain, [&](int64_t begin, int64_t end) {
          ++calls;
          EXPECT_LT(begin, end);
          for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
        });
        EXPECT_EQ(hits, std::vector<int>(static_cast<size_t>(n), 1));
        EXPECT_LE(calls, threads);
        if (grain >= n) {
          EXPECT_EQ(calls, n > 0 ? 1 : 0);
        }
      }
    }
  }
}

TEST(ThreadPoolTest, ManyLoopsInARow) {
  ThreadPool pool(3);
  std::atomic<int64_t> total = 0;
  for (int i = 0; i < 2000; ++i) {
    pool.ParallelFor(3, 1, [&](int64_t begin, int64_t end) { total += end - begin; });
  }
  EXPECT_EQ(total, 6000);
}

}  // namespace
}  // namespace lossd::kernels::testing::cpu_backend_test
