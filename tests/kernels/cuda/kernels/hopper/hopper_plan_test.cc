// SPDX-License-Identifier: Apache-2.0
// What is decided of the products on Hopper without a GPU.
#include <cstdint>
#include <set>

#include "gtest/gtest.h"
#include "kernels/cuda/kernels/hopper/plan.h"

namespace lossd::kernels::cuda::hopper::hopper_plan_test {
namespace {

constexpr int kClusters = 66;

constexpr LossTerms kPlain = {.vocab = 128256};
constexpr DType kBf16 = DType::kBFloat16;

TEST(FusedChoice, IsTakenForLargeChunks) {
  EXPECT_EQ(WhyNotFused(kPlain, kBf16, true, kClusters), "");
  EXPECT_EQ(WhyNotFaster(8192, 128256), "");
}

TEST(FusedChoice, ScaleSoftcapBiasClassWeightsAndEntropiesFit) {
  const float weights[1] = {1.0f};
  LossTerms terms = kPlain;
  terms.scale = -0.5f;
  terms.softcap = 30.0f;
  terms.z_loss = 1e-4f;
  terms.bias = terms.class_weights = weights;
  terms.want_entropy = terms.any_coef_entropy = true;
  EXPECT_EQ(WhyNotFused(terms, kBf16, true, kClusters), "");
}

TEST(FusedChoice, SaysWhyNot) {
  std::set<absl::string_view> reasons;
  reasons.insert(WhyNotFused(kPlain, kBf16, true, 0));
  reasons.insert(WhyNotFused(kPlain, DType::kFloat32, true, kClusters));
  reasons.insert(WhyNotFused(kPlain, DType::kFloat16, true, kClusters));
  LossTerms terms = kPlain;
  terms.smoothing = 0.1f;
  reasons.insert(WhyNotFused(terms, kBf16, true, kClusters));
  EXPECT_EQ(reasons.size(), 4u);
  EXPECT_EQ(reasons.count(""), 0u);
}

TEST(FusedChoice, Fp16LossesAreFusedWithoutExponentials) {
  EXPECT_EQ(WhyNotFused(kPlain, DType::kFloat16, false, kClusters), "");
}

TEST(FusedChoice, SmallChunksAreLeftToTheLibrary) {
  EXPECT_EQ(WhyNotFaster(128, 128256), "few rows");
  EXPECT_EQ(WhyNotFaster(8192, 1000), "few tiles");
}

TEST(LogitTiles, GroupsAreOfAboutTheSameSize) {
  EXPECT_EQ(PanelsPerGroup(32, 2304), 16);
  EXPECT_EQ(PanelsPerGroup(32, 4096), 8);
  EXPECT_EQ(PanelsPerGroup(1, 64), 1);
  EXPECT_EQ(PanelsPerGroup(7, int64_t{1} << 20), 1);
  for (int64_t panels = 1; panels < 70; ++panels) {
    const int64_t group = PanelsPerGroup(panels, 3072);
    EXPECT_GE(group, 1);
    EXPECT_LE(group * kPanelRows * 3072 * 2, 20 << 20);
  }
}

// ---- the work of a gradient's product ----

TEST(ProductPlanTest, EveryTileIsPlannedOnce) {
  for (int64_t rows : {1, 255, 256, 257, 3968, 8192, 128256}) {
    for (int64_t columns : {8, 256, 264, 2304, 5120}) {
      for (int64_t inner : {1, 64, 65, 1000, 8192, 256000}) {
        for (int clusters : {1, 3, 66, 200}) {
          const GradientGemmPlan plan = PlanGradientGemm(rows, columns, inner, clusters);
          EXPECT_EQ(plan.whole + plan.segmented, plan.panels * plan.row_tiles);
          EXPECT_EQ(plan.units, plan.whole + plan.segmented * plan.segments);
          EXPECT_GE(plan.panels * kPanelRows, columns);
          EXPECT_GE(plan.row_tiles * kColumnTile, rows);
          EXPECT_GE(plan.inner_tiles * kInnerTile, inner);
          EXPECT_LE(plan.segments, plan.inner_tiles);
          EXPECT_LE(plan.segmented, kMostPartials);
          EXPECT_EQ(plan.whole % clusters == 0 || plan.segmented == 0, true);
          EXPECT_GE(plan.group, 1);
        }
      }
    }
  }
}

TEST(ProductPlanTest, TheRestIsCutWhereThatFillsTheGrid) {
  // 9 x 32 tiles: four for every cluster, 24 are left.
  const GradientGemmPlan wide = PlanGradientGemm(8192, 2304, 256000, kClusters);
  EXPECT_EQ(wide.whole, 4 * kClusters);
  EXPECT_EQ(wide.segmented, 24);
  EXPECT_EQ(wide.segments, 11);
  // 9 x 4 tiles: fewer than clusters.
  const GradientGemmPlan few = PlanGradientGemm(1000, 2304, 256000, kClusters);
  EXPECT_EQ(few.whole, 0);
  EXPECT_EQ(few.segmented, 36);
  EXPECT_GT(few.segments, 1);
  // Too little to do in a tile for partial sums to pay.
  EXPECT_EQ(PlanGradientGemm(128256, 4096, 512, kClusters).segmented, 0);
}

TEST(ProductPlanTest, SegmentsNeverCostMore) {
  for (int64_t tiles = 6; tiles < kClusters; ++tiles) {
    const GradientGemmPlan plan = PlanGradientGemm(tiles * kPanelRows, kColumnTile, 100000, kClusters);
    const int64_t segmented = StagesFor(tiles, plan.segments, plan.inner_tiles, kClusters);
    EXPECT_LE(segmented, StagesFor(tiles, 1, plan.inner_tiles, kClusters)) << tiles;
    // At least three quarters of the grid work, partial sums and all.
    EXPECT_GE(4 * tiles * plan.inner_tiles, 3 * segmented * kClusters) << tiles;
  }
}

TEST(ProductPlanTest, GroupsAreOfAboutTheSameSize) {
  EXPECT_EQ(RowTilesPerGroup(1), 1);
  EXPECT_EQ(RowTilesPerGroup(9), 9);
  EXPECT_EQ(RowTilesPerGroup(16), 8);
  EXPECT_EQ(RowTilesPerGroup(20), 10);
  EXPECT_EQ(RowTilesPerGroup(21), 7);
}

TEST(ProductPlanTest, SaysWhyNot) {
  DeviceLimits limits = {.fused_clusters = kClusters};
  EXPECT_EQ(WhyNoGradientGemms(DType::kBFloat16, limits), "");
  EXPECT_EQ(WhyNoGradientGemms(DType::kFloat16, limits), "");
  EXPECT_EQ(WhyNoGradientGemms(DType::kFloat32, limits), "fp32 compute");
  EXPECT_EQ(WhyNoGradientGemms(DType::kBFloat16, {}), "not a Hopper GPU");
  limits.shared_by_mps = true;
  EXPECT_EQ(WhyNoGradientGemms(DType::kBFloat16, limits), "MPS is enabled");
}

TEST(ProductPlanTest, SaysWhereTheLibraryIsAsFast) {
  EXPECT_EQ(WhyNoFasterGradientGemms(512), "few rows");
  EXPECT_EQ(WhyNoFasterGradientGemms(768), "");
  EXPECT_EQ(WhyNoFasterGradientGemms(8192), "");
}

}  // namespace
}  // namespace lossd::kernels::cuda::hopper::hopper_plan_test
