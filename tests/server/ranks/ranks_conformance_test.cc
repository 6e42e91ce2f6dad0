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

using Groups = std::map<std::pair<int, int64_t>, std::unique_ptr<ranks::testing::RankGroup>>;

Groups& AllGroups() {
  static auto* const groups = new Groups();
  return *groups;
}

bool OnGpus() { return ranks::testing::RankBackend() == "cuda"; }

Backend& SharedGroup(int ranks, int64_t least_rows) {
  std::unique_ptr<ranks::testing::RankGroup>& group = AllGroups()[{ranks, least_rows}];
  if (group == nullptr) {
    group = std::make_unique<ranks::testing::RankGroup>(ranks, least_rows, int64_t{OnGpus() ? 64 : 4} << 20);
  }
  return group->backend();
}

class EndGroups final : public ::testing::Environment {
  void TearDown() override {
    for (auto& [of, group] : AllGroups()) {
      for (const int end : group->End()) EXPECT_EQ(end, 0);
    }
    AllGroups().clear();
  }
};
const auto* const kEnd = ::testing::AddGlobalTestEnvironment(new EndGroups);

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
INSTANTIATE_TEST_SUITE_P(Ranks, GradientsConformance, ::testing::ValuesIn(Cases()), ConformanceName);

}  // namespace
}  // namespace lossd::kernels::testing
