// SPDX-License-Identifier: Apache-2.0
// TestServer: a whole server in this process. And the fixtures of tests that call it: HeadsTest has heads
// with every parameter; BadInputTest sends bad input.
#ifndef LOSSD_TESTS_SERVER_SERVICE_SERVICE_FIXTURE_H_
#define LOSSD_TESTS_SERVER_SERVICE_SERVICE_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "proto/wire/status_details.h"
#include "server/app/server.h"
#include "server/log/log.h"
#include "tests/kernels/problem.h"
#include "tests/server/service/service_client.h"
#include "tests/support/temp_folder.h"

namespace lossd::app::testing {

inline ServerOptions SmallServer() {
  ServerOptions options;
  options.listen = "127.0.0.1:0";
  options.http = "";
  options.version = "test";
  options.threads = 1;
  options.slice_bytes = 64 << 10;
  options.staging_bytes = 1 << 20;
  options.retained_bytes = 256 << 10;
  options.workspace_bytes = 1 << 20;
  return options;
}

// A small server on the CPU. If there are several `devices`, they divide each head by rows or by classes.
inline ServerOptions SmallCpuServer(bool deterministic, int devices, bool by_vocabulary) {
  ServerOptions options = SmallServer();
  options.deterministic = deterministic;
  options.backend = "cpu";
  options.cpu_devices = devices;
  options.split = devices == 1 ? "any" : by_vocabulary ? "vocabulary" : "rows";
  return options;
}

// A server on a free loopback port, with a folder of its own. Both end with the object.
class TestServer {
 public:
  explicit TestServer(ServerOptions options = SmallServer()) {
    options.checkpoint_directory = folder_.File("checkpoints");
    log::Configure(log::LogLevel::kOff, log::LogFormat::kText);
    auto server = Server::Start(options);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  Server& server() { return *server_; }
  std::string target() const { return server_->grpc_address(); }
  std::string checkpoint_directory() const { return folder_.File("checkpoints"); }
  std::unique_ptr<TestClient> Connect() const { return TestClient::Connect(target()); }
  void Stop() { server_.reset(); }

 private:
  test::TempFolder folder_;
  std::unique_ptr<Server> server_;
};

// A server on the CPU, and a head with D = 13, V = 57 and every parameter, for tests of heads through the
// service.
class HeadsTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kHidden = 13;
  static constexpr uint64_t kClasses = 57;

  static v1::CreateHeadRequest Request(const std::string& name) {
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
  static LossAnswers Compute(TestClient& client, const std::string& head, uint64_t step, uint64_t id,
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

  static absl::Status Train(TestClient& client, const std::string& head, uint64_t step, uint64_t id,
                            kernels::testing::Rng& rng) {
    return Compute(client, head, step, id, rng).status;
  }

  static absl::StatusOr<v1::ApplyStepResponse> Step(TestClient& client, const std::string& head,
                                                    uint64_t step) {
    v1::ApplyStepRequest request;
    request.set_head(head);
    request.set_step(step);
    request.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01);
    return client.ApplyStep(request);
  }

  static std::vector<std::vector<float>> ReadAll(TestClient& client, const std::string& head) {
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

  kernels::testing::Rng rng_ = kernels::testing::FreshRng();
  TestServer server_;
  std::unique_ptr<TestClient> client_ = server_.Connect();
};

// Tests of the mistakes that clients can make. Each mistake must end with its status code and an error that
// names field and value. It must change no gradient, and the server must continue to serve.
class BadInputTest : public ::testing::Test {
 protected:
  static constexpr int64_t kRows = 12;
  static constexpr int64_t kHidden = 10;
  static constexpr int64_t kClasses = 30;

  BadInputTest() {
    for (float& value : hidden_) value = kernels::testing::Uniform(rng_, -1.0f, 1.0f);
    client_ = server_.Connect();
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("head");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(kClasses);
    request.mutable_spec()->set_bias(true);
    EXPECT_TRUE(client_->CreateHead(request).ok());
    // Gradients of one microbatch, which the mistakes must not change.
    EXPECT_TRUE(RunGood(/*id=*/1, /*accumulate=*/true).status.ok());
    gradients_ = ReadGradients();
    EXPECT_NE(gradients_.find_first_not_of('\0'), std::string::npos);
  }

  // Every test ends with a check that the bits of the gradients are unchanged and that the server still
  // computes.
  void TearDown() override {
    EXPECT_EQ(ReadGradients(), gradients_) << "an accumulator changed";
    const LossAnswers answers = RunGood(/*id=*/1000, /*accumulate=*/false);
    EXPECT_TRUE(answers.status.ok()) << answers.status;
    EXPECT_TRUE(answers.summary.has_value());
    ExpectIdle();
  }

  // Expects that buffers and streams are given back when the calls are over.
  void ExpectIdle() {
    const absl::Time limit = clocks::SteadyNow() + absl::Seconds(10);
    engine::EngineStats stats = server_.server().stats();
    while (clocks::SteadyNow() < limit && (stats.open_streams > 0 || stats.staging_used_bytes > 0)) {
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

  // Makes a call with the changed opening message and, if the call gets that far, good slices.
  absl::Status RunWith(const std::function<void(v1::OpenMicrobatch&)>& spoil) {
    v1::OpenMicrobatch open = GoodOpen();
    spoil(open);
    const auto stream = client_->OpenLoss();
    stream->SendOpen(open);
    stream->SendSlice(0, kRows, Payload(0, kRows));
    return stream->Finish().status;
  }

  // Makes a call with a good opening message, then what `act` sends, then the half-close.
  LossAnswers RunThen(const std::function<void(LossStream&)>& act) {
    const auto stream = client_->OpenLoss();
    stream->SendOpen(GoodOpen());
    act(*stream);
    return stream->Finish();
  }

  void ExpectError(const absl::Status& status, absl::StatusCode code, absl::string_view field,
                   absl::string_view value) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(std::string(field)));
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(std::string(value)));
    const auto detail = wire::GetErrorDetail(status);
    ASSERT_TRUE(detail.has_value()) << status;
    EXPECT_EQ(detail->field(), field);
    EXPECT_THAT(detail->value(), ::testing::HasSubstr(std::string(value)));
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

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_SERVICE_SERVICE_FIXTURE_H_
