// SPDX-License-Identifier: Apache-2.0
#include "client/plan/pipeline.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::plan::pipeline_test {
namespace {

using ::testing::ElementsAre;

// 32 layers of 10 ms.
PipelineShape Of(int stages, int64_t microbatches = 32, int64_t replicas = 1, size_t layers = 32) {
  return {.layer_seconds = std::vector<double>(layers, 10e-3),
          .stages = stages,
          .microbatches = microbatches,
          .microbatch_rows = 8192,
          .replicas = replicas};
}

TEST(Pipeline, WithoutAHeadEvenStagesTakeAStageForEachMicrobatchAndForEachOtherStage) {
  const PipelineLayout layout = WithServer(Of(8), 1e-9, 1, {});
  EXPECT_THAT(layout.layers, ElementsAre(4, 4, 4, 4, 4, 4, 4, 4));
  EXPECT_NEAR(layout.step_seconds, (32 + 8 - 1) * 40e-3, 1e-8);
  EXPECT_EQ(layout.gpus, 9);
  EXPECT_NEAR(layout.rows_per_second_and_gpu, 32 * 8192 / layout.step_seconds / 9, 1e-6);
  EXPECT_FALSE(layout.server_bound);
}

TEST(Pipeline, ALocalHeadTakesLayersFromTheLastStage) {
  // As much as two layers: 34 over 8 stages, so that one stage has to take 5.
  const PipelineLayout layout = WithLocalHead(Of(8), 20e-3, {});
  EXPECT_NEAR(layout.slowest_stage_seconds, 50e-3, 1e-12);
  EXPECT_LE(layout.layers.back(), 3);
  int64_t layers = 0;
  for (const int64_t stage : layout.layers) layers += stage;
  EXPECT_EQ(layers, 32);
  // One and a half divides no better.
  EXPECT_NEAR(WithLocalHead(Of(8), 15e-3, {}).slowest_stage_seconds, 50e-3, 1e-12);
  // What fits beside four layers less is free of charge.
  EXPECT_NEAR(WithLocalHead(Of(8, 32, 1, 31), 10e-3, {}).slowest_stage_seconds, 40e-3, 1e-12);
}

TEST(Pipeline, AHeadThatIsSlowerThanAnyStageHasALastStageOfItsOwn) {
  const PipelineLayout layout = WithLocalHead(Of(4), 200e-3, {});
  EXPECT_EQ(layout.layers.back(), 0);
  EXPECT_NEAR(layout.slowest_stage_seconds, 200e-3, 1e-12);
}

TEST(Pipeline, OneStageHasNothingToDivide) {
  const PipelineLayout layout = WithLocalHead(Of(1, 4), 20e-3, {});
  EXPECT_THAT(layout.layers, ElementsAre(32));
  EXPECT_NEAR(layout.step_seconds, 4 * 340e-3, 1e-12);
  const PipelineLayout colocated = Colocated(Of(1, 4), 20e-3, 1, {});
  EXPECT_THAT(colocated.layers, ElementsAre(32));
  EXPECT_THAT(colocated.shares, ElementsAre(1000));
}

TEST(Pipeline, AServerThatIsTooSlowForItsReplicasHoldsThemUp) {
  const PipelineShape shape = Of(16, 64, 4);
  const PipelineLayout fast = WithServer(shape, 4e-3, 1, {});
  EXPECT_FALSE(fast.server_bound);
  EXPECT_EQ(fast.gpus, 65);
  const PipelineLayout slow = WithServer(shape, 40e-3, 1, {});
  EXPECT_TRUE(slow.server_bound);
  // One microbatch through stages and server, and 63 times one of each replica.
  EXPECT_NEAR(slow.step_seconds, 320e-3 + 40e-3 + 63 * 4 * 40e-3, 1e-9);
}

TEST(Pipeline, AColocatedHeadFillsStagesWithFewerLayers) {
  // 13 layers on four GPUs, and a head of six layers: (13 + 6) / 4 each.
  const PipelineLayout layout = Colocated(Of(4, 24, 1, 13), 60e-3, 1, {});
  EXPECT_THAT(layout.layers, ElementsAre(3, 3, 3, 4));
  EXPECT_THAT(layout.shares, ElementsAre(292, 292, 292, 125));
  EXPECT_NEAR(layout.slowest_stage_seconds, 47.5e-3, 1e-4);
  EXPECT_EQ(layout.gpus, 4);
  EXPECT_DOUBLE_EQ(layout.step_seconds, layout.least_step_seconds);
  // Without shares every GPU has as much, and the stage with four layers holds the others up.
  const PipelineLayout even = ColocatedLayout(Of(4, 24, 1, 13), {3, 3, 3, 4}, {}, 60e-3, {});
  EXPECT_NEAR(even.slowest_stage_seconds, 55e-3, 1e-12);
  EXPECT_NEAR(even.step_seconds, 130e-3 + 15e-3 + 23 * 55e-3, 1e-12);
}

TEST(Pipeline, AnEmbeddingMakesTheFirstStageShorter) {
  PipelineShape shape = Of(4, 24, 1, 16);
  shape.embedding_seconds = 10e-3;
  const PipelineLayout colocated = Colocated(shape, 30e-3, 1, {});  // (16 + 1 + 3) / 4 layers each
  EXPECT_THAT(colocated.layers, ElementsAre(3, 4, 5, 4));
  EXPECT_THAT(colocated.shares, ElementsAre(333, 333, 1, 333));
  shape.embedding_seconds = 40e-3;
  EXPECT_EQ(WithServer(shape, 1e-3, 1, {}).layers.front(), 1);
}

TEST(Pipeline, FactorsAreOfThePartsThatTheyName) {
  const PipelineShape shape = Of(4, 24, 1, 16);
  const PipelineFactors factors = {.layer = 1.1, .local_head = 1.2, .colocated = 1.5};
  const PipelineLayout local = LocalLayout(shape, {5, 5, 5, 1}, 30e-3, factors);
  EXPECT_NEAR(local.step_seconds, 1.1 * 160e-3 + 1.2 * 30e-3 + 23 * 55e-3, 1e-12);
  EXPECT_NEAR(local.least_step_seconds, 160e-3 + 30e-3 + 23 * 50e-3, 1e-12);
  const PipelineLayout server = ServerLayout(shape, {5, 5, 6}, 30e-3, 1, factors);
  EXPECT_NEAR(server.step_seconds, 1.1 * 160e-3 + 30e-3 + 23 * 66e-3, 1e-12);
  const PipelineLayout colocated = ColocatedLayout(shape, {4, 4, 4, 4}, {1, 1, 1, 1}, 40e-3, factors);
  EXPECT_NEAR(colocated.step_seconds, 1.1 * 160e-3 + 15e-3 + 23 * (44e-3 + 15e-3), 1e-12);
}

}  // namespace
}  // namespace lossd::plan::pipeline_test
