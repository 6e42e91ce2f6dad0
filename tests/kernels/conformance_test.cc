// SPDX-License-Identifier: Apache-2.0
// The conformance suite on the CPU backend, and on groups of CPU backends.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/group/member_group.h"

namespace lossd::kernels::testing::conformance_test {
namespace {

Backend& SharedBackend() {
  static const std::unique_ptr<Backend> backend = [] {
    auto created = CreateCpuBackend({.threads = 3, .workspace_bytes = int64_t{4} << 20});
    EXPECT_TRUE(created.ok()) << created.status();
    return *std::move(created);
  }();
  return *backend;
}

std::vector<ConformanceCase> CpuCases() {
  std::vector<ConformanceCase> cases;
  for (DType hidden : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    cases.push_back({"Cpu", SharedBackend, DType::kFloat32, hidden});
  }
  cases.push_back({"CpuRecomputed", SharedBackend, DType::kFloat32, DType::kFloat32, Logits::kRecomputed});
  for (ConformanceCase& c : cases) c.distils = true;
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cpu, BackendConformance, ::testing::ValuesIn(CpuCases()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Cpu, GradientsConformance, ::testing::ValuesIn(CpuCases()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Cpu, DistillationConformance, ::testing::ValuesIn(CpuCases()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Cpu, PoolConformance, ::testing::ValuesIn(CpuCases()), ConformanceName);

// ---- Groups of CPU backends ----
// The conformance suite on groups of CPU backends.

Backend& SharedGroup(int members, int64_t least_rows) {
  static auto* const groups = new std::map<std::pair<int, int64_t>, std::unique_ptr<Backend>>();
  std::unique_ptr<Backend>& group = (*groups)[{members, least_rows}];
  if (group == nullptr) group = MakeCpuGroup(members, least_rows);
  return *group;
}

// Of heads that are split by vocabulary.
std::vector<ConformanceCase> VocabularyCases() {
  std::vector<ConformanceCase> cases;
  const auto add = [&](absl::string_view name, int members, DType hidden, std::vector<int32_t> shares) {
    cases.push_back({.name = absl::StrCat(name, members),
                     .backend = [members]() -> Backend& { return SharedGroup(members, 0); },
                     .hidden = hidden,
                     .devices = members,
                     .split = Split::kVocabulary,
                     .shares = std::move(shares),
                     .distils = true});
  };
  add("VocabularyOf", 1, DType::kFloat32, {});
  add("VocabularyOf", 2, DType::kFloat32, {});
  add("VocabularyOf", 2, DType::kFloat16, {});
  add("VocabularyOf", 3, DType::kBFloat16, {});
  add("VocabularyOf", 4, DType::kFloat32, {});
  add("SharesOf", 2, DType::kFloat16, {1, 7});
  add("SharesOf", 3, DType::kFloat32, {5, 0, 2});
  add("SharesWithoutEndsOf", 4, DType::kFloat32, {0, 1, 6, 0});
  add("SharesOfOneOf", 2, DType::kFloat32, {0, 1});
  return cases;
}

// Of heads that are split by vocabulary and have several replicas.
std::vector<ConformanceCase> GridCases() {
  std::vector<ConformanceCase> cases;
  const auto add = [&](int replicas, int places, int64_t least_rows, DType hidden,
                       std::vector<int32_t> shares) {
    const int members = replicas * places;
    cases.push_back({.name = absl::StrCat("GridOf", replicas, "x", places, shares.empty() ? "" : "Shares"),
                     .backend = [=]() -> Backend& { return SharedGroup(members, least_rows); },
                     .hidden = hidden,
                     .devices = members,
                     .split = Split::kVocabulary,
                     .shares = std::move(shares),
                     .replicas = replicas,
                     .distils = true});
  };
  add(2, 2, 0, DType::kFloat32, {});
  add(2, 2, 0, DType::kBFloat16, {5, 2});
  add(2, 3, 512, DType::kFloat16, {5, 0, 2});
  add(3, 2, 0, DType::kFloat32, {});
  return cases;
}

// Every chunk is divided, or only those of many rows, which is none here.
std::vector<ConformanceCase> GroupCases() {
  std::vector<ConformanceCase> cases;
  const auto add = [&](const std::string& name, int members, int64_t least_rows, DType hidden) {
    cases.push_back({.name = absl::StrCat(name, "Of", members),
                     .backend = [=]() -> Backend& { return SharedGroup(members, least_rows); },
                     .hidden = hidden,
                     .devices = members,
                     .distils = true});
  };
  add("Divided", 2, 0, DType::kFloat32);
  add("Divided", 3, 0, DType::kBFloat16);
  add("InTurn", 2, 512, DType::kFloat16);
  add("InTurn", 3, 512, DType::kFloat32);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Group, BackendConformance, ::testing::ValuesIn(GroupCases()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Group, GradientsConformance, ::testing::ValuesIn(GroupCases()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Group, DistillationConformance, ::testing::ValuesIn(GroupCases()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Group, PoolConformance, ::testing::ValuesIn(GroupCases()), ConformanceName);

INSTANTIATE_TEST_SUITE_P(GroupByVocabulary, BackendConformance, ::testing::ValuesIn(VocabularyCases()),
                         ConformanceName);
INSTANTIATE_TEST_SUITE_P(GroupByVocabulary, GradientsConformance, ::testing::ValuesIn(VocabularyCases()),
                         ConformanceName);
INSTANTIATE_TEST_SUITE_P(GroupByVocabulary, DistillationConformance, ::testing::ValuesIn(VocabularyCases()),
                         ConformanceName);
INSTANTIATE_TEST_SUITE_P(GroupByVocabulary, PoolConformance, ::testing::ValuesIn(VocabularyCases()),
                         ConformanceName);

INSTANTIATE_TEST_SUITE_P(GroupByBoth, BackendConformance, ::testing::ValuesIn(GridCases()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(GroupByBoth, GradientsConformance, ::testing::ValuesIn(GridCases()),
                         ConformanceName);
INSTANTIATE_TEST_SUITE_P(GroupByBoth, DistillationConformance, ::testing::ValuesIn(GridCases()),
                         ConformanceName);
INSTANTIATE_TEST_SUITE_P(GroupByBoth, PoolConformance, ::testing::ValuesIn(GridCases()), ConformanceName);

}  // namespace
}  // namespace lossd::kernels::testing::conformance_test
