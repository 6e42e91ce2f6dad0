// SPDX-License-Identifier: Apache-2.0
// Heads through the service: creation, initial values, tensors, what a head's spec asks for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "tests/server/service/heads_fixture.h"

namespace lossd::app::testing::heads_test {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

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
  EXPECT_THAT(logits, HasSubstr("spec.logits must be LOGITS_STORED, LOGITS_RECOMPUTED or unspecified"));
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

}  // namespace
}  // namespace lossd::app::testing::heads_test
