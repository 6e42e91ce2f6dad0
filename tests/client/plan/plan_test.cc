// SPDX-License-Identifier: Apache-2.0
#include "client/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::plan::plan_test {
namespace {

using kernels::Logits;
using kernels::MemoryKind;
using kernels::Split;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Measured Rates() { return *ParseMeasured(BuiltinMeasured()); }

Request Llama() {
  Request request;
  request.model = {.name = "llama", .hidden = 4096, .vocab = 128'256};
  return request;
}

TEST(Plan, OfOneGpuHasBothWaysToKeepLogits) {
  const auto plan = MakePlan(Llama(), Rates());
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->server.size(), 2u);
  EXPECT_EQ(plan->server[0].logits, Logits::kStored);
  EXPECT_EQ(plan->server[1].logits, Logits::kRecomputed);
  // fp32 values with a 16-bit copy, gradients, two moments.
  const int64_t parameters = int64_t{4096} * 128'256;
  for (const DeviceMemory& device : plan->server) {
    EXPECT_EQ(device.memory[MemoryKind::kWeights], 6 * parameters);
    EXPECT_EQ(device.memory[MemoryKind::kGradients], 4 * parameters);
    EXPECT_EQ(device.memory[MemoryKind::kOptimizer], 8 * parameters);
    EXPECT_TRUE(device.fits);
  }
  EXPECT_GT(plan->server[0].memory[MemoryKind::kWorkspace], plan->server[1].memory[MemoryKind::kWorkspace]);
  EXPECT_EQ(plan->trainer_bytes, 4 * 8192 * 4096);
}

TEST(Plan, OfSeveralGpusDividesWhatTheSplitSays) {
  Request request = Llama();
  request.gpus = 2;
  const auto one = MakePlan(Llama(), Rates());
  const auto two = MakePlan(request, Rates());
  ASSERT_TRUE(one.ok() && two.ok());
  ASSERT_EQ(two->server.size(), 4u);
  EXPECT_EQ(two->server[0].split, Split::kRows);
  EXPECT_EQ(two->server[1].split, Split::kVocabulary);
  const auto weights = [](const DeviceMemory& d) { return d.memory[MemoryKind::kWeights]; };
  const auto moments = [](const DeviceMemory& d) { return d.memory[MemoryKind::kOptimizer]; };
  EXPECT_EQ(weights(two->server[0]), weights(one->server[0]));
  EXPECT_EQ(2 * moments(two->server[0]), moments(one->server[0]));
  // In whole pages of the driver.
  EXPECT_NEAR(2.0 * static_cast<double>(weights(two->server[1])),
              static_cast<double>(weights(one->server[0])), 4 << 20);
  EXPECT_GT(two->speeds.front().low_rows_per_second, 1.7 * one->speeds.front().low_rows_per_second);
}

TEST(Plan, SaysNothingOfMoreGpusThanWereMeasured) {
  Request request = Llama();
  request.gpus = 8;
  const auto plan = MakePlan(request, Rates());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->server.size(), 4u);  // memory is arithmetic
  for (const ServerSpeed& speed : plan->speeds) {
    EXPECT_FALSE(speed.microbatch.known());
    EXPECT_EQ(speed.microbatch.why_none, "not measured on 8 GPUs");
  }
}

TEST(Plan, FeedsAsManyTrainersAsHaveTheirRowsComputedWhileTheyWork) {
  Request request = Llama();
  request.trainer_seconds = 2.0;
  const auto plan = MakePlan(request, Rates());
  ASSERT_TRUE(plan.ok()) << plan.status();
  const ServerSpeed& exact = plan->speeds.front();
  ASSERT_TRUE(exact.trainers_fed.has_value());
  request.trainers = *exact.trainers_fed;
  EXPECT_LE(MakePlan(request, Rates())->speeds.front().step_seconds, 2.0);
  request.trainers += 1;
  EXPECT_GT(MakePlan(request, Rates())->speeds.front().step_seconds, 2.0);
  request.trainer_seconds = 1e-3;  // less than the update alone
  EXPECT_EQ(MakePlan(request, Rates())->speeds.front().trainers_fed, 0);
  request.trainer_seconds = 0.0;
  EXPECT_FALSE(MakePlan(request, Rates())->speeds.front().trainers_fed.has_value());
}

Request LlamaInEightStages() {
  Request request = Llama();
  request.model.layers = 32;
  request.pipeline.stages = 8;
  request.pipeline.layer_seconds = {0.012};
  request.rows = 32 * 8192;
  return request;
}

TEST(Plan, ComparesPipelinesWithTheHeadOnTheLastStageOnAServerAndColocated) {
  Request request = LlamaInEightStages();
  const auto plan = MakePlan(request, Rates());
  ASSERT_TRUE(plan.ok()) << plan.status();
  // Local; a server beside eight stages and beside seven, exact and sampled; colocated, with MPS and without.
  ASSERT_EQ(plan->pipelines.known.size(), 9u);
  EXPECT_EQ(plan->pipelines.known[0].kind, PipelineKind::kLocal);
  EXPECT_EQ(plan->pipelines.known[0].local, LocalMethod::kCompiled);
  EXPECT_EQ(plan->pipelines.known[0].layout.gpus, 8);
  EXPECT_EQ(plan->pipelines.known[0].over_local, 1.0);
  EXPECT_EQ(plan->pipelines.known[1].layout.gpus, 9);
  EXPECT_EQ(plan->pipelines.known[3].layout.gpus, 8);
  EXPECT_NEAR(plan->pipelines.known[1].layout.least_step_seconds, (32 + 7) * 0.048 + 0.0382, 1e-4);
  for (size_t i = 5; i < 9; ++i) {
    const Pipeline& colocated = plan->pipelines.known[i];
    EXPECT_EQ(colocated.kind, PipelineKind::kColocated);
    EXPECT_EQ(colocated.mps, i < 7);
    EXPECT_EQ(colocated.layout.gpus, 8);
    EXPECT_EQ(colocated.layout.shares.size(), 8u);
    EXPECT_GT(colocated.layout.step_seconds, colocated.layout.least_step_seconds);
    EXPECT_NEAR(colocated.over_local,
                plan->pipelines.known[0].layout.step_seconds / colocated.layout.step_seconds, 1e-12);
  }
  EXPECT_LT(plan->pipelines.known[5].layout.step_seconds, plan->pipelines.known[7].layout.step_seconds);
  request.trainers = 16;
  const auto many = MakePlan(request, Rates());
  ASSERT_TRUE(many.ok()) << many.status();
  ASSERT_EQ(many->pipelines.known.size(), 7u);
  EXPECT_TRUE(many->pipelines.known[1].layout.server_bound);  // 2.2 million rows a second
  EXPECT_EQ(many->pipelines.known[3].layout.gpus, 128);       // each replica has a head on its own GPUs
}

TEST(Plan, PipelinesAreOfTheTimesThatAreGiven) {
  Request request = LlamaInEightStages();
  request.model.hidden = 1 << 20;  // of which no rate says anything
  request.model.vocab = 32'064;
  const Pipelines none = MakePlan(request, Rates())->pipelines;
  EXPECT_TRUE(none.known.empty());
  EXPECT_THAT(
      none.left_out,
      ElementsAre("The time of a local head is not known; --local-head-seconds gives it.",
                  "The time of exact gradients on a server is not known; --head-seconds gives it.",
                  "The time of sampled gradients on a server is not known; --sampled-seconds gives it."));
  request.pipeline.head_seconds = 0.040;
  request.pipeline.local_head_seconds = 0.050;
  const auto plan = MakePlan(request, Rates());
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->pipelines.known.size(), 5u);  // local, two with a server, colocated with and without MPS
  EXPECT_EQ(plan->pipelines.known[0].local, std::nullopt);
  EXPECT_EQ(plan->pipelines.known[3].head_seconds, 0.040);
  // A GPU without a class is none that a server takes: 256 of 32,064 are 8 thousandths.
  EXPECT_GE(*std::min_element(plan->pipelines.known[3].layout.shares.begin(),
                              plan->pipelines.known[3].layout.shares.end()),
            8);
}

TEST(Plan, AHeadOfFewClassesIsNotColocated) {
  Request request = LlamaInEightStages();
  request.model.vocab = 63;
  request.pipeline.head_seconds = request.pipeline.local_head_seconds = 0.001;
  const Pipelines pipelines = MakePlan(request, Rates())->pipelines;
  EXPECT_EQ(pipelines.known.size(), 3u);
  EXPECT_THAT(pipelines.left_out.back(), HasSubstr("63 classes is too small for 8 GPUs"));
}

TEST(Plan, SizesOfPipelinesDoNotWrapAround) {
  Request request = LlamaInEightStages();
  request.model.hidden = 1 << 24;
  request.rows = request.microbatch = int64_t{1} << 32;
  request.pipeline.head_seconds = 1e6;
  const auto plan = MakePlan(request, Rates());
  ASSERT_TRUE(plan.ok());
  for (const Pipeline& pipeline : plan->pipelines.known) {
    for (const int64_t bytes : pipeline.stage_bytes) EXPECT_GE(bytes, int64_t{1} << 60);
    EXPECT_FALSE(pipeline.fits);
  }
}

TEST(Plan, APipelineOfOtherLayersIsDividedByTheirTimes) {
  Request request = LlamaInEightStages();
  request.pipeline.layer_seconds.assign(32, 0.010);
  request.pipeline.layer_seconds[0] = 0.080;
  const auto plan = MakePlan(request, Rates());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->pipelines.known[5].layout.layers.front(), 1);
}

TEST(Plan, APipelineTakesTheMemoryOfItsStages) {
  Request request = LlamaInEightStages();
  request.pipeline.layer_bytes = int64_t{1} << 30;
  const auto plan = MakePlan(request, Rates());
  ASSERT_TRUE(plan.ok()) << plan.status();
  const int64_t layer = 16 * 12 * int64_t{4096} * 4096, embedding = 16 * int64_t{4096} * 128'256;
  const Pipeline& server = plan->pipelines.known[1];
  EXPECT_EQ(server.layout.layers.front(), 4);
  // Four layers, nine microbatches in flight, and what a layer has while it is computed.
  EXPECT_EQ(server.stage_bytes.front(), 4 * (layer + (int64_t{9} << 30)) + embedding + (1 << 30));
  EXPECT_EQ(server.stage_bytes.back(), 4 * (layer + (int64_t{2} << 30)) + (1 << 30));
  EXPECT_EQ(server.server_bytes, plan->server[0].device_bytes);
  // Colocated, each stage has its share of the head: 16 bytes and a 16-bit copy of a parameter at least.
  const Pipeline& colocated = plan->pipelines.known[5];
  int64_t of_head = 0;
  for (size_t stage = 0; stage < 8; ++stage)
    of_head += colocated.stage_bytes[stage] - server.stage_bytes[stage];
  EXPECT_GT(of_head, 18 * int64_t{4096} * 128'256);
  request.memory_bytes = int64_t{50} << 30;
  EXPECT_FALSE(MakePlan(request, Rates())->pipelines.known[5].fits);
  EXPECT_TRUE(colocated.fits);
}

TEST(Plan, RefusesPipelinesThatCannotBe) {
  const auto refused = [](auto change) {
    Request request = LlamaInEightStages();
    change(request);
    return std::string(MakePlan(request, Rates()).status().message());
  };
  const auto seconds = [&](std::vector<double> given) {
    return refused([&](Request& r) { r.pipeline.layer_seconds = given; });
  };
  EXPECT_THAT(seconds({}), HasSubstr("layer_seconds must be given with stages"));
  EXPECT_THAT(seconds({0.0}), HasSubstr("layer_seconds must be > 0 and at most 1e+06, got 0"));
  EXPECT_THAT(seconds(std::vector<double>(31, 0.01)), HasSubstr("one for each of the 32, got 31 values"));
  std::vector<double> one_bad(32, 0.01);
  one_bad[3] = INFINITY;
  EXPECT_THAT(seconds(one_bad), HasSubstr("layer_seconds[3] must be > 0 and at most 1e+06, got inf"));
  EXPECT_THAT(refused([](Request& r) { r.model.layers = 7; }), HasSubstr("layers must be from 8"));
  EXPECT_THAT(refused([](Request& r) { r.model.layers = 1 << 20; }), HasSubstr("layers must be from 8"));
  EXPECT_THAT(refused([](Request& r) { r.pipeline.stages = -1; }), HasSubstr("stages must be from 1 to 256"));
  EXPECT_THAT(refused([](Request& r) { r.pipeline.stages = 257; }),
              HasSubstr("stages must be from 1 to 256"));
  EXPECT_THAT(refused([](Request& r) { r.pipeline.embedding_seconds = NAN; }),
              HasSubstr("embedding_seconds"));
  EXPECT_THAT(refused([](Request& r) { r.pipeline.head_seconds = -1; }),
              HasSubstr("head_seconds must be from 0 to 1e+06"));
  EXPECT_THAT(refused([](Request& r) { r.pipeline.sampled_seconds = -1; }), HasSubstr("sampled_seconds"));
  EXPECT_THAT(refused([](Request& r) { r.pipeline.local_head_seconds = -1; }),
              HasSubstr("local_head_seconds"));
  EXPECT_THAT(refused([](Request& r) { r.pipeline.layer_bytes = -1; }), HasSubstr("layer_memory"));
}

TEST(Plan, SaysWhatDoesNotFit) {
  Request request = Llama();
  request.memory_bytes = int64_t{10} << 30;
  const auto plan = MakePlan(request, Rates());
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_FALSE(plan->server[0].fits);
  EXPECT_TRUE(plan->server[1].fits);
  request.stage_bytes = int64_t{3} << 30;
  const auto no_room = MakePlan(request, Rates());
  ASSERT_TRUE(no_room.ok()) << no_room.status();
  for (const LastStage& stage : no_room->last_stage) {
    EXPECT_EQ(stage.largest_microbatch, 0) << Name(stage.method);
  }
}

TEST(Plan, SmallMicrobatchesHaveNoPredictedTime) {
  Request request = Llama();
  request.microbatch = 128;
  const auto plan = MakePlan(request, Rates());
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const ServerSpeed& speed : plan->speeds) EXPECT_FALSE(speed.microbatch.known());
}

TEST(Plan, RefusesARequestAndNamesTheField) {
  const auto message = [](const auto& change) {
    Request request = Llama();
    change(request);
    return std::string(MakePlan(request, Rates()).status().message());
  };
  EXPECT_THAT(message([](Request& r) { r.model.hidden = 0; }), HasSubstr("hidden"));
  EXPECT_THAT(message([](Request& r) { r.model.vocab = int64_t{1} << 32; }), HasSubstr("vocab"));
  EXPECT_THAT(message([](Request& r) { r.rows = 0; }), HasSubstr("rows"));
  EXPECT_THAT(message([](Request& r) { r.microbatch = 65537; }),
              AllOf(HasSubstr("microbatch"), HasSubstr("65537")));
  EXPECT_THAT(message([](Request& r) { r.trainers = -1; }), HasSubstr("trainers"));
  EXPECT_THAT(message([](Request& r) { r.gpus = 0; }), HasSubstr("gpus"));
  EXPECT_THAT(message([](Request& r) { r.memory_bytes = -5; }), HasSubstr("memory"));
  EXPECT_THAT(message([](Request& r) { r.trainer_seconds = std::nan(""); }), HasSubstr("trainer_seconds"));
  EXPECT_THAT(message([](Request& r) { r.data = "made up"; }),
              AllOf(HasSubstr("data"), HasSubstr("made up")));
  EXPECT_THAT(message([](Request& r) { r.workspace_bytes = 1000; }), HasSubstr("workspace_bytes"));
}

TEST(Measured, NamesWhatIsWrong) {
  EXPECT_FALSE(ParseMeasured("").ok());
  EXPECT_THAT(ParseMeasured("{}").status().message(), HasSubstr("card"));
  const std::string head = R"({"card": {"name": "X", "memory_bytes": 1, "multiprocessors": 1, "clusters": 0},
                              "sources": [], )";
  EXPECT_THAT(ParseMeasured(head + R"("loss": [{"logits": "stored", "gradients": "exact", "data": "real",
      "hidden": 1, "vocab": 1, "rows": 1, "ms": 1, "source": 0}]})")
                  .status()
                  .message(),
              HasSubstr("source 0"));
  const std::string empty =
      R"("last_stage": [], "optimizer": [], "transports": [], "devices": [], "pipelines": [], "steps": [], "step_factors": {"layer": 1, "local_head": 1, "colocated": [], "worst_error": 0}})";
  const auto nothing = ParseMeasured(head + R"("loss": [], )" + empty);
  ASSERT_TRUE(nothing.ok()) << nothing.status();
  // Another card, of which nothing is known: memory, and no times.
  const auto plan = MakePlan(Llama(), *nothing);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->speeds.front().microbatch.why_none, "not measured on this card with such data");
  EXPECT_FALSE(plan->update.seconds.has_value());
  EXPECT_TRUE(plan->links.empty());
}

}  // namespace
}  // namespace lossd::plan::plan_test
