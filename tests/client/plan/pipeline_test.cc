// SPDX-License-Identifier: Apache-2.0
#include "client/plan/pipeline.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::plan::pipeline_test {
namespace {

using ::testing::ElementsAre;

// 32 layers of 10 ms.
PipelineShape Of(int stages, int64_t microbatches = 32, int64_t replicas = 1) {
  return {.layers = 32,
          .stages = stages,
          .microbatches = microbatches,
          .microbatch_rows = 8192,
          .replicas = replicas,
          .layer_seconds = 10e-3};
}

TEST(Pipeline, WithoutAHeadEvenStagesTakeAStageForEachMicrobatchAndForEachOtherStage) {
  const PipelineLayout layout = WithServer(Of(8), 1e9, 1);
  EXPECT_THAT(layout.layers, ElementsAre(4, 4, 4, 4, 4, 4, 4, 4));
  EXPECT_NEAR(layout.step_seconds, (32 + 8 - 1) * 40e-3, 1e-12);
  EXPECT_EQ(layout.gpus, 9);
  EXPECT_NEAR(layout.rows_per_second_and_gpu, 32 * 8192 / layout.step_seconds / 9, 1e-6);
  EXPECT_FALSE(layout.server_bound);
}

TEST(Pipeline, ALocalHeadTakesLayersFromTheLastStage) {
  // As much as two layers: 34 over 8 stages, so that one stage has to take 5.
  const PipelineLayout layout = WithLocalHead(Of(8), 20e-3);
  EXPECT_NEAR(layout.slowest_stage_seconds, 50e-3, 1e-12);
  EXPECT_LE(layout.layers.back(), 3);
  int64_t layers = 0;
  for (const int64_t stage : layout.layers) layers += stage;
  EXPECT_EQ(layers, 32);
  // One and a half divides no better.
  EXPECT_NEAR(WithLocalHead(Of(8), 15e-3).slowest_stage_seconds, 50e-3, 1e-12);
  // What fits beside four layers less is free of charge.
  EXPECT_NEAR(
      WithLocalHead(
          {.layers = 31, .stages = 8, .microbatches = 32, .microbatch_rows = 8192, .layer_seconds = 10e-3},
          10e-3)
          .slowest_stage_seconds,
      40e-3, 1e-12);
}

TEST(Pipeline, AHeadThatIsSlowerThanAnyStageHasALastStageOfItsOwn) {
  const PipelineLayout layout = WithLocalHead(Of(4), 200e-3);
  EXPECT_EQ(layout.layers.back(), 0);
  EXPECT_NEAR(layout.slowest_stage_seconds, 200e-3, 1e-12);
}

TEST(Pipeline, OneStageHasNothingToDivide) {
  const PipelineLayout layout = WithLocalHead(Of(1, 4), 20e-3);
  EXPECT_THAT(layout.layers, ElementsAre(32));
  EXPECT_NEAR(layout.step_seconds, 4 * 340e-3, 1e-12);
}

TEST(Pipeline, AServerThatIsTooSlowForItsReplicasHoldsThemUp) {
  const PipelineShape shape = Of(16, 64, 4);
  const double rows = 4.0 * 64 * 8192;
  const PipelineLayout fast = WithServer(shape, 2 * rows, 1);
  EXPECT_FALSE(fast.server_bound);
  EXPECT_EQ(fast.gpus, 65);
  const PipelineLayout slow = WithServer(shape, rows / 10, 1);
  EXPECT_TRUE(slow.server_bound);
  EXPECT_NEAR(slow.step_seconds, 10.0, 1e-9);
}

}  // namespace
}  // namespace lossd::plan::pipeline_test
