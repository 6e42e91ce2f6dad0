// SPDX-License-Identifier: Apache-2.0
// Runs `lossctl plan`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/client/cli/lossctl_fixture.h"

namespace lossd::cli::lossctl_plan_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

TEST_F(LossctlTest, PlanNeedsNoServer) {
  const std::string no_server = "--server 127.0.0.1:1 ";
  EXPECT_EQ(Json(no_server + "plan --hidden 4096 --vocab 128256")["server"][0]["chunk_rows"], 8192);
  EXPECT_EQ(Run(no_server + "plan").exit_code, 4);
  EXPECT_THAT(Run(no_server + "plan --hidden 4096 --vocab 128256 --trainers 0").err, HasSubstr("trainers"));
}

TEST_F(LossctlTest, PlanOfACardThatWasNotMeasuredSaysSo) {
  const std::string asked = "plan --hidden 4096 --vocab 128256 ";
  EXPECT_THAT(
      Run(asked + "--card h100-sxm").out,
      HasSubstr("Server: 1 NVIDIA H100 SXM with 74.5 GiB; not measured: bounds by data sheets, from times "
                "on an NVIDIA H200 of real rows"));
  const auto json = Json(asked + "--card h100-sxm");
  EXPECT_EQ(json["measured_on"], "NVIDIA H200");
  EXPECT_EQ(json["times"][0]["microbatch"]["basis"], "bounds by data sheets");
  EXPECT_FALSE(Json(asked).contains("measured_on"));
  EXPECT_THAT(Run(asked + "--card a100").err, HasSubstr("card must be one of h100-nvl, h100-sxm, h200"));
}

TEST_F(LossctlTest, PlanOfATrainersMemory) {
  std::ofstream(folder_.File("config.json"))
      << R"({"model_type": "llama", "hidden_size": 4096, "vocab_size": 128256, "num_hidden_layers": 32,
             "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8})";
  const std::string asked = "plan config.json --trainer-gpus 16 --trainer-memory 75GiB ";
  const auto memory = Json(asked + "--bytes-per-parameter 8")["trainer_memory"];
  EXPECT_EQ(memory["parameters"], 8'030'261'248);
  EXPECT_EQ(memory["heads"][0]["logit_bytes"], int64_t{65'536} * 128'256 * 4);
  EXPECT_EQ(memory["heads"][0]["largest_batch"], 1'579'332);  // published: 1,579,333, rounded to the nearest
  EXPECT_EQ(memory["heads"][1]["largest_batch"], 4'670'135);
  EXPECT_FALSE(Json("plan config.json").contains("trainer_memory"));
  const std::string text = Run(asked + "--bytes-per-parameter 8 --trainer-rows 2000000").out;
  EXPECT_THAT(text,
              HasSubstr("Memory of a trainer with 16 GPUs of 75.0 GiB for a batch of 2,000,000 rows\n"));
  EXPECT_THAT(text, ContainsRegex("stored logits .*1,579,332 rows  the batch does not fit\n"));
  EXPECT_THAT(text, ContainsRegex("fused loss .*4,670,135 rows  2.96 times\n"));
  EXPECT_THAT(text, HasSubstr("8,030,261,248 parameters of 8 bytes; activations: 262,144 bytes a row"));
  // Other sizes than the file's have another number of parameters.
  EXPECT_THAT(Run(asked + "--vocab 32000").err, HasSubstr("parameters must be given"));
  EXPECT_EQ(Json(asked + "--vocab 32000 --parameters 7.24B")["trainer_memory"]["parameters"], 7'240'000'000);
}

TEST_F(LossctlTest, PlanOfATrainersMemoryKeepsAnEmbeddingThatIsTheClassifier) {
  std::ofstream(folder_.File("config.json"))
      << R"({"model_type": "gemma2", "hidden_size": 2304, "vocab_size": 256000, "num_hidden_layers": 26,
             "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256})";
  const auto memory = Json("plan config.json --trainer-gpus 1")["trainer_memory"];
  EXPECT_EQ(memory["heads"][2]["head"], "server");
  EXPECT_EQ(memory["heads"][2]["state_bytes"], 16 * 2'614'341'888);
  const std::string text = Run("plan config.json --trainer-gpus 1").out;
  EXPECT_THAT(text, HasSubstr("Memory of a trainer with 1 GPU of 131 GiB for a batch of 65,536 rows\n"));
  EXPECT_THAT(text, HasSubstr("The classifier is the embedding, whose state is counted"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("A GPU")));
}

TEST_F(LossctlTest, PlanOfATrainersMemoryNamesWhatIsWrong) {
  const auto refused = [&](const std::string& options, int exit_code, const std::string& says) {
    const Outcome outcome = Run("plan --hidden 4096 --vocab 128256 " + options);
    EXPECT_EQ(outcome.exit_code, exit_code) << options;
    EXPECT_EQ(outcome.out, "") << options;
    EXPECT_THAT(outcome.err, HasSubstr(says)) << options;
  };
  refused("--trainer-gpus 0", 2, "--trainer-gpus");
  refused("--trainer-memory 75GiB", 2, "--trainer-gpus");
  const std::string asked = "--trainer-gpus 16 ";
  refused(asked, 4, "parameters must be given");
  refused(asked + "--parameters many", 2, "--parameters");
  refused(asked + "--parameters 0", 2, "--parameters");
  refused(asked + "--parameters 1M", 4, "parameters must be at least the 525336576 of the head, got 1000000");
  refused(asked + "--parameters 8B", 4, "layers must be from 1 to 65536, got 0");
  const std::string complete = asked + "--parameters 8B --layers 32 ";
  refused(complete + "--trainer-memory 0", 4, "trainer_memory must be > 0, got 0");
  refused(complete + "--trainer-memory 8192GiB", 4, "trainer_memory");
  refused(complete + "--trainer-rows 0", 2, "--trainer-rows");
  refused(complete + "--bytes-per-parameter -8", 4,
          "bytes_per_parameter must be > 0 and at most 1024, got -8");
  refused(complete + "--activation-bytes -1", 2, "--activation-bytes");
  refused(complete + "--logit-bytes 0", 4, "logit_bytes must be from 1 to 64, got 0");
}

TEST_F(LossctlTest, PlanOfAPipelineHasSharesToPaste) {
  const std::string asked =
      "plan --hidden 2304 --vocab 256000 --layers 13 --stages 4 --rows 196608 --layer-seconds 0.007 ";
  const std::string text = Run(asked).out;
  EXPECT_THAT(text, ContainsRegex("local, compiled .* 1\\.00 .* GiB"));
  EXPECT_THAT(text, ContainsRegex("server, exact .*held up by the server\n"));
  EXPECT_THAT(text, ContainsRegex("colocated, exact .*--shares [0-9]+,[0-9]+,[0-9]+,[0-9]+\n"));
  EXPECT_THAT(text, ContainsRegex("colocated, sampled, no MPS .*--shares "));
  EXPECT_THAT(text, ContainsRegex("Steps are predicted by [0-9]+ measured ones.* % apart \\[[0-9, ]+\\]"));
  EXPECT_THAT(Run(asked + "--memory 20GiB").out, ContainsRegex("colocated, exact .*; does not fit\n"));
  const auto json = Json(asked + "--head-seconds 0.06 --embedding-seconds 0.002");
  const auto& colocated = json["pipelines"][5];
  EXPECT_EQ(colocated["kind"], "colocated");
  EXPECT_EQ(colocated["mps"], true);
  EXPECT_EQ(colocated["head_seconds"], 0.06);
  EXPECT_EQ(colocated["stage_bytes"].size(), 4u);
  EXPECT_LT(colocated["shares"][0], colocated["shares"][1]);
  EXPECT_THAT(Run(asked + "--layer-seconds 0.1,0.2").err, HasSubstr("layer_seconds must be one"));
  EXPECT_THAT(Run("plan --hidden 64 --vocab 1000 --head-seconds 1").err, HasSubstr("--stages"));
}

}  // namespace
}  // namespace lossd::cli::lossctl_plan_test
