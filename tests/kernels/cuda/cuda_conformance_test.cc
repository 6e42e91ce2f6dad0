// SPDX-License-Identifier: Apache-2.0
// The conformance suite on the CUDA backend.
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/group/group_backend.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/cuda/cuda_test_device.h"

namespace lossd::kernels::testing::cuda_conformance_test {
namespace {

constexpr CudaBackendOptions kOptions = {.workspace_bytes = int64_t{64} << 20, .max_chunk_rows = 512};

template <FusedLoss kFused, bool kHostBranches = false, bool kSmallestBlocks = false,
          bool kSharesProcess = false>
Backend& BackendWith() {
  static const std::unique_ptr<Backend> backend = [] {
    CudaBackendOptions options = kOptions;
    options.fused_loss = kFused;
    options.host_branches = kHostBranches;
    options.smallest_blocks = kSmallestBlocks;
    options.shares_process = kSharesProcess;
    auto created = CreateCudaBackend(options);
    EXPECT_TRUE(created.ok()) << created.status();
    return *std::move(created);
  }();
  return *backend;
}

constexpr int kGroupGpus = 2;
constexpr int kGridGpus = 4;

// Every chunk is divided between so many GPUs.
template <FusedLoss kFused, bool kHostBranches = false, bool kSmallestBlocks = false, int kGpus = kGroupGpus>
Backend& GroupWith() {
  static const std::unique_ptr<Backend> group = [] {
    std::vector<std::unique_ptr<Backend>> members;
    std::vector<int> gpus;
    for (int i = 0; i < kGpus; ++i) {
      gpus.push_back(i);
      CudaBackendOptions options = kOptions;
      options.device = i;
      options.replica = {i, kGpus};
      options.fused_loss = kFused;
      options.host_branches = kHostBranches;
      options.smallest_blocks = kSmallestBlocks;
      auto member = CreateCudaBackend(options);
      EXPECT_TRUE(member.ok()) << member.status();
      members.push_back(*std::move(member));
    }
    auto connection = CudaReplicaGroup::Create(gpus);
    EXPECT_TRUE(connection.ok()) << connection.status();
    const std::shared_ptr<CudaReplicaGroup> shared = *std::move(connection);
    using Heads = absl::Span<HeadKernels* const>;
    auto created = CreateGroupBackend(
        std::move(members), [shared](Heads heads) { return shared->Connect(heads); },
        {.least_rows = 0, .join_classes = [shared](Heads heads) { return shared->Join(heads); }});
    EXPECT_TRUE(created.ok()) << created.status();
    return *std::move(created);
  }();
  return *group;
}

// Compute dtype and hidden dtype.
using Dtypes = std::vector<std::pair<DType, DType>>;
constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBf16 = DType::kBFloat16;

// A way of computing chunks, on a backend whose options make it take that way wherever it can, with every one
// of these dtypes. A new way is a line in Ways().
struct Way {
  const char* name;
  Backend& (*backend)();
  Logits logits;
  Dtypes dtypes;
  int gpus = 1;
  Split split = Split::kAny;
  std::vector<int32_t> shares = {};
  int replicas = 1;
};

// Fused losses are taken wherever they are possible. Heads that recompute logits have the blocks that a
// server would choose, and in "Blocks" several of everything. Branches on the host are for checkers of the
// filtered kernels.
std::vector<Way> Ways() {
  constexpr FusedLoss kNever = FusedLoss::kNever, kFused = FusedLoss::kWherePossible;
  constexpr Logits kStored = Logits::kStored, kRecomputed = Logits::kRecomputed;
  const Dtypes every = {{kF32, kF32},  {kF32, kF16},  {kF32, kBf16}, {kF16, kF32},  {kF16, kF16},
                        {kF16, kBf16}, {kBf16, kF32}, {kBf16, kF16}, {kBf16, kBf16}};
  const Dtypes equal = {{kF32, kF32}, {kF16, kF16}, {kBf16, kBf16}};
  return {
      {"Cuda", BackendWith<kNever>, kStored, every},
      {"CudaFused",
       BackendWith<kFused>,
       kStored,
       {{kF16, kF32}, {kF16, kF16}, {kBf16, kF32}, {kBf16, kBf16}}},
      {"CudaEmbedded", BackendWith<kNever, false, false, true>, kStored, equal},
      {"CudaHostBranch", BackendWith<kNever, true>, kStored, {{kF32, kF32}, {kBf16, kF32}}},
      {"CudaRecomputed", BackendWith<kNever>, kRecomputed, {{kF32, kF32}, {kF16, kF32}, {kBf16, kF32}}},
      {"CudaRecomputedBlocks", BackendWith<kNever, false, true>, kRecomputed, equal},
      {"CudaRecomputedFused", BackendWith<kFused>, kRecomputed, {{kF16, kF16}, {kBf16, kBf16}}},
      {"CudaRecomputedFusedBlocks",
       BackendWith<kFused, false, true>,
       kRecomputed,
       {{kF16, kF16}, {kBf16, kBf16}, {kBf16, kF32}}},
      {"CudaRecomputedHostBranch", BackendWith<kFused, true, true>, kRecomputed, {{kBf16, kBf16}}},
      {"CudaRecomputedUnfusedHostBranch", BackendWith<kNever, true, true>, kRecomputed, {{kBf16, kBf16}}},
      {"CudaGroup", GroupWith<kNever>, kStored, {{kF32, kF32}, {kF16, kBf16}, {kBf16, kF32}}, kGroupGpus},
      {"CudaGroupFused", GroupWith<kFused>, kStored, {{kBf16, kBf16}}, kGroupGpus},
      {"CudaGroupRecomputed", GroupWith<kFused>, kRecomputed, {{kBf16, kBf16}}, kGroupGpus},
      {"CudaVocabulary",
       GroupWith<kNever>,
       kStored,
       {{kF32, kF32}, {kF16, kF16}, {kBf16, kBf16}, {kBf16, kF32}},
       kGroupGpus,
       Split::kVocabulary},
      {"CudaVocabularyHostBranch",
       GroupWith<kFused, true>,
       kStored,
       {{kF32, kF32}, {kBf16, kBf16}},
       kGroupGpus,
       Split::kVocabulary},
      {"CudaVocabularyFused",
       GroupWith<kFused>,
       kStored,
       {{kBf16, kBf16}, {kBf16, kF32}},
       kGroupGpus,
       Split::kVocabulary},
      {"CudaVocabularyRecomputed",
       GroupWith<kNever>,
       kRecomputed,
       {{kF32, kF32}, {kBf16, kBf16}},
       kGroupGpus,
       Split::kVocabulary},
      {"CudaVocabularyRecomputedBlocks",
       GroupWith<kFused, false, true>,
       kRecomputed,
       {{kF32, kF32}, {kBf16, kBf16}},
       kGroupGpus,
       Split::kVocabulary},
      {"CudaVocabularyRecomputedFused",
       GroupWith<kFused>,
       kRecomputed,
       {{kF16, kF16}, {kBf16, kBf16}},
       kGroupGpus,
       Split::kVocabulary},
      {"CudaShares",
       GroupWith<kFused>,
       kStored,
       {{kF32, kF32}, {kBf16, kBf16}},
       kGroupGpus,
       Split::kVocabulary,
       {1, 3}},
      {"CudaSharesRecomputed",
       GroupWith<kFused>,
       kRecomputed,
       {{kF32, kF32}, {kBf16, kBf16}},
       kGroupGpus,
       Split::kVocabulary,
       {5, 1}},
      {"CudaGrid",
       GroupWith<kFused, false, false, kGridGpus>,
       kStored,
       {{kF32, kF32}, {kBf16, kBf16}},
       kGridGpus,
       Split::kVocabulary,
       {},
       2},
      {"CudaGridShares",
       GroupWith<kNever, false, false, kGridGpus>,
       kStored,
       {{kBf16, kF32}},
       kGridGpus,
       Split::kVocabulary,
       {1, 3},
       2},
      {"CudaGridRecomputed",
       GroupWith<kFused, false, false, kGridGpus>,
       kRecomputed,
       {{kF32, kF32}, {kBf16, kBf16}},
       kGridGpus,
       Split::kVocabulary,
       {5, 1},
       2},
  };
}

// Shares that leave GPUs without classes, or with few.
std::vector<Way> WaysWithFewClasses() {
  constexpr FusedLoss kNever = FusedLoss::kNever, kFused = FusedLoss::kWherePossible;
  constexpr Logits kStored = Logits::kStored, kRecomputed = Logits::kRecomputed;
  const Dtypes ends = {{kF32, kF32}, {kBf16, kBf16}};
  const auto of_two = [](const char* name, Backend& (*backend)(), Logits logits, Dtypes dtypes,
                         std::vector<int32_t> shares) {
    return Way{name, backend, logits, std::move(dtypes), kGroupGpus, Split::kVocabulary, std::move(shares)};
  };
  const auto of_four = [](const char* name, Logits logits, std::vector<int32_t> shares) {
    return Way{name,
               GroupWith<kFused, false, false, 4>,
               logits,
               {{kBf16, kBf16}},
               4,
               Split::kVocabulary,
               std::move(shares)};
  };
  return {
      of_two("CudaSharesWithoutFirst", GroupWith<kNever>, kStored,
             {{kF32, kF32}, {kF16, kF16}, {kBf16, kF32}}, {0, 1}),
      of_two("CudaSharesWithoutLast", GroupWith<kNever>, kStored, ends, {2, 0}),
      of_two("CudaSharesWithoutFirstFused", GroupWith<kFused>, kStored, {{kBf16, kBf16}, {kBf16, kF32}},
             {0, 3}),
      of_two("CudaSharesWithoutLastFused", GroupWith<kFused>, kStored, {{kBf16, kBf16}}, {1, 0}),
      of_two("CudaSharesWithoutFirstHostBranch", GroupWith<kFused, true>, kStored, ends, {0, 1}),
      of_two("CudaSharesWithoutFirstRecomputed", GroupWith<kNever>, kRecomputed, ends, {0, 1}),
      of_two("CudaSharesWithoutLastRecomputedBlocks", GroupWith<kFused, false, true>, kRecomputed, ends,
             {1, 0}),
      of_two("CudaSharesWithoutLastRecomputedFused", GroupWith<kFused>, kRecomputed,
             {{kF16, kF16}, {kBf16, kBf16}}, {1, 0}),
      of_two("CudaSharesWithoutFirstRecomputedFused", GroupWith<kFused>, kRecomputed,
             {{kF16, kF16}, {kBf16, kBf16}}, {0, 1}),
      of_two("CudaSharesUneven", GroupWith<kFused>, kStored, ends, {1, 1000}),
      of_two("CudaSharesUnevenRecomputed", GroupWith<kFused>, kRecomputed, ends, {999, 1}),
      of_four("CudaSharesOfFour", kStored, {3, 0, 1, 5}),
      of_four("CudaSharesOfFourOne", kStored, {0, 0, 1, 0}),
      of_four("CudaSharesOfFourEnds", kStored, {0, 2, 1, 0}),
      of_four("CudaSharesOfFourRecomputed", kRecomputed, {0, 7, 0, 1}),
      of_four("CudaSharesOfFourOneRecomputed", kRecomputed, {0, 1, 0, 0}),
  };
}

std::vector<ConformanceCase> Cases() {
  std::vector<ConformanceCase> cases;
  std::vector<Way> ways = Ways(), few = WaysWithFewClasses();
  ways.insert(ways.end(), few.begin(), few.end());
  for (const Way& way : ways) {
    if (GpuCount() < way.gpus) continue;
    for (const auto& [compute, hidden] : way.dtypes) {
      cases.push_back({way.name, way.backend, compute, hidden, way.logits, /*auto_samples_uniform=*/true,
                       way.gpus, way.split, way.shares, way.replicas,
                       /*distils=*/true, /*exact_distilled=*/way.logits == Logits::kRecomputed});
    }
  }
  return cases;
}

// Without a GPU there is no case at all.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(BackendConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GradientsConformance);
INSTANTIATE_TEST_SUITE_P(Cuda, BackendConformance, ::testing::ValuesIn(Cases()), ConformanceName);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DistillationConformance);
INSTANTIATE_TEST_SUITE_P(Cuda, DistillationConformance, ::testing::ValuesIn(Cases()), ConformanceName);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PoolConformance);
INSTANTIATE_TEST_SUITE_P(Cuda, PoolConformance, ::testing::ValuesIn(Cases()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Cuda, GradientsConformance, ::testing::ValuesIn(Cases()), ConformanceName);

TEST(CudaConformance, HasAGpu) { LOSSD_SKIP_WITHOUT_GPU(); }

}  // namespace
}  // namespace lossd::kernels::testing::cuda_conformance_test
