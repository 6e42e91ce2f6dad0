// The conformance suite on the CUDA backend.
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/cuda/cuda_test_device.h"

namespace lossd::kernels::testing {
namespace {

std::unique_ptr<Backend> Create(FusedLoss fused_loss, bool host_branches = false,
                                bool smallest_blocks = false) {
  auto created = CreateCudaBackend({.workspace_bytes = int64_t{64} << 20,
                                    .max_chunk_rows = 512,
                                    .fused_loss = fused_loss,
                                    .host_branches = host_branches,
                                    .smallest_blocks = smallest_blocks});
  EXPECT_TRUE(created.ok()) << created.status();
  return *std::move(created);
}

Backend& SharedBackend() {
  static const std::unique_ptr<Backend> backend = Create(FusedLoss::kNever);
  return *backend;
}

Backend& FusedBackend() {
  static const std::unique_ptr<Backend> backend = Create(FusedLoss::kWherePossible);
  return *backend;
}

Backend& HostBranchBackend() {
  static const std::unique_ptr<Backend> backend = Create(FusedLoss::kNever, true);
  return *backend;
}

Backend& SmallBlockBackend() {
  static const std::unique_ptr<Backend> backend = Create(FusedLoss::kNever, false, true);
  return *backend;
}

Backend& FusedSmallBlockBackend() {
  static const std::unique_ptr<Backend> backend = Create(FusedLoss::kWherePossible, false, true);
  return *backend;
}

Backend& HostBranchSmallBlockBackend() {
  static const std::unique_ptr<Backend> backend = Create(FusedLoss::kWherePossible, true, true);
  return *backend;
}

// Heads for cut: with the blocks that a server would choose, and with several of everything.
void AddCutCases(std::vector<ConformanceCase>& cases) {
  for (DType compute : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    cases.push_back({"CudaCut", SharedBackend, compute, DType::kFloat32, Algorithm::kCut});
    cases.push_back({"CudaCutBlocks", SmallBlockBackend, compute, compute, Algorithm::kCut});
    if (compute == DType::kFloat32) continue;
    cases.push_back({"CudaCutFused", FusedBackend, compute, compute, Algorithm::kCut});
    cases.push_back({"CudaCutFusedBlocks", FusedSmallBlockBackend, compute, compute, Algorithm::kCut});
  }
  cases.push_back(
      {"CudaCutFusedBlocks", FusedSmallBlockBackend, DType::kBFloat16, DType::kFloat32, Algorithm::kCut});
  cases.push_back({"CudaCutHostBranch", HostBranchSmallBlockBackend, DType::kBFloat16, DType::kBFloat16,
                   Algorithm::kCut});
}

// Every compute dtype with every hidden dtype, the fused loss wherever it is possible, and, for checkers of
// the filtered kernels, branches on the host; none without a GPU.
std::vector<ConformanceCase> Cases() {
  std::vector<ConformanceCase> cases;
  if (!HaveGpu()) return cases;
  for (DType compute : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (DType hidden : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      cases.push_back({"Cuda", SharedBackend, compute, hidden});
    }
  }
  for (DType compute : {DType::kFloat16, DType::kBFloat16}) {
    for (DType hidden : {DType::kFloat32, compute}) {
      cases.push_back({"CudaFused", FusedBackend, compute, hidden});
    }
  }
  for (DType compute : {DType::kFloat32, DType::kBFloat16}) {
    cases.push_back({"CudaHostBranch", HostBranchBackend, compute, DType::kFloat32});
  }
  AddCutCases(cases);
  return cases;
}

// Without a GPU there is no case at all.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(BackendConformance);
INSTANTIATE_TEST_SUITE_P(Cuda, BackendConformance, ::testing::ValuesIn(Cases()), ConformanceName);

TEST(CudaConformance, HasAGpu) { LOSSD_SKIP_WITHOUT_GPU(); }

}  // namespace
}  // namespace lossd::kernels::testing
