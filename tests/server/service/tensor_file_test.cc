// SPDX-License-Identifier: Apache-2.0
// Tests of tensors in files through the service.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/tensorfile/safetensors.h"
#include "proto/wire/status_details.h"
#include "tests/server/service/service_fixture.h"

// ---- Values that are no numbers ----
// Files whose tensors hold values that are no numbers: refused, unless they were asked for.

namespace lossd::app::testing::non_finite_files_test {
namespace {

using ::testing::HasSubstr;

// A tensor of every type that a file may have, with one value that is none, at places before and after the
// pieces in which files are read.
class NonFiniteTest : public HeadsTest, public ::testing::WithParamInterface<kernels::DType> {
 protected:
  static constexpr int64_t kFileClasses = 1000;

  NonFiniteTest()
      : weight_(kFileClasses * kHidden, 0.5f),
        bias_(kFileClasses, -0.25f),
        class_weights_(kFileClasses, 2.0f) {
    std::filesystem::create_directories(server_.checkpoint_directory());
    request_ = Request("head");
    request_.mutable_spec()->set_vocab_size(kFileClasses);
    request_.mutable_spec()->set_norm(v1::NORM_NONE);
    v1::TensorFile& file = *request_.mutable_tensor_file();
    file.set_path("model.safetensors");
    file.set_weight("w");
    file.set_bias("b");
    file.set_class_weights("u");
  }

  absl::Status Create() {
    static const std::map<kernels::DType, formats::DType> types = {
        {kernels::DType::kFloat32, formats::DType::kFloat32},
        {kernels::DType::kFloat16, formats::DType::kFloat16},
        {kernels::DType::kBFloat16, formats::DType::kBFloat16}};
    const formats::DType type = types.at(GetParam());
    const std::string path = server_.checkpoint_directory() + "/model.safetensors";
    std::filesystem::remove(path);
    auto writer =
        formats::CreateSafetensors(path, {{{.name = "w", .dtype = type, .shape = {kFileClasses, kHidden}},
                                           {.name = "b", .dtype = type, .shape = {kFileClasses}},
                                           {.name = "u", .dtype = type, .shape = {kFileClasses}}}});
    EXPECT_TRUE(writer.ok()) << writer.status();
    for (const auto* values : {&weight_, &bias_, &class_weights_}) {
      EXPECT_TRUE((*writer)->Append(kernels::testing::Encode(GetParam(), *values)).ok());
    }
    EXPECT_TRUE((*writer)->Finish().ok());
    return client_->CreateHead(request_).status();
  }
  void ExpectRefused(const std::string& field, const std::string& what) {
    const absl::Status status = Create();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
    EXPECT_THAT(std::string(status.message()), HasSubstr("in model.safetensors"));
    EXPECT_EQ(wire::GetErrorDetail(status).value_or(v1::ErrorDetail()).field(), "tensor_file." + field);
    EXPECT_EQ(client_->ListHeads()->heads_size(), 0);
  }
  void ExpectTaken() {
    const absl::Status status = Create();
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(client_->DeleteHead("head").ok());
  }

  std::vector<float> weight_, bias_, class_weights_;
  v1::CreateHeadRequest request_;
};
INSTANTIATE_TEST_SUITE_P(Types, NonFiniteTest,
                         ::testing::Values(kernels::DType::kFloat32, kernels::DType::kFloat16,
                                           kernels::DType::kBFloat16));

TEST_P(NonFiniteTest, AreRefusedUnlessAskedFor) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  ExpectTaken();
  for (const size_t at : {size_t{0}, size_t{5}, weight_.size() / 2 + 3, weight_.size() - 1}) {
    const std::string place = absl::StrCat(" at [", at / kHidden, ", ", at % kHidden, "] of 'w'");
    for (const auto& [value, text] : std::map<float, std::string>{{kInfinity, "inf"}, {-kInfinity, "-inf"}}) {
      weight_[at] = value;
      ExpectRefused("weight", absl::StrCat("got ", text, place));
    }
    weight_[at] = kNaN;
    ExpectRefused("weight",
                  absl::StrCat("finite values, unless tensor_file.allow_non_finite is set, got nan", place));
    weight_[weight_.size() - 1] = kNaN;  // the first one is named
    ExpectRefused("weight", place);
    request_.mutable_tensor_file()->set_allow_non_finite(true);
    ExpectTaken();
    request_.mutable_tensor_file()->set_allow_non_finite(false);
    weight_[at] = weight_[weight_.size() - 1] = 0.5f;
  }
  // A class that is masked by its bias.
  bias_[7] = -kInfinity;
  ExpectTaken();
  bias_[8] = kInfinity;
  ExpectRefused("bias", "got inf at [8] of 'b'");
  bias_[8] = -kNaN;
  ExpectRefused("bias", "got nan at [8] of 'b'");
  bias_[8] = 0;
}

TEST_P(NonFiniteTest, ClassWeightsAreNotNegative) {
  class_weights_[3] = 0;
  class_weights_[4] = -0.0f;
  ExpectTaken();
  class_weights_[999] = -0.5f;
  ExpectRefused("class_weights", "numbers below 0, got -0.5 at [999] of 'u'");
  request_.mutable_tensor_file()->set_allow_non_finite(true);
  ExpectRefused("class_weights", "got -0.5 at [999]");
  class_weights_[2] = std::numeric_limits<float>::quiet_NaN();
  class_weights_[999] = 1;
  ExpectTaken();
  request_.mutable_tensor_file()->set_allow_non_finite(false);
  ExpectRefused("class_weights", "got nan at [2] of 'u'");
}

}  // namespace
}  // namespace lossd::app::testing::non_finite_files_test

// ---- Initial values from files ----
// Heads whose initial values come from files: one file, or a model of several with an index.

namespace lossd::app::testing::tensor_file_test {
namespace {

using ::testing::HasSubstr;

class TensorFileTest : public HeadsTest {
 protected:
  // weight (BF16), bias (F32) and a table of the wrong shape, below the checkpoint directory.
  TensorFileTest() {
    std::filesystem::create_directories(server_.checkpoint_directory());
    for (size_t i = 0; i < kHidden * kClasses; ++i) {
      weight_.push_back(
          kernels::testing::RoundTo(kernels::DType::kBFloat16, kernels::testing::Uniform(rng_, -1, 1)));
    }
    for (size_t i = 0; i < kClasses; ++i) bias_.push_back(static_cast<float>(i));
    const std::vector<formats::SafetensorsSpec> specs = {
        {.name = "lm_head.weight", .dtype = formats::DType::kBFloat16, .shape = {kClasses, kHidden}},
        {.name = "lm_head.bias", .dtype = formats::DType::kFloat32, .shape = {kClasses}}};
    auto writer = formats::CreateSafetensors(server_.checkpoint_directory() + "/model.safetensors", specs);
    EXPECT_TRUE(writer.ok()) << writer.status();
    EXPECT_TRUE((*writer)->Append(kernels::testing::Encode(kernels::DType::kBFloat16, weight_)).ok());
    EXPECT_TRUE((*writer)->Append(kernels::testing::Encode(kernels::DType::kFloat32, bias_)).ok());
    EXPECT_TRUE((*writer)->Finish().ok());

    request_ = Request("head");
    request_.mutable_spec()->set_norm(v1::NORM_NONE);
    request_.mutable_spec()->set_class_weights(false);
    request_.mutable_tensor_file()->set_path("model.safetensors");
    request_.mutable_tensor_file()->set_weight("lm_head.weight");
    request_.mutable_tensor_file()->set_bias("lm_head.bias");
  }

  void ExpectRefused(absl::StatusCode code, const std::string& field) {
    const absl::Status status = client_->CreateHead(request_).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
    const v1::ErrorDetail detail = wire::GetErrorDetail(status).value_or(v1::ErrorDetail());
    EXPECT_TRUE(absl::StartsWith(detail.field(), "tensor_file.")) << detail.field();
    EXPECT_EQ(client_->ListHeads()->heads_size(), 0);
  }

  std::vector<float> weight_, bias_;
  v1::CreateHeadRequest request_;
};

TEST_F(TensorFileTest, FillsAHead) {
  const auto created = client_->CreateHead(request_);
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), weight_);
  EXPECT_EQ(*client_->Read("head", v1::PARAM_BIAS, v1::ROLE_VALUE), bias_);
}

TEST_F(TensorFileTest, Refusals) {
  request_.mutable_tensor_file()->set_bias("");
  ExpectRefused(absl::StatusCode::kInvalidArgument, "tensor_file.bias");
  request_.mutable_tensor_file()->set_bias("missing");
  ExpectRefused(absl::StatusCode::kNotFound, "tensor_file.bias");
  request_.mutable_tensor_file()->set_bias("lm_head.weight");
  ExpectRefused(absl::StatusCode::kInvalidArgument, "[57, 13]");
  request_.mutable_tensor_file()->set_bias("lm_head.bias");
  request_.mutable_tensor_file()->set_norm_gain("gain");
  ExpectRefused(absl::StatusCode::kInvalidArgument, "tensor_file.norm_gain");
}

// A checkpoint as a source, in one file or in shards: for a head of another kind than the one that was saved.
class CheckpointAsSourceTest : public HeadsTest, public ::testing::WithParamInterface<int64_t> {
 protected:
  static ServerOptions Options() {
    ServerOptions options = SmallServer();
    options.checkpoint_shard_bytes = GetParam();
    return options;
  }

  TestServer shard_server_{Options()};
  std::unique_ptr<TestClient> trainer_ = shard_server_.Connect();
};
INSTANTIATE_TEST_SUITE_P(ShardBytes, CheckpointAsSourceTest, ::testing::Values(1 << 30, 3000));

TEST_P(CheckpointAsSourceTest, FillsAFrozenHead) {
  ASSERT_TRUE(trainer_->CreateHead(Request("trained")).ok());
  ASSERT_TRUE(trainer_->SaveCheckpoint("trained", "one").ok());
  const std::string folder = shard_server_.checkpoint_directory() + "/trained/one";
  EXPECT_EQ(std::filesystem::exists(folder + "/tensors.safetensors"), GetParam() > 3000);
  v1::CreateHeadRequest request = Request("frozen");
  request.mutable_spec()->set_frozen(true);
  v1::TensorFile& file = *request.mutable_tensor_file();
  file.set_path("trained/one");
  file.set_weight("weight");
  file.set_bias("bias");
  file.set_norm_gain("norm.gain");
  file.set_norm_shift("norm.shift");
  file.set_class_weights("class_weights");
  const auto created = trainer_->CreateHead(request);
  ASSERT_TRUE(created.ok()) << created.status();
  for (const v1::Param param : {v1::PARAM_WEIGHT, v1::PARAM_BIAS, v1::PARAM_NORM_GAIN, v1::PARAM_NORM_SHIFT,
                                v1::PARAM_CLASS_WEIGHTS}) {
    EXPECT_EQ(*trainer_->Read("frozen", param, v1::ROLE_VALUE),
              *trainer_->Read("trained", param, v1::ROLE_VALUE));
  }
  request.mutable_spec()->set_name("other");
  request.mutable_spec()->set_vocab_size(kClasses + 1);
  absl::Status status = trainer_->CreateHead(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("of shape [57, 13] in trained/one/tensors"));
  request.mutable_tensor_file()->set_weight("weight.gradient");
  EXPECT_EQ(trainer_->CreateHead(request).status().code(), absl::StatusCode::kNotFound);
  test::WriteWholeFile(folder + "/manifest.json", "{}");
  status = trainer_->CreateHead(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("tensor_file.path: checkpoint trained/one: the manifest"));
}

// Also where the last part alone has the shape of the whole tensor.
TEST_P(CheckpointAsSourceTest, PartsThatDoNotBelongTogether) {
  if (GetParam() > 3000) GTEST_SKIP() << "one part";
  ASSERT_TRUE(trainer_->CreateHead(Request("trained")).ok());
  ASSERT_TRUE(trainer_->SaveCheckpoint("trained", "one").ok());
  const std::string folder = shard_server_.checkpoint_directory() + "/trained/one/";
  std::vector<std::string> shards;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".safetensors") shards.push_back(entry.path().filename());
  }
  std::sort(shards.begin(), shards.end());
  ASSERT_GT(shards.size(), 1U);
  v1::CreateHeadRequest request = Request("frozen");
  request.mutable_spec()->set_frozen(true);
  request.mutable_spec()->clear_bias();
  request.mutable_spec()->clear_norm();
  request.mutable_spec()->clear_class_weights();
  request.mutable_tensor_file()->set_path("trained/one");
  request.mutable_tensor_file()->set_weight("weight");
  const auto write = [&](const std::string& file, formats::DType dtype, const std::vector<int64_t>& shape) {
    std::filesystem::remove(folder + file);
    auto writer =
        formats::CreateSafetensors(folder + file, {{{.name = "weight", .dtype = dtype, .shape = shape}}});
    ASSERT_TRUE(writer.ok()) << writer.status();
    const std::vector<uint8_t> bytes(static_cast<size_t>(shape[0] * shape[1]) * 4);
    const size_t used = bytes.size() / (dtype == formats::DType::kFloat32 ? 1 : 2);
    ASSERT_TRUE((*writer)->Append({bytes.data(), used}).ok());
    ASSERT_TRUE((*writer)->Finish().ok());
  };
  for (const formats::DType other : {formats::DType::kFloat32, formats::DType::kFloat16}) {
    const bool is_type = other == formats::DType::kFloat16;
    for (size_t i = 0; i + 1 < shards.size(); ++i)
      write(shards[i], other, {3, is_type ? int64_t{kHidden} : 7});
    write(shards.back(), formats::DType::kFloat32, {kClasses, kHidden});
    const absl::Status status = trainer_->CreateHead(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("'weight' of type ", is_type ? "F16" : "F32", " and shape [3, ",
                                       is_type ? kHidden : 7, "] in trained/one/", shards[0])));
    EXPECT_EQ(trainer_->ListHeads()->heads_size(), 1);
  }
}

// A model of two shards and an index in a folder, as Hugging Face lays it out; embeddings tied.
class ShardedModelTest : public TensorFileTest {
 protected:
  ShardedModelTest() {
    std::filesystem::create_directories(Path(""));
    WriteShard("model-00001-of-00002.safetensors", "model.embed_tokens.weight", kernels::DType::kFloat16,
               {kClasses, kHidden}, weight_);
    WriteShard("model-00002-of-00002.safetensors", "model.norm.weight", kernels::DType::kFloat32, {kHidden},
               gain_);
    WriteIndex(R"("model.embed_tokens.weight": "model-00001-of-00002.safetensors",
                  "model.norm.weight": "model-00002-of-00002.safetensors")");
    request_ = Request("head");
    request_.mutable_spec()->set_norm(v1::NORM_RMSNORM);
    request_.mutable_spec()->set_bias(false);
    request_.mutable_spec()->set_class_weights(false);
    request_.mutable_tensor_file()->set_path("model");
    request_.mutable_tensor_file()->set_weight("model.embed_tokens.weight");
    request_.mutable_tensor_file()->set_norm_gain("model.norm.weight");
  }

  std::string Path(const std::string& name) { return server_.checkpoint_directory() + "/model/" + name; }

  void WriteShard(const std::string& file, const std::string& tensor, kernels::DType dtype,
                  const std::vector<int64_t>& shape, const std::vector<float>& values) {
    std::filesystem::remove(Path(file));
    const formats::DType stored =
        dtype == kernels::DType::kFloat16 ? formats::DType::kFloat16 : formats::DType::kFloat32;
    auto writer =
        formats::CreateSafetensors(Path(file), {{{.name = tensor, .dtype = stored, .shape = shape}}});
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE((*writer)->Append(kernels::testing::Encode(dtype, values)).ok());
    ASSERT_TRUE((*writer)->Finish().ok());
  }
  void WriteIndex(const std::string& weight_map) {
    test::WriteWholeFile(Path("model.safetensors.index.json"),
                         R"({"metadata": {"total_size": 1}, "weight_map": {)" + weight_map + "}}");
  }
  // The request fails with `code`, and the error says all of `what`, and nothing of the server's paths.
  void ExpectError(absl::StatusCode code, const std::vector<std::string>& what) {
    const absl::Status status = client_->CreateHead(request_).status();
    EXPECT_EQ(status.code(), code) << status;
    for (const std::string& part : what) EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    EXPECT_THAT(std::string(status.message()),
                ::testing::Not(HasSubstr(std::filesystem::canonical(server_.checkpoint_directory()))));
    EXPECT_EQ(client_->ListHeads()->heads_size(), 0);
  }
  void ExpectLoads() {
    const auto created = client_->CreateHead(request_);
    ASSERT_TRUE(created.ok()) << created.status();
    std::vector<float> rounded;
    for (const float value : weight_) {
      rounded.push_back(kernels::testing::RoundTo(kernels::DType::kFloat16, value));
    }
    EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), rounded);
    EXPECT_EQ(*client_->Read("head", v1::PARAM_NORM_GAIN, v1::ROLE_VALUE), gain_);
    EXPECT_TRUE(client_->DeleteHead("head").ok());
  }

  const std::vector<float> gain_ = std::vector<float>(kHidden, 1.25f);
};

TEST_F(ShardedModelTest, FillsAHead) {
  ExpectLoads();
  request_.mutable_tensor_file()->set_path("model/model.safetensors.index.json");
  ExpectLoads();
  // A folder without an index.
  std::filesystem::remove(Path("model.safetensors.index.json"));
  request_.mutable_tensor_file()->set_path("model");
  ExpectError(absl::StatusCode::kNotFound,
              {"tensor_file.path: model: ", "model.safetensors.index.json", "model.safetensors"});
  std::filesystem::copy_file(server_.checkpoint_directory() + "/model.safetensors",
                             Path("model.safetensors"));
  request_.mutable_tensor_file()->set_weight("lm_head.weight");
  ExpectError(absl::StatusCode::kNotFound,
              {"tensor_file.norm_gain", "model/model.safetensors", "'model.norm.weight'"});
}

TEST_F(ShardedModelTest, Refusals) {
  request_.mutable_tensor_file()->set_weight("lm_head.weight");
  ExpectError(absl::StatusCode::kNotFound,
              {"tensor_file.weight", "model/model.safetensors.index.json", "'lm_head.weight'"});
  request_.mutable_tensor_file()->set_weight("model.norm.weight");
  ExpectError(
      absl::StatusCode::kInvalidArgument,
      {"tensor_file.weight", "[57, 13]", "'model.norm.weight' of shape [13]", "model-00002-of-00002"});
  request_.mutable_tensor_file()->set_weight("model.embed_tokens.weight");

  // What the index promises is not there.
  WriteIndex(
      R"("model.embed_tokens.weight": "missing.safetensors", "model.norm.weight": "missing.safetensors")");
  ExpectError(absl::StatusCode::kNotFound, {"tensor_file.weight", "model.safetensors.index.json",
                                            "'model.embed_tokens.weight'", "model/missing.safetensors"});
  WriteIndex(R"("model.embed_tokens.weight": "model-00002-of-00002.safetensors")");
  ExpectError(absl::StatusCode::kNotFound,
              {"tensor_file.weight", "model-00002-of-00002.safetensors", "'model.embed_tokens.weight'"});
  test::WriteWholeFile(Path("bad.safetensors"), "nonsense");
  WriteIndex(R"("model.embed_tokens.weight": "bad.safetensors")");
  ExpectError(absl::StatusCode::kInvalidArgument, {"tensor_file.weight", "model/bad.safetensors"});

  // Out of the folder, by name or by a link.
  WriteIndex(R"("model.embed_tokens.weight": "../model.safetensors")");
  ExpectError(absl::StatusCode::kInvalidArgument,
              {"tensor_file.path", "no path of a file in the index's folder"});
  test::TempFolder outside;
  std::filesystem::rename(Path("model-00001-of-00002.safetensors"), outside.File("x"));
  std::filesystem::create_symlink(outside.File("x"), Path("link.safetensors"));
  WriteIndex(R"("model.embed_tokens.weight": "link.safetensors")");
  ExpectError(absl::StatusCode::kInvalidArgument,
              {"tensor_file.weight", "model/link.safetensors", "outside"});

  test::WriteWholeFile(Path("model.safetensors.index.json"), "{");
  ExpectError(absl::StatusCode::kInvalidArgument, {"tensor_file.path", "model.safetensors.index.json"});
  request_.mutable_tensor_file()->set_path("../checkpoints/model");
  ExpectError(absl::StatusCode::kInvalidArgument, {"tensor_file.path", ".."});
}

TEST_F(ShardedModelTest, ShardsInSubfolders) {
  std::filesystem::create_directories(Path("shards/deep"));
  std::filesystem::rename(Path("model-00001-of-00002.safetensors"), Path("shards/model-00001.safetensors"));
  std::filesystem::rename(Path("model-00002-of-00002.safetensors"),
                          Path("shards/deep/model-00002.safetensors"));
  WriteIndex(R"("model.embed_tokens.weight": "shards/model-00001.safetensors",
                "model.norm.weight": "shards/deep/model-00002.safetensors")");
  ExpectLoads();
  request_.mutable_tensor_file()->set_path("model/model.safetensors.index.json");
  ExpectLoads();
  for (const char* path :
       {"shards/../shards/model-00001.safetensors", "/model/shards/model-00001.safetensors"}) {
    WriteIndex(absl::StrCat(R"("model.embed_tokens.weight": ")", path, R"(")"));
    ExpectError(absl::StatusCode::kInvalidArgument,
                {"tensor_file.path", "no path of a file in the index's folder"});
  }
  // A subfolder that is a link out of the directory.
  test::TempFolder outside;
  std::filesystem::create_directory_symlink(outside.path(), Path("away"));
  WriteIndex(R"("model.embed_tokens.weight": "away/x.safetensors")");
  ExpectError(absl::StatusCode::kInvalidArgument,
              {"tensor_file.weight", "'model/away' is a symbolic link", "outside"});
}

// What links lead to counts, and where they lead astray the error says so.
TEST_F(ShardedModelTest, Links) {
  test::TempFolder outside;
  const auto replace = [&](const std::string& link, const std::string& target) {
    std::filesystem::remove_all(Path(link));
    std::filesystem::create_symlink(target, Path(link));
  };
  request_.mutable_tensor_file()->set_path("linked");
  std::filesystem::create_directory_symlink("model", server_.checkpoint_directory() + "/linked");
  ExpectLoads();
  for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
    std::filesystem::remove(Path("model.safetensors.index.json"));
    test::WriteWholeFile(outside.File("x"), "{}");
    replace(name, outside.File("x"));
    request_.mutable_tensor_file()->set_path("model");
    ExpectError(absl::StatusCode::kInvalidArgument,
                {"tensor_file.path", absl::StrCat("model/", name), "is a symbolic link",
                 "outside the server's directory", "copy", "--checkpoint_dir"});
    replace(name, "nothing");
    ExpectError(absl::StatusCode::kNotFound, {"tensor_file.path", absl::StrCat("model/", name),
                                              "is a symbolic link to something that is not there"});
    replace(name, name);
    ExpectError(absl::StatusCode::kInvalidArgument,
                {"tensor_file.path", absl::StrCat("model/", name), "loop"});
    std::filesystem::remove(Path(name));
  }
  std::filesystem::create_directory_symlink(outside.path(), server_.checkpoint_directory() + "/away");
  request_.mutable_tensor_file()->set_path("away");
  ExpectError(absl::StatusCode::kInvalidArgument,
              {"tensor_file.path: path 'away' leads outside", "it is a symbolic link"});
  replace("manifest.json", outside.File("x"));
  request_.mutable_tensor_file()->set_path("model");
  ExpectError(absl::StatusCode::kInvalidArgument, {"model/manifest.json", "is a symbolic link", "outside"});
}

TEST_F(ShardedModelTest, TypesThatAreNoWeights) {
  std::filesystem::remove(Path("ints.safetensors"));
  auto writer = formats::CreateSafetensors(Path("ints.safetensors"), {{{.name = "model.embed_tokens.weight",
                                                                        .dtype = formats::DType::kInt8,
                                                                        .shape = {kClasses, kHidden}}}});
  ASSERT_TRUE((*writer)->Append(std::vector<uint8_t>(kClasses * kHidden)).ok());
  ASSERT_TRUE((*writer)->Finish().ok());
  WriteIndex(R"("model.embed_tokens.weight": "ints.safetensors")");
  ExpectError(absl::StatusCode::kInvalidArgument,
              {"tensor_file.weight", "F32, F16 or BF16", "'model.embed_tokens.weight' of type I8",
               "model/ints.safetensors"});
}

}  // namespace
}  // namespace lossd::app::testing::tensor_file_test
