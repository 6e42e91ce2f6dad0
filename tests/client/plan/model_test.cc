// SPDX-License-Identifier: Apache-2.0
#include "client/plan/model.h"

#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"

namespace lossd::plan {
namespace {

using testing::HasSubstr;

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

TEST(Model, NamesTheFieldThatIsWrongOrMissing) {
  EXPECT_THAT(ParseModel(R"({"vocab_size": 10})").status().message(), HasSubstr("hidden_size"));
  EXPECT_THAT(ParseModel(R"({"hidden_size": 10})").status().message(), HasSubstr("vocab_size"));
  EXPECT_THAT(ParseModel(R"({"hidden_size": "wide", "vocab_size": 10})").status().message(),
              testing::AllOf(HasSubstr("hidden_size"), HasSubstr("wide")));
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
  EXPECT_THAT(ReadModel(file).status().message(), testing::AllOf(HasSubstr(file), HasSubstr("vocab_size")));
}

}  // namespace
}  // namespace lossd::plan
