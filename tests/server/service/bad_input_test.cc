// SPDX-License-Identifier: Apache-2.0
// Bad loss calls; bad_input_fixture.h says what has to hold after each.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/wire/status_details.h"
#include "tests/server/service/bad_input_fixture.h"

namespace lossd::app::testing::bad_input_test {
namespace {

using ::testing::HasSubstr;

// ---- The opening message ----

TEST_F(BadInputTest, HiddenDtype) {
  ExpectInvalid(RunWith([](auto& open) { open.set_hidden_dtype(v1::DTYPE_UNSPECIFIED); }),
                "open.hidden_dtype", "0");
  ExpectInvalid(RunWith([](auto& open) { open.set_hidden_dtype(static_cast<v1::DType>(7)); }),
                "open.hidden_dtype", "7");
}

TEST_F(BadInputTest, DtypeThatDoesNotFitTheBytes) {
  ExpectInvalid(RunWith([](auto& open) { open.set_hidden_dtype(v1::DTYPE_BF16); }), "payload", "480");
}

TEST_F(BadInputTest, Reduction) {
  ExpectInvalid(RunWith([](auto& open) { open.set_reduction(v1::REDUCTION_UNSPECIFIED); }), "open.reduction",
                "0");
}

TEST_F(BadInputTest, RowRange) {
  ExpectInvalid(RunWith([](auto& open) { open.mutable_rows()->set_end(kRows + 1); }), "open.rows.end", "13");
  ExpectInvalid(RunWith([](auto& open) {
                  open.mutable_rows()->set_begin(5);
                  open.mutable_rows()->set_end(4);
                }),
                "open.rows.end", "4");
  ExpectInvalid(RunWith([](auto& open) { open.mutable_rows()->set_end(uint64_t{1} << 63); }), "open.rows.end",
                "9223372036854775808");
  ExpectInvalid(RunWith([](auto& open) { open.set_microbatch_rows(uint64_t{1} << 31); }),
                "open.microbatch_rows", "2147483648");
}

TEST_F(BadInputTest, CountsOfTargetsAndWeights) {
  ExpectInvalid(RunWith([](auto& open) { open.add_targets(1); }), "open.targets.size", "13");
  ExpectInvalid(RunWith([](auto& open) { open.clear_targets(); }), "open.targets.size", "0");
  ExpectInvalid(RunWith([](auto& open) { open.add_row_weights(1.0f); }), "open.row_weights.size", "1");
}

TEST_F(BadInputTest, Labels) {
  ExpectInvalid(RunWith([](auto& open) { open.set_targets(3, kClasses); }), "open.targets[3]", "30");
  ExpectInvalid(RunWith([](auto& open) { open.set_targets(11, -1); }), "open.targets[11]", "-1");
  ExpectInvalid(RunWith([](auto& open) { open.set_targets(0, std::numeric_limits<int32_t>::max()); }),
                "open.targets[0]", "2147483647");
}

TEST_F(BadInputTest, Numbers) {
  ExpectInvalid(RunWith([](auto& open) { open.mutable_options()->set_label_smoothing(1.5f); }),
                "open.options.label_smoothing", "1.5");
  ExpectInvalid(RunWith([](auto& open) { open.mutable_options()->set_softcap(-1.0f); }),
                "open.options.softcap", "-1");
  ExpectInvalid(RunWith([](auto& open) { open.mutable_options()->set_filter_epsilon(1.0f); }),
                "open.options.filter_epsilon", "1");
  ExpectInvalid(RunWith([](auto& open) { open.mutable_options()->set_sample_threshold(0.0f); }),
                "open.options.sample_threshold", "0");
  ExpectInvalid(RunWith([](auto& open) { open.mutable_options()->set_max_gradient_error(-0.5f); }),
                "open.options.max_gradient_error", "-0.5");
  ExpectInvalid(
      RunWith([](auto& open) { open.mutable_options()->set_gradients(static_cast<v1::Gradients>(17)); }),
      "open.options.gradients", "17");
  ExpectInvalid(RunWith([](auto& open) { open.set_normalizer(NAN); }), "open.normalizer", "nan");
  ExpectInvalid(RunWith([](auto& open) { open.set_grad_output(INFINITY); }), "open.grad_output", "inf");
  ExpectInvalid(RunWith([](auto& open) {
                  for (int64_t i = 0; i < kRows; ++i) open.add_row_weights(i == 5 ? NAN : 1.0f);
                }),
                "open.row_weights[5]", "nan");
  ExpectInvalid(RunWith([](auto& open) { open.mutable_options()->set_use_class_weights(true); }),
                "open.options.use_class_weights", "true");
}

TEST_F(BadInputTest, UnknownHead) {
  ExpectError(RunWith([](auto& open) { open.set_head("missing"); }), absl::StatusCode::kNotFound, "open.head",
              "missing");
}

TEST_F(BadInputTest, StepThatIsNotOpen) {
  const absl::Status status = RunWith([](auto& open) { open.set_step(5); });
  ExpectError(status, absl::StatusCode::kFailedPrecondition, "open.step", "5");
  const auto detail = wire::GetErrorDetail(status);
  ASSERT_TRUE(detail.has_value() && detail->has_current_step());
  EXPECT_EQ(detail->current_step(), 0u);
  ExpectInvalid(RunWith([](auto& open) { open.clear_step(); }), "open.step", "nothing");
}

TEST_F(BadInputTest, IncarnationOfAnotherProcess) {
  const uint64_t own = server_.server().incarnation();
  EXPECT_TRUE(RunWith([own](auto& open) {
                open.set_incarnation(own);
                open.set_accumulate_gradients(false);
              }).ok());
  const uint64_t other = 0xabcdef;
  ExpectError(RunWith([](auto& open) { open.set_incarnation(other); }), absl::StatusCode::kFailedPrecondition,
              "open.incarnation", "0000000000abcdef");
  const auto stream = client_->OpenLoss();
  v1::ComputeLossRequest backward;
  backward.mutable_backward()->set_incarnation(other);
  stream->Send(backward);
  ExpectError(stream->Finish().status, absl::StatusCode::kFailedPrecondition, "backward.incarnation",
              "0000000000abcdef");
  v1::ApplyStepRequest step;
  step.set_head("head");
  step.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.1);
  step.set_incarnation(other);
  ExpectError(client_->ApplyStep(step).status(), absl::StatusCode::kFailedPrecondition, "incarnation",
              "0000000000abcdef");
  EXPECT_EQ(client_->DescribeHead("head")->state().step(), 0u);
  v1::OpenGradient gradient;
  gradient.set_head("head");
  gradient.set_param(v1::PARAM_WEIGHT);
  gradient.set_incarnation(other);
  ExpectError(client_->AddGradient(gradient, "").status(), absl::StatusCode::kFailedPrecondition,
              "open.incarnation", "0000000000abcdef");
}

TEST_F(BadInputTest, SameMicrobatchWithOtherContents) {
  const absl::Status status = RunWith([](auto& open) {
    open.set_microbatch_id(1);
    open.set_targets(0, 20);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

// ---- The order of messages ----

TEST_F(BadInputTest, SliceBeforeOpen) {
  const auto stream = client_->OpenLoss();
  stream->SendSlice(0, kRows, Payload(0, kRows));
  ExpectInvalid(stream->Finish().status, "slice", "first");
}

TEST_F(BadInputTest, OpenTwice) {
  ExpectInvalid(RunThen([&](LossStream& stream) { stream.SendOpen(GoodOpen(8)); }).status, "open", "second");
}

TEST_F(BadInputTest, PayloadWithOpen) {
  v1::ComputeLossRequest request;
  *request.mutable_open() = GoodOpen();
  request.set_payload("12345");
  const auto stream = client_->OpenLoss();
  stream->Send(request);
  ExpectInvalid(stream->Finish().status, "payload", "5 bytes");
}

TEST_F(BadInputTest, MessageWithoutKind) {
  ExpectInvalid(RunThen([](LossStream& stream) { stream.SendRaw(""); }).status, "kind", "neither");
}

TEST_F(BadInputTest, BytesThatAreNoMessage) {
  const absl::Status status =
      RunThen([](LossStream& stream) { stream.SendRaw("\xff\xff\xff garbage"); }).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("ComputeLossRequest"));
}

TEST_F(BadInputTest, HalfCloseBeforeOpen) {
  ExpectInvalid(client_->OpenLoss()->Finish().status, "open", "nothing");
}

// Rows of the microbatch are pending then: another call brings the rest, so nothing was accumulated twice.
TEST_F(BadInputTest, HalfCloseWithRowsMissing) {
  const LossAnswers answers = RunThen([](LossStream&) {});
  ExpectInvalid(answers.status, "slice.rows", "row 0");
  EXPECT_FALSE(answers.summary.has_value());
}

// ---- Slices ----

TEST_F(BadInputTest, SliceRows) {
  ExpectInvalid(RunThen([&](LossStream& s) { s.SendSlice(4, kRows + 1, Payload(4, kRows)); }).status,
                "slice.rows", "[4, 13)");
  ExpectInvalid(RunThen([&](LossStream& s) { s.SendSlice(3, 3, ""); }).status, "slice.rows", "[3, 3)");
  ExpectInvalid(RunThen([&](LossStream& s) { s.SendSlice(5, 3, Payload(0, 2)); }).status, "slice.rows.end",
                "3");
  ExpectInvalid(RunThen([&](LossStream& s) { s.SendSlice(-1, 3, Payload(0, 4)); }).status, "slice.rows.end",
                "3");
}

TEST_F(BadInputTest, SliceByteCount) {
  ExpectInvalid(RunThen([&](LossStream& s) { s.SendSlice(0, kRows, Payload(0, kRows - 1)); }).status,
                "payload", "440");
  ExpectInvalid(RunThen([&](LossStream& s) { s.SendSlice(0, kRows, ""); }).status, "payload", "0");
}

TEST_F(BadInputTest, SliceBeyondTheLimit) {
  const std::string big(static_cast<size_t>(SmallServer().slice_bytes) + 4, '\0');
  ExpectInvalid(RunThen([&](LossStream& s) { s.SendSlice(0, kRows, big); }).status, "payload",
                absl::StrCat(big.size()));
}

TEST_F(BadInputTest, OversizedMessage) {
  const auto description = client_->GetServer();
  ASSERT_TRUE(description.ok());
  const std::string huge(description->max_message_bytes() + 1, '\0');
  const absl::Status status = RunThen([&](LossStream& s) { s.SendSlice(0, kRows, huge); }).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(description->max_message_bytes())));
}

// The rows that came before are computed, but the second slice spoils the call before the first can be
// accumulated only if it is still queued: use a microbatch whose first rows carry no target.
TEST_F(BadInputTest, DuplicateRows) {
  v1::OpenMicrobatch open = GoodOpen();
  for (int i = 0; i < 4; ++i) open.set_targets(i, -100);
  const auto stream = client_->OpenLoss();
  stream->SendOpen(open);
  stream->SendSlice(0, 4, Payload(0, 4));
  stream->SendSlice(3, 6, Payload(3, 6));
  ExpectInvalid(stream->Finish().status, "slice.rows", "[3, 6)");
}

TEST_F(BadInputTest, RowsThatAreNotFinite) {
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> values = hidden_;
    values[5 * kHidden + 3] = poison;
    const LossAnswers answers = RunThen([&](LossStream& s) { s.SendSlice(0, kRows, Bytes(values)); });
    EXPECT_EQ(answers.status.code(), absl::StatusCode::kOutOfRange) << answers.status;
    EXPECT_THAT(std::string(answers.status.message()), HasSubstr("row 5"));
    EXPECT_FALSE(answers.summary.has_value());
  }
}

// ---- Calls that end early ----

TEST_F(BadInputTest, StreamCutInTheMiddle) {
  v1::OpenMicrobatch open = GoodOpen();
  for (int i = 0; i < 4; ++i) open.set_targets(i, -100);
  const auto stream = client_->OpenLoss();
  stream->SendOpen(open);
  stream->SendSlice(0, 4, Payload(0, 4));
  ASSERT_TRUE(stream->ReadOne());  // accepted
  ASSERT_TRUE(stream->ReadOne());  // the slice
  stream->Cancel();
  EXPECT_EQ(stream->Finish().status.code(), absl::StatusCode::kCancelled);
}

TEST_F(BadInputTest, ConnectionCutInTheMiddle) {
  {
    const auto other = server_.Connect();
    const auto stream = other->OpenLoss();
    stream->SendOpen(GoodOpen());
    ASSERT_TRUE(stream->ReadOne());
  }
  ExpectIdle();
}

TEST_F(BadInputTest, Deadline) {
  const auto stream = client_->OpenLoss(absl::Milliseconds(150));
  stream->SendOpen(GoodOpen());
  ASSERT_TRUE(stream->ReadOne());
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_EQ(stream->Finish().status.code(), absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace lossd::app::testing::bad_input_test
