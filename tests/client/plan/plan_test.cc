// SPDX-License-Identifier: Apache-2.0
// Tests of client/plan: cards, models and their parameters, pipelines, whole plans, rates, and the memory of
// a trainer.
#include "client/plan/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/plan/measured.h"
#include "client/plan/model.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"

// ---- Cards ----

namespace lossd::plan::cards_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Measured Rates() { return *ParseMeasured(BuiltinMeasured()); }

Request Llama() {
  Request request;
  request.model = {.name = "llama", .hidden = 4096, .vocab = 128'256};
  return request;
}

TEST(Cards, TheMeasuredOneStaysAsItIs) {
  const auto same = OnCard(Rates(), "h200");
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_FALSE(same->bounds.has_value());
  EXPECT_EQ(same->devices.size(), Rates().devices.size());
}

TEST(Cards, TimesOfAnotherLieBetweenWhatArithmeticAndMemorySay) {
  const auto h100 = OnCard(Rates(), "h100-sxm");
  ASSERT_TRUE(h100.ok()) << h100.status();
  EXPECT_EQ(h100->bounds->measured_on, "NVIDIA H200");
  EXPECT_DOUBLE_EQ(h100->bounds->least, 1.0);
  EXPECT_DOUBLE_EQ(h100->bounds->most, 4.8 / 3.35);
  const auto here = MakePlan(Llama(), Rates());
  const auto there = MakePlan(Llama(), *h100);
  ASSERT_TRUE(here.ok() && there.ok());
  EXPECT_EQ(there->request.memory_bytes, 80'000'000'000);
  for (size_t i = 0; i < here->speeds.size(); ++i) {
    const Estimate& measured = here->speeds[i].microbatch;
    const Estimate& bounds = there->speeds[i].microbatch;
    ASSERT_TRUE(measured.known());
    EXPECT_EQ(Name(bounds.basis), "bounds by data sheets");
    EXPECT_DOUBLE_EQ(bounds.low_seconds, measured.low_seconds);
    EXPECT_DOUBLE_EQ(bounds.high_seconds, measured.high_seconds * 4.8 / 3.35);
    EXPECT_EQ(bounds.sources, measured.sources);
    EXPECT_LT(there->speeds[i].low_rows_per_second, here->speeds[i].low_rows_per_second);
  }
  for (const LastStage& stage : there->last_stage) EXPECT_EQ(stage.microbatch.basis, Basis::kDataSheets);
  EXPECT_NEAR(*there->update.seconds, *here->update.seconds * 4.8 / 3.35, 1e-9);
  for (const Link& link : there->links) EXPECT_NE(link.transport, "cuda_ipc");
}

TEST(Cards, WhatIsNotKnownStaysSo) {
  Request small = Llama(), several = Llama();
  small.microbatch = 128;
  several.gpus = 2;
  for (const Request& request : {small, several}) {
    const auto plan = MakePlan(request, *OnCard(Rates(), "h100-nvl"));
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (const ServerSpeed& speed : plan->speeds) EXPECT_FALSE(speed.microbatch.known());
  }
}

TEST(Cards, RefusesWhatNoSheetIsKnownOf) {
  EXPECT_THAT(OnCard(Rates(), "a100").status().message(),
              AllOf(HasSubstr("card must be one of h100-nvl, h100-sxm, h200"), HasSubstr("got a100")));
  Measured mine = Rates();
  mine.card.name = "of mine";
  EXPECT_THAT(OnCard(std::move(mine), "h100-sxm").status().message(), HasSubstr("of mine"));
}

}  // namespace
}  // namespace lossd::plan::cards_test

// ---- Model ----

namespace lossd::plan::model_test {
namespace {

using ::testing::HasSubstr;

TEST(Model, IsReadFromTheNamesOfSeveralFamilies) {
  const auto llama = ParseModel(R"({"model_type": "llama", "hidden_size": 4096, "vocab_size": 128256,
                                    "num_hidden_layers": 32, "tie_word_embeddings": false})");
  ASSERT_TRUE(llama.ok()) << llama.status();
  EXPECT_EQ(llama->name, "llama");
  EXPECT_EQ(llama->hidden, 4096);
  EXPECT_EQ(llama->vocab, 128256);
  EXPECT_EQ(llama->layers, 32);
  EXPECT_FALSE(llama->tied);
  const auto gpt = ParseModel(R"({"n_embd": 768, "vocab_size": 50257, "n_layer": 12})");
  ASSERT_TRUE(gpt.ok()) << gpt.status();
  EXPECT_EQ(gpt->hidden, 768);
  EXPECT_EQ(gpt->layers, 12);
  const auto images = ParseModel(R"({"model_type": "mllama", "tie_word_embeddings": true,
                                     "text_config": {"hidden_size": 64, "vocab_size": 100}})");
  ASSERT_TRUE(images.ok()) << images.status();
  EXPECT_EQ(images->hidden, 64);
  EXPECT_TRUE(images->tied);
  EXPECT_EQ(images->layers, 0);
}

TEST(Model, IsTiedAsItsConfigurationOrItsTypeSays) {
  const auto tied = [](const std::string& fields) {
    const auto model = ParseModel(R"({"hidden_size": 64, "vocab_size": 100)" + fields + "}");
    EXPECT_TRUE(model.ok()) << model.status();
    return model.ok() && model->tied;
  };
  EXPECT_FALSE(tied(""));
  EXPECT_FALSE(tied(R"(, "model_type": "llama")"));
  EXPECT_TRUE(tied(R"(, "model_type": "llama", "tie_word_embeddings": true)"));
  EXPECT_TRUE(tied(R"(, "model_type": "gemma2")"));
  EXPECT_FALSE(tied(R"(, "model_type": "gemma2", "tie_word_embeddings": false)"));
}

TEST(Model, HasParametersIfTheWholeConfigurationIsKnown) {
  const std::string sizes =
      R"("hidden_size": 8, "vocab_size": 10, "num_hidden_layers": 1, "intermediate_size": 16,
                               "num_attention_heads": 2, "model_type": "llama")";
  EXPECT_EQ(ParseModel("{" + sizes + "}")->parameters, 4 * 64 + 3 * 8 * 16 + 3 * 8 + 2 * 80);
  EXPECT_EQ(ParseModel("{" + sizes + R"(, "tie_word_embeddings": true})")->parameters,
            4 * 64 + 3 * 8 * 16 + 3 * 8 + 80);
  EXPECT_EQ(ParseModel(R"({"text_config": {)" + sizes + "}}")->parameters, 0)
      << "images have parameters, too";
  EXPECT_THAT(ParseModel("{" + sizes + R"(, "num_key_value_heads": "two"})").status().message(),
              ::testing::AllOf(HasSubstr("num_key_value_heads"), HasSubstr("two")));
}

TEST(Model, NamesTheFieldThatIsWrongOrMissing) {
  EXPECT_THAT(ParseModel(R"({"vocab_size": 10})").status().message(), HasSubstr("hidden_size"));
  EXPECT_THAT(ParseModel(R"({"hidden_size": 10})").status().message(), HasSubstr("vocab_size"));
  EXPECT_THAT(ParseModel(R"({"hidden_size": "wide", "vocab_size": 10})").status().message(),
              ::testing::AllOf(HasSubstr("hidden_size"), HasSubstr("wide")));
  EXPECT_THAT(ParseModel(R"({"hidden_size": -1, "vocab_size": 10})").status().message(), HasSubstr("-1"));
  EXPECT_THAT(ParseModel(R"({"hidden_size": 99999999, "vocab_size": 10})").status().message(),
              HasSubstr("hidden"));
  EXPECT_FALSE(ParseModel("[]").ok());
  EXPECT_FALSE(ParseModel("{").ok());
}

TEST(Model, IsReadFromAFileOrItsFolder) {
  const test::TempFolder folder;
  EXPECT_EQ(ReadModel(folder.path()).status().code(), absl::StatusCode::kNotFound);
  const std::string file = (std::filesystem::path(folder.path()) / "config.json").string();
  std::ofstream(file) << R"({"hidden_size": 8, "vocab_size": 16})";
  ASSERT_TRUE(ReadModel(file).ok()) << ReadModel(file).status();
  EXPECT_EQ(ReadModel(folder.path())->vocab, 16);
  std::ofstream(file) << R"({"hidden_size": 8})";
  EXPECT_THAT(ReadModel(file).status().message(), ::testing::AllOf(HasSubstr(file), HasSubstr("vocab_size")));
}

}  // namespace
}  // namespace lossd::plan::model_test

// ---- Numbers of parameters ----
// Configurations that are not among the fifteen models of TrainerMemoryBesidePublished, below.

namespace lossd::plan::parameters_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;

// 10 classes, 2 layers of hidden size 8: 4 attention heads of 2, 2 of keys and values, 12 in the MLP.
Json Small(const char* model_type) {
  return {{"model_type", model_type}, {"hidden_size", 8},         {"vocab_size", 10},
          {"num_hidden_layers", 2},   {"num_attention_heads", 4}, {"num_key_value_heads", 2},
          {"intermediate_size", 12}};
}

constexpr int64_t kQueries = 8 * 8, kKeys = 8 * 4;
constexpr int64_t kLayer = 2 * kQueries + 2 * kKeys + 3 * 8 * 12 + 2 * 8;
constexpr int64_t kSmall = 2 * kLayer + 8 + 2 * 10 * 8;

int64_t Count(const Json& config, bool tied = false) {
  const auto count = CountParameters(config, tied);
  EXPECT_TRUE(count.ok()) << count.status();
  return count.value_or(-1);
}

TEST(Parameters, OfALayerAreThoseOfItsMatricesNormsAndBiases) {
  Json config = Small("llama");
  EXPECT_EQ(Count(config), kSmall);
  EXPECT_EQ(Count(config, true), kSmall - 10 * 8);
  config["attention_bias"] = true;
  EXPECT_EQ(Count(config), kSmall + 2 * (8 + 2 * 4 + 8));
  config["attention_bias"] = false;
  config["mlp_bias"] = true;
  EXPECT_EQ(Count(config), kSmall + 2 * (2 * 12 + 8));
}

TEST(Parameters, OfQwenHaveBiasesOrNormsOfAttentionHeads) {
  EXPECT_EQ(Count(Small("qwen2")), kSmall + 2 * (8 + 2 * 4));
  Json config = Small("qwen3");
  EXPECT_EQ(Count(config), 0) << "head_dim is not hidden size / heads there";
  config["head_dim"] = 2;
  EXPECT_EQ(Count(config), kSmall + 2 * 2 * 2);
}

TEST(Parameters, HeadDimAndKeysHaveTheDefaultsOfTheirFamily) {
  Json config = Small("mistral");
  config["head_dim"] = 4;  // as of models whose attention is wider than the hidden size
  EXPECT_EQ(Count(config), kSmall + 2 * (2 * kQueries + 2 * kKeys));
  config["head_dim"] = nullptr;
  EXPECT_EQ(Count(config), kSmall);
  config.erase("num_key_value_heads");
  EXPECT_EQ(Count(config), 0);
  config["model_type"] = "llama";
  EXPECT_EQ(Count(config), kSmall + 2 * 2 * (kQueries - kKeys));
}

TEST(Parameters, AreNotGuessed) {
  Json config = Small("llama");
  config["model_type"] = "something_new";
  EXPECT_EQ(Count(config), 0);
  config.erase("model_type");
  EXPECT_EQ(Count(config), 0);
  for (const char* size : {"hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers"}) {
    Json without = Small("llama");
    without.erase(size);
    EXPECT_EQ(Count(without), 0) << size;
  }
  EXPECT_EQ(Count(Small("mixtral")), 0) << "without the number of experts";
  Json phi = Small("phi");
  EXPECT_GT(Count(phi), 0);
  phi["qk_layernorm"] = true;
  EXPECT_EQ(Count(phi), 0);
}

TEST(Parameters, OfAStrangeFileAreRefusedByName) {
  Json config = Small("llama");
  config["intermediate_size"] = -12;
  EXPECT_THAT(CountParameters(config, false).status().message(),
              AllOf(HasSubstr("intermediate_size"), HasSubstr("-12")));
  config["intermediate_size"] = int64_t{1} << 62;
  EXPECT_THAT(CountParameters(config, false).status().message(), HasSubstr("parameters"));
  Json gpt = {{"model_type", "gpt2"}, {"n_embd", int64_t{1} << 62}, {"n_layer", 1},
              {"n_head", 1},          {"n_positions", 1},           {"vocab_size", 1}};
  EXPECT_EQ(Count(gpt), 0) << "no size of the MLP, and no overflow";
  gpt["n_inner"] = int64_t{1} << 62;
  EXPECT_THAT(CountParameters(gpt, false).status().message(), HasSubstr("parameters"));
}

TEST(Parameters, ModelTypesAreNamed) {
  EXPECT_THAT(CountedModelTypes(), AllOf(HasSubstr("llama, "), HasSubstr("qwen3")));
  EXPECT_TRUE(TiedByDefault("gemma2"));
  EXPECT_FALSE(TiedByDefault("llama"));
  EXPECT_FALSE(TiedByDefault("something_new"));
}

}  // namespace
}  // namespace lossd::plan::parameters_test

// ---- Pipeline ----

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

TEST(Pipeline, TheLeastShareIsOneOfTheHead) {
  // Not of what the shares would add up to if a late stage had its least share on top.
  const std::vector<double> five(5, 1.0), late = {10.0, 1.0, 1.0};
  EXPECT_THAT(Balance(five, 0.1, {0.0, 0.0}, 500).shares, ElementsAre(500, 500));
  EXPECT_THAT(Balance(late, 4.0, {0.0, 0.0, 0.0}, 200).shares, ElementsAre(200, 400, 400));
  EXPECT_THAT(Balance(late, 4.0, {0.0, 0.0, 0.0}, 0).shares, ElementsAre(0, 500, 500));
}

TEST(Pipeline, AHeadThatTakesHardlyAnyTimeHasShares) {
  const std::vector<double> four(4, 1.0);
  for (const double seconds : {1e-17, 1e-300, 1e-3}) {
    EXPECT_THAT(Balance(four, seconds, {0.0, 0.0, 0.0, 0.0}, 0).shares, ElementsAre(250, 250, 250, 250))
        << seconds;
  }
  EXPECT_THAT(Balance(four, 0.0, {0.0, 0.0, 0.0, 0.0}, 0).shares, ElementsAre(1, 1, 1, 1));
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

// ---- Plan ----

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

// ---- Rates ----

namespace lossd::plan::rates_test {
namespace {

using ::testing::HasSubstr;

Timing Of(int64_t hidden, int64_t vocab, int64_t rows, double ms, size_t source = 0) {
  return {hidden, vocab, rows, ms, source, "real"};
}

TEST(Rates, AShapeThatWasMeasuredTakesItsTimeInProportionToTheRows) {
  const std::vector<Timing> measured = {Of(4096, 100'000, 8192, 40.0, 3)};
  const Estimate same = EstimateTime(measured, 4096, 100'000, 8192);
  EXPECT_EQ(same.basis, Basis::kMeasured);
  EXPECT_DOUBLE_EQ(same.low_seconds, 0.040);
  EXPECT_DOUBLE_EQ(same.high_seconds, 0.040);
  EXPECT_THAT(same.sources, ::testing::ElementsAre(3));
  EXPECT_DOUBLE_EQ(EstimateTime(measured, 4096, 100'000, 16384).low_seconds, 0.080);
}

TEST(Rates, OfSeveralRunsOfAShapeTheOneOfMostSimilarRowsCounts) {
  const std::vector<Timing> measured = {Of(4096, 100'000, 8192, 40.0, 0), Of(4096, 100'000, 4096, 22.0, 1)};
  EXPECT_DOUBLE_EQ(EstimateTime(measured, 4096, 100'000, 4096).low_seconds, 0.022);
  EXPECT_DOUBLE_EQ(EstimateTime(measured, 4096, 100'000, 65536).low_seconds, 0.320);
}

TEST(Rates, ShapesThatPredictEachOtherPredictAThird) {
  // 10, 10.4 and 10.2 ns a row and thousand elements.
  const std::vector<Timing> measured = {Of(2000, 100'000, 8192, 2000.0 * 100 * 8192 * 10.0e-6),
                                        Of(4000, 100'000, 8192, 4000.0 * 100 * 8192 * 10.4e-6),
                                        Of(4000, 200'000, 8192, 4000.0 * 200 * 8192 * 10.2e-6)};
  const Estimate estimate = EstimateTime(measured, 3000, 150'000, 8192);
  EXPECT_EQ(estimate.basis, Basis::kLikeShapes);
  const double units = 3000.0 * 150 * 8192 * 1e-9;
  EXPECT_NEAR(estimate.middle_seconds(), 10.2 * units, 1e-9 * units);
  EXPECT_LT(estimate.low_seconds, 10.0 * units);
  EXPECT_GT(estimate.high_seconds, 10.4 * units);
}

TEST(Rates, ShapesThatDoNotPredictEachOtherGiveBounds) {
  const std::vector<Timing> measured = {Of(2000, 100'000, 8192, 2000.0 * 100 * 8192 * 10.0e-6),
                                        Of(4000, 100'000, 8192, 4000.0 * 100 * 8192 * 20.0e-6),
                                        Of(4000, 200'000, 8192, 4000.0 * 200 * 8192 * 12.0e-6)};
  const Estimate estimate = EstimateTime(measured, 3000, 150'000, 8192);
  EXPECT_EQ(estimate.basis, Basis::kBetween);
  const double units = 3000.0 * 150 * 8192 * 1e-9;
  EXPECT_NEAR(estimate.low_seconds, 10.0 * units, 1e-9 * units);
  EXPECT_NEAR(estimate.high_seconds, 20.0 * units, 1e-9 * units);
}

TEST(Rates, WhatWasNotMeasuredIsNotInvented) {
  const std::vector<Timing> measured = {Of(2000, 100'000, 8192, 16.0), Of(4000, 100'000, 8192, 33.0),
                                        Of(4000, 200'000, 8192, 66.0)};
  EXPECT_THAT(EstimateTime({}, 2000, 100'000, 8192).why_none, HasSubstr("not measured on this card"));
  EXPECT_THAT(EstimateTime(measured, 2000, 100'000, 16).why_none, HasSubstr("2048 rows"));
  EXPECT_THAT(EstimateTime(measured, 999, 100'000, 8192).why_none, HasSubstr("hidden size"));
  EXPECT_THAT(EstimateTime(measured, 8001, 100'000, 8192).why_none, HasSubstr("hidden size"));
  EXPECT_THAT(EstimateTime(measured, 2000, 49'999, 8192).why_none, HasSubstr("vocabulary"));
  EXPECT_THAT(EstimateTime(measured, 2000, 400'001, 8192).why_none, HasSubstr("vocabulary"));
  EXPECT_THAT(EstimateTime({measured[0], measured[1]}, 3000, 100'000, 8192).why_none,
              HasSubstr("too few shapes"));
  for (const Estimate& none : {EstimateTime({}, 2000, 100'000, 8192)}) {
    EXPECT_FALSE(none.known());
    EXPECT_EQ(none.high_seconds, 0.0);
  }
}

}  // namespace
}  // namespace lossd::plan::rates_test

// ---- Trainer memory ----

namespace lossd::plan::trainer_memory_test {
namespace {

using Json = nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

Model Llama() {
  return {.name = "llama", .hidden = 4096, .vocab = 128'256, .layers = 32, .parameters = 8'030'261'248};
}

TrainerShape Shape() {
  return {.gpus = 16, .memory_bytes = int64_t{75} << 30, .rows = 65'536, .parameters = 8'030'261'248};
}

// ---- what was published ----

double Megabytes(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// Memory by part and the largest batches of all models of the table, by the code of `lossctl plan`:
// parameters counted from the configuration, MakePlan.
TEST(TrainerMemoryBesidePublished, IsThatOfEveryModel) {
  std::ifstream file(LOSSD_PUBLISHED_MEMORY);
  ASSERT_TRUE(file) << LOSSD_PUBLISHED_MEMORY;
  const Json published = Json::parse(file);
  const Json& setting = published.at("setting");
  const auto measured = ParseMeasured(BuiltinMeasured());
  ASSERT_TRUE(measured.ok()) << measured.status();
  ASSERT_EQ(published.at("models").size(), 15u);
  for (const Json& theirs : published.at("models")) {
    SCOPED_TRACE(theirs.at("name").get<std::string>());
    absl::StatusOr<Model> model = ParseModel(theirs.at("config").dump());
    ASSERT_TRUE(model.ok()) << model.status();
    ASSERT_GT(model->parameters, 0);
    Request request;
    request.model = *model;
    request.model.vocab = theirs.at("vocab");
    request.rows = setting.at("rows");
    request.trainer = {.gpus = setting.at("gpus"),
                       .memory_bytes = setting.at("gpu_memory_bytes"),
                       .parameters = model->parameters + theirs.at("masks").get<int64_t>(),
                       .bytes_per_parameter = setting.at("bytes_per_parameter"),
                       .logit_bytes = setting.at("bytes_per_logit")};
    const auto plan = MakePlan(request, *measured);
    ASSERT_TRUE(plan.ok()) << plan.status();
    const auto& [before, after, server] = plan->trainer_memory->heads;
    // The table has whole megabytes and rows, rounded to the nearest; the plan rounds rows down.
    const Json& megabytes = theirs.at("megabytes");
    EXPECT_NEAR(Megabytes(before.state_bytes), megabytes.at("state").get<double>(), 0.5);
    EXPECT_NEAR(Megabytes(before.logit_bytes), megabytes.at("logits").get<double>(), 0.5);
    EXPECT_NEAR(Megabytes(before.activation_bytes), megabytes.at("activations").get<double>(), 0.5);
    EXPECT_EQ(after.TotalBytes(), before.TotalBytes() - before.logit_bytes);
    const Json& rows = theirs.at("largest_batch");
    EXPECT_NEAR(static_cast<double>(before.largest_batch), rows.at("before").get<double>(), 1.0);
    EXPECT_NEAR(static_cast<double>(after.largest_batch), rows.at("after").get<double>(), 1.0);
    // What no other publication has: the head's state leaves, too, unless the embedding needs it.
    if (request.model.tied) {
      EXPECT_EQ(server.largest_batch, after.largest_batch);
    } else {
      EXPECT_GT(server.largest_batch, after.largest_batch);
    }
  }
}

// ---- the rest ----

TEST(TrainerMemory, ABatchFitsUpToTheLargest) {
  TrainerShape shape = Shape();
  shape.head_parameters = int64_t{4096} * 128'256;
  const auto planned = MemoryOfTrainer(Llama(), shape);
  ASSERT_TRUE(planned.ok()) << planned.status();
  for (const HeadMemory& head : planned->heads) {
    for (const int64_t more : {0, 1}) {
      shape.rows = head.largest_batch + more;
      const auto full = MemoryOfTrainer(Llama(), shape);
      ASSERT_TRUE(full.ok()) << full.status();
      const HeadMemory& same = full->heads[static_cast<size_t>(head.head)];
      EXPECT_EQ(same.head, head.head);
      EXPECT_EQ(full->Fits(same), more == 0) << Name(head.head);
      EXPECT_EQ(same.largest_batch, head.largest_batch) << Name(head.head);
    }
  }
}

TEST(TrainerMemory, AServerTakesTheStateOfTheHead) {
  TrainerShape shape = Shape();
  shape.head_parameters = int64_t{4096} * 128'256;
  const auto planned = MemoryOfTrainer(Llama(), shape);
  ASSERT_TRUE(planned.ok()) << planned.status();
  const auto& [stored, fused, server] = planned->heads;
  EXPECT_EQ(stored.state_bytes, 16 * shape.parameters);  // by default
  EXPECT_EQ(fused.state_bytes, stored.state_bytes);
  EXPECT_EQ(server.state_bytes, stored.state_bytes - 16 * shape.head_parameters);
  EXPECT_EQ(server.logit_bytes, 0);
  EXPECT_EQ(server.activation_bytes, int64_t{65'536} * 32 * 4096 * 2);
}

TEST(TrainerMemory, AModelThatDoesNotFitHasNoBatch) {
  TrainerShape shape = Shape();
  shape.gpus = 1;
  const auto planned = MemoryOfTrainer(Llama(), shape);
  ASSERT_TRUE(planned.ok()) << planned.status();
  for (const HeadMemory& head : planned->heads) {
    EXPECT_EQ(head.largest_batch, 0);
    EXPECT_FALSE(planned->Fits(head));
  }
}

TEST(TrainerMemory, ActivationsAreAsGivenOrOfTheLayers) {
  Model model = Llama();
  model.layers = 0;
  EXPECT_THAT(MemoryOfTrainer(model, Shape()).status().message(), HasSubstr("layers"));
  TrainerShape shape = Shape();
  shape.activation_bytes = 1000;
  const auto planned = MemoryOfTrainer(model, shape);
  ASSERT_TRUE(planned.ok()) << planned.status();
  EXPECT_EQ(planned->heads[0].activation_bytes, int64_t{65'536} * 1000);
}

TEST(TrainerMemory, APlanFillsInWhatItKnows) {
  Request request;
  request.model = Llama();
  const auto measured = ParseMeasured(BuiltinMeasured());
  ASSERT_TRUE(measured.ok()) << measured.status();
  EXPECT_FALSE(MakePlan(request, *measured)->trainer_memory.has_value());
  request.trainer = TrainerShape{.gpus = 8};
  request.rows = 100'000;
  const auto plan = MakePlan(request, *measured);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const TrainerShape& shape = plan->trainer_memory->shape;
  EXPECT_EQ(shape.memory_bytes, plan->request.memory_bytes);
  EXPECT_EQ(shape.rows, 100'000);
  EXPECT_EQ(shape.parameters, 8'030'261'248);
  EXPECT_EQ(shape.activation_bytes, 32 * 4096 * 2);
  EXPECT_EQ(shape.head_parameters, int64_t{4096} * 128'256);
  request.model.tied = true;
  EXPECT_EQ(MakePlan(request, *measured)->trainer_memory->shape.head_parameters, 0);
  request.model.parameters = 0;
  EXPECT_THAT(MakePlan(request, *measured).status().message(),
              AllOf(HasSubstr("parameters must be given"), HasSubstr("llama")));
}

TEST(TrainerMemory, RefusesAShapeAndNamesTheField) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const auto message = [](const auto& change) {
    TrainerShape shape = Shape();
    change(shape);
    return std::string(MemoryOfTrainer(Llama(), shape).status().message());
  };
  EXPECT_THAT(message([](TrainerShape& s) { s.gpus = 0; }), HasSubstr("trainer_gpus"));
  EXPECT_THAT(message([](TrainerShape& s) { s.gpus = kMost; }), HasSubstr("trainer_gpus"));
  EXPECT_THAT(message([](TrainerShape& s) { s.memory_bytes = 0; }), HasSubstr("trainer_memory"));
  EXPECT_THAT(message([](TrainerShape& s) { s.memory_bytes = kMost; }), HasSubstr("trainer_memory"));
  EXPECT_THAT(message([](TrainerShape& s) { s.rows = 0; }), HasSubstr("trainer_rows"));
  EXPECT_THAT(message([](TrainerShape& s) { s.rows = kMost; }), HasSubstr("trainer_rows"));
  EXPECT_THAT(message([](TrainerShape& s) { s.parameters = 1'000'000; }),
              AllOf(HasSubstr("525336576 of the head"), HasSubstr("1000000")));
  EXPECT_THAT(message([](TrainerShape& s) { s.parameters = kMost; }), HasSubstr("parameters"));
  EXPECT_THAT(message([](TrainerShape& s) { s.bytes_per_parameter = 0.0; }),
              HasSubstr("bytes_per_parameter"));
  EXPECT_THAT(message([](TrainerShape& s) { s.bytes_per_parameter = std::nan(""); }),
              AllOf(HasSubstr("bytes_per_parameter"), HasSubstr("nan")));
  EXPECT_THAT(message([](TrainerShape& s) { s.activation_bytes = -1; }), HasSubstr("activation_bytes"));
  EXPECT_THAT(message([](TrainerShape& s) { s.logit_bytes = 65; }),
              AllOf(HasSubstr("logit_bytes"), HasSubstr("65")));
}

}  // namespace
}  // namespace lossd::plan::trainer_memory_test
