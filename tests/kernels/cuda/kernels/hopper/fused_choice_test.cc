// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/kernels/hopper/fused_choice.h"

#include <cstdint>
#include <set>

#include "gtest/gtest.h"
#include "kernels/cuda/kernels/hopper/logit_tiles.h"

namespace lossd::kernels::cuda::hopper::fused_choice_test {
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

}  // namespace
}  // namespace lossd::kernels::cuda::hopper::fused_choice_test
