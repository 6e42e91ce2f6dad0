// SPDX-License-Identifier: Apache-2.0
#include "client/plan/plan.h"

#include <cmath>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::plan::plan_test {
namespace {

using kernels::Logits;
using kernels::MemoryKind;
using kernels::Split;
using ::testing::AllOf;
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

TEST(Plan, ComparesPipelinesWithTheHeadOnTheLastStageAndOnAServer) {
  Request request = Llama();
  request.model.layers = 32;
  request.stages = 8;
  request.layer_seconds = 0.012;
  request.rows = 32 * 8192;
  const auto plan = MakePlan(request, Rates());
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->pipelines.size(),
            5u);  // local; a server beside eight stages and beside seven, exact and sampled
  EXPECT_EQ(plan->pipelines[0].local, LocalMethod::kCompiled);
  EXPECT_EQ(plan->pipelines[0].layout.gpus, 8);
  EXPECT_EQ(plan->pipelines[1].layout.gpus, 9);
  EXPECT_EQ(plan->pipelines[3].layout.gpus, 8);
  // 39.5 ms of the head are 3.3 layers.
  EXPECT_NEAR(plan->pipelines[0].layout.slowest_stage_seconds, 0.060, 1e-9);
  EXPECT_NEAR(plan->pipelines[1].layout.slowest_stage_seconds, 0.048, 1e-9);
  EXPECT_NEAR(plan->pipelines[1].layout.step_seconds, (32 + 7) * 0.048, 1e-9);
  request.trainers = 16;
  const auto many = MakePlan(request, Rates());
  ASSERT_TRUE(many.ok()) << many.status();
  ASSERT_EQ(many->pipelines.size(), 3u);
  EXPECT_TRUE(many->pipelines[1].layout.server_bound);  // 2.2 million rows a second
  request.layer_seconds = 0.0;
  EXPECT_THAT(MakePlan(request, Rates()).status().message(), HasSubstr("layer_seconds"));
  request.layer_seconds = 0.012;
  request.model.layers = 7;
  EXPECT_THAT(MakePlan(request, Rates()).status().message(), HasSubstr("layers"));
  request.stages = -1;
  EXPECT_THAT(MakePlan(request, Rates()).status().message(), HasSubstr("stages"));
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
      R"("last_stage": [], "optimizer": [], "transports": [], "devices": [], "pipelines": []})";
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
