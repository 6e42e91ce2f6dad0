// SPDX-License-Identifier: Apache-2.0
// Tests of heads through the service, on a server in this process: bad requests, creation, plans, restored
// heads, versions, and checkpoints.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "kernels/clocks/clock.h"
#include "proto/wire/status_details.h"
#include "tests/server/service/service_fixture.h"
#include "tests/server/service/small_training.h"
#include "tests/support/temp_folder.h"

namespace lossd::app::testing::heads_test {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// ---- Bad requests about heads ----
// BadInputTest (service_fixture.h) says what has to hold after each of these requests.

using BadHeadInputTest = BadInputTest;

TEST_F(BadHeadInputTest, HeadSpecs) {
  const auto create = [&](const std::function<void(v1::HeadSpec&)>& spoil) {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("other");
    request.mutable_spec()->set_hidden_size(4);
    request.mutable_spec()->set_vocab_size(4);
    spoil(*request.mutable_spec());
    return client_->CreateHead(request).status();
  };
  ExpectInvalid(create([](auto& spec) { spec.set_name("../up"); }), "spec.name", "../up");
  ExpectInvalid(create([](auto& spec) { spec.set_name(""); }), "spec.name", "");
  ExpectInvalid(create([](auto& spec) { spec.set_hidden_size(0); }), "spec.hidden_size", "0");
  ExpectInvalid(create([](auto& spec) { spec.set_vocab_size(uint64_t{1} << 40); }), "spec.vocab_size",
                "1099511627776");
  ExpectInvalid(create([](auto& spec) { spec.set_norm(static_cast<v1::Norm>(9)); }), "spec.norm", "9");
  ExpectInvalid(create([](auto& spec) { spec.set_norm_epsilon(-1.0f); }), "spec.norm_epsilon", "-1");
  ExpectError(create([](auto& spec) { spec.set_name("head"); }), absl::StatusCode::kAlreadyExists,
              "spec.name", "head");
  // A long name is shown in part, up to the end of a character.
  std::string accents = "n";
  for (int i = 0; i < 200; ++i) accents += "\xc3\xa9";
  ExpectInvalid(create([&](auto& spec) { spec.set_name(accents); }), "spec.name", accents.substr(0, 91));
  EXPECT_EQ(client_->ListHeads()->heads_size(), 1);
}

TEST_F(BadHeadInputTest, TensorFiles) {
  const auto create = [&](const std::function<void(v1::TensorFile&)>& spoil) {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("other");
    request.mutable_spec()->set_hidden_size(4);
    request.mutable_spec()->set_vocab_size(4);
    request.mutable_tensor_file()->set_weight("w");
    spoil(*request.mutable_tensor_file());
    return client_->CreateHead(request).status();
  };
  EXPECT_EQ(create([](auto& file) { file.set_path("missing.safetensors"); }).code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(create([](auto& file) { file.set_path("../../etc/passwd"); }).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create([](auto& file) { file.set_path("/etc/passwd"); }).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->ListHeads()->heads_size(), 1);
}

TEST_F(BadHeadInputTest, Tensors) {
  v1::ReadTensorRequest read;
  read.set_head("head");
  ExpectInvalid(client_->ReadTensor(read).status(), "param", "0");
  read.set_param(v1::PARAM_NORM_GAIN);
  ExpectError(client_->ReadTensor(read).status(), absl::StatusCode::kNotFound, "param", "norm.gain");
  read.set_param(v1::PARAM_WEIGHT);
  read.mutable_rows()->set_end(kClasses + 1);
  ExpectInvalid(client_->ReadTensor(read).status(), "rows.end", "31");
  read.set_head("missing");
  ExpectError(client_->ReadTensor(read).status(), absl::StatusCode::kNotFound, "head", "missing");

  v1::OpenTensor open;
  open.set_head("head");
  open.set_param(v1::PARAM_BIAS);
  open.set_role(v1::ROLE_GRADIENT);
  ExpectError(client_->WriteTensor(open, std::string(kClasses * 4, 'x')),
              absl::StatusCode::kFailedPrecondition, "open.role", "ROLE_GRADIENT");
  open.set_role(v1::ROLE_VALUE);
  const std::string zeros(kClasses * 4, '\0');
  ExpectInvalid(client_->WriteTensor(open, zeros.substr(0, 8)), "payload", "row 2");
  ExpectInvalid(client_->WriteTensor(open, zeros + "1234"), "payload", "row 31");
  ExpectInvalid(client_->WriteTensor(open, zeros.substr(0, 7)), "payload", "7");
}

TEST_F(BadHeadInputTest, Steps) {
  v1::ApplyStepRequest step;
  step.set_head("head");
  ExpectInvalid(client_->ApplyStep(step).status(), "optimizer.kind", "nothing");
  step.mutable_optimizer()->mutable_adamw()->set_learning_rate(-1);
  ExpectInvalid(client_->ApplyStep(step).status(), "optimizer.adamw.learning_rate", "-1");
  step.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.1);
  step.mutable_optimizer()->set_grad_multiplier(NAN);
  ExpectInvalid(client_->ApplyStep(step).status(), "optimizer.grad_multiplier", "nan");
  step.mutable_optimizer()->set_grad_multiplier(1);
  step.set_step(3);
  ExpectError(client_->ApplyStep(step).status(), absl::StatusCode::kFailedPrecondition, "step", "3");
  step.set_step(0);
  step.add_expected_microbatches(1);
  step.add_expected_microbatches(99);
  const absl::Status missing = client_->ApplyStep(step).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition) << missing;
  const auto detail = wire::GetErrorDetail(missing);
  ASSERT_TRUE(detail.has_value());
  ASSERT_EQ(detail->missing_size(), 1);
  EXPECT_THAT(detail->missing(0), HasSubstr("99"));
}

TEST_F(BadHeadInputTest, Checkpoints) {
  EXPECT_EQ(client_->SaveCheckpoint("head", "../up").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->SaveCheckpoint("missing", "").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->LoadCheckpoint("head/none", "").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->LoadCheckpoint("../head", "").status().code(), absl::StatusCode::kInvalidArgument);
}

// ---- Heads ----
// Heads through the service: creation, initial values, tensors, what a head's spec asks for.

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
  // What a request with nearly everything below its epsilon leaves out.
  const auto dropped = [&](const std::string& head, v1::Gradients gradients) {
    v1::LossOptions options;
    options.set_gradients(gradients);
    options.set_filter_epsilon(0.5f);
    options.set_max_gradient_error(0.0f);
    const LossAnswers answers = Compute(*client_, head, 0, ++id, rng_, options);
    EXPECT_TRUE(answers.status.ok()) << answers.status;
    return answers.summary.has_value() ? answers.summary->dropped_mass() : -1.0;
  };
  for (const v1::Logits logits : {v1::LOGITS_STORED, v1::LOGITS_RECOMPUTED}) {
    for (const v1::Gradients of_head :
         {v1::GRADIENTS_EXACT, v1::GRADIENTS_FILTERED, v1::GRADIENTS_SAMPLED, v1::GRADIENTS_AUTO}) {
      const std::string head = absl::StrCat(v1::Logits_Name(logits), "-", v1::Gradients_Name(of_head));
      SCOPED_TRACE(head);
      v1::CreateHeadRequest request = Request(head);
      request.mutable_spec()->set_logits(logits);
      request.mutable_spec()->set_gradients(of_head);
      const auto created = client_->CreateHead(request);
      ASSERT_TRUE(created.ok()) << created.status();
      EXPECT_EQ(created->spec().logits(), logits);
      EXPECT_EQ(created->spec().gradients(), of_head);
      EXPECT_EQ(dropped(head, v1::GRADIENTS_UNSPECIFIED) > 0.0, of_head == v1::GRADIENTS_FILTERED);
      EXPECT_EQ(dropped(head, v1::GRADIENTS_EXACT), 0.0);
      EXPECT_GT(dropped(head, v1::GRADIENTS_FILTERED), 0.0);
      EXPECT_EQ(dropped(head, v1::GRADIENTS_SAMPLED), 0.0);
      EXPECT_EQ(dropped(head, v1::GRADIENTS_AUTO), 0.0);
    }
  }
  ASSERT_TRUE(client_->CreateHead(Request("plain")).ok());
  EXPECT_EQ(client_->DescribeHead("plain")->spec().logits(), v1::LOGITS_STORED);
  EXPECT_EQ(client_->DescribeHead("plain")->spec().gradients(), v1::GRADIENTS_EXACT);
}

TEST_F(HeadsTest, RefusesLogitsAndGradientsThatItDoesNotKnow) {
  const auto message_of = [&](const auto& change) {
    v1::CreateHeadRequest request = Request("bad");
    change(*request.mutable_spec());
    const absl::Status status = client_->CreateHead(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const std::string logits = message_of([](auto& spec) { spec.set_logits(static_cast<v1::Logits>(17)); });
  EXPECT_THAT(logits,
              HasSubstr("spec.logits must be LOGITS_STORED, LOGITS_RECOMPUTED, LOGITS_NONE or unspecified"));
  EXPECT_THAT(logits, HasSubstr("17"));
  const std::string gradients =
      message_of([](auto& spec) { spec.set_gradients(static_cast<v1::Gradients>(5)); });
  EXPECT_THAT(gradients, HasSubstr("spec.gradients must be GRADIENTS_EXACT"));
  EXPECT_THAT(gradients, HasSubstr("5"));
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

TEST_F(HeadsTest, FrozenHeadsTakeNoGradients) {
  v1::CreateHeadRequest request = Request("frozen");
  request.mutable_spec()->set_frozen(true);
  const auto created = client_->CreateHead(request);
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_EQ(created->memory().gradients(), 0u);
  EXPECT_EQ(Train(*client_, "frozen", 0, 1, rng_).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Step(*client_, "frozen", 0).status().code(), absl::StatusCode::kFailedPrecondition);
}

// ---- PlanHead ----
// PlanHead through the service: it answers what CreateHead would, and leaves no trace.

v1::CreateHeadRequest Request(const std::string& name = "head") {
  v1::CreateHeadRequest request;
  v1::HeadSpec& spec = *request.mutable_spec();
  spec.set_name(name);
  spec.set_hidden_size(24);
  spec.set_vocab_size(101);
  spec.set_bias(true);
  spec.set_norm(v1::NORM_RMSNORM);
  return request;
}

// What a plan may leave behind.
std::string Traces(client::Client& client) {
  const auto server = client.GetServer();
  EXPECT_TRUE(server.ok()) << server.status();
  return absl::StrCat(client.ListHeads()->size(), " heads, ", server->memory().ShortDebugString());
}

// Also on several devices, whichever way they divide the head, and on a deterministic server.
TEST(PlanHead, AnswersWhatCreateHeadThenDoes) {
  for (const std::string split : {"", "rows", "vocabulary", "deterministic"}) {
    SCOPED_TRACE(split);
    ServerOptions options = SmallServer();
    options.deterministic = split == "deterministic";
    if (split == "rows" || split == "vocabulary") {
      options.backend = "cpu";
      options.cpu_devices = 2;
      options.split = split;
    }
    TestServer server(options);
    const auto client = Connect(server.target());
    const std::string before = Traces(*client);
    const auto planned = client->PlanHead(Request());
    ASSERT_TRUE(planned.ok()) << planned.status();
    EXPECT_EQ(Traces(*client), before);
    EXPECT_EQ(client->DescribeHead("head").status().code(), absl::StatusCode::kNotFound);

    const auto created = client->CreateHead(Request());  // the name is free
    ASSERT_TRUE(created.ok()) << created.status();
    EXPECT_EQ(planned->spec().ShortDebugString(), created->spec().ShortDebugString());
    EXPECT_EQ(planned->memory().ShortDebugString(), created->memory().ShortDebugString());
    EXPECT_EQ(planned->slice_limits().ShortDebugString(), created->slice_limits().ShortDebugString());
    EXPECT_EQ(planned->chunk_rows(), created->chunk_rows());
    EXPECT_EQ(planned->compute_dtype(), created->compute_dtype());
    EXPECT_EQ(planned->state().incarnation(), created->state().incarnation());
    ASSERT_EQ(planned->choices_size(), created->choices_size());
    for (int i = 0; i < planned->choices_size(); ++i) {
      EXPECT_EQ(planned->choices(i).ShortDebugString(), created->choices(i).ShortDebugString());
    }
    EXPECT_EQ(planned->state().generation(), 0u) << "there is none";
    EXPECT_NE(created->state().generation(), 0u);
  }
}

TEST(PlanHead, EndsWithTheErrorsOfCreateHead) {
  ServerOptions options = SmallServer();
  options.memory_limit_bytes = 8 << 20;
  TestServer server(options);
  const auto client = Connect(server.target());
  ASSERT_TRUE(client->CreateHead(Request("taken")).ok());
  const std::string before = Traces(*client);
  const std::pair<const char*, std::function<void(v1::CreateHeadRequest&)>> kBad[] = {
      {"no name", [](auto& r) { r.mutable_spec()->set_name(""); }},
      {"a name that is taken", [](auto& r) { r.mutable_spec()->set_name("taken"); }},
      {"no classes", [](auto& r) { r.mutable_spec()->set_vocab_size(0); }},
      {"an unknown norm", [](auto& r) { r.mutable_spec()->set_norm(static_cast<v1::Norm>(9)); }},
      {"rows that fit no slice", [](auto& r) { r.mutable_spec()->set_hidden_size(1 << 20); }},
      {"more than the limit", [](auto& r) { r.mutable_spec()->set_vocab_size(100'000); }},
      {"a file that is not there",
       [](auto& r) {
         r.mutable_tensor_file()->set_path("missing.safetensors");
         r.mutable_tensor_file()->set_weight("w");
       }},
      {"a file outside", [](auto& r) {
         r.mutable_tensor_file()->set_path("../../etc/passwd");
         r.mutable_tensor_file()->set_weight("w");
       }}};
  for (const auto& [what, spoil] : kBad) {
    SCOPED_TRACE(what);
    v1::CreateHeadRequest request = Request();
    spoil(request);
    const absl::Status planned = client->PlanHead(request).status();
    EXPECT_FALSE(planned.ok());
    EXPECT_EQ(planned, client->CreateHead(request).status());
    EXPECT_EQ(Traces(*client), before);
  }
}

// Members that share a limit: together they need more than it, and each alone does not.
TEST(PlanHead, AddsUpWhatDevicesOfOneMemoryNeed) {
  ServerOptions options = SmallServer();
  options.backend = "cpu";
  options.cpu_devices = 3;
  options.split = "rows";
  options.memory_limit_bytes = 16 << 20;
  TestServer server(options);
  const auto client = Connect(server.target());
  int refused = 0, fit = 0;
  for (uint64_t classes = 1'000; classes < 200'000; classes = classes * 3 / 2) {
    v1::CreateHeadRequest request = Request();
    request.mutable_spec()->set_vocab_size(classes);
    const absl::Status planned = client->PlanHead(request).status();
    const absl::Status created = client->CreateHead(request).status();
    EXPECT_EQ(planned.code(), created.code()) << classes << ": " << planned << "; " << created;
    ++(created.ok() ? fit : refused);
    if (created.ok()) {
      EXPECT_TRUE(client->DeleteHead("head").ok());
    }
  }
  EXPECT_GT(fit, 2);
  EXPECT_GT(refused, 2);
}

// ---- Restored heads ----
// --restore=latest: a server starts with every head as its newest checkpoint has it, or not at all.

class RestoreTest : public HeadsTest {
 protected:
  // A server beside the fixture's, on the same folder of checkpoints.
  absl::StatusOr<std::unique_ptr<Server>> StartAgain(const std::string& restore = "latest") const {
    ServerOptions options = SmallServer();
    options.checkpoint_directory = server_.checkpoint_directory();
    options.restore = restore;
    return Server::Start(options);
  }
  void TrainAndSave(const std::string& head, uint64_t step, const std::string& name) {
    ASSERT_TRUE(Train(*client_, head, step, 1, rng_).ok());
    ASSERT_TRUE(Step(*client_, head, step).ok());
    ASSERT_TRUE(client_->SaveCheckpoint(head, name).ok());
  }
  // The largest file of a checkpoint, which has its tensors.
  std::filesystem::path TensorsOf(const std::string& checkpoint) const {
    std::filesystem::path largest;
    for (const auto& entry :
         std::filesystem::directory_iterator(server_.checkpoint_directory() + "/" + checkpoint)) {
      if (largest.empty() || entry.file_size() > std::filesystem::file_size(largest)) largest = entry.path();
    }
    return largest;
  }
};

TEST_F(RestoreTest, TheNewestOfEveryHead) {
  for (const char* head : {"first", "second"}) {
    ASSERT_TRUE(client_->CreateHead(Request(head)).ok());
    TrainAndSave(head, 0, "");
    TrainAndSave(head, 1, "a");  // before the other by name, after it in time
  }
  TrainAndSave("second", 2, "b");
  ASSERT_TRUE(Train(*client_, "first", 2, 1, rng_).ok());  // not saved: gradients of the open step
  ASSERT_TRUE(client_->CreateHead(Request("never-saved")).ok());

  const auto again = StartAgain();
  ASSERT_TRUE(again.ok()) << again.status();
  const auto client = TestClient::Connect((*again)->grpc_address());
  for (const auto& [head, step] : {std::pair{"first", 2u}, {"second", 3u}}) {
    const auto description = client->DescribeHead(head);
    ASSERT_TRUE(description.ok()) << description.status();
    EXPECT_EQ(description->state().step(), step);
    EXPECT_EQ(description->step_rows(), 0u);
    EXPECT_EQ(ReadAll(*client, head), ReadAll(*client_, head)) << head;
  }
  EXPECT_EQ(client->DescribeHead("never-saved").status().code(), absl::StatusCode::kNotFound);
  // Training goes on where it was.
  EXPECT_TRUE(Train(*client, "first", 2, 1, rng_).ok());
  EXPECT_TRUE(Step(*client, "first", 2).ok());
}

TEST_F(RestoreTest, NothingToRestore) {
  const auto again = StartAgain();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(TestClient::Connect((*again)->grpc_address())->DescribeHead("first").status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(RestoreTest, ADamagedCheckpointEndsTheStart) {
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  TrainAndSave("head", 0, "older");
  TrainAndSave("head", 1, "newer");
  std::fstream file(TensorsOf("head/newer"), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-3, std::ios::end);
  file.put('\x5a');
  file.close();
  const absl::Status refused = StartAgain().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("cannot restore head/newer"));
  std::filesystem::remove_all(server_.checkpoint_directory() + "/head/newer");
  const auto again = StartAgain();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(TestClient::Connect((*again)->grpc_address())->DescribeHead("head")->state().step(), 1u);
}

TEST_F(RestoreTest, OtherValuesAreRefused) {
  const absl::Status refused = StartAgain("newest").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("restore"));
  EXPECT_THAT(refused.message(), HasSubstr("newest"));
}

// ---- Versions ----
// Versions of a head through the service: what answers say of them, and how calls end that meet a write or a
// change.

constexpr auto kUnavailable = absl::StatusCode::kUnavailable;
constexpr auto kAborted = absl::StatusCode::kAborted;

class VersionsTest : public HeadsTest {
 protected:
  VersionsTest() { EXPECT_TRUE(client_->CreateHead(Request("head")).ok()); }

  v1::HeadState State(TestClient& client) { return client.DescribeHead("head")->state(); }
  v1::HeadState State() { return State(*client_); }
  // Rows [begin, end) of a weight of ones.
  static std::string Ones(uint64_t begin, uint64_t end) {
    return Bytes(std::vector<float>((end - begin) * kHidden, 1.0f));
  }
  // A write of which the server has the first half.
  std::unique_ptr<WriteStream> HalfWritten(TestClient& client) {
    const v1::HeadState before = State(client);
    v1::OpenTensor open;
    open.set_head("head");
    open.set_param(v1::PARAM_WEIGHT);
    auto write = client.OpenWrite();
    EXPECT_TRUE(write->Send(&open, Ones(0, kClasses / 2)));
    while (State(client).weights_version() == before.weights_version()) absl::SleepFor(absl::Milliseconds(1));
    return write;
  }
  static absl::StatusCode ReadCode(TestClient& client) {
    return client.Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE).status().code();
  }
  // A write that has ended is forgotten soon.
  static void ExpectReadableSoon(TestClient& client) {
    const absl::Time limit = clocks::SteadyNow() + absl::Minutes(2);
    absl::StatusCode code = ReadCode(client);
    while (code == kUnavailable && clocks::SteadyNow() < limit) {
      absl::SleepFor(absl::Milliseconds(5));
      code = ReadCode(client);
    }
    EXPECT_EQ(code, absl::StatusCode::kOk);
  }
};

TEST_F(VersionsTest, AWriteOfNoRowsToAHeadThatIsDeletedMeanwhileFails) {
  v1::OpenTensor open;
  open.set_head("head");
  open.set_param(v1::PARAM_WEIGHT);
  open.mutable_rows()->set_begin(3);
  open.mutable_rows()->set_end(3);
  auto write = client_->OpenWrite();
  ASSERT_TRUE(write->Send(&open, ""));
  ASSERT_TRUE(client_->DeleteHead("head").ok());
  EXPECT_FALSE(write->Finish().ok());
}

TEST_F(VersionsTest, AnswersCarryThem) {
  const v1::HeadState created = State();
  EXPECT_GT(created.generation(), 0u);
  EXPECT_GT(created.weights_version(), 0u);
  const LossAnswers answers = Compute(*client_, "head", 0, 1, rng_);
  ASSERT_TRUE(answers.status.ok()) << answers.status;
  for (const v1::HeadState& state : {answers.accepted->state(), answers.summary->state()}) {
    EXPECT_EQ(state.generation(), created.generation());
    EXPECT_EQ(state.weights_version(), created.weights_version());
  }
  const auto applied = Step(*client_, "head", 0);
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_GT(applied->state().generation(), created.generation());
  EXPECT_GT(applied->state().weights_version(), created.weights_version());
  EXPECT_EQ(applied->state().weights_version(), State().weights_version());

  const auto saved = client_->SaveCheckpoint("head", "one");
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_EQ(saved->state().weights_version(), State().weights_version());
  const auto loaded = client_->LoadCheckpoint("head/one", "");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_GT(loaded->state().generation(), saved->state().generation());
  EXPECT_GT(loaded->state().weights_version(), saved->state().weights_version());
}

// A repeat is known by the generation that was applied, also after the checkpoint of it was loaded.
TEST_F(VersionsTest, ALoadedStepKnowsItsGeneration) {
  v1::ApplyStepRequest request;
  request.set_head("head");
  request.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01);
  request.set_incarnation(State().incarnation());
  const uint64_t other = State().generation();
  ASSERT_TRUE(client_->ZeroGradients("head", 0).ok());
  const uint64_t applied = State().generation();
  request.set_generation(applied);
  ASSERT_TRUE(client_->ApplyStep(request).ok());
  ASSERT_TRUE(client_->SaveCheckpoint("head", "one").ok());
  ASSERT_TRUE(client_->LoadCheckpoint("head/one", "").ok());
  EXPECT_TRUE(client_->ApplyStep(request)->repeated_call());
  request.set_generation(other);
  EXPECT_EQ(client_->ApplyStep(request).status().code(), kAborted);
}

TEST_F(VersionsTest, CallsThatWouldSeeAHalfWrittenTensorAreRefused) {
  const auto write = HalfWritten(*client_);
  EXPECT_EQ(ReadCode(*client_), kUnavailable);
  EXPECT_EQ(Train(*client_, "head", 0, 1, rng_).code(), kUnavailable);
  EXPECT_EQ(Step(*client_, "head", 0).status().code(), kUnavailable);
  EXPECT_EQ(client_->SaveCheckpoint("head", "half").status().code(), kUnavailable);
  EXPECT_EQ(client_->ListCheckpoints("head")->checkpoints_size(), 0);
  EXPECT_TRUE(client_->ZeroGradients("head", 0).ok());
  EXPECT_TRUE(client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_GRADIENT).ok());
  EXPECT_TRUE(write->Send(nullptr, Ones(kClasses / 2, kClasses)));
  const auto written = write->Finish();
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(written->state().weights_version(), State().weights_version());
  EXPECT_EQ(ReadCode(*client_), absl::StatusCode::kOk);
  EXPECT_TRUE(Train(*client_, "head", 0, 1, rng_).ok());
  EXPECT_TRUE(Step(*client_, "head", 0).ok());
}

TEST_F(VersionsTest, AWriteThatIsCancelledEnds) {
  auto write = HalfWritten(*client_);
  const uint64_t begun = State().weights_version();
  write.reset();
  ExpectReadableSoon(*client_);
  EXPECT_GT(State().weights_version(), begun);
}

TEST_F(VersionsTest, AWriteThatIsRefusedEndsBeforeItsAnswer) {
  const auto write = HalfWritten(*client_);
  write->Send(nullptr, "no row");
  EXPECT_EQ(write->Finish().status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReadCode(*client_), absl::StatusCode::kOk);
}

TEST_F(VersionsTest, AWriteThatStopsHalfWayEndsBeforeItsAnswer) {
  const auto write = HalfWritten(*client_);
  EXPECT_EQ(write->Finish().status().code(), absl::StatusCode::kInvalidArgument) << "rows are missing";
  EXPECT_EQ(ReadCode(*client_), absl::StatusCode::kOk);
}

TEST_F(VersionsTest, AWriterThatSendsNothingMoreLosesItsCall) {
  ServerOptions options = SmallServer();
  options.timeouts.idle = absl::Seconds(2);
  TestServer impatient(options);
  const auto client = impatient.Connect();
  ASSERT_TRUE(client->CreateHead(Request("head")).ok());
  const auto write = HalfWritten(*client);
  ExpectReadableSoon(*client);
  EXPECT_EQ(write->Finish().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Train(*client, "head", 0, 1, rng_).ok());
}

TEST_F(VersionsTest, ACheckpointOrADeletionEndsAWrite) {
  ASSERT_TRUE(client_->SaveCheckpoint("head", "one").ok());
  const auto before = client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE);
  auto write = HalfWritten(*client_);
  ASSERT_TRUE(client_->LoadCheckpoint("head/one", "").ok());
  EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), *before);
  write->Send(nullptr, Ones(kClasses / 2, kClasses));
  EXPECT_EQ(write->Finish().status().code(), kAborted);
  EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), *before);

  write = HalfWritten(*client_);
  ASSERT_TRUE(client_->DeleteHead("head").ok());
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  write->Send(nullptr, Ones(kClasses / 2, kClasses));
  EXPECT_EQ(write->Finish().status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadCode(*client_), absl::StatusCode::kOk);
}

// ---- Checkpoints ----
// Checkpoints through the service: what is saved comes back, damaged files do not.

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

TEST_F(HeadsTest, CheckpointsKeepLogitsGradientsAndLimit) {
  v1::CreateHeadRequest request = Request("small");
  request.mutable_spec()->set_logits(v1::LOGITS_RECOMPUTED);
  request.mutable_spec()->set_gradients(v1::GRADIENTS_AUTO);
  request.mutable_spec()->set_workspace_bytes(128 << 10);
  ASSERT_TRUE(client_->CreateHead(request).ok());
  ASSERT_TRUE(client_->SaveCheckpoint("small", "one").ok());
  const auto copy = client_->LoadCheckpoint("small/one", "copy");
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(copy->spec().logits(), v1::LOGITS_RECOMPUTED);
  EXPECT_EQ(copy->spec().gradients(), v1::GRADIENTS_AUTO);
  EXPECT_EQ(copy->spec().workspace_bytes(), 128u << 10);
  // A head that is there keeps its own.
  ASSERT_TRUE(client_->CreateHead(Request("plain")).ok());
  const auto plain = client_->LoadCheckpoint("small/one", "plain");
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->spec().logits(), v1::LOGITS_STORED);
  EXPECT_EQ(plain->spec().gradients(), v1::GRADIENTS_EXACT);
  EXPECT_EQ(plain->spec().workspace_bytes(), 0u);
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

// The errors name field and value.
TEST_F(HeadsTest, WrongDeletionsSayWhatIsWrong) {
  const auto expect = [&](const std::string& checkpoint, const std::string& id, absl::StatusCode code,
                          const std::string& field, const std::string& value) {
    const absl::Status status = client_->DeleteCheckpoint(checkpoint, id).status();
    EXPECT_EQ(status.code(), code) << status;
    const v1::ErrorDetail detail = wire::GetErrorDetail(status).value_or(v1::ErrorDetail());
    EXPECT_EQ(detail.field(), field);
    EXPECT_EQ(detail.value(), value);
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  expect("../up", "x", kInvalid, "checkpoint", "../up");
  expect("", "x", kInvalid, "checkpoint", "");
  expect("head/none", "x", absl::StatusCode::kNotFound, "checkpoint", "head/none");
  expect("head/none", "", kInvalid, "deletion_id", "nothing");
  expect("head/none", std::string(65, 'x'), kInvalid, "deletion_id", "65 characters");
}

// Through the service: once for an id, and the names that are left.
TEST_F(HeadsTest, CheckpointsAreDeleted) {
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  const auto saved = client_->SaveCheckpoint("head", "one");
  ASSERT_TRUE(saved.ok()) << saved.status();
  ASSERT_TRUE(client_->SaveCheckpoint("head", "two").ok());
  const auto deleted = client_->DeleteCheckpoint("head/one", "a");
  ASSERT_TRUE(deleted.ok()) << deleted.status();
  EXPECT_EQ(deleted->bytes(), saved->bytes());
  EXPECT_FALSE(deleted->repeated_call());
  ASSERT_TRUE(client_->SaveCheckpoint("head", "one").ok());
  EXPECT_TRUE(client_->DeleteCheckpoint("head/one", "a")->repeated_call());
  EXPECT_EQ(client_->ListCheckpoints("head")->checkpoints_size(), 2);
  EXPECT_EQ(client_->DeleteCheckpoint("head/two", "a").status().code(),
            absl::StatusCode::kFailedPrecondition);
  // The head does not need its checkpoints, nor they the head.
  ASSERT_TRUE(client_->DeleteHead("head").ok());
  EXPECT_TRUE(client_->DeleteCheckpoint("head/one", "b").ok());
  EXPECT_TRUE(client_->DeleteCheckpoint("head/two", "c").ok());
  EXPECT_EQ(client_->ListCheckpoints("")->checkpoints_size(), 0);
  EXPECT_EQ(client_->DeleteCheckpoint("head/two", "d").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(test::NamesInHeadFolder(server_.checkpoint_directory() + "/head").empty());
}

}  // namespace
}  // namespace lossd::app::testing::heads_test
