// SPDX-License-Identifier: Apache-2.0
// What the CPU backend promises beyond the contract: options, limits, threads.
#include "kernels/cpu/cpu_backend.h"

#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/parallel_for.h"
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

}  // namespace
}  // namespace lossd::kernels::testing::cpu_backend_test
