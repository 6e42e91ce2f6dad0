// SPDX-License-Identifier: Apache-2.0
// Indexes of sharded models: what is written is found, and nothing malformed is taken.
#include "proto/tensorfile/safetensors_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/support/peak_memory.h"
#include "tests/support/temp_folder.h"

namespace lossd::formats::safetensors_index_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Ne;

class SafetensorsIndexTest : public testing::Test {
 protected:
  absl::StatusOr<SafetensorsIndex> Open(absl::string_view text) {
    test::WriteWholeFile(path_, text);
    return Read({"a", "b", "c", "bad", "lm_head.weight"});
  }
  absl::StatusOr<SafetensorsIndex> Read(const std::vector<std::string>& tensors) {
    const auto file = InputFile::Open(path_, "the index");
    if (!file.ok()) return file.status();
    return SafetensorsIndex::Read(**file, tensors);
  }
  void ExpectRefused(absl::string_view text, const std::string& why) {
    const absl::Status status = Open(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 100);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("the index"), HasSubstr(why)));
  }

  test::TempFolder folder_;
  const std::string path_ = folder_.File("model.safetensors.index.json");
};

TEST_F(SafetensorsIndexTest, FindsShards) {
  const auto index = Open(R"({"metadata": {"total_size": 12, "x": {"y": [1]}},
      "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->tensors(), 2);
  EXPECT_EQ(*index->ShardOf("a"), "model-00001-of-00002.safetensors");
  EXPECT_EQ(*index->ShardOf("b"), "model-00002-of-00002.safetensors");
  const absl::Status missing = index->ShardOf("c").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), AllOf(HasSubstr("the index"), HasSubstr("'c'")));
}

TEST_F(SafetensorsIndexTest, FindsShardsInSubfolders) {
  const auto index =
      Open(R"({"weight_map": {"a": "shards/model-00001.safetensors", "b": "x/y/..z", "c": "plain"}})");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(*index->ShardOf("a"), "shards/model-00001.safetensors");
  EXPECT_EQ(*index->ShardOf("b"), "x/y/..z");
}

TEST_F(SafetensorsIndexTest, Refusals) {
  for (const char* text :
       {"", "[]", "{", "1", R"({"weight_map": {"a": "x", "a": "y"}})",
        R"({"weight_map": {}, "weight_map": {}})", "{\"weight_map\": {\"\xff\": \"x\"}}"}) {
    ExpectRefused(text, "unique keys");
  }
  // Nothing may hide behind a 0.
  for (const std::string behind : {"", " ", "]", "{\"weight_map\": {}}"}) {
    ExpectRefused(R"({"weight_map": {"a": "x"}})" + std::string(1, '\0') + behind, "no JSON object");
  }
  for (const char* text : {"{}", R"({"weight_map": []})", R"({"weight_map": null})"}) {
    ExpectRefused(text, "no weight_map");
  }
  for (const char* shard :
       {"\"\"", "\".\"", "\"..\"", "\"../x\"", "\"a/../../x\"", "\"a/..\"", "\"a//b\"", "\"a/\"", "\"./x\"",
        "\"/\"", "\"a/./b\"", "\"/etc/passwd\"", "\"x\\u0000y\"", "3", "null", "{}", "[\"x\"]"}) {
    ExpectRefused(absl::StrCat("{\"weight_map\": {\"fine\": \"x\", \"bad\": ", shard, "}}"), "'bad'");
  }
  ExpectRefused(absl::StrCat("{\"weight_map\": ", std::string(100'000, '[')), "unique keys");
  ExpectRefused(
      absl::StrCat("{\"metadata\": ", std::string(20, '['), std::string(20, ']'), ", \"weight_map\": {}}"),
      "unique keys");
}

TEST_F(SafetensorsIndexTest, LongerThanAllowed) {
  test::WriteWholeFile(path_, "{}");
  ASSERT_EQ(truncate(path_.c_str(), kMaxSafetensorsIndexBytes + 1), 0);
  const absl::Status status = Read({}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(kMaxSafetensorsIndexBytes)));
}

// What is read takes no more memory than what is asked for, however long the index is.
TEST_F(SafetensorsIndexTest, LongIndexesTakeLittleMemory) {
  constexpr int64_t kMost = int64_t{16} << 20;
  std::vector<std::string> texts(5);
  texts[0] = "{\"weight_map\": {";
  for (int i = 0; i < 1'500'000; ++i)
    absl::StrAppend(&texts[0], "\"", i, "\":\"model-00001-of-00002.safetensors\",");
  texts[0] += "\"a\": \"x\"}}";
  texts[1] = absl::StrCat("{\"metadata\": {\"x\": [", std::string(30 << 20, '1'));  // a long number
  texts[2] = absl::StrCat("{\"weight_map\": {\"", std::string(50 << 20, 'a'), "\": \"x\"}}");
  texts[3] = "{\"metadata\": [0";
  for (int i = 0; i < 15'000'000; ++i) texts[3] += ",0";
  texts[3] += "], \"weight_map\": {\"a\": \"x\"}}";
  texts[4] = "{";
  for (int i = 0; i < 3'000'000; ++i) absl::StrAppend(&texts[4], "\"", i, "\":{},");
  texts[4] += "\"weight_map\": {\"a\": \"x\"}}";
  for (size_t i = 0; i < texts.size(); ++i) {
    ASSERT_LE(static_cast<int64_t>(texts[i].size()), kMaxSafetensorsIndexBytes);
    test::WriteWholeFile(path_, texts[i]);
    std::string().swap(texts[i]);
    absl::Status status;
    const int64_t growth = test::PeakGrowth([&] { status = Read({"a"}).status(); });
    EXPECT_EQ(status.ok(), i == 0) << i << status;
    EXPECT_LE(growth, kMost) << i;
  }
}

// Whatever a few bytes are changed to: an error, or names that stay in the folder or below it.
TEST_F(SafetensorsIndexTest, DamagedTexts) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const std::string whole = R"({"weight_map": {"lm_head.weight": "a.safetensors", "b": "c.safetensors"}})";
  for (int round = 0; round < 2000; ++round) {
    std::string text = whole.substr(0, random() % 4 == 0 ? random() % whole.size() : whole.size());
    for (size_t i = random() % 4; i > 0 && !text.empty(); --i) {
      text[random() % text.size()] = static_cast<char>(random());
    }
    const auto index = Open(text);
    if (!index.ok()) {
      EXPECT_EQ(index.status().code(), absl::StatusCode::kInvalidArgument) << text;
      continue;
    }
    const auto shard = index->ShardOf("lm_head.weight");
    if (!shard.ok()) continue;
    for (const absl::string_view part : absl::StrSplit(*shard, '/')) {
      EXPECT_THAT(std::string(part), AllOf(Ne(""), Ne("."), Ne(".."))) << text;
    }
  }
}

}  // namespace
}  // namespace lossd::formats::safetensors_index_test
