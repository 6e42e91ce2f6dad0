// The conformance suite on groups of ranks in several processes.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/server/ranks/rank_group.h"

namespace lossd::kernels::testing {
namespace {

// One at a time, so that a test of two ranks has not the processes of four beside it; ended at the exit.
std::unique_ptr<ranks::testing::RankGroup>& Group() {
  static std::unique_ptr<ranks::testing::RankGroup> group;
  return group;
}

bool OnGpus() { return ranks::testing::RankBackend() == "cuda"; }

Backend& SharedGroup(int ranks, int64_t least_rows) {
  static std::pair<int, int64_t> of;
  if (of != std::pair(ranks, least_rows)) {
    Group().reset();
    Group() =
        std::make_unique<ranks::testing::RankGroup>(ranks, least_rows, int64_t{OnGpus() ? 64 : 4} << 20);
    of = {ranks, least_rows};
  }
  return Group()->backend();
}

class EndGroup final : public ::testing::Environment {
  void TearDown() override {
    if (Group() == nullptr) return;
    for (const int end : Group()->End()) EXPECT_EQ(end, 0);
    Group().reset();
  }
};
const auto* const kEnd = ::testing::AddGlobalTestEnvironment(new EndGroup);

// Every chunk is divided, or only those of many rows, which is none here.
std::vector<ConformanceCase> Cases() {
  std::vector<ConformanceCase> cases;
  const auto add = [&](const std::string& name, int ranks, int64_t least_rows, DType compute, DType hidden) {
    cases.push_back({.name = absl::StrCat(name, "Ranks", ranks),
                     .backend = [=]() -> Backend& { return SharedGroup(ranks, least_rows); },
                     .compute = compute,
                     .hidden = hidden,
                     .auto_samples_uniform = OnGpus(),
                     .devices = ranks});
  };
  constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBf16 = DType::kBFloat16;
  if (OnGpus()) {
    add("DividedGpu", 2, 0, kBf16, kBf16);
    add("InTurnGpu", 2, 512, kF32, kF32);
    return cases;
  }
  add("Divided", 2, 0, kF32, kF32);
  add("InTurn", 2, 512, kF32, kBf16);
  add("Divided", 4, 0, kF32, kF16);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Ranks, BackendConformance, ::testing::ValuesIn(Cases()), ConformanceName);

}  // namespace
}  // namespace lossd::kernels::testing
