// SPDX-License-Identifier: Apache-2.0
// Bad requests about heads; bad_input_fixture.h says what has to hold after each.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "proto/wire/status_details.h"
#include "tests/server/service/bad_input_fixture.h"

namespace lossd::app::testing::bad_head_input_test {
namespace {

using ::testing::HasSubstr;

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

}  // namespace
}  // namespace lossd::app::testing::bad_head_input_test
