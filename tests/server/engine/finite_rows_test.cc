// SPDX-License-Identifier: Apache-2.0
// An engine on the CPU backend: rows of weight 0 may hold anything, directly, deferred and in deterministic
// mode; and what is refused because it is not finite leaves no bit behind.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/engine.h"
#include "tests/server/engine/row_collector.h"
#include "tests/server/engine/sent_slice.h"
#include "tests/server/engine/stream_specs.h"

namespace lossd::engine::finite_rows_test {
namespace {

using kernels::Param;
using kernels::Role;
using ::testing::HasSubstr;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Mode {
  bool deterministic;
  bool deferred;
};

class FiniteRowsTest : public ::testing::TestWithParam<Mode> {
 protected:
  static constexpr int64_t kD = 12, kV = 60, kRows = 20;

  void SetUp() override {
    auto backend = kernels::CreateCpuBackend({.threads = 2, .workspace_bytes = 1 << 20});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < kV * kD; ++i) weight_.push_back(0.3f * normal(rng_));
    bias_.assign(kV, 0.0f);
    for (int64_t i = 0; i < kRows * kD; ++i) hidden_.push_back(normal(rng_));
    for (int64_t i = 0; i < kRows; ++i) {
      targets_.push_back(static_cast<int32_t>(rng_() % 40));
      weights_.push_back(i % 3 == 1 ? 0.0f : 1.5f);
    }
  }
  // A fresh engine whose head has the test's values.
  std::unique_ptr<Engine> Start() {
    const EngineOptions options{.slice_bytes = 8192,
                                .staging_bytes = 16384,
                                .retained_bytes = 1 << 16,
                                .deterministic = GetParam().deterministic};
    auto engine = Engine::Create(options, backend_.get(), 42, {});
    EXPECT_TRUE(engine.ok()) << engine.status();
    EXPECT_TRUE(
        (*engine)
            ->CreateHead("head", {.hidden_size = kD, .vocab_size = kV, .has_bias = true, .trainable = true})
            .ok());
    EXPECT_TRUE((*engine)->PublishHead("head").ok());
    const auto write = [&](head::Head& head) {
      absl::Status status;
      for (const auto& [param, values] : {std::pair{Param::kWeight, &weight_}, {Param::kBias, &bias_}}) {
        status.Update(head.kernels().WriteTensor(
            {param, Role::kValue}, 0, kV, kernels::DType::kFloat32,
            {reinterpret_cast<const uint8_t*>(values->data()), values->size() * sizeof(float)}));
      }
      return status;
    };
    EXPECT_TRUE((*engine)->OnDevice("head", write).ok());
    return *std::move(engine);
  }
  // The microbatch, forward and, in deferred mode, backward. Returns the status of the call that ends it.
  absl::Status Send(Engine& engine, uint64_t id, const std::vector<float>& hidden,
                    std::shared_ptr<RowCollector>& results) {
    StreamSpec spec = Spec(id, kRows, {0, kRows});
    spec.targets = targets_;
    spec.row_weights = weights_;
    spec.want_rows.entropy = spec.want_rows.lse = true;
    if (GetParam().deferred) {
      spec.reduction = Reduction::kNone;
      spec.retain = true;
      spec.want_grad_hidden = spec.accumulate_gradients = false;
    } else {
      spec.reduction = Reduction::kMean;
    }
    results = std::make_shared<RowCollector>();
    auto stream = engine.Open(spec, results);
    if (!stream.ok()) return stream.status();
    (*stream)->Start();
    EXPECT_TRUE(SendSlice(**stream, {0, kRows}, hidden));
    if (!results->Wait().ok() || !GetParam().deferred) return results->Wait();
    BackwardSpec backward;
    backward.head = "head";
    backward.step = 0;
    backward.microbatch_id = id;
    backward.rows = {0, kRows};
    backward.want_grad_hidden = backward.accumulate_gradients = true;
    backward.grad_loss.assign(kRows, 0.5f);
    backward.grad_entropy.assign(kRows, 0.25f);
    for (size_t i = 0; i < weights_.size(); ++i) {
      if (weights_[i] == 0.0f) backward.grad_entropy[i] = 0.0f;
    }
    losses_ = results->losses();
    results = std::make_shared<RowCollector>();
    auto gradients = engine.OpenBackward(backward, results);
    if (!gradients.ok()) return gradients.status();
    (*gradients)->Start();
    for (RowRange rows : (*gradients)->RetainedSlices()) {
      EXPECT_TRUE(SentSlice(**gradients, rows).Wait());
    }
    return results->Wait();
  }
  // The bits of the gradients of weight and bias.
  std::vector<uint32_t> GradientBits(Engine& engine) {
    std::vector<uint32_t> bits(static_cast<size_t>(kV * (kD + 1)));
    const auto read = [&](head::Head& head) {
      auto* const bytes = reinterpret_cast<uint8_t*>(bits.data());
      absl::Status status =
          head.kernels().ReadTensor({Param::kWeight, Role::kGradient}, 0, kV, kernels::DType::kFloat32,
                                    {bytes, static_cast<size_t>(kV * kD) * sizeof(float)});
      status.Update(
          head.kernels().ReadTensor({Param::kBias, Role::kGradient}, 0, kV, kernels::DType::kFloat32,
                                    {bytes + kV * kD * 4, static_cast<size_t>(kV) * sizeof(float)}));
      return status;
    };
    EXPECT_TRUE(engine.OnDevice("head", read).ok());
    return bits;
  }
  // The hidden states with rows of weight 0 that are not finite.
  std::vector<float> Poisoned() const {
    std::vector<float> hidden = hidden_;
    for (int64_t i = 0; i < kRows * kD; ++i) {
      if (weights_[static_cast<size_t>(i / kD)] == 0.0f) hidden[static_cast<size_t>(i)] = NAN;
    }
    return hidden;
  }

  std::mt19937_64 rng_{std::random_device{}()};
  std::unique_ptr<kernels::Backend> backend_;
  std::vector<float> weight_, bias_, hidden_, weights_;
  std::vector<int32_t> targets_;
  std::map<int64_t, float> losses_;  // of the forward pass of the last deferred microbatch
};

INSTANTIATE_TEST_SUITE_P(Modes, FiniteRowsTest,
                         ::testing::Values(Mode{false, false}, Mode{false, true}, Mode{true, false},
                                           Mode{true, true}));

TEST_P(FiniteRowsTest, RowsOfWeightZeroMayHoldAnything) {
  std::shared_ptr<RowCollector> want, got;
  const auto finite = Start();
  ASSERT_TRUE(Send(*finite, 0, hidden_, want).ok()) << want->Wait();
  const auto losses = GetParam().deferred ? losses_ : want->losses();
  const auto poisoned = Start();
  ASSERT_TRUE(Send(*poisoned, 0, Poisoned(), got).ok()) << got->Wait();
  EXPECT_EQ(GetParam().deferred ? losses_ : got->losses(), losses);
  EXPECT_EQ(got->grads(), want->grads());
  EXPECT_EQ(got->summary().normalizer, want->summary().normalizer);
  EXPECT_EQ(got->summary().valid_rows, kRows) << "they count as valid, whatever they hold";
  EXPECT_EQ(got->summary().accumulated_rows, kRows);
  EXPECT_EQ(GradientBits(*poisoned), GradientBits(*finite));
  for (int64_t row = 0; row < kRows; ++row) {
    if (weights_[static_cast<size_t>(row)] != 0.0f) continue;
    EXPECT_EQ(got->grads()[row], std::vector<float>(kD, 0.0f)) << "row " << row;
    EXPECT_EQ(losses.at(row), 0.0f) << "row " << row;
  }
}

TEST_P(FiniteRowsTest, ZeroProbabilitiesTrain) {
  std::fill_n(bias_.begin() + 40, 10, -kInf);
  std::shared_ptr<RowCollector> results;
  const auto engine = Start();
  ASSERT_TRUE(Send(*engine, 0, hidden_, results).ok()) << results->Wait();
  for (const auto& [row, gradient] : results->grads()) {
    for (const float value : gradient) ASSERT_TRUE(std::isfinite(value)) << "row " << row;
  }
  for (const uint32_t bits : GradientBits(*engine)) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    ASSERT_TRUE(std::isfinite(value));
  }
}

// Neither a row whose loss is not finite nor one whose dx is not: the gradients keep their bits.
TEST_P(FiniteRowsTest, RefusedRowsLeaveNoBit) {
  for (int64_t row = 0; row < kRows; ++row) hidden_[static_cast<size_t>(row * kD)] = 1.0f;
  for (const bool by_gradient : {false, true}) {
    bias_.assign(kV, 0.0f);
    const auto engine = Start();
    std::shared_ptr<RowCollector> good, bad;
    ASSERT_TRUE(Send(*engine, 0, hidden_, good).ok()) << good->Wait();
    const auto before = GradientBits(*engine);
    if (by_gradient) {
      // Class 50 gets probability 0, and dx 0 times infinity.
      const float value = -kInf;
      const auto write = [&](head::Head& head) {
        std::vector<float> row(kD, 0.0f);
        row[0] = value;
        return head.kernels().WriteTensor({Param::kWeight, Role::kValue}, 50, 1, kernels::DType::kFloat32,
                                          {reinterpret_cast<const uint8_t*>(row.data()), kD * sizeof(float)});
      };
      ASSERT_TRUE(engine->OnDevice("head", write).ok());
    }
    std::vector<float> hidden = hidden_;
    if (!by_gradient) hidden[5 * kD + 1] = NAN;  // its weight is not 0
    const absl::Status status = Send(*engine, 1, hidden, bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(by_gradient ? "row 0" : "row 5"));
    EXPECT_EQ(GradientBits(*engine), before);
  }
}

}  // namespace
}  // namespace lossd::engine::finite_rows_test
