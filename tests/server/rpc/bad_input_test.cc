// What clients can get wrong. Each case must end with its status code and an error that names field and
// value, change no accumulator, and leave the server serving.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/wire/status_details.h"
#include "tests/kernels/problem.h"
#include "tests/server/rpc/service_client.h"
#include "tests/server/rpc/test_server.h"

namespace lossd::rpc::testing {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 12;
constexpr int64_t kHidden = 10;
constexpr int64_t kClasses = 30;

class BadInputTest : public ::testing::Test {
 protected:
  BadInputTest() {
    for (float& value : hidden_) value = kernels::testing::Uniform(rng_, -1.0f, 1.0f);
    client_ = server_.Connect();
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("head");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(kClasses);
    request.mutable_spec()->set_bias(true);
    EXPECT_TRUE(client_->CreateHead(request).ok());
    // Something to protect: gradients of one microbatch.
    EXPECT_TRUE(RunGood(/*id=*/1, /*accumulate=*/true).status.ok());
    gradients_ = ReadGradients();
    EXPECT_NE(gradients_.find_first_not_of('\0'), std::string::npos);
  }

  // Every test ends with the accumulators' bits unchanged and a server that computes.
  void TearDown() override {
    EXPECT_EQ(ReadGradients(), gradients_) << "an accumulator changed";
    const LossAnswers answers = RunGood(/*id=*/1000, /*accumulate=*/false);
    EXPECT_TRUE(answers.status.ok()) << answers.status;
    EXPECT_TRUE(answers.summary.has_value());
    ExpectIdle();
  }

  // Buffers and streams come back once the calls are over.
  void ExpectIdle() {
    const absl::Time limit = absl::Now() + absl::Seconds(10);
    engine::EngineStats stats = server_.server().stats();
    while (absl::Now() < limit && (stats.open_streams > 0 || stats.staging_used_bytes > 0)) {
      absl::SleepFor(absl::Milliseconds(2));
      stats = server_.server().stats();
    }
    EXPECT_EQ(stats.open_streams, 0);
    EXPECT_EQ(stats.queued_slices, 0);
    EXPECT_EQ(stats.staging_used_bytes, 0);
  }

  std::string ReadGradients() {
    std::string all;
    for (const v1::Param param : {v1::PARAM_WEIGHT, v1::PARAM_BIAS}) {
      v1::ReadTensorRequest request;
      request.set_head("head");
      request.set_param(param);
      request.set_role(v1::ROLE_GRADIENT);
      const auto bytes = client_->ReadTensor(request);
      EXPECT_TRUE(bytes.ok()) << bytes.status();
      if (bytes.ok()) all += *bytes;
    }
    return all;
  }

  v1::OpenMicrobatch GoodOpen(uint64_t id = 7) const {
    v1::OpenMicrobatch open;
    open.set_head("head");
    open.set_step(0);
    open.set_microbatch_id(id);
    open.set_microbatch_rows(kRows);
    open.mutable_rows()->set_end(kRows);
    open.set_hidden_dtype(v1::DTYPE_FP32);
    open.set_reduction(v1::REDUCTION_MEAN);
    open.set_want_grad_hidden(true);
    open.set_accumulate_gradients(true);
    for (int64_t i = 0; i < kRows; ++i) open.add_targets(static_cast<int32_t>(i));
    return open;
  }

  std::string Payload(int64_t begin, int64_t end) const {
    return Bytes(std::vector<float>(hidden_.begin() + begin * kHidden, hidden_.begin() + end * kHidden));
  }

  LossAnswers RunGood(uint64_t id, bool accumulate) {
    v1::OpenMicrobatch open = GoodOpen(id);
    open.set_accumulate_gradients(accumulate);
    const auto stream = client_->OpenLoss();
    stream->SendOpen(open);
    stream->SendSlice(0, kRows, Payload(0, kRows));
    return stream->Finish();
  }

  // A call with this opening message and, if it gets that far, good slices.
  absl::Status RunWith(const std::function<void(v1::OpenMicrobatch&)>& spoil) {
    v1::OpenMicrobatch open = GoodOpen();
    spoil(open);
    const auto stream = client_->OpenLoss();
    stream->SendOpen(open);
    stream->SendSlice(0, kRows, Payload(0, kRows));
    return stream->Finish().status;
  }

  // A good opening message, then what `act` sends, then the half-close.
  LossAnswers RunThen(const std::function<void(LossStream&)>& act) {
    const auto stream = client_->OpenLoss();
    stream->SendOpen(GoodOpen());
    act(*stream);
    return stream->Finish();
  }

  void ExpectError(const absl::Status& status, absl::StatusCode code, absl::string_view field,
                   absl::string_view value) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(field)));
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(value)));
    const auto detail = wire::GetErrorDetail(status);
    ASSERT_TRUE(detail.has_value()) << status;
    EXPECT_EQ(detail->field(), field);
    EXPECT_THAT(detail->value(), HasSubstr(std::string(value)));
    EXPECT_EQ(detail->incarnation(), server_.server().incarnation());
  }
  void ExpectInvalid(const absl::Status& status, absl::string_view field, absl::string_view value) {
    ExpectError(status, absl::StatusCode::kInvalidArgument, field, value);
  }

  kernels::testing::Rng rng_ = kernels::testing::FreshRng();
  std::vector<float> hidden_ = std::vector<float>(kRows * kHidden);
  TestServer server_;
  std::unique_ptr<TestClient> client_;
  std::string gradients_;
};

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
  ExpectInvalid(RunWith([](auto& open) { open.mutable_options()->set_max_dropped_mass(-0.5f); }),
                "open.options.max_dropped_mass", "-0.5");
  ExpectInvalid(
      RunWith([](auto& open) { open.mutable_options()->set_algorithm(static_cast<v1::Algorithm>(17)); }),
      "open.options.algorithm", "17");
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
  ExpectError(RunWith([](auto& open) { open.set_head("nobody"); }), absl::StatusCode::kNotFound, "open.head",
              "nobody");
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

// ---- Heads ----

TEST_F(BadInputTest, HeadSpecs) {
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
  EXPECT_EQ(client_->ListHeads()->heads_size(), 1);
}

TEST_F(BadInputTest, TensorFiles) {
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

TEST_F(BadInputTest, Tensors) {
  v1::ReadTensorRequest read;
  read.set_head("head");
  ExpectInvalid(client_->ReadTensor(read).status(), "param", "0");
  read.set_param(v1::PARAM_NORM_GAIN);
  ExpectError(client_->ReadTensor(read).status(), absl::StatusCode::kNotFound, "param", "norm.gain");
  read.set_param(v1::PARAM_WEIGHT);
  read.mutable_rows()->set_end(kClasses + 1);
  ExpectInvalid(client_->ReadTensor(read).status(), "rows.end", "31");
  read.set_head("nobody");
  ExpectError(client_->ReadTensor(read).status(), absl::StatusCode::kNotFound, "head", "nobody");

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

TEST_F(BadInputTest, Steps) {
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

TEST_F(BadInputTest, Checkpoints) {
  EXPECT_EQ(client_->SaveCheckpoint("head", "../up").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(client_->SaveCheckpoint("nobody", "").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->LoadCheckpoint("head/none", "").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->LoadCheckpoint("../head", "").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lossd::rpc::testing
