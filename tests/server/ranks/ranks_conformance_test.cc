// The conformance suite on groups of ranks in several processes.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
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

Backend& SharedGroup(int ranks) {
  static int of = 0;
  if (of != ranks) {
    Group().reset();
    Group() = std::make_unique<ranks::testing::RankGroup>(ranks);
    of = ranks;
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

std::vector<ConformanceCase> Cases() {
  std::vector<ConformanceCase> cases;
  const auto add = [&](int ranks, DType hidden) {
    cases.push_back({.name = absl::StrCat("Ranks", ranks),
                     .backend = [=]() -> Backend& { return SharedGroup(ranks); },
                     .hidden = hidden,
                     .devices = ranks});
  };
  add(2, DType::kFloat32);
  add(2, DType::kBFloat16);
  add(4, DType::kFloat16);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Ranks, BackendConformance, ::testing::ValuesIn(Cases()), ConformanceName);

}  // namespace
}  // namespace lossd::kernels::testing
