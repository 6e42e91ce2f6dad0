// SPDX-License-Identifier: Apache-2.0
// Loss computations against the fake server when nothing goes wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "client/cpp/client.h"
#include "tests/client/fake_server.h"

namespace lossd::client::loss_test {
namespace {

constexpr int32_t kIgnore = -100;
constexpr uint64_t kVocab = 50;

// Random rows with what the fake server makes of them.
struct Batch {
  Batch(std::mt19937& random, uint64_t rows, uint64_t hidden_size, double ignored = 0.2)
      : n(rows),
        d(hidden_size),
        x(n * d),
        targets(n),
        dx(n * d, NAN),
        loss(n, NAN),
        lse(n, NAN),
        entropy(n, NAN),
        logprob(n, NAN),
        argmax(n, 7777) {
    // Multiples of 1/4 below 2: exact in bf16, and their sums exact in fp32.
    for (float& value : x) value = static_cast<float>(static_cast<int>(random() % 16) - 8) / 4;
    for (int32_t& target : targets) {
      const bool ignore = std::uniform_real_distribution<>()(random) < ignored;
      target = ignore ? kIgnore : static_cast<int32_t>(random() % kVocab);
    }
  }

  Microbatch AsMicrobatch(uint64_t id) const {
    return {.head = "head",
            .step = 0,
            .id = id,
            .hidden_size = d,
            .hidden_dtype = v1::DTYPE_FP32,
            .hidden = x.data(),
            .targets = targets};
  }
  LossOutputs Outputs() {
    return {.grad_hidden = dx.data(),
            .row_loss = absl::MakeSpan(loss),
            .row_lse = absl::MakeSpan(lse),
            .row_entropy = absl::MakeSpan(entropy),
            .row_logprob = absl::MakeSpan(logprob),
            .row_argmax = absl::MakeSpan(argmax)};
  }
  bool Valid(uint64_t row) const { return targets[row] != kIgnore; }
  double Sum(uint64_t row) const {
    double sum = 0;
    for (uint64_t i = 0; i < d; ++i) sum += x[row * d + i];
    return sum;
  }
  double Loss(uint64_t row) const { return Valid(row) ? Sum(row) + 0.25 * targets[row] : 0; }
  double LossSum() const {
    double sum = 0;
    for (uint64_t row = 0; row < n; ++row) sum += Loss(row);
    return sum;
  }
  double GradientSum() const {
    double sum = 0;
    for (uint64_t row = 0; row < n; ++row) sum += Valid(row) ? Sum(row) : 0;
    return sum;
  }
  uint64_t ValidRows() const {
    uint64_t valid = 0;
    for (uint64_t row = 0; row < n; ++row) valid += Valid(row);
    return valid;
  }
  void ExpectOutputs() const {
    for (uint64_t row = 0; row < n; ++row) {
      for (uint64_t i = row * d; i < (row + 1) * d; ++i)
        ASSERT_EQ(dx[i], Valid(row) ? 2 * x[i] : 0.0f) << "row " << row;
      ASSERT_EQ(loss[row], Loss(row)) << "row " << row;
      ASSERT_EQ(lse[row], Valid(row) ? Loss(row) + 1 : 0) << "row " << row;
      ASSERT_EQ(entropy[row], Valid(row) ? 0.125 * targets[row] : 0) << "row " << row;
      ASSERT_EQ(logprob[row], -Loss(row)) << "row " << row;
      ASSERT_EQ(argmax[row], !Valid(row)    ? -1
                             : row % 2 == 0 ? targets[row]
                                            : targets[row] + 1)
          << "row " << row;
    }
  }

  uint64_t n, d;
  std::vector<float> x;
  std::vector<int32_t> targets;
  std::vector<float> dx, loss, lse, entropy, logprob;
  std::vector<int32_t> argmax;
};

class LossTest : public ::testing::Test {
 protected:
  void SetUp() override {
    server_.AddHead("head", kD, kVocab);
    client_ = Client::Connect({.target = server_.target(), .channels = 3}).value();
  }

  static constexpr uint64_t kD = 17;
  const unsigned seed_ = std::random_device()();
  const ::testing::ScopedTrace trace_{__FILE__, __LINE__, ::testing::Message() << "seed " << seed_};
  std::mt19937 random_{seed_};
  lossd::fake::FakeServer server_;
  std::unique_ptr<Client> client_;
};

TEST_F(LossTest, AllOutputsForManySplits) {
  uint64_t id = 0;
  double accumulated = 0;
  for (uint64_t rows : {0, 1, 2, 63, 64, 129, 500, 1023}) {
    for (int streams : {0, 1, 3, 7}) {
      for (uint64_t slice_bytes : {1, 200, 5000, 1 << 20}) {
        Batch batch(random_, rows, kD);
        const auto result = client_->ComputeLoss(
            batch.AsMicrobatch(id++), batch.Outputs(),
            {.accumulate_gradients = true, .streams = streams, .slice_bytes = slice_bytes});
        ASSERT_TRUE(result.ok()) << result.status();
        batch.ExpectOutputs();
        const double valid = static_cast<double>(batch.ValidRows());
        EXPECT_NEAR(result->loss_sum, batch.LossSum(), 1e-6);
        EXPECT_NEAR(result->loss, valid > 0 ? batch.LossSum() / valid : 0.0, 1e-9);
        EXPECT_EQ(result->normalizer, valid);
        EXPECT_EQ(result->valid_rows, batch.ValidRows());
        EXPECT_EQ(result->accumulated_rows, batch.ValidRows());
        EXPECT_EQ(result->repeated_rows, 0u);
        EXPECT_EQ(result->incarnation, server_.incarnation());
        EXPECT_LE(result->streams, std::max(1, streams == 0 ? 3 : streams));
        EXPECT_GE(result->sent_bytes, batch.ValidRows() * kD * sizeof(float));
        EXPECT_EQ(result->received_bytes, result->sent_bytes);
        accumulated += batch.GradientSum();
      }
    }
  }
  EXPECT_NEAR(server_.accumulated("head"), accumulated, 1e-6);
  EXPECT_EQ(server_.describes(), 1u) << "limits are learnt once";
}

TEST_F(LossTest, AllRowsIgnoredSendsNothing) {
  Batch batch(random_, 300, kD, /*ignored=*/1.0);
  const auto result =
      client_->ComputeLoss(batch.AsMicrobatch(1), batch.Outputs(), {.accumulate_gradients = true});
  ASSERT_TRUE(result.ok()) << result.status();
  batch.ExpectOutputs();
  EXPECT_EQ(result->loss, 0.0);
  EXPECT_EQ(result->valid_rows, 0u);
  EXPECT_EQ(server_.slices_received(), 0u);
}

TEST_F(LossTest, OwnIgnoreIndexAndSumReduction) {
  Batch batch(random_, 200, kD, 0);
  batch.targets[5] = batch.targets[199] = 42;
  ComputeOptions options{.reduction = v1::REDUCTION_SUM};
  options.loss.set_ignore_index(42);
  const uint64_t ignored = std::count(batch.targets.begin(), batch.targets.end(), 42);
  const auto result = client_->ComputeLoss(batch.AsMicrobatch(1), {}, options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->valid_rows, 200 - ignored);
  EXPECT_EQ(result->normalizer, 1.0);
  EXPECT_EQ(result->loss, result->loss_sum);
  EXPECT_EQ(result->received_bytes, 0u);
}

TEST_F(LossTest, GivenNormalizerAndRowWeights) {
  Batch batch(random_, 150, kD);
  std::vector<float> weights(150);
  double expected = 0;
  for (uint64_t row = 0; row < 150; ++row) {
    weights[row] = static_cast<float>(random_() % 8) / 4;
    expected += weights[row] * batch.Loss(row);
  }
  Microbatch microbatch = batch.AsMicrobatch(1);
  microbatch.row_weights = weights;
  const auto result = client_->ComputeLoss(microbatch, {}, {.normalizer = 640.0});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_NEAR(result->loss, expected / 640, 1e-9);
}

TEST_F(LossTest, Bf16TravelsAsItIs) {
  Batch batch(random_, 333, kD);
  std::vector<uint16_t> x16(batch.x.size()), dx16(batch.x.size(), 0xffff);
  for (size_t i = 0; i < x16.size(); ++i) {
    std::memcpy(&x16[i], reinterpret_cast<const char*>(&batch.x[i]) + 2, 2);
  }
  Microbatch microbatch = batch.AsMicrobatch(1);
  microbatch.hidden_dtype = v1::DTYPE_BF16;
  microbatch.hidden = x16.data();
  const auto result = client_->ComputeLoss(microbatch, {.grad_hidden = dx16.data()}, {.slice_bytes = 1000});
  ASSERT_TRUE(result.ok()) << result.status();
  for (uint64_t i = 0; i < x16.size(); ++i) {
    float value = 0;
    std::memcpy(reinterpret_cast<char*>(&value) + 2, &dx16[i], 2);
    ASSERT_EQ(value, batch.Valid(i / kD) ? 2 * batch.x[i] : 0.0f);
  }
}

TEST_F(LossTest, SameMicrobatchTwiceAccumulatesOnce) {
  Batch batch(random_, 400, kD);
  const ComputeOptions options{.accumulate_gradients = true};
  ASSERT_TRUE(client_->ComputeLoss(batch.AsMicrobatch(9), batch.Outputs(), options).ok());
  const auto again = client_->ComputeLoss(batch.AsMicrobatch(9), batch.Outputs(), options);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->accumulated_rows, 0u);
  EXPECT_EQ(again->repeated_rows, batch.ValidRows());
  EXPECT_NEAR(server_.accumulated("head"), batch.GradientSum(), 1e-6);
}

TEST_F(LossTest, DeferredGradients) {
  for (int streams : {1, 3}) {
    Batch batch(random_, 500, kD);
    const uint64_t id = 100 + streams;
    Microbatch microbatch = batch.AsMicrobatch(id);
    LossOutputs outputs = batch.Outputs();
    outputs.grad_hidden = nullptr;
    const auto forward = client_->ComputeLoss(
        microbatch, outputs,
        {.reduction = v1::REDUCTION_NONE, .retain = true, .streams = streams, .slice_bytes = 2000});
    ASSERT_TRUE(forward.ok()) << forward.status();
    EXPECT_NEAR(forward->loss, batch.LossSum(), 1e-6);

    std::vector<float> gradients(batch.n);
    double accumulated = server_.accumulated("head");
    for (uint64_t row = 0; row < batch.n; ++row) {
      gradients[row] = static_cast<float>(random_() % 5) / 4;
      if (batch.Valid(row)) accumulated += gradients[row] * batch.Sum(row);
    }
    const RetainedGradients upstream{.head = "head",
                                     .step = 0,
                                     .id = id,
                                     .hidden_size = kD,
                                     .hidden_dtype = v1::DTYPE_FP32,
                                     .grad_loss = gradients};
    const auto backward =
        client_->Backward(upstream, batch.dx.data(), {.accumulate_gradients = true, .streams = streams});
    ASSERT_TRUE(backward.ok()) << backward.status();
    EXPECT_EQ(backward->valid_rows, batch.ValidRows());
    EXPECT_EQ(backward->accumulated_rows, batch.ValidRows());
    EXPECT_EQ(backward->received_bytes, batch.n * kD * sizeof(float));
    EXPECT_NEAR(server_.accumulated("head"), accumulated, 1e-6);
    for (uint64_t i = 0; i < batch.dx.size(); ++i) {
      ASSERT_EQ(batch.dx[i], batch.Valid(i / kD) ? 2 * gradients[i / kD] * batch.x[i] : 0.0f);
    }
    EXPECT_EQ(client_->Backward(upstream, nullptr, {.accumulate_gradients = true})->repeated_rows,
              batch.ValidRows());
    EXPECT_TRUE(client_->ReleaseMicrobatch("head", id).value());
    EXPECT_FALSE(client_->ReleaseMicrobatch("head", id).value());
    EXPECT_EQ(client_->Backward(upstream, batch.dx.data(), {}).status().code(), absl::StatusCode::kNotFound);
  }
}

TEST_F(LossTest, ManyMicrobatchesAtOnceWithCallbacks) {
  std::vector<std::unique_ptr<Batch>> batches;
  std::vector<PendingLoss> pending;
  std::atomic<int> called{0};
  double expected = 0;
  for (uint64_t id = 0; id < 40; ++id) {
    batches.push_back(std::make_unique<Batch>(random_, 1 + random_() % 600, kD));
    expected += batches.back()->GradientSum();
    pending.push_back(client_->ComputeLossAsync(batches.back()->AsMicrobatch(id), batches.back()->Outputs(),
                                                {.accumulate_gradients = true, .slice_bytes = 3000},
                                                [&called](const absl::StatusOr<LossResult>& result) {
                                                  EXPECT_TRUE(result.ok()) << result.status();
                                                  ++called;
                                                }));
  }
  for (size_t i = 0; i < pending.size(); ++i) {
    const auto result = pending[i].Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(pending[i].Done());
    batches[i]->ExpectOutputs();
  }
  EXPECT_EQ(called, 40);
  EXPECT_NEAR(server_.accumulated("head"), expected, 1e-6);
}

TEST_F(LossTest, ManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([this, t, seed = random_()] {
      std::mt19937 random(seed);
      for (int i = 0; i < 10; ++i) {
        Batch batch(random, 1 + random() % 300, kD);
        const auto result = client_->ComputeLoss(batch.AsMicrobatch(t * 100 + i), batch.Outputs(), {});
        ASSERT_TRUE(result.ok()) << result.status();
        batch.ExpectOutputs();
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST_F(LossTest, ArgumentsMayGoOnceTheCallIsMade) {
  Batch batch(random_, 300, kD);
  PendingLoss pending;
  {
    const std::vector<int32_t> targets = batch.targets;
    const std::string name = "head";
    Microbatch microbatch = batch.AsMicrobatch(1);
    microbatch.targets = targets;
    pending = client_->ComputeLossAsync(microbatch, batch.Outputs(), {});
  }
  ASSERT_TRUE(pending.Wait().ok());
  batch.ExpectOutputs();
}

TEST_F(LossTest, SmallMessageLimitMeansMoreStreams) {
  auto client =
      Client::Connect({.target = server_.target(), .channels = 1, .max_message_bytes = 70 << 10}).value();
  Batch batch(random_, 3000, kD);
  const auto result = client->ComputeLoss(batch.AsMicrobatch(1), batch.Outputs(), {.slice_bytes = 4096});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(result->streams, 1);
  batch.ExpectOutputs();
}

}  // namespace
}  // namespace lossd::client::loss_test
