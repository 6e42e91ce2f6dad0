// SPDX-License-Identifier: Apache-2.0
// The conformance suite on the CPU backend.
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/kernels/backend_conformance.h"

namespace lossd::kernels::testing::cpu_conformance_test {
namespace {

Backend& SharedBackend() {
  static const std::unique_ptr<Backend> backend = [] {
    auto created = CreateCpuBackend({.threads = 3, .workspace_bytes = int64_t{4} << 20});
    EXPECT_TRUE(created.ok()) << created.status();
    return *std::move(created);
  }();
  return *backend;
}

std::vector<ConformanceCase> Cases() {
  std::vector<ConformanceCase> cases;
  for (DType hidden : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    cases.push_back({"Cpu", SharedBackend, DType::kFloat32, hidden});
  }
  cases.push_back({"CpuRecomputed", SharedBackend, DType::kFloat32, DType::kFloat32, Logits::kRecomputed});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cpu, BackendConformance, ::testing::ValuesIn(Cases()), ConformanceName);
INSTANTIATE_TEST_SUITE_P(Cpu, GradientsConformance, ::testing::ValuesIn(Cases()), ConformanceName);

}  // namespace
}  // namespace lossd::kernels::testing::cpu_conformance_test
