// SPDX-License-Identifier: Apache-2.0
// What trainer_memory_test.cc has no model for; that one counts fifteen.
#include "client/plan/parameters.h"

#include <nlohmann/json.hpp>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

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
