// SPDX-License-Identifier: Apache-2.0
// The conformance suite on groups of ranks in several processes; a second program has them on threads of one.
#include <gmock/gmock.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/clocks/clock.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/group/member_group.h"
#include "tests/server/ranks/rank_group.h"

namespace lossd::kernels::testing::ranks_conformance_test {
namespace {

// Ranks, the least rows that are divided, and the way.
using Groups = std::map<std::tuple<int, int64_t, std::string>, std::unique_ptr<ranks::testing::RankGroup>>;

Groups& AllGroups() {
  static auto* const groups = new Groups();
  return *groups;
}

bool OnGpus() { return ranks::testing::RankBackend() == "cuda"; }

// Of GPUs a rank each has, only groups of as many.
bool HaveGpusFor(int ranks) {
  const bool shared = ranks::testing::FromEnvironment("LOSSD_RANK_COLLECTIVES", "auto") != kNccl;
  return ranks::testing::VisibleGpus() >= (shared ? 1 : ranks);
}

ranks::testing::RankGroup& SharedRanks(int ranks, int64_t least_rows, const std::string& way = "") {
  std::unique_ptr<ranks::testing::RankGroup>& group = AllGroups()[{ranks, least_rows, way}];
  if (group == nullptr) {
    group =
        std::make_unique<ranks::testing::RankGroup>(ranks, least_rows, int64_t{OnGpus() ? 64 : 4} << 20, way);
  }
  return *group;
}

// The rows of chunks lie in its staging memory from now on, as those of a server do.
Backend& SharedGroup(int ranks, int64_t least_rows, const std::string& way = "") {
  ranks::testing::RankGroup& group = SharedRanks(ranks, least_rows, way);
  SetRowMemory(group.rows());
  return group.backend();
}

class EndGroups final : public ::testing::Environment {
  void TearDown() override {
    for (auto& [of, group] : AllGroups()) {
      SetRowMemory({});
      for (const int end : group->End()) EXPECT_EQ(end, 0);
    }
    AllGroups().clear();
  }
};
const auto* const kEnd = ::testing::AddGlobalTestEnvironment(new EndGroups);

// Every chunk is divided, or only those of many rows, which is none here.
std::vector<ConformanceCase> Cases() {
  std::vector<ConformanceCase> cases;
  const auto add = [&](const std::string& name, int ranks, int64_t least_rows, DType compute, DType hidden,
                       Split split = Split::kAny, const std::string& way = "",
                       Logits logits = Logits::kStored) {
    cases.push_back({.name = absl::StrCat(name, "Ranks", ranks),
                     .backend = [=]() -> Backend& { return SharedGroup(ranks, least_rows, way); },
                     .compute = compute,
                     .hidden = hidden,
                     .logits = logits,
                     .auto_samples_uniform = OnGpus(),
                     .devices = ranks,
                     .split = split,
                     .distils = true,
                     .exact_distilled = OnGpus() && logits == Logits::kRecomputed});
  };
  constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBf16 = DType::kBFloat16;
  if (OnGpus()) {
    if (!HaveGpusFor(2)) return cases;
    add("DividedGpu", 2, 0, kBf16, kBf16);
    add("InTurnGpu", 2, 512, kF32, kF32);
    const auto vocabulary = [&](const std::string& name, const std::string& way, Logits logits, DType compute,
                                DType hidden, int ranks = 2) {
      if (HaveGpusFor(ranks)) {
        add(absl::StrCat("Vocabulary", name, "Gpu"), ranks, 0, compute, hidden, Split::kVocabulary, way,
            logits);
      }
    };
    constexpr Logits kStored = Logits::kStored, kRecomputed = Logits::kRecomputed;
    vocabulary("", "", kStored, kBf16, kBf16);
    vocabulary("", "", kStored, kBf16, kF32, 3);
    vocabulary("Unfused", "unfused", kStored, kF32, kF32);
    vocabulary("Unfused", "unfused", kStored, kF16, kF16);
    vocabulary("HostBranch", "fused+host_branches", kStored, kBf16, kBf16);
    vocabulary("Fused", "fused", kStored, kBf16, kF32);
    vocabulary("Recomputed", "unfused", kRecomputed, kF32, kF32);
    vocabulary("RecomputedBlocks", "fused+blocks", kRecomputed, kBf16, kBf16);
    vocabulary("RecomputedFused", "fused", kRecomputed, kF16, kF16);
    return cases;
  }
  if (ranks::testing::OnThreads()) {
    add("Divided", 4, 0, kF32, kF16);
    add("Vocabulary", 3, 0, kF32, kBf16, Split::kVocabulary);
    return cases;
  }
  add("Divided", 2, 0, kF32, kF32);
  add("InTurn", 2, 512, kF32, kBf16);
  add("Divided", 4, 0, kF32, kF16);
  add("Vocabulary", 2, 0, kF32, kF32, Split::kVocabulary);
  add("Vocabulary", 3, 0, kF32, kBf16, Split::kVocabulary);
  add("Vocabulary", 4, 0, kF32, kF16, Split::kVocabulary);
  return cases;
}

// ---- Bits ----

std::vector<std::vector<float>> GradientsOf(HeadKernels& head) {
  std::vector<std::vector<float>> all;
  for (const Param param : kTrainedParams) {
    if (HasTensor(head.config(), {param, Role::kGradient})) all.push_back(ReadGradient(head, param));
  }
  return all;
}

void ExpectSameBits(const ChunkRun& got, const ChunkRun& want) {
  ASSERT_TRUE(got.done.ok() && want.done.ok()) << got.done << want.done;
  EXPECT_EQ(got.gradients, want.gradients);
  ASSERT_EQ(got.slices.size(), want.slices.size());
  for (size_t i = 0; i < want.slices.size(); ++i) {
    SCOPED_TRACE(i);
    const SliceOutputs &a = got.slices[i], &b = want.slices[i];
    EXPECT_EQ(a.first_nonfinite_row, b.first_nonfinite_row);
    if (b.first_nonfinite_row >= 0) continue;
    ExpectSameRows(a, b);
    EXPECT_EQ(a.sums.loss, b.sums.loss);
    EXPECT_EQ(a.sums.dropped_mass, b.sums.dropped_mass);
    EXPECT_EQ(a.sums.sampling_variance, b.sums.sampling_variance);
    EXPECT_EQ(a.sums.squared_gradient, b.sums.squared_gradient);
    EXPECT_EQ(a.sums.correct_rows, b.sums.correct_rows);
  }
}

// Whatever the options, and where hidden states wait for their backward pass.
void ExpectBitsOfAsManyDevices(Split split) {
  if (OnGpus()) GTEST_SKIP() << "devices of one process exchange by NCCL, which adds in another order";
  Rng rng = FreshRng();
  for (const int count : {2, 3, 4}) {
    Backend& ranks = SharedGroup(count, 0);
    const std::unique_ptr<Backend> devices = MakeCpuGroup(count, 0);
    for (int repeat = 0; repeat < 12; ++repeat) {
      ProblemSpec spec = RandomSpec(UniformInt(rng, 1, 90), UniformInt(rng, 1, 70),
                                    UniformInt(rng, count, 300), DType::kBFloat16, DType::kFloat32, rng);
      spec.config.split = split;
      spec.options.gradients = static_cast<Gradients>(repeat % 4);
      spec.options.filter_epsilon = 1e-3f;
      spec.options.sample_threshold = 1.0f / 64;
      spec.options.max_gradient_error = repeat < 4 ? 0.01f : 10.0f;
      const Problem problem = MakeProblem(spec, rng);
      SCOPED_TRACE(Describe(problem));
      const auto of_ranks = MakeHead(ranks, problem), of_devices = MakeHead(*devices, problem);
      ASSERT_TRUE(of_ranks != nullptr && of_devices != nullptr);
      EXPECT_EQ(of_ranks->chunk_rows(), of_devices->chunk_rows());
      const auto kept = ranks.AllocateRetained(RetainedBytes(problem)).value();
      const auto also_kept = devices->AllocateRetained(RetainedBytes(problem)).value();
      for (const bool backward : {false, true}) {
        ExpectSameBits(
            RunChunk(*of_ranks, problem, {.retained = kept.get(), .take_retained = backward}),
            RunChunk(*of_devices, problem, {.retained = also_kept.get(), .take_retained = backward}));
      }
      EXPECT_EQ(GradientsOf(*of_ranks), GradientsOf(*of_devices));
      if (!problem.accumulate_gradients) continue;
      EXPECT_EQ(*of_ranks->GradNorm(), *of_devices->GradNorm());
    }
  }
}

TEST(RanksBits, ByVocabularyTheyAreThoseOfAsManyDevices) { ExpectBitsOfAsManyDevices(Split::kVocabulary); }
TEST(RanksBits, ByRowsTheyAreThoseOfAsManyDevices) { ExpectBitsOfAsManyDevices(Split::kRows); }

// ---- Deferred rows ----

using States = std::map<int, RankState>;

States StatesOf(ranks::testing::RankGroup& group) {
  States states;
  for (const ranks::RankReport& report : group.leader().Reports()) states[report.state.rank] = report.state;
  return states;
}

TEST(RanksDeferredRows, AreDividedAmongAllRanks) {
  if (OnGpus() && !HaveGpusFor(2)) GTEST_SKIP() << "no GPUs";
  constexpr int64_t kRows = 48;  // of each rank
  Rng rng = FreshRng();
  for (const int count : OnGpus() ? std::vector<int>{2} : std::vector<int>{2, 4}) {
    Backend& backend = SharedGroup(count, 0);
    ranks::testing::RankGroup& group = SharedRanks(count, 0);
    ProblemSpec spec;
    spec.config = {.hidden_size = 64, .vocab_size = 11, .split = Split::kRows};
    spec.config.compute_dtype = OnGpus() ? DType::kBFloat16 : DType::kFloat32;
    spec.slice_rows.assign(static_cast<size_t>(2 * count), kRows / 2);
    const Problem problem = MakeProblem(spec, rng);
    const auto head = MakeHead(backend, problem);
    ASSERT_NE(head, nullptr);
    const auto kept = backend.AllocateRetained(RetainedBytes(problem)).value();
    Problem forward = problem;
    forward.accumulate_gradients = false;
    for (SliceData& slice : forward.slices) slice.want_grad_hidden = false;
    for (const bool backward : {false, true}) {
      const States before = StatesOf(group);
      const ChunkRun run =
          RunChunk(*head, backward ? problem : forward, {.retained = kept.get(), .take_retained = backward});
      ASSERT_TRUE(run.done.ok()) << run.done;
      for (const auto& [rank, after] : StatesOf(group)) {
        SCOPED_TRACE(absl::StrCat("rank ", rank, " of ", count, backward ? ", backward" : ", forward"));
        EXPECT_EQ(after.rows - before.at(rank).rows, kRows);
        if (rank == 0) continue;  // no rows travel to it
        const int64_t bytes = kRows * 64 * int64_t{sizeof(float)};
        const int64_t sent = after.traffic->sent_bytes - before.at(rank).traffic->sent_bytes;
        if (ranks::testing::SharesRows()) {
          EXPECT_LT(sent, bytes) << "hidden states lie in shared memory";
        } else {
          EXPECT_GT(sent, bytes);
        }
      }
    }
  }
}

// A message has room for so much beside the rows.
TEST(RanksTeachers, AreRefusedIfTheirHiddenStatesAreTooLarge) {
  if (OnGpus() && !HaveGpusFor(2)) GTEST_SKIP() << "no GPUs";
  Backend& backend = SharedGroup(2, 0);
  const auto make = [&](int64_t hidden_size, bool trainable) {
    HeadConfig config{.hidden_size = hidden_size, .vocab_size = 32, .split = Split::kVocabulary};
    config.trainable = trainable;
    return backend.CreateHead(config).value();
  };
  const auto student = make(8, true), fits = make(128, false), too_large = make(136, false);
  EXPECT_TRUE(student->CheckTeacher(*fits).ok()) << student->CheckTeacher(*fits);
  const absl::Status refused = student->CheckTeacher(*too_large);
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(refused.message()),
              ::testing::AllOf(::testing::HasSubstr("distillation.teacher"),
                               ::testing::HasSubstr("at most 128"), ::testing::HasSubstr("136")));
  EXPECT_EQ(student->CheckTeacher(*make(8, true)).code(), absl::StatusCode::kInvalidArgument);
}

TEST(RanksMemory, IsSharedWhileItLasts) {
  if (OnGpus() && !HaveGpusFor(2)) GTEST_SKIP() << "no GPUs";
  if (ranks::testing::OnThreads()) GTEST_SKIP() << "one process has the mappings of all";
  ranks::testing::RankGroup& group = SharedRanks(2, 0);
  const int shared = ranks::testing::SharesRows() ? 1 : 0;
  EXPECT_EQ(group.Mappings(1), shared);
  const int64_t before = group.backend().memory().current[MemoryKind::kStaging];
  auto memory = group.backend().AllocateStaging(3 << 20);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(group.Mappings(1), 2 * shared);
  const int64_t counted = group.backend().memory().current[MemoryKind::kStaging] - before;
  EXPECT_GE(counted, 3 << 20);
  EXPECT_LT(counted, 4 << 20) << "it is counted once";
  memory->reset();
  EXPECT_EQ(group.backend().memory().current[MemoryKind::kStaging], before);
  const absl::Time limit = clocks::SteadyNow() + absl::Minutes(1);
  while (group.Mappings(1) > shared && clocks::SteadyNow() < limit) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(group.Mappings(1), shared);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(BackendConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GradientsConformance);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DistillationConformance);
INSTANTIATE_TEST_SUITE_P(Ranks, BackendConformance, ::testing::ValuesIn(Cases()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Ranks, GradientsConformance, ::testing::ValuesIn(Cases()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Ranks, DistillationConformance, ::testing::ValuesIn(Cases()), ConformanceName);

}  // namespace
}  // namespace lossd::kernels::testing::ranks_conformance_test
