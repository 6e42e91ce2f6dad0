// Heads through the service: creation, initial values, tensors, checkpoints, steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "proto/tensorfile/safetensors.h"
#include "proto/wire/status_details.h"
#include "tests/kernels/problem.h"
#include "tests/server/rpc/service_client.h"
#include "tests/server/rpc/test_server.h"

namespace lossd::rpc::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kHidden = 13;
constexpr uint64_t kClasses = 57;

v1::CreateHeadRequest Request(const std::string& name) {
  v1::CreateHeadRequest request;
  v1::HeadSpec& spec = *request.mutable_spec();
  spec.set_name(name);
  spec.set_hidden_size(kHidden);
  spec.set_vocab_size(kClasses);
  spec.set_bias(true);
  spec.set_norm(v1::NORM_LAYERNORM);
  spec.set_class_weights(true);
  return request;
}

// Accumulates the gradients of one microbatch of random rows.
LossAnswers Compute(TestClient& client, const std::string& head, uint64_t step, uint64_t id,
                    kernels::testing::Rng& rng, const v1::LossOptions& options = {}) {
  constexpr int64_t kRows = 20;
  std::vector<float> hidden(kRows * kHidden);
  for (float& value : hidden) value = kernels::testing::Uniform(rng, -1.0f, 1.0f);
  v1::OpenMicrobatch open;
  open.set_head(head);
  open.set_step(step);
  open.set_microbatch_id(id);
  open.set_microbatch_rows(kRows);
  open.mutable_rows()->set_end(kRows);
  open.set_hidden_dtype(v1::DTYPE_FP32);
  open.set_reduction(v1::REDUCTION_MEAN);
  open.set_accumulate_gradients(true);
  *open.mutable_options() = options;
  for (int64_t i = 0; i < kRows; ++i) {
    open.add_targets(static_cast<int32_t>(kernels::testing::UniformInt(rng, 0, kClasses - 1)));
  }
  const auto stream = client.OpenLoss();
  stream->SendOpen(open);
  stream->SendSlice(0, kRows, Bytes(hidden));
  const LossAnswers answers = stream->Finish();
  // No gradient was asked for, so none is sent.
  for (const LossAnswers::Slice& slice : answers.slices) EXPECT_TRUE(slice.payload.empty());
  return answers;
}

absl::Status Train(TestClient& client, const std::string& head, uint64_t step, uint64_t id,
                   kernels::testing::Rng& rng) {
  return Compute(client, head, step, id, rng).status;
}

absl::StatusOr<v1::ApplyStepResponse> Step(TestClient& client, const std::string& head, uint64_t step) {
  v1::ApplyStepRequest request;
  request.set_head(head);
  request.set_step(step);
  request.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01);
  return client.ApplyStep(request);
}

std::vector<std::vector<float>> ReadAll(TestClient& client, const std::string& head) {
  std::vector<std::vector<float>> all;
  for (const v1::Param param :
       {v1::PARAM_WEIGHT, v1::PARAM_BIAS, v1::PARAM_NORM_GAIN, v1::PARAM_NORM_SHIFT}) {
    for (const v1::Role role : {v1::ROLE_VALUE, v1::ROLE_MOMENT1, v1::ROLE_MOMENT2}) {
      auto values = client.Read(head, param, role);
      EXPECT_TRUE(values.ok()) << values.status();
      all.push_back(std::move(values).value_or(std::vector<float>()));
    }
  }
  return all;
}

class HeadsTest : public ::testing::Test {
 protected:
  kernels::testing::Rng rng_ = kernels::testing::FreshRng();
  TestServer server_;
  std::unique_ptr<TestClient> client_ = server_.Connect();
};

TEST_F(HeadsTest, DescribesWhatWasCreated) {
  const auto created = client_->CreateHead(Request("a"));
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(created->spec().vocab_size(), kClasses);
  EXPECT_EQ(created->spec().norm(), v1::NORM_LAYERNORM);
  EXPECT_EQ(created->spec().optimizer_state(), v1::OPTIMIZER_STATE_ADAM);
  EXPECT_EQ(created->compute_dtype(), v1::DTYPE_FP32);
  EXPECT_FLOAT_EQ(created->spec().norm_epsilon(), 1e-5f);
  EXPECT_EQ(created->state().incarnation(), server_.server().incarnation());
  EXPECT_EQ(created->state().step(), 0u);
  EXPECT_GE(created->memory().weights(), kHidden * kClasses * 4);
  EXPECT_GE(created->memory().optimizer(), kHidden * kClasses * 8);
  EXPECT_GT(created->chunk_rows(), 0u);
  ASSERT_GT(created->choices_size(), 0);
  EXPECT_EQ(created->choices(0).what(), "chunk");
  EXPECT_EQ(created->choices(0).workspace_bytes(), created->memory().workspace());
  EXPECT_EQ(created->last_chunk_choices_size(), 0) << "there was none yet";
  ASSERT_TRUE(client_->CreateHead(Request("b")).ok());
  const auto heads = client_->ListHeads();
  ASSERT_EQ(heads->heads_size(), 2);
  EXPECT_EQ(heads->heads(0).spec().name(), "a");
  EXPECT_TRUE(client_->DeleteHead("a").ok());
  EXPECT_EQ(client_->DescribeHead("a").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->ListHeads()->heads_size(), 1);
}

TEST_F(HeadsTest, KaimingUniformFromASeed) {
  ASSERT_TRUE(client_->CreateHead(Request("default")).ok());
  v1::CreateHeadRequest request = Request("seven");
  request.mutable_kaiming_uniform()->set_seed(7);
  ASSERT_TRUE(client_->CreateHead(request).ok());
  request.mutable_spec()->set_name("seven-again");
  ASSERT_TRUE(client_->CreateHead(request).ok());
  const auto zero = *client_->Read("default", v1::PARAM_WEIGHT, v1::ROLE_VALUE);
  const auto seven = *client_->Read("seven", v1::PARAM_WEIGHT, v1::ROLE_VALUE);
  EXPECT_EQ(seven, *client_->Read("seven-again", v1::PARAM_WEIGHT, v1::ROLE_VALUE));
  EXPECT_NE(seven, zero);
  const float bound = 1.0f / std::sqrt(static_cast<float>(kHidden));
  double sum = 0.0;
  double squares = 0.0;
  for (const float value : seven) {
    EXPECT_LE(std::fabs(value), bound);
    sum += value;
    squares += double{value} * value;
  }
  const auto n = static_cast<double>(seven.size());
  EXPECT_NEAR(sum / n, 0.0, 4 * bound / std::sqrt(3.0 * n));
  EXPECT_NEAR(squares / n, bound * bound / 3.0, 0.15 * bound * bound / 3.0);
  EXPECT_THAT(*client_->Read("seven", v1::PARAM_NORM_GAIN, v1::ROLE_VALUE), Each(1.0f));
  EXPECT_THAT(*client_->Read("seven", v1::PARAM_NORM_SHIFT, v1::ROLE_VALUE), Each(0.0f));
  EXPECT_THAT(*client_->Read("seven", v1::PARAM_CLASS_WEIGHTS, v1::ROLE_VALUE), Each(1.0f));
}

TEST_F(HeadsTest, TensorsInParts) {
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  std::vector<float> weight(kHidden * kClasses);
  for (float& value : weight) value = kernels::testing::Uniform(rng_, -1.0f, 1.0f);
  v1::OpenTensor open;
  open.set_head("head");
  open.set_param(v1::PARAM_WEIGHT);
  ASSERT_TRUE(client_->WriteTensor(open, Bytes(weight), /*message_bytes=*/5 * kHidden * 4).ok());
  EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), weight);

  // Rows 10 to 12 in another dtype.
  open.set_dtype(v1::DTYPE_BF16);
  open.mutable_rows()->set_begin(10);
  open.mutable_rows()->set_end(12);
  const std::vector<float> ones(2 * kHidden, 1.0f);
  const std::vector<uint8_t> encoded = kernels::testing::Encode(kernels::DType::kBFloat16, ones);
  ASSERT_TRUE(client_->WriteTensor(open, Bytes(encoded)).ok());
  v1::ReadTensorRequest read;
  read.set_head("head");
  read.set_param(v1::PARAM_WEIGHT);
  read.set_dtype(v1::DTYPE_FP16);
  read.mutable_rows()->set_begin(11);
  read.mutable_rows()->set_end(13);
  const auto bytes = client_->ReadTensor(read);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  std::vector<float> expected(weight.begin() + 11 * kHidden, weight.begin() + 13 * kHidden);
  std::fill(expected.begin(), expected.begin() + kHidden, 1.0f);
  EXPECT_EQ(*bytes, Bytes(kernels::testing::Encode(kernels::DType::kFloat16, expected)));
}

// A tensor of several messages, read and written.
TEST_F(HeadsTest, LargeTensors) {
  v1::CreateHeadRequest request = Request("large");
  request.mutable_spec()->set_vocab_size(40'000);
  request.mutable_spec()->set_hidden_size(101);
  request.mutable_spec()->set_optimizer_state(v1::OPTIMIZER_STATE_NONE);
  ASSERT_TRUE(client_->CreateHead(request).ok());
  std::vector<float> weight(40'000 * 101);
  for (float& value : weight) value = kernels::testing::Uniform(rng_, -1.0f, 1.0f);
  v1::OpenTensor open;
  open.set_head("large");
  open.set_param(v1::PARAM_WEIGHT);
  const absl::Status written = client_->WriteTensor(open, Bytes(weight), size_t{9'000} * 101 * 4);
  ASSERT_TRUE(written.ok()) << written;
  EXPECT_EQ(*client_->Read("large", v1::PARAM_WEIGHT, v1::ROLE_VALUE), weight);
}

// Save, go on, load: the head is as it was, and so are the steps that follow.
TEST_F(HeadsTest, CheckpointRoundTrip) {
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  kernels::testing::Rng batches(1);
  for (uint64_t step = 0; step < 3; ++step) {
    ASSERT_TRUE(Train(*client_, "head", step, 1, batches).ok());
    ASSERT_TRUE(Step(*client_, "head", step).ok());
  }
  const auto saved_values = ReadAll(*client_, "head");
  const auto saved = client_->SaveCheckpoint("head", "");
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->checkpoint(), "head/step-0000000003");
  EXPECT_GT(saved->bytes(), kHidden * kClasses * 12);
  EXPECT_EQ(client_->SaveCheckpoint("head", "").status().code(), absl::StatusCode::kAlreadyExists);

  kernels::testing::Rng next_batches(2);
  ASSERT_TRUE(Train(*client_, "head", 3, 1, next_batches).ok());
  ASSERT_TRUE(Step(*client_, "head", 3).ok());
  const auto later_values = ReadAll(*client_, "head");
  EXPECT_NE(later_values, saved_values);

  // Into the same head; gradients of the open step are discarded.
  ASSERT_TRUE(Train(*client_, "head", 4, 1, batches).ok());
  const auto loaded = client_->LoadCheckpoint(saved->checkpoint(), "");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->state().step(), 3u);
  EXPECT_EQ(loaded->step_rows(), 0u);
  EXPECT_EQ(ReadAll(*client_, "head"), saved_values);
  EXPECT_EQ(*client_->GradNorm("head"), 0.0);

  // As a new head.
  const auto copy = client_->LoadCheckpoint(saved->checkpoint(), "copy");
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(ReadAll(*client_, "copy"), saved_values);
  for (const char* head : {"head", "copy"}) {
    kernels::testing::Rng same_batches(2);
    ASSERT_TRUE(Train(*client_, head, 3, 1, same_batches).ok());
    ASSERT_TRUE(Step(*client_, head, 3).ok());
    EXPECT_EQ(ReadAll(*client_, head), later_values) << head;
  }
}

TEST_F(HeadsTest, CheckpointOfAnotherShapeIsRefused) {
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  ASSERT_TRUE(client_->SaveCheckpoint("head", "first").ok());
  v1::CreateHeadRequest other = Request("other");
  other.mutable_spec()->set_vocab_size(kClasses + 1);
  ASSERT_TRUE(client_->CreateHead(other).ok());
  const auto before = ReadAll(*client_, "other");
  EXPECT_EQ(client_->LoadCheckpoint("head/first", "other").status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReadAll(*client_, "other"), before);
}

TEST_F(HeadsTest, DamagedCheckpointIsRefused) {
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  ASSERT_TRUE(client_->SaveCheckpoint("head", "first").ok());
  const auto before = ReadAll(*client_, "head");
  for (const auto& entry :
       std::filesystem::directory_iterator(server_.checkpoint_directory() + "/head/first")) {
    if (entry.path().extension() != ".safetensors") continue;
    std::string content = test::ReadWholeFile(entry.path());
    content[content.size() - 5] ^= 1;
    test::WriteWholeFile(entry.path(), content);
  }
  EXPECT_EQ(client_->LoadCheckpoint("head/first", "").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(client_->LoadCheckpoint("head/first", "fresh").status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReadAll(*client_, "head"), before);
  EXPECT_EQ(client_->DescribeHead("fresh").status().code(), absl::StatusCode::kNotFound);
}

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
  request_.mutable_tensor_file()->set_bias("nobody");
  ExpectRefused(absl::StatusCode::kNotFound, "tensor_file.bias");
  request_.mutable_tensor_file()->set_bias("lm_head.weight");
  ExpectRefused(absl::StatusCode::kInvalidArgument, "[57, 13]");
  request_.mutable_tensor_file()->set_bias("lm_head.bias");
  request_.mutable_tensor_file()->set_norm_gain("gain");
  ExpectRefused(absl::StatusCode::kInvalidArgument, "tensor_file.norm_gain");
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
      R"("model.embed_tokens.weight": "nobody.safetensors", "model.norm.weight": "nobody.safetensors")");
  ExpectError(absl::StatusCode::kNotFound, {"tensor_file.weight", "model.safetensors.index.json",
                                            "'model.embed_tokens.weight'", "model/nobody.safetensors"});
  WriteIndex(R"("model.embed_tokens.weight": "model-00002-of-00002.safetensors")");
  ExpectError(absl::StatusCode::kNotFound,
              {"tensor_file.weight", "model-00002-of-00002.safetensors", "'model.embed_tokens.weight'"});
  test::WriteWholeFile(Path("bad.safetensors"), "nonsense");
  WriteIndex(R"("model.embed_tokens.weight": "bad.safetensors")");
  ExpectError(absl::StatusCode::kInvalidArgument, {"tensor_file.weight", "model/bad.safetensors"});

  // Out of the folder, by name or by a link.
  WriteIndex(R"("model.embed_tokens.weight": "../model.safetensors")");
  ExpectError(absl::StatusCode::kInvalidArgument, {"tensor_file.path", "no file name"});
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

// Progress comes, a call that ends early does not end its save unless it says so, and saves are listed.
TEST_F(HeadsTest, SavesThroughTheService) {
  v1::CreateHeadRequest large = Request("large");
  large.mutable_spec()->set_vocab_size(200'000);
  ASSERT_TRUE(client_->CreateHead(large).ok());
  v1::SaveCheckpointRequest request;
  request.set_head("large");
  request.set_name("whole");
  uint64_t total = 0;
  const auto saved = client_->SaveCheckpoint(request, [&](const v1::SaveProgress& progress) {
    EXPECT_LE(progress.written_bytes(), progress.read_bytes());
    EXPECT_LE(progress.read_bytes(), progress.total_bytes());
    total = std::max(total, progress.total_bytes());
    return true;
  });
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(total, 4 * (3 * (kHidden * 200'000 + 200'000 + 2 * kHidden) + 200'000));
  EXPECT_GT(saved->bytes(), total);

  request.set_name("left-alone");
  EXPECT_EQ(client_->SaveCheckpoint(request, [](const v1::SaveProgress&) { return false; }).status().code(),
            absl::StatusCode::kCancelled);
  // Saves take turns: once this one is done, that one is.
  ASSERT_TRUE(client_->SaveCheckpoint("large", "last").ok());
  const auto list = client_->ListCheckpoints("large");
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_EQ(list->checkpoints_size(), 3);
  EXPECT_TRUE(client_->LoadCheckpoint("large/left-alone", "copy").ok());
  EXPECT_EQ(client_->ListCheckpoints("no/name").status().code(), absl::StatusCode::kInvalidArgument);

  request.set_name("cancelled");
  request.set_cancel_with_call(true);
  EXPECT_EQ(client_->SaveCheckpoint(request, [](const v1::SaveProgress&) { return false; }).status().code(),
            absl::StatusCode::kCancelled);
  ASSERT_TRUE(client_->SaveCheckpoint("large", "after").ok());
  EXPECT_EQ(client_->ListCheckpoints("")->checkpoints_size(), 4);
}

TEST_F(HeadsTest, MemoryThatDoesNotFit) {
  ServerOptions options = SmallServer();
  options.memory_limit_bytes = 8 << 20;
  TestServer small(options);
  const auto client = small.Connect();
  v1::CreateHeadRequest request = Request("big");
  request.mutable_spec()->set_vocab_size(100'000);
  const absl::Status status = client->CreateHead(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(client->ListHeads()->heads_size(), 0);
  EXPECT_EQ(client->GetServer()->memory().weights(), 0u);
  EXPECT_TRUE(client->CreateHead(Request("small")).ok());
}

TEST_F(HeadsTest, SaysHowGradientsAreComputed) {
  uint64_t id = 0;
  const auto dropped = [&](const std::string& head, v1::Algorithm algorithm, std::optional<float> epsilon) {
    v1::LossOptions options;
    options.set_algorithm(algorithm);
    if (epsilon.has_value()) options.set_filter_epsilon(*epsilon);
    const LossAnswers answers = Compute(*client_, head, 0, ++id, rng_, options);
    EXPECT_TRUE(answers.status.ok()) << answers.status;
    return answers.summary.has_value() ? answers.summary->dropped_mass() : -1.0;
  };
  v1::CreateHeadRequest request = Request("filtered");
  request.mutable_spec()->set_algorithm(v1::ALGORITHM_FILTERED);
  ASSERT_TRUE(client_->CreateHead(request).ok());
  EXPECT_GT(dropped("filtered", v1::ALGORITHM_UNSPECIFIED, 0.5f), 0.0);
  EXPECT_EQ(dropped("filtered", v1::ALGORITHM_EXACT, 0.5f), 0.0);

  request = Request("cut");
  request.mutable_spec()->set_algorithm(v1::ALGORITHM_CUT);
  const auto created = client_->CreateHead(request);
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(created->spec().algorithm(), v1::ALGORITHM_CUT);
  EXPECT_EQ(dropped("cut", v1::ALGORITHM_UNSPECIFIED, std::nullopt), 0.0);
  EXPECT_EQ(dropped("cut", v1::ALGORITHM_CUT, std::nullopt), 0.0);
  EXPECT_GT(dropped("cut", v1::ALGORITHM_UNSPECIFIED, 0.5f), 0.0);
  v1::LossOptions exact;
  exact.set_algorithm(v1::ALGORITHM_EXACT);
  const absl::Status refused = Compute(*client_, "cut", 0, ++id, rng_, exact).status;
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("open.options.algorithm"));

  ASSERT_TRUE(client_->CreateHead(Request("plain")).ok());
  EXPECT_EQ(client_->DescribeHead("plain")->spec().algorithm(), v1::ALGORITHM_EXACT);
  EXPECT_GT(dropped("plain", v1::ALGORITHM_CUT, 0.5f), 0.0);
  request.mutable_spec()->set_name("bad");
  request.mutable_spec()->set_algorithm(static_cast<v1::Algorithm>(17));
  const absl::Status unknown = client_->CreateHead(request).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("spec.algorithm"));
}

TEST_F(HeadsTest, HasItsOwnWorkspaceLimit) {
  v1::CreateHeadRequest request = Request("default");
  const auto usual = client_->CreateHead(request);
  ASSERT_TRUE(usual.ok()) << usual.status();
  EXPECT_EQ(usual->spec().workspace_bytes(), 0u);
  request.mutable_spec()->set_name("small");
  request.mutable_spec()->set_workspace_bytes(64 << 10);
  const auto small = client_->CreateHead(request);
  ASSERT_TRUE(small.ok()) << small.status();
  EXPECT_LE(small->memory().workspace(), 64u << 10);
  EXPECT_LT(small->chunk_rows(), usual->chunk_rows());
  EXPECT_TRUE(Train(*client_, "small", 0, 1, rng_).ok());
  request.mutable_spec()->set_name("tiny");
  request.mutable_spec()->set_workspace_bytes(100);
  EXPECT_EQ(client_->CreateHead(request).status().code(), absl::StatusCode::kResourceExhausted);
  request.mutable_spec()->set_workspace_bytes(uint64_t{1} << 63);
  EXPECT_EQ(client_->CreateHead(request).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(HeadsTest, CheckpointsKeepAlgorithmAndLimit) {
  v1::CreateHeadRequest request = Request("cut");
  request.mutable_spec()->set_algorithm(v1::ALGORITHM_CUT);
  request.mutable_spec()->set_workspace_bytes(128 << 10);
  ASSERT_TRUE(client_->CreateHead(request).ok());
  ASSERT_TRUE(client_->SaveCheckpoint("cut", "one").ok());
  const auto copy = client_->LoadCheckpoint("cut/one", "copy");
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(copy->spec().algorithm(), v1::ALGORITHM_CUT);
  EXPECT_EQ(copy->spec().workspace_bytes(), 128u << 10);
  // A head that is there keeps its own.
  ASSERT_TRUE(client_->CreateHead(Request("plain")).ok());
  const auto plain = client_->LoadCheckpoint("cut/one", "plain");
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->spec().algorithm(), v1::ALGORITHM_EXACT);
  EXPECT_EQ(plain->spec().workspace_bytes(), 0u);
}

TEST_F(HeadsTest, FrozenHeadsTakeNoGradients) {
  v1::CreateHeadRequest request = Request("frozen");
  request.mutable_spec()->set_frozen(true);
  const auto created = client_->CreateHead(request);
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(created->memory().gradients(), 0u);
  EXPECT_EQ(Train(*client_, "frozen", 0, 1, rng_).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Step(*client_, "frozen", 0).status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace lossd::rpc::testing
