// SPDX-License-Identifier: Apache-2.0
// What launches decide without a GPU: which kernels a norm takes, by thresholds and with reasons
// (norm_test.cc runs what is chosen), and the order of clusters.
#include <cuda_runtime_api.h>

#include <set>

#include "gtest/gtest.h"
#include "kernels/cuda/kernels/hopper/cluster_launch.h"
#include "kernels/cuda/kernels/norm.h"

namespace lossd::kernels::cuda::launch_plan_test {
namespace {

constexpr DeviceLimits kHopper = {.multiprocessors = 132,
                                  .shared_bytes_per_block = 225 << 10,
                                  .shared_bytes_per_sm = 228 << 10,
                                  .has_clusters = true,
                                  .is_hopper = true};
constexpr DeviceLimits kAmpere = {
    .multiprocessors = 108, .shared_bytes_per_block = 161 << 10, .shared_bytes_per_sm = 164 << 10};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

NormParams Rows(int64_t cols, DType x, DType dy) {
  NormParams p;
  p.rows = 4096;
  p.x = {nullptr, x, cols, cols};
  p.y = {nullptr, dy, cols, cols};
  return p;
}

NormPlan Backward(int64_t cols, DType x, DType dy, const DeviceLimits& limits) {
  return PlanNormBackward(Rows(cols, x, dy), {}, limits);
}

void Expect(const NormPlan& plan, NormRows rows, absl::string_view reason) {
  EXPECT_EQ(Name(plan.rows), Name(rows));
  EXPECT_EQ(plan.reason, reason);
}

TEST(NormPlan, ForwardHoldsRowsInRegisters) {
  for (const DType dtype : kDTypes) {
    for (const int64_t cols : {8, 1024, 4096, 16384}) {
      Expect(PlanNormForward(Rows(cols, dtype, dtype)), NormRows::kRegisters, "");
    }
    Expect(PlanNormForward(Rows(507, dtype, dtype)), NormRows::kNowhere, "8 does not divide the columns");
    Expect(PlanNormForward(Rows(16392, dtype, dtype)), NormRows::kNowhere, "long rows");
    NormParams shifted = Rows(1024, dtype, dtype);
    shifted.x.data = reinterpret_cast<void*>(uintptr_t{4});
    Expect(PlanNormForward(shifted), NormRows::kNowhere, "rows that are not aligned");
  }
}

TEST(NormPlan, BackwardOnHopperCopiesWholeRows) {
  const DType half = DType::kBFloat16, full = DType::kFloat32;
  for (const int64_t cols : {1024, 4096, 8192, 12288, 15872, 24584, 32768}) {
    Expect(Backward(cols, half, half, kHopper), NormRows::kBulkCopies, "");
  }
  for (const int64_t cols : {1024, 8192, 16384}) {
    Expect(Backward(cols, full, half, kHopper), NormRows::kBulkCopies, "");
    Expect(Backward(cols, full, full, kHopper), NormRows::kBulkCopies, "");
  }
  Expect(Backward(1016, half, half, kHopper), NormRows::kWarpCopies, "short rows");
}

TEST(NormPlan, BackwardElsewhereCopiesByWarps) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t cols : {8, 1024, 8192}) {
      Expect(Backward(cols, dtype, dtype, kAmpere), NormRows::kWarpCopies, "not a Hopper GPU");
    }
  }
}

TEST(NormPlan, BackwardReadsRowsAgainThatFitNowhere) {
  for (const DeviceLimits& limits : {kHopper, kAmpere}) {
    Expect(Backward(507, DType::kFloat16, DType::kFloat16, limits), NormRows::kNowhere,
           "8 does not divide the columns");
    Expect(Backward(32776, DType::kFloat16, DType::kFloat16, limits), NormRows::kNowhere, "long rows");
    Expect(Backward(16392, DType::kFloat32, DType::kFloat32, limits), NormRows::kNowhere, "long rows");
    Expect(Backward(4096, DType::kFloat16, DType::kBFloat16, limits), NormRows::kNowhere,
           "a rare pair of dtypes");
    Expect(Backward(4096, DType::kBFloat16, DType::kFloat16, limits), NormRows::kNowhere,
           "a rare pair of dtypes");
    NormParams p = Rows(1024, DType::kFloat32, DType::kFloat32);
    NormBackwardParams b;
    b.dx = p.x;
    b.dx.data = reinterpret_cast<void*>(uintptr_t{1024});
    EXPECT_NE(PlanNormBackward(p, b, limits).rows, NormRows::kNowhere);
    b.dx.data = reinterpret_cast<void*>(uintptr_t{1028});
    Expect(PlanNormBackward(p, b, limits), NormRows::kNowhere, "rows that are not aligned");
  }
}

// Whatever the shape there is a plan, and every plan but the first choice has a reason.
TEST(NormPlan, EveryPlanHasItsReason) {
  for (int64_t cols = 1; cols < 40'000; cols += cols < 64 ? 1 : 331) {
    for (const int64_t c : {cols, (cols + 7) / 8 * 8}) {
      for (const DType x : kDTypes) {
        for (const DType dy : kDTypes) {
          const NormPlan forward = PlanNormForward(Rows(c, x, dy));
          EXPECT_EQ(forward.reason.empty(), forward.rows == NormRows::kRegisters);
          const NormPlan backward = Backward(c, x, dy, kHopper);
          EXPECT_EQ(backward.reason.empty(), backward.rows == NormRows::kBulkCopies);
          EXPECT_NE(Backward(c, x, dy, kAmpere).rows, NormRows::kBulkCopies);
        }
      }
    }
  }
}

// ---- the order of clusters ----

// On a machine without a GPU too: no groups are known there.
TEST(ClusterOrder, EveryPositionIsPreferredOnce) {
  const hopper::ClusterOrder order = hopper::FindClusterOrder();
  const std::set<int> positions(std::begin(order.preferred), std::end(order.preferred));
  EXPECT_EQ(positions.size(), hopper::kMostClusters);
  EXPECT_EQ(*positions.begin(), 0);
  EXPECT_EQ(*positions.rbegin(), hopper::kMostClusters - 1);
}

}  // namespace
}  // namespace lossd::kernels::cuda::launch_plan_test
