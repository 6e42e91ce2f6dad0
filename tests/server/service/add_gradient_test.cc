// SPDX-License-Identifier: Apache-2.0
// Gradients from outside (tied embeddings) and skipped steps through the service.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/wire/status_details.h"
#include "tests/kernels/problem.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/test_server.h"

namespace lossd::app::testing::add_gradient_test {
namespace {

using kernels::DType;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kHidden = 11;
constexpr uint64_t kClasses = 29;

class AddGradientTest : public ::testing::Test {
 protected:
  AddGradientTest() : AddGradientTest(SmallServer()) {}
  explicit AddGradientTest(const ServerOptions& options) : server_(options) {}

  void SetUp() override {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("head");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(kClasses);
    request.mutable_spec()->set_bias(true);
    const auto head = client_->CreateHead(request);
    ASSERT_TRUE(head.ok()) << head.status();
    for (float& value : values_) value = kernels::testing::Uniform(rng_, -1.0f, 1.0f);
  }

  static v1::OpenGradient Open(uint64_t id, uint64_t step = 0) {
    v1::OpenGradient open;
    open.set_head("head");
    open.set_step(step);
    open.set_contribution_id(id);
    open.set_param(v1::PARAM_WEIGHT);
    return open;
  }
  std::vector<float> Gradient() {
    return client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_GRADIENT).value_or(std::vector<float>());
  }
  absl::StatusOr<v1::ApplyStepResponse> Apply(uint64_t step, bool skip, std::vector<uint64_t> expected = {}) {
    v1::ApplyStepRequest request;
    request.set_head("head");
    request.set_step(step);
    request.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01);
    request.set_skip_non_finite(skip);
    request.mutable_expected_microbatches()->Add(expected.begin(), expected.end());
    return client_->ApplyStep(request);
  }
  // Makes the gradient overflow: each value is finite, their sum is not.
  void Overflow(uint64_t step) {
    const std::vector<float> huge(kHidden, 3e38f);
    for (uint64_t id : {100, 101}) {
      v1::OpenGradient open = Open(id, step);
      open.mutable_contribution_rows()->set_end(1);
      const auto added = client_->AddGradient(open, Bytes(huge));
      ASSERT_TRUE(added.ok()) << added.status();
    }
  }

  TestServer server_;
  std::unique_ptr<TestClient> client_ = server_.Connect();
  kernels::testing::Rng rng_ = kernels::testing::FreshRng();
  std::vector<float> values_ = std::vector<float>(kClasses * kHidden);
};

TEST_F(AddGradientTest, AddsAndReadsBackInSlicesOfEveryType) {
  std::vector<float> want(values_.size());
  uint64_t id = 0;
  for (const auto& [dtype, wire] : {std::pair(DType::kFloat32, v1::DTYPE_FP32),
                                    {DType::kFloat16, v1::DTYPE_FP16},
                                    {DType::kBFloat16, v1::DTYPE_BF16}}) {
    v1::OpenGradient open = Open(id++);
    open.set_dtype(wire);
    open.set_scale(-0.25f);
    const std::vector<uint8_t> bytes = kernels::testing::Encode(dtype, values_);
    const size_t row_bytes = kHidden * kernels::SizeOf(dtype);
    const auto added = client_->AddGradient(open, std::string(bytes.begin(), bytes.end()), 3 * row_bytes);
    ASSERT_TRUE(added.ok()) << added.status();
    EXPECT_EQ(added->added_rows(), kClasses);
    EXPECT_EQ(added->repeated_rows(), 0u);
    EXPECT_EQ(added->rows().end(), kClasses);
    const std::vector<float> sent = kernels::testing::Decode(dtype, bytes);
    for (size_t i = 0; i < want.size(); ++i) want[i] += -0.25f * sent[i];
  }
  EXPECT_EQ(Gradient(), want);
  v1::ReadTensorRequest read;
  read.set_head("head");
  read.set_param(v1::PARAM_WEIGHT);
  read.set_role(v1::ROLE_GRADIENT);
  read.set_dtype(v1::DTYPE_BF16);
  read.mutable_rows()->set_begin(3);
  read.mutable_rows()->set_end(20);
  const auto got = client_->ReadTensor(read);
  ASSERT_TRUE(got.ok()) << got.status();
  const auto rows = absl::MakeConstSpan(want).subspan(3 * kHidden, 17 * kHidden);
  const std::vector<uint8_t> encoded = kernels::testing::Encode(DType::kBFloat16, rows);
  EXPECT_EQ(*got, std::string(encoded.begin(), encoded.end()));
}

TEST_F(AddGradientTest, ResentRowsAreAcknowledgedAndNotAdded) {
  v1::OpenGradient part = Open(7);
  part.mutable_rows()->set_end(10);
  const std::string payload = Bytes(values_);
  const size_t row_bytes = kHidden * sizeof(float);
  ASSERT_TRUE(client_->AddGradient(part, payload.substr(0, 10 * row_bytes), 4 * row_bytes).ok());
  const auto incomplete = Apply(0, false, {7});
  EXPECT_EQ(incomplete.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(wire::GetErrorDetail(incomplete.status())->missing(),
              ElementsAre("contribution 7: rows [10, 29) of [0, 29)"));
  const auto whole = client_->AddGradient(Open(7), payload, 5 * row_bytes);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->added_rows(), 19u);
  EXPECT_EQ(whole->repeated_rows(), 10u);
  EXPECT_EQ(Gradient(), values_);
  EXPECT_EQ(client_->DescribeHead("head")->step_contributions(), 1u);

  std::string changed = payload;
  changed[2 * row_bytes] = static_cast<char>(changed[2 * row_bytes] ^ 1);
  const absl::Status other = client_->AddGradient(Open(7), changed).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(wire::GetErrorDetail(other)->field(), "payload row 2");
  EXPECT_EQ(Gradient(), values_);

  const auto applied = Apply(0, false, {7});
  ASSERT_TRUE(applied.ok()) << applied.status();
  EXPECT_EQ(applied->contributions(), 1u);
  const absl::Status closed = client_->AddGradient(Open(7), payload).status();
  EXPECT_EQ(closed.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(wire::GetErrorDetail(closed)->current_step(), 1u);
}

TEST_F(AddGradientTest, BadCallsNameFieldAndValue) {
  const auto field_of = [&](const v1::OpenGradient& open, absl::string_view payload) {
    const absl::Status status = client_->AddGradient(open, payload).status();
    EXPECT_FALSE(status.ok());
    const auto detail = wire::GetErrorDetail(status);
    return detail.has_value() ? detail->field() : absl::StrCat("no detail: ", status.message());
  };
  const std::string payload = Bytes(values_);
  v1::OpenGradient open = Open(1);
  open.set_head("missing");
  EXPECT_EQ(field_of(open, payload), "open.head");
  open = Open(1);
  open.set_param(v1::PARAM_NORM_GAIN);
  EXPECT_EQ(field_of(open, payload), "open.param");
  open.set_param(v1::PARAM_UNSPECIFIED);
  EXPECT_EQ(field_of(open, payload), "open.param");
  open = Open(1);
  open.set_dtype(static_cast<v1::DType>(77));
  EXPECT_EQ(field_of(open, payload), "open.dtype");
  open = Open(1);
  open.set_scale(std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(field_of(open, payload), "open.scale");
  open = Open(1);
  open.mutable_rows()->set_begin(5);
  open.mutable_rows()->set_end(30);
  EXPECT_EQ(field_of(open, payload), "open.rows");
  EXPECT_EQ(field_of(Open(1), payload.substr(0, payload.size() - 4)), "payload");
  EXPECT_EQ(field_of(Open(1), payload + payload), "payload");
  std::vector<float> bad = values_;
  bad[4 * kHidden + 6] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(field_of(Open(1), Bytes(bad)), "payload row 4 column 6");
  EXPECT_THAT(Gradient(), Each(0.0f));
}

TEST_F(AddGradientTest, StepsWithANonFiniteNormAreRefusedOrSkipped) {
  const auto before = client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE);
  ASSERT_NO_FATAL_FAILURE(Overflow(0));
  const absl::Status refused = Apply(0, false).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("skip_non_finite must be set"));
  EXPECT_EQ(client_->DescribeHead("head")->state().step(), 0u);
  EXPECT_FALSE(std::isfinite(*client_->GradNorm("head"))) << "the gradients are still there";

  for (const bool repeat : {false, true}) {
    const auto skipped = Apply(0, true, {100, 101});
    ASSERT_TRUE(skipped.ok()) << skipped.status();
    EXPECT_TRUE(skipped->skipped());
    EXPECT_EQ(skipped->repeated_call(), repeat);
    EXPECT_FALSE(std::isfinite(skipped->grad_norm()));
    EXPECT_EQ(skipped->state().step(), 1u);
  }
  EXPECT_EQ(*client_->GradNorm("head"), 0.0);
  EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), *before);
  EXPECT_EQ(client_->DescribeHead("head")->updates(), 0u);
}

// The count of updates, and so AdamW's bias correction, is that of steps that updated something, also in a
// head restored from a checkpoint.
TEST_F(AddGradientTest, SkippedStepsDoNotCountInTheBiasCorrection) {
  const auto train = [&](uint64_t step) {
    EXPECT_TRUE(client_->AddGradient(Open(0, step), Bytes(values_)).ok());
    const auto applied = Apply(step, true);
    EXPECT_TRUE(applied.ok() && !applied->skipped());
  };
  train(0);
  const auto start = client_->SaveCheckpoint("head", "start");
  ASSERT_TRUE(start.ok()) << start.status();
  train(1);
  const auto want = client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE);

  ASSERT_TRUE(client_->LoadCheckpoint(start->checkpoint(), "").ok());
  ASSERT_NO_FATAL_FAILURE(Overflow(1));
  ASSERT_TRUE(Apply(1, true).ok());
  const auto skipped = client_->SaveCheckpoint("head", "skipped");
  ASSERT_TRUE(skipped.ok()) << skipped.status();
  train(2);
  EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), *want);
  EXPECT_EQ(client_->DescribeHead("head")->updates(), 2u);
  for (const std::string name : {"head", "copy"}) {  // into the head that is there, and as a new one
    const auto loaded = client_->LoadCheckpoint(skipped->checkpoint(), name);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(loaded->state().step(), 2u);
    EXPECT_EQ(loaded->updates(), 1u);
  }
  train(2);
  EXPECT_EQ(*client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE), *want);
}

ServerOptions DeterministicServer() {
  ServerOptions options = SmallServer();
  options.deterministic = true;
  return options;
}

class OrderedAddGradientTest : public AddGradientTest {
 protected:
  OrderedAddGradientTest() : AddGradientTest(DeterministicServer()) {}
};

// More calls wait than the service has workers, and the one they wait for comes last.
TEST_F(OrderedAddGradientTest, WaitingContributionsHoldNoWorker) {
  constexpr uint64_t kCalls = 20;
  std::vector<std::thread> calls;
  for (uint64_t id = 1; id < kCalls; ++id) {
    calls.emplace_back([this, id] {
      const auto added = client_->AddGradient(Open(id), Bytes(values_));
      EXPECT_TRUE(added.ok()) << added.status();
    });
  }
  while (server_.server().stats().waiting_slices < static_cast<int64_t>(kCalls) - 1)
    absl::SleepFor(absl::Milliseconds(2));
  EXPECT_EQ(client_->DescribeHead("head")->step_contributions(), 0u);
  EXPECT_THAT(Gradient(), Each(0.0f));
  ASSERT_TRUE(client_->AddGradient(Open(0), Bytes(values_)).ok());
  for (std::thread& call : calls) call.join();
  std::vector<float> want(values_.size());
  for (uint64_t id = 0; id < kCalls; ++id) {
    for (size_t i = 0; i < want.size(); ++i) want[i] += values_[i];
  }
  EXPECT_EQ(Gradient(), want);
}

TEST_F(OrderedAddGradientTest, AWaitingContributionEndsWithItsCall) {
  const absl::Status late =
      client_->AddGradient(Open(1), Bytes(values_), size_t{1} << 20, absl::Milliseconds(100)).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
  while (server_.server().stats().waiting_slices > 0) absl::SleepFor(absl::Milliseconds(2));
  std::thread zeroed([this] {
    const absl::Status status = client_->AddGradient(Open(2), Bytes(values_)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  });
  while (server_.server().stats().waiting_slices < 1) absl::SleepFor(absl::Milliseconds(2));
  ASSERT_TRUE(client_->ZeroGradients("head", 0).ok());
  zeroed.join();
  ASSERT_TRUE(client_->AddGradient(Open(0), Bytes(values_)).ok());
  ASSERT_TRUE(client_->AddGradient(Open(1), Bytes(values_)).ok());
}

}  // namespace
}  // namespace lossd::app::testing::add_gradient_test
