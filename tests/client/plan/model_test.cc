// SPDX-License-Identifier: Apache-2.0
#include "client/plan/model.h"

#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"

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
