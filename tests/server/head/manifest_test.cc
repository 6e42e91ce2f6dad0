// SPDX-License-Identifier: Apache-2.0
// Tests of manifest.h: checksums, the manifest, and the division of classes into shards.
#include "server/head/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"

// ---- Checksum ----

namespace lossd::head::checksum_test {
namespace {

// Values of the XXH3 reference implementation.
TEST(ChecksumTest, KnownValues) {
  Checksum checksum;
  EXPECT_EQ(checksum.Digest(), "2d06800538d394c2");
  const std::string text = "lossd";
  checksum.Update(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), 2));
  Checksum whole;
  whole.Update(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), 5));
  EXPECT_NE(checksum.Digest(), whole.Digest());
  checksum.Update(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()) + 2, 3));
  EXPECT_EQ(checksum.Digest(), whole.Digest());
}

}  // namespace
}  // namespace lossd::head::checksum_test

// ---- Manifest ----
// What a manifest says is read back exactly, and a manifest of another version is refused.

namespace lossd::head::manifest_test {
namespace {

using testing::HasSubstr;
using Json = nlohmann::ordered_json;

Manifest SomeManifest(std::mt19937_64& random) {
  const auto number = [&] { return std::uniform_real_distribution<double>(0, 1)(random) / 3; };
  Manifest manifest;
  manifest.subject = {.head = "lm",
                      .config = {.hidden_size = 5,
                                 .vocab_size = 7,
                                 .has_bias = true,
                                 .logits = kernels::Logits::kRecomputed,
                                 .gradients = kernels::Gradients::kAuto,
                                 .workspace_bytes = int64_t{1} << 40,
                                 .split = kernels::Split::kVocabulary,
                                 .shares = {3, 0, 4},
                                 .replicas = 2,
                                 .class_list = {{0, 2, 3, 9, 10, 11, 19}, 20}},
                      .step = random() % (uint64_t{1} << 53) | 1,
                      .incarnation = random()};
  AppliedStep& step = manifest.subject.last_step.emplace();
  step.incarnation = random();
  step.optimizer = {.kind = kernels::OptimizerOptions::Kind::kSgd,
                    .learning_rate = number(),
                    .weight_decay = number(),
                    .decay_vectors = true,
                    .grad_multiplier = -number(),
                    .beta1 = number(),
                    .beta2 = number(),
                    .epsilon = number() * 1e-8,
                    .momentum = number(),
                    .dampening = 0,
                    .nesterov = true,
                    .lazy_rows = random() % 2 == 0};
  step.grad_norm = number() * 1e30;
  step.microbatches = 12;
  step.contributions = 3;
  step.skipped = true;
  step.begin_optimizer = random() % 2 == 0;
  manifest.subject.run = "h\u00f6st:17-0123abcd";
  manifest.subject.applied_unix_seconds = static_cast<int64_t>(1 + random() % 4'000'000'000);
  manifest.subject.updates = random() % manifest.subject.step;
  step.rows = int64_t{1} << 40;
  manifest.saved_at = absl::FromUnixSeconds(static_cast<int64_t>(random() % 4'000'000'000));
  manifest.automatic = true;
  manifest.shards = {{.file = "tensors.safetensors",
                      .file_bytes = 1234,
                      .classes = {0, 7},
                      .tensors = {{"weight", 140, "0123456789abcdef"}}}};
  return manifest;
}

// The same in three files.
Manifest SomeShardedManifest(std::mt19937_64& random) {
  Manifest manifest = SomeManifest(random);
  manifest.shards.clear();
  for (size_t i = 0; i < 3; ++i) {
    const auto begin = static_cast<int64_t>(2 * i);
    const ClassRange classes = {begin, i == 2 ? 7 : begin + 2};
    manifest.shards.push_back({.file = ShardFile(i, 3),
                               .file_bytes = static_cast<int64_t>(random() % 1000),
                               .classes = classes,
                               .tensors = {{"weight", 20 * classes.size(), "0123456789abcdef"}}});
  }
  return manifest;
}

std::string Sealed(Json json) {
  json.erase("checksum");
  const std::string text = json.dump();
  Checksum checksum;
  checksum.Update(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
  json["checksum"] = checksum.Digest();
  return json.dump(2);
}

class ManifestTest : public testing::Test {
 protected:
  const uint32_t seed_ = std::random_device{}();
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
  std::mt19937_64 random_{seed_};
};

TEST_F(ManifestTest, RoundTrip) {
  for (int i = 0; i < 300; ++i) {
    const Manifest manifest = i % 2 == 0 ? SomeManifest(random_) : SomeShardedManifest(random_);
    const absl::StatusOr<Manifest> read = DecodeManifest(EncodeManifest(manifest));
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->subject, manifest.subject) << "every double to the last bit";
    EXPECT_EQ(read->saved_at, manifest.saved_at);
    EXPECT_EQ(read->automatic, manifest.automatic);
    EXPECT_EQ(ShardBytes(*read), ShardBytes(manifest));
    ASSERT_EQ(read->shards.size(), manifest.shards.size());
    for (size_t shard = 0; shard < read->shards.size(); ++shard) {
      EXPECT_EQ(read->shards[shard].file, manifest.shards[shard].file);
      EXPECT_EQ(read->shards[shard].classes, manifest.shards[shard].classes);
      EXPECT_EQ(read->shards[shard].tensors[0].bytes, manifest.shards[shard].tensors[0].bytes);
    }
    EXPECT_EQ(ContentDigest(*read), ContentDigest(manifest));
  }
}

TEST_F(ManifestTest, NormsThatAreNoNumbers) {
  Manifest manifest = SomeManifest(random_);
  for (const double norm : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    manifest.subject.last_step->grad_norm = norm;
    const absl::StatusOr<Manifest> read = DecodeManifest(EncodeManifest(manifest));
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(std::isnan(norm), std::isnan(read->subject.last_step->grad_norm));
    EXPECT_EQ(std::isinf(norm), std::isinf(read->subject.last_step->grad_norm));
  }
}

TEST_F(ManifestTest, WithoutALastStep) {
  Manifest manifest = SomeManifest(random_);
  manifest.subject.last_step.reset();
  EXPECT_EQ(DecodeManifest(EncodeManifest(manifest))->subject, manifest.subject);
}

// Versions 1 and 2 say "algorithm" where this one says "logits" and "gradients".
// What is not known is not written, so that the manifest is one of an earlier server.
TEST_F(ManifestTest, WithoutAHistory) {
  Manifest manifest = SomeManifest(random_);
  manifest.subject.last_step->begin_optimizer = false;
  const std::string content = ContentDigest(manifest);
  manifest.subject.run.clear();
  manifest.subject.applied_unix_seconds = 0;
  const std::string text = EncodeManifest(manifest);
  EXPECT_THAT(text, testing::Not(HasSubstr("history")));
  EXPECT_THAT(text, testing::Not(HasSubstr("begin_optimizer")));
  EXPECT_EQ(DecodeManifest(text)->subject, manifest.subject);
  EXPECT_EQ(ContentDigest(manifest), content) << "who trained is no content";
  manifest.subject.last_step->begin_optimizer = true;
  EXPECT_NE(ContentDigest(manifest), content);
}

// Written where it is true only, so that a step without it is recorded as by an earlier server.
TEST_F(ManifestTest, LazyRows) {
  Manifest manifest = SomeManifest(random_);
  manifest.subject.last_step->optimizer.lazy_rows = false;
  const std::string text = EncodeManifest(manifest);
  const std::string content = ContentDigest(manifest);
  EXPECT_THAT(text, testing::Not(HasSubstr("lazy_rows")));
  EXPECT_EQ(DecodeManifest(text)->subject, manifest.subject);
  manifest.subject.last_step->optimizer.lazy_rows = true;
  EXPECT_THAT(EncodeManifest(manifest), HasSubstr("lazy_rows"));
  EXPECT_EQ(DecodeManifest(EncodeManifest(manifest))->subject, manifest.subject);
  EXPECT_NE(ContentDigest(manifest), content);
  Json json = Json::parse(text);
  json["last_step"]["optimizer"]["lazy_rows"] = "yes";
  EXPECT_FALSE(DecodeManifest(Sealed(json)).ok());
}

TEST_F(ManifestTest, OtherVersionsAreRefused) {
  Json json = Json::parse(EncodeManifest(SomeManifest(random_)));
  for (const Json& version : {Json(0), Json(1), Json(2), Json(5), Json("3"), Json()}) {
    json["version"] = version;
    const absl::Status status = DecodeManifest(Sealed(json)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("has version " + version.dump()));
    EXPECT_THAT(std::string(status.message()), HasSubstr("reads versions 3 and 4"));
  }
}

// Texts that nest deeply, are long, or name something twice. Copying or printing such a value would need a
// stack as deep as the text nests.
TEST_F(ManifestTest, HostileTexts) {
  const std::string deep = std::string(60'000, '[') + std::string(60'000, ']');
  const std::string whole = EncodeManifest(SomeManifest(random_));
  std::string objects;
  for (int i = 0; i < 60'000; ++i) objects += "{\"a\":";
  std::string many = "[0";
  for (int i = 0; i < 60'000; ++i) many += ",0";
  for (const std::string& text :
       {deep, std::string(60'000, '['), objects, objects + "1" + std::string(60'000, '}'),
        absl::StrCat("{\"format\":\"lossd checkpoint\",\"version\":", deep, "}"),
        absl::StrCat("{\"format\":", deep, "}"),
        absl::StrCat(whole.substr(0, whole.rfind('}')), ",\"x\":", deep, "}"),
        absl::StrCat("{\"version\":3,", whole.substr(1)),
        absl::StrCat("{\"x\":", many, "],", whole.substr(1)), std::string(2 << 20, ' ') + whole,
        std::string()}) {
    EXPECT_EQ(DecodeManifest(text).status().code(), absl::StatusCode::kDataLoss) << text.substr(0, 50);
  }
}

// Sealed with a right checksum, and yet nothing that this program wrote.
TEST_F(ManifestTest, BadValues) {
  const Json whole = Json::parse(EncodeManifest(SomeManifest(random_)));
  const auto refused = [](const Json& json, const std::string& what) {
    EXPECT_EQ(DecodeManifest(Sealed(json)).status().code(), absl::StatusCode::kDataLoss) << what;
  };
  for (const auto& [field, value] : whole.items()) {
    if (field == "checksum" || field == "version") continue;
    Json json = whole;
    json.erase(field);
    if (field != "history") refused(json, "without " + field);
    json = whole;
    json[field] = Json::array({-1});
    refused(json, "array " + field);
  }
  for (const auto& [field, value] : whole["last_step"]["optimizer"].items()) {
    Json json = whole;
    json["last_step"]["optimizer"][field] = "what";
    refused(json, field);
  }
  for (const auto& [field, value] : whole["head"].items()) {
    if (field == "split" || field == "shares" || field == "replicas" || field == "class_list") continue;
    Json json = whole;
    json["head"].erase(field);
    refused(json, "head without " + field);
  }
  Json json = whole;
  for (const char* field : {"logits", "gradients", "split"}) {
    json = whole;
    json["head"][field] = "other";
    refused(json, field);
  }
  for (const Json& shares : {Json("1, 2"), Json::array({1, -2}), Json::array({0, 0}), Json::array({1.5}),
                             Json::array({int64_t{1} << 31})}) {
    json = whole;
    json["head"]["shares"] = shares;
    refused(json, "shares " + shares.dump());
  }
  for (const Json& residency : {Json("other"), Json(1), Json("host")}) {  // the head is trained
    json = whole;
    json["head"]["residency"] = residency;
    refused(json, "residency " + residency.dump());
  }
  for (const Json& replicas : {Json("2"), Json(-1), Json(1.5), Json(65537)}) {
    json = whole;
    json["head"]["replicas"] = replicas;
    refused(json, "replicas " + replicas.dump());
  }
  EXPECT_EQ(whole["head"]["class_list"], "0,2,1,6,1,1,8");
  for (const Json& list : {Json(""), Json("0,2,1,6,1,1"), Json("0,2,1,6,1,1,-8"), Json("0,2,1,6,1,0,8"),
                           Json("0,2,1,6,1,1,9"), Json("0,2,1,6,1,1,2147483647"), Json("0,2,1,6,1,1,x"),
                           Json::array({0, 2, 3, 9, 10, 11, 19}), Json(7)}) {
    json = whole;
    json["head"]["class_list"] = list;
    refused(json, "class_list " + list.dump());
  }
  json = whole;
  json["last_step"]["optimizer"]["learning_rate"] = -1.0;
  refused(json, "learning rate");
  json = whole;
  json["last_step"]["grad_norm"] = "12";
  refused(json, "norm");
  json = whole;
  json["saved_at"] = "yesterday";
  refused(json, "time");
  for (const Json& history : {Json{{"run", 5}}, Json{{"run", "a\nb"}}, Json{{"run", std::string(600, 'x')}},
                              Json{{"applied_unix_seconds", "yesterday"}}}) {
    json = whole;
    json["history"] = history;
    refused(json, "history " + history.dump());
  }
  for (const char* field : {"step", "updates", "file_bytes"}) {
    json = whole;
    json[field] = 1e300;
    refused(json, field);
  }
}

// As many shards as there may be, each with as many tensors as there are, are within the limits of the text.
TEST_F(ManifestTest, TheLargestManifest) {
  Manifest manifest = SomeManifest(random_);
  manifest.subject.config.vocab_size = kernels::kMostListedClasses;
  std::vector<int32_t> listed;
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  for (int32_t i = 0; i < 65'536; ++i) listed.push_back(i * (kMost / 65'536));
  manifest.subject.config.class_list = {std::move(listed), kMost};
  manifest.subject.config.norm = kernels::Norm::kLayerNorm;
  manifest.subject.config.has_class_weights = true;
  manifest.shards.clear();
  const auto classes = DivideClasses(manifest.subject.config, {.most_bytes = 1, .threads = 64});
  ASSERT_EQ(classes.size(), kMostShards);
  for (size_t shard = 0; shard < classes.size(); ++shard) {
    ManifestShard& line = manifest.shards.emplace_back();
    line = {
        .file = ShardFile(shard, classes.size()), .file_bytes = int64_t{1} << 53, .classes = classes[shard]};
    for (int i = 0; i < 13; ++i)
      line.tensors.push_back({"norm.shift.moment1", int64_t{1} << 40, "0123456789abcdef"});
  }
  const std::string text = EncodeManifest(manifest);
  EXPECT_TRUE(DecodeManifest(text).ok()) << text.size() << " bytes, " << DecodeManifest(text).status();
}

// Sealed with a right checksum: files that lack classes, have some twice, or are called otherwise.
TEST_F(ManifestTest, BadShards) {
  const Json whole = Json::parse(EncodeManifest(SomeShardedManifest(random_)));
  const auto refused = [&](absl::string_view what, auto change) {
    Json json = whole;
    change(json["shards"]);
    const absl::Status status = DecodeManifest(Sealed(json)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << what;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(what)));
  };
  refused("tensors-00002-of-00003.safetensors has classes [1, 4), where classes from 2 on belong",
          [](Json& shards) { shards[1]["classes"][0] = 1; });
  refused("tensors-00002-of-00003.safetensors has classes [3, 4), where classes from 2 on belong",
          [](Json& shards) { shards[1]["classes"][0] = 3; });
  refused("tensors-00002-of-00003.safetensors has classes [2, 2), ",
          [](Json& shards) { shards[1]["classes"][1] = 2; });
  refused("tensors-00003-of-00003.safetensors has classes [4, 8), ",
          [](Json& shards) { shards[2]["classes"][1] = 8; });
  refused("the manifest's 3 shards have classes [0, 6) of 7",
          [](Json& shards) { shards[2]["classes"][1] = 6; });
  refused("tensors-00001-of-00003.safetensors has classes [4, 7), ",
          [](Json& shards) { std::swap(shards[0]["classes"], shards[2]["classes"]); });
  refused("a file other than tensors-00001-of-00003.safetensors for classes [0, 2)",
          [](Json& shards) { std::swap(shards[0]["file"], shards[2]["file"]); });
  refused("a file other than", [](Json& shards) { shards[1]["file"] = "../other/tensors.safetensors"; });
  refused("a file other than", [](Json& shards) { shards.erase(2); });
  refused("tensors-00002-of-00003.safetensors, classes [2, 4), has -1 bytes",
          [](Json& shards) { shards[1]["file_bytes"] = -1; });
  refused("bytes", [](Json& shards) { shards[1]["file_bytes"] = std::numeric_limits<int64_t>::max(); });
  refused("has classes", [](Json& shards) { shards[1]["classes"].push_back(4); });
  refused("incomplete", [](Json& shards) { shards[1]["classes"] = Json::array({2}); });
  refused("incomplete", [](Json& shards) { shards[1]["classes"] = "2-4"; });
  refused("incomplete", [](Json& shards) { shards[1]["classes"][1] = 4.0; });
  refused("incomplete", [](Json& shards) { shards[1].erase("tensors"); });
  refused("incomplete", [](Json& shards) { shards[1] = 2; });
  refused("incomplete", [](Json& shards) { shards = Json::object({{"0", shards[0]}}); });
  refused("the manifest's 0 shards", [](Json& shards) { shards = Json::array(); });
  refused("the manifest's 1 shards", [](Json& shards) {
    const Json only = shards[0];
    shards = Json::array({only});
    shards[0]["file"] = "tensors.safetensors";
    shards[0]["classes"] = Json::array({0, 7});
  });
}

// It has no split of the head.
TEST_F(ManifestTest, AnEarlierVersionsIsRead) {
  Json json = Json::parse(EncodeManifest(SomeManifest(random_)));
  json["head"].erase("split");
  const auto read = DecodeManifest(Sealed(json));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->subject.config.split, kernels::Split::kAny);
}

}  // namespace
}  // namespace lossd::head::manifest_test

// ---- Shards ----
// Every class is in exactly one file, files are about as large as each other, and there are as many as the
// rules want.

namespace lossd::head::shards_test {
namespace {

using kernels::HeadConfig;
using kernels::Param;
using kernels::Role;

constexpr int64_t kMebibyte = int64_t{1} << 20;

// 12 MiB for 1024 classes.
HeadConfig HeadOf(int64_t vocab_size) { return {.hidden_size = 1024, .vocab_size = vocab_size}; }

size_t Shards(const HeadConfig& config, int64_t most_bytes, int threads) {
  return DivideClasses(config, {.most_bytes = most_bytes, .threads = threads}).size();
}

TEST(ShardsTest, AsManyAsTheRulesWant) {
  EXPECT_EQ(Shards(HeadOf(1024), 1024 * kMebibyte, 4), 1u) << "too small for several";
  EXPECT_EQ(Shards(HeadOf(2048), 1024 * kMebibyte, 4), 1u) << "24 MiB";
  EXPECT_EQ(Shards(HeadOf(4096), 1024 * kMebibyte, 4), 3u) << "of 16 MiB";
  EXPECT_EQ(Shards(HeadOf(40960), 1024 * kMebibyte, 4), 4u) << "one for each thread";
  EXPECT_EQ(Shards(HeadOf(40960), 100 * kMebibyte, 4), 8u) << "480 MiB: 5, and as many for each thread";
  EXPECT_EQ(Shards(HeadOf(40960), 100 * kMebibyte, 1), 5u);
  EXPECT_EQ(Shards(HeadOf(40960), 1, 4), kMostShards);
  EXPECT_EQ(Shards(HeadOf(3), 1, 4), 3u) << "no file without a class";
  EXPECT_EQ(Shards(HeadOf(int64_t{1} << 31), 1024 * kMebibyte, 3), kMostShards);
}

TEST(ShardsTest, EveryRowIsInOneFile) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    const auto below = [&](int64_t limit) { return static_cast<int64_t>(random()) % limit; };
    const HeadConfig config{.hidden_size = 1 + below(50),
                            .vocab_size = 1 + below(700),
                            .has_bias = random() % 2 == 0,
                            .has_class_weights = random() % 2 == 0,
                            .norm = random() % 2 == 0 ? kernels::Norm::kNone : kernels::Norm::kLayerNorm};
    const auto ranges =
        DivideClasses(config, {.most_bytes = 1 + below(20'000), .threads = static_cast<int>(below(9))});
    std::map<std::pair<Param, Role>, int64_t> rows;  // so far
    int64_t least = config.vocab_size, most = 0, next = 0;
    for (const ClassRange& range : ranges) {
      EXPECT_EQ(range.begin, next);
      next = range.end;
      least = std::min(least, range.size());
      most = std::max(most, range.size());
      for (const TensorPart& part : PartsOf(config, range)) {
        EXPECT_EQ((rows[{part.id.param, part.id.role}]), part.row_begin);
        rows[{part.id.param, part.id.role}] += part.rows;
      }
    }
    EXPECT_EQ(next, config.vocab_size);
    EXPECT_GE(least, 1);
    EXPECT_LE(most - least, 1);
    EXPECT_EQ(rows.size(), CheckpointTensors(config).size());
    for (const auto& [tensor, count] : rows) EXPECT_EQ(count, kernels::ShapeOf(config, tensor.first).rows);
  }
}

TEST(ShardsTest, Names) {
  EXPECT_EQ(ShardFile(0, 1), "tensors.safetensors");
  EXPECT_EQ(ShardFile(0, 12), "tensors-00001-of-00012.safetensors");
  EXPECT_EQ(ShardFile(11, 12), "tensors-00012-of-00012.safetensors");
  EXPECT_TRUE(ShardMetadata(HeadOf(4), {0, 4}).empty());
  EXPECT_THAT(ShardMetadata(HeadOf(4), {1, 3}),
              testing::ElementsAre(testing::Pair("classes", "[1, 3) of 4")));
}

}  // namespace
}  // namespace lossd::head::shards_test
