// SPDX-License-Identifier: Apache-2.0
// A client and a server that misbehaves on request, with what a whole loss computation has to give.
#ifndef LOSSD_TESTS_CLIENT_CPP_FAULTS_FIXTURE_H_
#define LOSSD_TESTS_CLIENT_CPP_FAULTS_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "tests/client/fake_server.h"

namespace lossd::client {

inline constexpr uint64_t kD = 8;
inline constexpr uint64_t kRows = 400;

class FaultsTest : public testing::Test {
 protected:
  void SetUp() override {
    server_.AddHead("head", kD, 10);
    client_ = Connect();
    for (size_t i = 0; i < x_.size(); ++i) x_[i] = static_cast<float>(i % 16) / 4;
    for (size_t i = 0; i < targets_.size(); ++i) targets_[i] = static_cast<int32_t>(i % 10);
  }
  std::unique_ptr<Client> Connect() {
    return Client::Connect({
                               .target = server_.target(),
                               .channels = 2,
                               .retry = {.max_attempts = 3, .initial_backoff = absl::Milliseconds(20)},
                           })
        .value();
  }
  Microbatch AsMicrobatch(uint64_t id = 1) const {
    return {.head = "head",
            .step = 0,
            .id = id,
            .hidden_size = kD,
            .hidden_dtype = v1::DTYPE_FP32,
            .hidden = x_.data(),
            .targets = targets_};
  }
  LossOutputs Outputs() { return {.grad_hidden = dx_.data(), .row_loss = absl::MakeSpan(loss_)}; }
  // 400 rows of 32 bytes: two streams of 13 slices.
  static ComputeOptions Options() { return {.accumulate_gradients = true, .slice_bytes = 512}; }
  absl::StatusOr<LossResult> Compute() { return client_->ComputeLoss(AsMicrobatch(), Outputs(), Options()); }

  double GradientSum() const {
    double sum = 0;
    for (float value : x_) sum += value;
    return sum;
  }
  void ExpectComplete(const absl::StatusOr<LossResult>& result) {
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->valid_rows, kRows);
    EXPECT_EQ(result->accumulated_rows + result->repeated_rows, kRows);
    for (size_t i = 0; i < x_.size(); ++i) ASSERT_EQ(dx_[i], 2 * x_[i]);
    EXPECT_NEAR(server_.accumulated("head"), GradientSum(), 1e-6) << "every row once";
  }
  void ExpectError(lossd::fake::Faults faults, absl::StatusCode code, const std::string& text) {
    server_.SetFaults(std::move(faults));
    const auto result = Compute();
    EXPECT_EQ(result.status().code(), code) << result.status();
    EXPECT_THAT(std::string(result.status().message()), ::testing::HasSubstr(text));
    server_.SetFaults({});
    EXPECT_TRUE(Compute().ok()) << "the client is usable afterwards";
  }

  lossd::fake::FakeServer server_;
  std::unique_ptr<Client> client_;
  std::vector<float> x_ = std::vector<float>(kRows * kD);
  std::vector<float> dx_ = std::vector<float>(kRows * kD);
  std::vector<float> loss_ = std::vector<float>(kRows);
  std::vector<int32_t> targets_ = std::vector<int32_t>(kRows);
};

// A contribution to the weight's gradient: row v is {v + 1, 0, ...}; its sum is 55.
struct Addition {
  explicit Addition(uint64_t id) {
    open.set_head("head");
    open.set_contribution_id(id);
    open.set_param(v1::PARAM_WEIGHT);
    open.mutable_rows()->set_end(10);
    open.set_dtype(v1::DTYPE_FP32);
    for (size_t v = 0; v < 10; ++v) values[v * kD] = static_cast<float>(v + 1);
  }
  absl::StatusOr<v1::AddGradientResponse> Send(Client& client) const {
    return client.AddGradient(open, {reinterpret_cast<const char*>(values.data()), values.size() * 4});
  }

  v1::OpenGradient open;
  std::vector<float> values = std::vector<float>(10 * kD);
};

}  // namespace lossd::client

#endif  // LOSSD_TESTS_CLIENT_CPP_FAULTS_FIXTURE_H_
