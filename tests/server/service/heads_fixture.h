// SPDX-License-Identifier: Apache-2.0
// A server on the CPU and a head of 13 by 57 with every parameter, for tests of heads through the service.
#ifndef LOSSD_TESTS_SERVER_SERVICE_HEADS_FIXTURE_H_
#define LOSSD_TESTS_SERVER_SERVICE_HEADS_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/kernels/problem.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/test_server.h"

namespace lossd::app::testing {

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

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_SERVICE_HEADS_FIXTURE_H_
