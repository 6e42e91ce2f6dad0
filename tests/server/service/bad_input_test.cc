// SPDX-License-Identifier: Apache-2.0
// Tests of bad input through the service: bad loss calls, and the fields that errors name.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "proto/wire/status_details.h"
#include "tests/server/service/service_fixture.h"

// ---- Bad loss calls ----
// BadInputTest (service_fixture.h) says what has to hold after each of these calls.

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

TEST_F(BadInputTest, SingleClasses) {
  const auto with_classes = [](uint32_t count, std::vector<int32_t> classes) {
    return [=](v1::OpenMicrobatch& open) {
      open.set_class_count(count);
      open.mutable_classes()->Assign(classes.begin(), classes.end());
    };
  };
  ExpectInvalid(RunWith(with_classes(2, {1})), "open.classes", "1");
  ExpectInvalid(RunWith(with_classes(0, {1})), "open.classes", "1");
  ExpectInvalid(RunWith(with_classes(2, {1, kClasses})), "open.classes[1]", "30");
  ExpectInvalid(RunWith(with_classes(1, {-1})), "open.classes[0]", "-1");
  ExpectInvalid(RunWith(with_classes(257, std::vector<int32_t>(257, 1))), "open.class_count", "257");
  ExpectInvalid(RunWith([](auto& open) { open.set_top_k(kClasses + 1); }), "open.top_k", "31");
}

// 2^19 / (4 * 256 + 9 * 20) rows, as `accepted` says.
TEST_F(BadInputTest, RowsOfSlicesWithClasses) {
  constexpr uint64_t kMost = 435;
  v1::OpenMicrobatch open;
  open.set_head("head");
  open.set_microbatch_rows(kMost + 1);
  open.mutable_rows()->set_end(kMost + 1);
  open.set_hidden_dtype(v1::DTYPE_FP32);
  open.set_reduction(v1::REDUCTION_SUM);
  for (uint64_t i = 0; i <= kMost; ++i) open.add_targets(1);
  open.set_class_count(256);
  for (int i = 0; i < 256; ++i) open.add_classes(2);
  open.set_top_k(20);
  for (const bool too_many : {false, true}) {
    const auto stream = client_->OpenLoss();
    stream->SendOpen(open);
    const uint64_t rows = too_many ? kMost + 1 : kMost;
    stream->SendSlice(0, static_cast<int64_t>(rows), std::string(rows * kHidden * sizeof(float), '\0'));
    if (!too_many) stream->SendSlice(kMost, kMost + 1, std::string(kHidden * sizeof(float), '\0'));
    const LossAnswers answers = stream->Finish();
    if (too_many) {
      ExpectInvalid(answers.status, "slice.rows", "[0, 436)");
      continue;
    }
    ASSERT_TRUE(answers.status.ok()) << answers.status;
    EXPECT_EQ(answers.accepted->limits().max_rows(), kMost);
    EXPECT_EQ(answers.slices[0].result.class_logprobs_size(), static_cast<int>(kMost) * 256);
    EXPECT_EQ(answers.slices[0].result.top_classes_size(), static_cast<int>(kMost) * 20);
  }
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

// ---- Fields of errors ----
// Every field that a client can get wrong: the error's detail names it by its full path and repeats what was
// sent. A field of these messages that the tables below leave out has to be listed as one that takes every
// value.

namespace lossd::app::testing::error_fields_test {
namespace {

using ::testing::UnorderedElementsAreArray;

constexpr auto kNotFound = absl::StatusCode::kNotFound;
constexpr auto kFailedPrecondition = absl::StatusCode::kFailedPrecondition;
constexpr auto kAborted = absl::StatusCode::kAborted;

template <typename MessageT>
struct Case {
  std::function<void(MessageT&)> spoil;
  std::string field;  // the whole path
  std::string value;
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
};

// "rows" of "open.rows.end" and of "open.rows[3]" with the prefix "open."
std::string FirstOf(absl::string_view path, absl::string_view prefix) {
  absl::ConsumePrefix(&path, prefix);
  return std::string(path.substr(0, path.find_first_of(".[")));
}

class ErrorFieldsTest : public BadInputTest {
 protected:
  void ExpectDetail(const absl::Status& status, absl::StatusCode code, const std::string& field,
                    const std::string& value) {
    EXPECT_EQ(status.code(), code) << status;
    const v1::ErrorDetail detail = wire::GetErrorDetail(status).value_or(v1::ErrorDetail());
    EXPECT_EQ(detail.field(), field) << status;
    EXPECT_EQ(detail.value(), value) << status;
    EXPECT_EQ(detail.incarnation(), server_.server().incarnation());
  }

  // Runs each case with `call`, and checks that the cases and `free` together are all fields of MessageT.
  template <typename MessageT, typename Call>
  void Walk(absl::string_view prefix, const std::vector<Case<MessageT>>& cases, std::set<std::string> free,
            const Call& call) {
    for (const Case<MessageT>& c : cases) {
      SCOPED_TRACE(absl::StrCat(c.field, " = ", c.value));
      ExpectDetail(call(c.spoil), c.code, c.field, c.value);
      if (absl::StartsWith(c.field, prefix)) free.insert(FirstOf(c.field, prefix));
    }
    std::vector<std::string> all;
    const google::protobuf::Descriptor* descriptor = MessageT::descriptor();
    for (int i = 0; i < descriptor->field_count(); ++i) all.push_back(descriptor->field(i)->name());
    for (int i = 0; i < descriptor->real_oneof_decl_count(); ++i) {
      all.push_back(descriptor->oneof_decl(i)->name());  // named where none of it was sent
    }
    EXPECT_THAT(free, UnorderedElementsAreArray(all)) << descriptor->full_name();
  }

  void CreateHead(const std::string& name, bool frozen) {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name(name);
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(kClasses);
    request.mutable_spec()->set_frozen(frozen);
    const auto created = client_->CreateHead(request);
    EXPECT_TRUE(created.ok()) << created.status();
  }

  // A microbatch that waits for its upstream gradients.
  void Retain(const std::string& head, uint64_t id) {
    v1::OpenMicrobatch open = GoodOpen(id);
    open.set_head(head);
    open.set_reduction(v1::REDUCTION_NONE);
    open.set_want_grad_hidden(false);
    open.set_accumulate_gradients(false);
    open.set_retain(true);
    const auto stream = client_->OpenLoss();
    stream->SendOpen(open);
    stream->SendSlice(0, kRows, Payload(0, kRows));
    const absl::Status status = stream->Finish().status;
    EXPECT_TRUE(status.ok()) << status;
  }

  template <typename MessageT>
  void NameGeneration(uint64_t generation, MessageT* message) {
    message->set_incarnation(server_.server().incarnation());
    message->set_generation(generation);
  }

  const uint64_t other_incarnation_ = 0xabcdef;
  const std::string other_incarnation_text_ = "0000000000abcdef";
};

// So many soft targets a row, all of them `place` with this weight.
void SetSoftTargets(v1::Rest rest, int64_t count, float weight, int32_t place, v1::OpenMicrobatch* open) {
  open->mutable_options()->set_rest(rest);
  open->set_target_count(static_cast<uint32_t>(count));
  for (int64_t i = 0; i < count * open->targets_size(); ++i) {
    open->add_target_classes(place);
    open->add_target_weights(weight);
  }
}

TEST_F(ErrorFieldsTest, HeadSpec) {
  const auto call = [&](const std::function<void(v1::HeadSpec&)>& spoil) {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("other");
    request.mutable_spec()->set_hidden_size(4);
    request.mutable_spec()->set_vocab_size(4);
    spoil(*request.mutable_spec());
    return client_->CreateHead(request).status();
  };
  using Spec = v1::HeadSpec;
  Walk<Spec>(
      "spec.",
      {{[](Spec& s) { s.set_name("a/b"); }, "spec.name", "a/b"},
       {[](Spec& s) { s.set_name("head"); }, "spec.name", "head", absl::StatusCode::kAlreadyExists},
       {[](Spec& s) { s.set_hidden_size(0); }, "spec.hidden_size", "0"},
       {[](Spec& s) { s.set_hidden_size(20000); }, "spec.hidden_size",
        "20000"},  // a row is more than a slice
       {[](Spec& s) { s.set_hidden_size(uint64_t{1} << 63); }, "spec.hidden_size", "9223372036854775808"},
       {[](Spec& s) { s.set_vocab_size(0); }, "spec.vocab_size", "0"},
       {[](Spec& s) { s.set_vocab_size(uint64_t{1} << 63); }, "spec.vocab_size", "9223372036854775808"},
       {[](Spec& s) { s.set_norm(static_cast<v1::Norm>(9)); }, "spec.norm", "9"},
       {[](Spec& s) { s.set_norm_epsilon(-1.0f); }, "spec.norm_epsilon", "-1"},
       {[](Spec& s) { s.set_compute_dtype(static_cast<v1::DType>(9)); }, "spec.compute_dtype", "9"},
       {[](Spec& s) { s.set_optimizer_state(static_cast<v1::OptimizerState>(9)); }, "spec.optimizer_state",
        "9"},
       {[](Spec& s) { s.set_logits(static_cast<v1::Logits>(17)); }, "spec.logits", "17"},
       {[](Spec& s) { s.set_gradients(static_cast<v1::Gradients>(17)); }, "spec.gradients", "17"},
       {[](Spec& s) { s.set_split(static_cast<v1::Split>(17)); }, "spec.split", "17"},
       {[](Spec& s) { s.add_shares(0); }, "spec.shares", "0"},
       {[](Spec& s) { s.add_shares(uint32_t{1} << 31); }, "spec.shares[0]", "2147483648"},
       {[](Spec& s) { s.set_replicas(65537); }, "spec.replicas", "65537"},
       {[](Spec& s) { s.set_residency(static_cast<v1::Residency>(9)); }, "spec.residency", "9"},
       {[](Spec& s) { s.set_residency(v1::RESIDENCY_HOST); }, "spec.residency", "host"},
       {[](Spec& s) { s.add_class_list(5); }, "spec.class_list", "1 entries"},
       {[](Spec& s) { s.add_class_list(uint32_t{1} << 31); }, "spec.class_list[0]", "2147483648"},
       {[](Spec& s) { s.set_full_vocab_size(9); }, "spec.full_vocab_size", "9"},
       {[](Spec& s) { s.set_workspace_bytes(uint64_t{1} << 63); }, "spec.workspace_bytes",
        "9223372036854775808"}},
      {"bias", "class_weights", "frozen"}, call);
}

TEST_F(ErrorFieldsTest, LossOptions) {
  const auto call = [&](const std::function<void(v1::LossOptions&)>& spoil) {
    return RunWith([&](v1::OpenMicrobatch& open) { spoil(*open.mutable_options()); });
  };
  using Options = v1::LossOptions;
  Walk<Options>(
      "open.options.",
      {{[](Options& o) { o.set_label_smoothing(1.5f); }, "open.options.label_smoothing", "1.5"},
       {[](Options& o) { o.set_z_loss(-0.5f); }, "open.options.z_loss", "-0.5"},
       {[](Options& o) { o.set_softcap(-1.0f); }, "open.options.softcap", "-1"},
       {[](Options& o) { o.set_logit_scale(0.0f); }, "open.options.logit_scale", "0"},
       {[](Options& o) { o.set_use_class_weights(true); }, "open.options.use_class_weights", "true"},
       {[](Options& o) { o.set_gradients(static_cast<v1::Gradients>(17)); }, "open.options.gradients", "17"},
       {[](Options& o) { o.set_filter_epsilon(1.0f); }, "open.options.filter_epsilon", "1"},
       {[](Options& o) { o.set_sample_threshold(2.0f); }, "open.options.sample_threshold", "2"},
       {[](Options& o) { o.set_max_gradient_error(NAN); }, "open.options.max_gradient_error", "nan"},
       {[](Options& o) { o.set_rest(static_cast<v1::Rest>(7)); }, "open.options.rest", "7"},
       {[](Options& o) {
          o.set_rest(v1::REST_NONE);
          o.set_use_class_weights(true);
        },
        "open.options.use_class_weights", "true"},
       {[](Options& o) {
          o.mutable_objective()->set_kind(v1::OBJECTIVE_DFT);
          o.set_label_smoothing(0.5f);
        },
        "open.options.label_smoothing", "0.5"},
       {[](Options& o) { o.mutable_objective()->set_entropy_bonus(1.0f); },
        "open.options.objective.entropy_bonus", "1"},
       {[](Options& o) { o.mutable_distillation()->set_teacher("teacher"); },
        "open.options.distillation.divergence", "0"}},
      {"ignore_index", "refuse_unlisted"}, call);
}

TEST_F(ErrorFieldsTest, Distillation) {
  const auto call = [&](const std::function<void(v1::Distillation&)>& spoil) {
    return RunWith([&](v1::OpenMicrobatch& open) {
      v1::Distillation& distillation = *open.mutable_options()->mutable_distillation();
      distillation.set_teacher("teacher");
      distillation.set_divergence(v1::DIVERGENCE_JENSEN_SHANNON);
      spoil(distillation);
    });
  };
  using Distillation = v1::Distillation;
  const std::string path = "open.options.distillation.";
  Walk<Distillation>(
      path,
      {{[](Distillation& d) { d.set_teacher("../x"); }, path + "teacher", "../x"},
       {[](Distillation& d) { d.set_divergence(static_cast<v1::Divergence>(17)); }, path + "divergence",
        "17"},
       {[](Distillation& d) { d.set_beta(1.0f); }, path + "beta", "1"},
       {[](Distillation& d) { d.set_temperature(0.0f); }, path + "temperature", "0"},
       {[](Distillation& d) { d.set_weight(-1.0f); }, path + "weight", "-1"},
       {[](Distillation& d) { d.set_target_weight(NAN); }, path + "target_weight", "nan"},
       {[](Distillation& d) { d.set_teacher_logit_scale(0.0f); }, path + "teacher_logit_scale", "0"},
       {[](Distillation& d) { d.set_teacher_softcap(-1.0f); }, path + "teacher_softcap", "-1"}},
      {}, call);
  EXPECT_FALSE(RunWith([](v1::OpenMicrobatch& open) {
                 open.mutable_options()->mutable_objective()->set_kind(v1::OBJECTIVE_DFT);
                 open.mutable_options()->mutable_distillation()->set_teacher("teacher");
                 open.mutable_options()->mutable_distillation()->set_divergence(v1::DIVERGENCE_FORWARD_KL);
               }).ok());
}

TEST_F(ErrorFieldsTest, Objective) {
  const auto call = [&](const std::function<void(v1::Objective&)>& spoil) {
    return RunWith([&](v1::OpenMicrobatch& open) {
      open.mutable_options()->mutable_objective()->set_kind(v1::OBJECTIVE_PPO);
      for (int64_t i = 0; i < kRows; ++i) open.add_advantages(1.0f);
      for (int64_t i = 0; i < kRows; ++i) open.add_old_logprobs(-1.0f);
      spoil(*open.mutable_options()->mutable_objective());
    });
  };
  using Objective = v1::Objective;
  const std::string path = "open.options.objective.";
  Walk<Objective>(
      path,
      {{[](Objective& o) { o.set_kind(static_cast<v1::ObjectiveKind>(17)); }, path + "kind", "17"},
       {[](Objective& o) { o.set_clip_low(1.5f); }, path + "clip_low", "1.5"},
       {[](Objective& o) { o.set_clip_high(-0.5f); }, path + "clip_high", "-0.5"},
       {[](Objective& o) {
          o.set_kind(v1::OBJECTIVE_REINFORCE);
          o.set_clip_high(0.5f);
        },
        path + "clip_high", "0.5"},
       {[](Objective& o) { o.set_dual_clip(0.5f); }, path + "dual_clip", "0.5"},
       {[](Objective& o) {
          o.set_kind(v1::OBJECTIVE_CISPO);
          o.set_dual_clip(3.0f);
        },
        path + "dual_clip", "3"},
       {[](Objective& o) { o.set_kl(static_cast<v1::KlEstimator>(9)); }, path + "kl", "9"},
       {[](Objective& o) { o.set_kl_coef(-1.0f); }, path + "kl_coef", "-1"},
       {[](Objective& o) { o.set_entropy_bonus(NAN); }, path + "entropy_bonus", "nan"},
       // What comes with the rows follows from the objective.
       {[](Objective& o) { o.set_kl_coef(0.5f); }, "open.ref_logprobs", "0"},
       {[](Objective& o) { o.set_kind(v1::OBJECTIVE_REINFORCE); }, "open.old_logprobs", "12"},
       {[](Objective& o) { o.set_kind(v1::OBJECTIVE_DFT); }, "open.advantages", "12"},
       {[](Objective& o) { o.Clear(); }, "open.advantages", "12"}},
      {}, call);
}

TEST_F(ErrorFieldsTest, OpenMicrobatch) {
  CreateHead("frozen", /*frozen=*/true);
  using Open = v1::OpenMicrobatch;
  Walk<Open>(
      "open.",
      {{[](Open& o) { o.set_head("x must be y, got z"); }, "open.head", "x must be y, got z", kNotFound},
       {[](Open& o) { o.set_run("\x01"); }, "open.run", "a character that is not printable"},
       {[](Open& o) { o.set_step(5); }, "open.step", "5", kFailedPrecondition},
       {[](Open& o) { o.clear_step(); }, "open.step", "nothing"},
       {[](Open& o) {
          o.set_microbatch_id(1);
          o.set_targets(0, 20);
        },
        "open.microbatch_id", "1", kFailedPrecondition},
       {[](Open& o) {
          o.set_microbatch_id(1);
          o.set_grad_output(3.0f);
        },
        "open.microbatch_id", "1", kFailedPrecondition},
       {[](Open& o) { o.set_microbatch_rows(uint64_t{1} << 31); }, "open.microbatch_rows", "2147483648"},
       {[](Open& o) { o.mutable_rows()->set_end(13); }, "open.rows.end", "13"},
       {[](Open& o) { o.set_hidden_dtype(static_cast<v1::DType>(7)); }, "open.hidden_dtype", "7"},
       {[](Open& o) { o.set_hidden_size(9999); }, "open.hidden_size", "9999"},
       {[](Open& o) { o.mutable_options()->set_softcap(-1.0f); }, "open.options.softcap", "-1"},
       {[](Open& o) { o.set_reduction(static_cast<v1::Reduction>(7)); }, "open.reduction", "7"},
       {[](Open& o) { o.set_reduction(v1::REDUCTION_NONE); }, "open.reduction", "none"},
       {[](Open& o) { o.set_normalizer(NAN); }, "open.normalizer", "nan"},
       {[](Open& o) {
          o.set_reduction(v1::REDUCTION_SUM);
          o.set_normalizer(2.0);
        },
        "open.normalizer", "2"},
       {[](Open& o) { o.set_grad_output(-INFINITY); }, "open.grad_output", "-inf"},
       {[](Open& o) { o.set_head("frozen"); }, "open.accumulate_gradients", "true", kFailedPrecondition},
       {[](Open& o) { o.set_targets(3, kClasses); }, "open.targets[3]", "30"},
       {[](Open& o) { o.add_targets(1); }, "open.targets.size", "13"},
       {[](Open& o) { o.add_row_weights(1.0f); }, "open.row_weights.size", "1"},
       {[](Open& o) {
          for (int64_t i = 0; i < kRows; ++i) o.add_row_weights(i == 5 ? NAN : 1.0f);
        },
        "open.row_weights[5]", "nan"},
       {[](Open& o) { o.add_advantages(1.0f); }, "open.advantages.size", "1"},
       {[](Open& o) {
          o.mutable_options()->mutable_objective()->set_kind(v1::OBJECTIVE_REINFORCE);
          for (int64_t i = 0; i < kRows; ++i) o.add_advantages(i == 7 ? INFINITY : 1.0f);
        },
        "open.advantages[7]", "inf"},
       {[](Open& o) { o.add_old_logprobs(1.0f); }, "open.old_logprobs.size", "1"},
       {[](Open& o) { o.add_ref_logprobs(1.0f); }, "open.ref_logprobs.size", "1"},
       {[](Open& o) {
          for (int64_t i = 0; i < kRows; ++i) o.add_ref_logprobs(1.0f);
        },
        "open.ref_logprobs", "12"},
       {[](Open& o) {
          o.mutable_options()->mutable_objective()->set_kind(v1::OBJECTIVE_DFT);
          o.set_reduction(v1::REDUCTION_NONE);
          o.set_accumulate_gradients(false);
          o.set_want_grad_hidden(false);
        },
        "open.reduction", "none"},
       {[](Open& o) { o.set_class_count(257); }, "open.class_count", "257"},
       {[](Open& o) {
          o.set_class_count(1);
          o.add_classes(kClasses);
        },
        "open.classes[0]", "30"},
       {[](Open& o) { o.mutable_options()->set_rest(static_cast<v1::Rest>(7)); }, "open.options.rest", "7"},
       {[](Open& o) { o.set_target_count(2); }, "open.target_count", "2"},
       {[](Open& o) { o.add_target_classes(1); }, "open.target_classes", "1"},
       {[](Open& o) { o.add_target_weights(1.0f); }, "open.target_weights", "1"},
       {[](Open& o) { SetSoftTargets(v1::REST_NONE, 0, 0.0f, 0, &o); }, "open.target_count", "0"},
       {[](Open& o) { SetSoftTargets(v1::REST_NONE, kClasses + 1, 0.01f, 0, &o); }, "open.target_count",
        "31"},
       {[](Open& o) { o.set_top_k(kClasses + 1); }, "open.top_k", "31"},
       {[](Open& o) { o.set_embedding(v1::EMBEDDING_ROWS); }, "open.reduction", "mean"},
       {[](Open& o) { o.set_embedding(static_cast<v1::Embedding>(3)); }, "open.embedding", "3"},
       {[](Open& o) { o.add_depths()->set_rows(5); }, "open.depths", "5"},
       {[](Open& o) {
          o.add_depths()->set_rows(5);
          o.add_depths()->set_rows(8);
        },
        "open.depths[1].rows", "8"},
       {[](Open& o) {
          o.add_depths()->set_rows(kRows);
          o.mutable_depths(0)->set_weight(INFINITY);
        },
        "open.depths[0].weight", "inf"},
       {[](Open& o) {
          o.add_depths()->set_rows(kRows);
          o.mutable_depths(0)->set_normalizer(NAN);
        },
        "open.depths[0].normalizer", "nan"},
       {[](Open& o) {
          SetSoftTargets(v1::REST_NONE, 2, 0.5f, 3, &o);
          o.add_target_classes(1);
        },
        "open.target_classes", "25"},
       {[](Open& o) {
          SetSoftTargets(v1::REST_NONE, 2, 0.5f, 3, &o);
          o.add_target_weights(1.0f);
        },
        "open.target_weights", "25"},
       {[](Open& o) { SetSoftTargets(v1::REST_NONE, 2, 0.5f, kClasses, &o); }, "open.target_classes[0]",
        "30"},
       {[](Open& o) { SetSoftTargets(v1::REST_NONE, 2, 0.5f, -1, &o); }, "open.target_weights[0]", "0.5"},
       {[](Open& o) { SetSoftTargets(v1::REST_NONE, 2, NAN, 3, &o); }, "open.target_weights[0]", "nan"},
       {[](Open& o) { SetSoftTargets(v1::REST_NONE, 2, 3e38f, 3, &o); }, "open.target_weights[0]", "6e+38"},
       {[](Open& o) { SetSoftTargets(v1::REST_ONE_CLASS, 2, 0.75f, 3, &o); }, "open.target_weights[0]",
        "1.5"},
       {[](Open& o) { SetSoftTargets(v1::REST_RENORMALIZED, 2, 0.0f, 3, &o); }, "open.target_weights[0]",
        "0"},
       {[](Open& o) {
          SetSoftTargets(v1::REST_NONE, 2, 0.5f, 3, &o);
          o.set_top_k(3);
        },
        "open.top_k", "3"},
       {[](Open& o) {
          SetSoftTargets(v1::REST_NONE, 2, 0.5f, 3, &o);
          o.mutable_options()->set_label_smoothing(0.25f);
        },
        "open.options.label_smoothing", "0.25"},
       {[](Open& o) {
          SetSoftTargets(v1::REST_NONE, 2, 0.5f, 3, &o);
          o.mutable_options()->mutable_objective()->set_kind(v1::OBJECTIVE_DFT);
        },
        "open.options.objective", "dft"},
       {[](Open& o) {
          SetSoftTargets(v1::REST_NONE, 2, 0.5f, 3, &o);
          o.mutable_options()->mutable_distillation()->set_teacher("teacher");
          o.mutable_options()->mutable_distillation()->set_divergence(v1::DIVERGENCE_FORWARD_KL);
        },
        "open.options.distillation", "forward_kl"},
       {[](Open& o) { o.set_top_k(kClasses + 1); }, "open.top_k", "31"},
       {[](Open& o) { o.set_retain(true); }, "open.retain", "true"},
       {[](Open& o) { o.set_region("no such region"); }, "open.region", "another one",
        absl::StatusCode::kUnavailable},
       {[this](Open& o) { o.set_incarnation(other_incarnation_); }, "open.incarnation",
        other_incarnation_text_, kFailedPrecondition},
       {[](Open& o) { o.set_generation(77); }, "open.generation", "77"},
       {[this](Open& o) { NameGeneration(77777, &o); }, "open.generation", "77777", kAborted}},
      {"want_grad_hidden", "want_row_loss", "want_row_lse", "want_row_entropy", "want_row_logprob",
       "want_row_argmax"},
      [&](const std::function<void(Open&)>& spoil) { return RunWith(spoil); });
}

TEST_F(ErrorFieldsTest, OpenBackward) {
  CreateHead("frozen", /*frozen=*/true);
  Retain("frozen", 7);
  Retain("head", 7);
  const auto call = [&](const std::function<void(v1::OpenBackward&)>& spoil) {
    v1::ComputeLossRequest request;
    v1::OpenBackward& backward = *request.mutable_backward();
    backward.set_head("head");
    backward.set_step(0);
    backward.set_microbatch_id(7);
    backward.mutable_rows()->set_end(kRows);
    for (int64_t i = 0; i < kRows; ++i) backward.add_grad_loss(1.0f);
    spoil(backward);
    const auto stream = client_->OpenLoss();
    stream->Send(request);
    stream->HalfClose();
    return stream->Finish().status;
  };
  using Backward = v1::OpenBackward;
  Walk<Backward>(
      "backward.",
      {{[](Backward& b) { b.set_head("missing"); }, "backward.head", "missing", kNotFound},
       {[](Backward& b) { b.set_run("\x01"); }, "backward.run", "a character that is not printable"},
       {[](Backward& b) { b.set_step(5); }, "backward.step", "5", kFailedPrecondition},
       {[](Backward& b) {
          b.clear_step();
          b.set_accumulate_gradients(true);
        },
        "backward.step", "nothing"},
       {[](Backward& b) { b.set_microbatch_id(99); }, "backward.microbatch_id", "99", kNotFound},
       {[](Backward& b) {
          b.set_microbatch_id(7);
          b.mutable_rows()->set_end(0);
        },
        "backward.rows", "[0, 0)"},
       {[](Backward& b) { b.mutable_rows()->set_begin(20); }, "backward.rows.end", "12"},
       {[](Backward& b) {
          b.set_head("frozen");
          b.set_accumulate_gradients(true);
        },
        "backward.accumulate_gradients", "true", kFailedPrecondition},
       {[](Backward& b) { b.set_hidden_size(9999); }, "backward.hidden_size", "9999"},
       {[](Backward& b) { b.set_hidden_dtype(static_cast<v1::DType>(7)); }, "backward.hidden_dtype", "7"},
       {[](Backward& b) { b.set_hidden_dtype(v1::DTYPE_BF16); }, "backward.hidden_dtype", "bf16"},
       {[](Backward& b) { b.add_grad_loss(1.0f); }, "backward.grad_loss", "13"},
       {[](Backward& b) { b.set_grad_loss(4, NAN); }, "backward.grad_loss[4]", "nan"},
       {[](Backward& b) { b.add_grad_lse(1.0f); }, "backward.grad_lse", "1"},
       {[](Backward& b) { b.add_grad_entropy(1.0f); }, "backward.grad_entropy", "1"},
       {[this](Backward& b) { b.set_incarnation(other_incarnation_); }, "backward.incarnation",
        other_incarnation_text_, kFailedPrecondition},
       {[](Backward& b) { b.set_generation(77); }, "backward.generation", "77"},
       {[this](Backward& b) { NameGeneration(77777, &b); }, "backward.generation", "77777", kAborted},
       {[](Backward& b) {
          b.set_want_grad_hidden(true);
          b.set_region("no such region");
          b.mutable_in_region()->set_bytes(1);
        },
        "backward.region", "another one", absl::StatusCode::kUnavailable},
       {[](Backward& b) { b.mutable_in_region(); }, "backward.in_region", "a range without a region"}},
      {"want_grad_hidden"}, call);
}

TEST_F(ErrorFieldsTest, OpenGradient) {
  const auto call = [&](const std::function<void(v1::OpenGradient&)>& spoil) {
    v1::OpenGradient open;
    open.set_head("head");
    open.set_contribution_id(5);
    open.set_param(v1::PARAM_WEIGHT);
    spoil(open);
    return client_->AddGradient(open, std::string(kClasses * kHidden * sizeof(float), '\0')).status();
  };
  using Open = v1::OpenGradient;
  Walk<Open>(
      "open.",
      {{[](Open& o) { o.set_head("missing"); }, "open.head", "missing", kNotFound},
       {[](Open& o) { o.set_run("\x01"); }, "open.run", "a character that is not printable"},
       {[](Open& o) { o.set_step(5); }, "open.step", "5", kFailedPrecondition},
       {[](Open& o) { o.set_contribution_id(1); }, "open.contribution_id", "1", kFailedPrecondition},
       {[](Open& o) { o.set_param(static_cast<v1::Param>(77)); }, "open.param", "77"},
       {[](Open& o) { o.set_param(v1::PARAM_NORM_GAIN); }, "open.param", "norm.gain", kFailedPrecondition},
       {[](Open& o) { o.mutable_contribution_rows()->set_end(31); }, "open.contribution_rows", "[0, 31)"},
       {[](Open& o) { o.mutable_rows()->set_end(31); }, "open.rows", "[0, 31)"},
       {[](Open& o) { o.set_dtype(static_cast<v1::DType>(9)); }, "open.dtype", "9"},
       {[](Open& o) { o.set_scale(INFINITY); }, "open.scale", "inf"},
       {[this](Open& o) { o.set_incarnation(other_incarnation_); }, "open.incarnation",
        other_incarnation_text_, kFailedPrecondition},
       {[](Open& o) { o.set_generation(77); }, "open.generation", "77"},
       {[this](Open& o) { NameGeneration(77777, &o); }, "open.generation", "77777", kAborted}},
      {}, call);
}

class OptimizerFieldsTest : public ErrorFieldsTest {
 protected:
  absl::Status Apply(const std::function<void(v1::Optimizer&)>& spoil) {
    v1::ApplyStepRequest request;
    request.set_head("head");
    spoil(*request.mutable_optimizer());
    return client_->ApplyStep(request).status();
  }
};

TEST_F(OptimizerFieldsTest, Common) {
  using Optimizer = v1::Optimizer;
  Walk<Optimizer>(
      "optimizer.",
      {{[](Optimizer& o) { o.clear_adamw(); }, "optimizer.kind", "nothing"},
       {[](Optimizer& o) { o.mutable_adamw()->set_beta1(1.0); }, "optimizer.adamw.beta1", "1"},
       {[](Optimizer& o) {
          o.clear_adamw();
          o.mutable_sgd()->set_momentum(-1.0);
        },
        "optimizer.sgd.momentum", "-1"},
       {[](Optimizer& o) { o.set_grad_multiplier(INFINITY); }, "optimizer.grad_multiplier", "inf"}},
      {"decay_vectors", "lazy_rows"}, [&](const std::function<void(Optimizer&)>& spoil) {
        return Apply([&](Optimizer& optimizer) {
          optimizer.mutable_adamw()->set_learning_rate(0.1);
          spoil(optimizer);
        });
      });
}

TEST_F(OptimizerFieldsTest, AdamW) {
  using AdamW = v1::AdamW;
  Walk<AdamW>("optimizer.adamw.",
              {{[](AdamW& a) { a.set_learning_rate(-1); }, "optimizer.adamw.learning_rate", "-1"},
               {[](AdamW& a) { a.set_beta1(1.0); }, "optimizer.adamw.beta1", "1"},
               {[](AdamW& a) { a.set_beta2(-0.5); }, "optimizer.adamw.beta2", "-0.5"},
               {[](AdamW& a) { a.set_epsilon(NAN); }, "optimizer.adamw.epsilon", "nan"},
               {[](AdamW& a) { a.set_weight_decay(-2); }, "optimizer.adamw.weight_decay", "-2"}},
              {}, [&](const std::function<void(AdamW&)>& spoil) {
                return Apply([&](v1::Optimizer& optimizer) { spoil(*optimizer.mutable_adamw()); });
              });
}

TEST_F(OptimizerFieldsTest, Sgd) {
  using Sgd = v1::Sgd;
  Walk<Sgd>("optimizer.sgd.",
            {{[](Sgd& s) { s.set_learning_rate(-1); }, "optimizer.sgd.learning_rate", "-1"},
             {[](Sgd& s) { s.set_momentum(-0.5); }, "optimizer.sgd.momentum", "-0.5"},
             {[](Sgd& s) { s.set_nesterov(true); }, "optimizer.sgd.momentum", "0"},
             {[](Sgd& s) { s.set_dampening(NAN); }, "optimizer.sgd.dampening", "nan"},
             {[](Sgd& s) { s.set_weight_decay(-2); }, "optimizer.sgd.weight_decay", "-2"}},
            {"nesterov"}, [&](const std::function<void(Sgd&)>& spoil) {
              return Apply([&](v1::Optimizer& optimizer) { spoil(*optimizer.mutable_sgd()); });
            });
}

TEST_F(ErrorFieldsTest, OtherCalls) {
  v1::ReadTensorRequest read;
  read.set_head("missing");
  read.set_param(v1::PARAM_WEIGHT);
  ExpectDetail(client_->ReadTensor(read).status(), kNotFound, "head", "missing");
  v1::OpenTensor write;
  write.set_head("missing");
  write.set_param(v1::PARAM_WEIGHT);
  ExpectDetail(client_->WriteTensor(write, ""), kNotFound, "open.head", "missing");
  ExpectDetail(client_->DescribeHead("missing").status(), kNotFound, "head", "missing");
  ExpectDetail(client_->DeleteHead("missing"), kNotFound, "head", "missing");
  ExpectDetail(client_->ZeroGradients("head", 4), kFailedPrecondition, "step", "4");
  ExpectDetail(client_->SaveCheckpoint("missing", "").status(), kNotFound, "head", "missing");
  ExpectDetail(client_->SaveCheckpoint("head", "../up").status(), absl::StatusCode::kInvalidArgument, "name",
               "../up");
  ExpectDetail(client_->ListCheckpoints("../up").status(), absl::StatusCode::kInvalidArgument, "head",
               "../up");
  ExpectDetail(client_->LoadCheckpoint("../up", "").status(), absl::StatusCode::kInvalidArgument,
               "checkpoint", "../up");
  ExpectDetail(client_->LoadCheckpoint("head/none", "").status(), kNotFound, "checkpoint", "head/none");
}

TEST_F(ErrorFieldsTest, SetShares) {
  using Request = v1::SetSharesRequest;
  const std::vector<Case<Request>> cases = {
      {[](Request& r) { r.set_head("missing"); }, "head", "missing", kNotFound},
      {[](Request& r) { r.add_shares(1u << 31); }, "shares[0]", "2147483648"},
      {[](Request& r) { r.set_change_id(""); }, "change_id", "nothing"},
      {[](Request& r) { r.set_incarnation(77); }, "incarnation", "000000000000004d", kFailedPrecondition},
  };
  Walk<Request>("", cases, {}, [&](const auto& spoil) {
    Request request;
    request.set_head("head");
    request.set_change_id("a");
    spoil(request);
    return client_->SetShares(request);
  });
}

TEST_F(ErrorFieldsTest, ApplyStepsGeneration) {
  v1::ApplyStepRequest request;
  request.set_head("head");
  request.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.1);
  request.set_generation(77);
  ExpectDetail(client_->ApplyStep(request).status(), absl::StatusCode::kInvalidArgument, "generation", "77");
  NameGeneration(77777, &request);
  ExpectDetail(client_->ApplyStep(request).status(), kAborted, "generation", "77777");
  EXPECT_EQ(client_->DescribeHead("head")->state().step(), 0u);
}

TEST_F(ErrorFieldsTest, TensorFile) {
  v1::CreateHeadRequest request;
  request.mutable_spec()->set_name("other");
  request.mutable_spec()->set_hidden_size(4);
  request.mutable_spec()->set_vocab_size(4);
  request.mutable_tensor_file()->set_weight("w");
  request.mutable_tensor_file()->set_path("missing.safetensors");
  ExpectDetail(client_->CreateHead(request).status(), kNotFound, "tensor_file.path", "missing.safetensors");
  request.mutable_tensor_file()->set_path("../../etc/passwd");
  ExpectDetail(client_->CreateHead(request).status(), absl::StatusCode::kInvalidArgument, "tensor_file.path",
               "../../etc/passwd");
}

}  // namespace
}  // namespace lossd::app::testing::error_fields_test
