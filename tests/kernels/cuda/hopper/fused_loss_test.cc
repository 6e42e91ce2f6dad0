#include "kernels/cuda/hopper/fused_loss.h"

#include <cstdint>
#include <set>

#include "gtest/gtest.h"
#include "kernels/cuda/hopper/logit_tiles.h"

namespace lossd::kernels::cuda::hopper {
namespace {

constexpr int kClusters = 66;

RowLossParams Large() {
  RowLossParams p;
  p.dtype = DType::kBFloat16;
  p.vocab = 128256;
  p.rows = p.padded_rows = 8192;
  p.write_gradient = true;
  return p;
}

TEST(FusedLoss, IsTakenForLargeChunks) {
  EXPECT_EQ(WhyNotFused(Large(), kClusters), "");
  EXPECT_EQ(WhyNotFaster(Large()), "");
}

TEST(FusedLoss, ScaleSoftcapBiasAndClassWeightsFit) {
  const float weights[1] = {1.0f};
  RowLossParams p = Large();
  p.scale = -0.5f;
  p.softcap = 30.0f;
  p.z_loss = 1e-4f;
  p.bias = p.class_weights = weights;
  p.want_entropy = true;
  EXPECT_EQ(WhyNotFused(p, kClusters), "");
}

TEST(FusedLoss, SaysWhyNot) {
  std::set<absl::string_view> reasons;
  reasons.insert(WhyNotFused(Large(), 0));
  RowLossParams p = Large();
  p.dtype = DType::kFloat32;
  reasons.insert(WhyNotFused(p, kClusters));
  p = Large();
  p.dtype = DType::kFloat16;
  reasons.insert(WhyNotFused(p, kClusters));
  p = Large();
  p.smoothing = 0.1f;
  reasons.insert(WhyNotFused(p, kClusters));
  p = Large();
  p.any_coef_entropy = true;
  reasons.insert(WhyNotFused(p, kClusters));
  EXPECT_EQ(reasons.size(), 5u);
  EXPECT_EQ(reasons.count(""), 0u);
}

TEST(FusedLoss, Fp16LossesAreFusedWithoutGradients) {
  RowLossParams p = Large();
  p.dtype = DType::kFloat16;
  p.write_gradient = false;
  EXPECT_EQ(WhyNotFused(p, kClusters), "");
}

TEST(FusedLoss, SmallChunksAreLeftToTheLibrary) {
  RowLossParams p = Large();
  p.rows = p.padded_rows = 128;
  EXPECT_EQ(WhyNotFaster(p), "few rows");
  p = Large();
  p.vocab = 1000;
  EXPECT_EQ(WhyNotFaster(p), "few tiles");
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

}  // namespace
}  // namespace lossd::kernels::cuda::hopper
