// SPDX-License-Identifier: Apache-2.0
// Loss computations against the fake server when nothing goes wrong, and their parts: the plan of a call and
// the record of its answers (loss_plan.h), and the threads that work on calls (core.h).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/core.h"
#include "client/cpp/loss_plan.h"
#include "kernels/clocks/clock.h"
#include "tests/client/fake_server.h"

namespace lossd::client::internal::loss_test {
namespace {

using ::testing::ElementsAre;

// ---- Losses ----

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

// The fake server says the sums of the numbers that came with valid rows.
TEST_F(LossTest, NumbersOfAnObjectiveTravelWithTheirRows) {
  Batch batch(random_, 333, kD);
  std::vector<float> advantages(333), old_logprobs(333), ref_logprobs(333);
  v1::ObjectiveSums expected;
  for (uint64_t row = 0; row < 333; ++row) {
    advantages[row] = static_cast<float>(random_() % 64);
    old_logprobs[row] = -static_cast<float>(random_() % 64);
    ref_logprobs[row] = static_cast<float>(random_() % 64) / 8;
    if (batch.targets[row] == -100) continue;
    expected.set_rows(expected.rows() + 1);
    expected.set_ratio(expected.ratio() + double{advantages[row]});
    expected.set_old_kl(expected.old_kl() + double{old_logprobs[row]});
    expected.set_ref_kl(expected.ref_kl() + double{ref_logprobs[row]});
  }
  Microbatch microbatch = batch.AsMicrobatch(1);
  microbatch.advantages = advantages;
  microbatch.old_logprobs = old_logprobs;
  microbatch.ref_logprobs = ref_logprobs;
  ComputeOptions options{.streams = 4, .slice_bytes = 1000};
  options.loss.mutable_objective()->set_kind(v1::OBJECTIVE_PPO);
  const auto result = client_->ComputeLoss(microbatch, {}, options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->objective.SerializeAsString(), expected.SerializeAsString());
  microbatch.old_logprobs = absl::MakeConstSpan(old_logprobs).subspan(1);
  EXPECT_THAT(std::string(client_->ComputeLoss(microbatch, {}, options).status().message()),
              ::testing::HasSubstr("old_logprobs has 332 entries for 333 rows"));
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

// ---- Loss plan ----

std::vector<int32_t> RandomTargets(std::mt19937& random, size_t rows, double ignored) {
  std::vector<int32_t> targets(rows);
  for (int32_t& target : targets) {
    target = std::uniform_real_distribution<>()(random) < ignored ? kIgnore
                                                                  : static_cast<int32_t>(random() % 1000);
  }
  return targets;
}

TEST(LossPlanTest, RangesCoverEveryRowOnce) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    const auto targets = RandomTargets(random, random() % 2000, (round % 11) / 10.0);
    const int streams = 1 + static_cast<int>(random() % 9);
    const uint64_t max_rows = round % 3 == 0 ? 1 + random() % 300 : 1 << 20;
    const std::vector<Rows> ranges = SplitRanges(targets, kIgnore, streams, max_rows);
    ASSERT_GE(ranges.size(), 1u);
    uint64_t next = 0;
    for (const Rows& range : ranges) {
      ASSERT_EQ(range.begin, next);
      ASSERT_LE(range.size(), max_rows);
      ASSERT_TRUE(targets.empty() || range.size() > 0);
      next = range.end;
    }
    ASSERT_EQ(next, targets.size());
    ASSERT_TRUE(max_rows <= targets.size() || ranges.size() <= static_cast<size_t>(streams));
  }
}

TEST(LossPlanTest, RangesHoldAboutTheSameNumberOfValidRows) {
  std::vector<int32_t> targets(4000, kIgnore);
  std::fill(targets.begin() + 3000, targets.end(), 5);  // a long ignored prompt
  const std::vector<Rows> ranges = SplitRanges(targets, kIgnore, 4, 1 << 20);
  ASSERT_EQ(ranges.size(), 4u);
  for (const Rows& range : ranges) {
    const auto part = absl::MakeConstSpan(targets).subspan(range.begin, range.size());
    EXPECT_NEAR(CountValid(part, kIgnore), 250, 1);
  }
}

TEST(LossPlanTest, FewRowsUseFewStreams) {
  EXPECT_EQ(SplitRanges(std::vector<int32_t>(kMinRowsPerStream * 2, 1), kIgnore, 8, 1 << 20).size(), 2u);
  EXPECT_EQ(SplitRanges(std::vector<int32_t>(1, 1), kIgnore, 8, 1 << 20).size(), 1u);
  EXPECT_EQ(SplitRanges({}, kIgnore, 8, 1 << 20), std::vector<Rows>{Rows{}});
}

TEST(LossPlanTest, SlicesHoldEveryValidRowOnceAndStartAndEndWithOne) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    const auto targets = RandomTargets(random, 1 + random() % 500, (round % 11) / 10.0);
    Rows range;
    range.begin = random() % targets.size();
    range.end = range.begin + random() % (targets.size() - range.begin + 1);
    const SliceRule rule{.max_rows = 1 + random() % 60, .row_grid = round % 2 == 0 ? 0 : 1 + random() % 100};
    std::vector<int> covered(targets.size(), 0);
    uint64_t previous_end = range.begin;
    for (const Rows& slice : DivideIntoSlices(targets, kIgnore, range, rule)) {
      ASSERT_GE(slice.begin, previous_end);
      ASSERT_LE(slice.end, range.end);
      ASSERT_GT(slice.size(), 0u);
      ASSERT_LE(slice.size(), rule.max_rows);
      if (rule.row_grid > 0) {
        ASSERT_EQ(slice.begin / rule.row_grid, (slice.end - 1) / rule.row_grid);
      }
      ASSERT_NE(targets[slice.begin], kIgnore);
      ASSERT_NE(targets[slice.end - 1], kIgnore);
      previous_end = slice.end;
      for (uint64_t row = slice.begin; row < slice.end; ++row) ++covered[row];
    }
    for (uint64_t row = 0; row < targets.size(); ++row) {
      const bool must = row >= range.begin && row < range.end && targets[row] != kIgnore;
      ASSERT_TRUE(!must || covered[row] == 1) << "row " << row;
      ASSERT_LE(covered[row], 1);
    }
  }
}

TEST(LossPlanTest, LargeMicrobatchesAreCopiedByMoreStreamsThanSmallOnes) {
  constexpr uint64_t kMiB = 1 << 20;
  EXPECT_EQ(StreamsInRegion(0, 16), 1);
  EXPECT_EQ(StreamsInRegion(15 * kMiB, 16), 1);
  EXPECT_EQ(StreamsInRegion(16 * kMiB, 16), 2);
  EXPECT_EQ(StreamsInRegion(48 * kMiB, 16), 4);
  EXPECT_EQ(StreamsInRegion(uint64_t{1} << 50, 1024), 4);
  EXPECT_EQ(StreamsInRegion(48 * kMiB, 6), 3);
  for (const unsigned cores : {0, 1, 2, 3}) EXPECT_EQ(StreamsInRegion(48 * kMiB, cores), 1) << cores;
}

TEST(LossPlanTest, LongIgnoredRunsAreNotSent) {
  std::vector<int32_t> targets(1000, kIgnore);
  targets[10] = targets[11] = targets[900] = 3;
  EXPECT_THAT(DivideIntoSlices(targets, kIgnore, {0, 1000}, {.max_rows = 1000}),
              ::testing::ElementsAre(Rows{10, 12}, Rows{900, 901}));
}

TEST(LossPlanTest, SliceRowsKeepToEveryLimit) {
  v1::SliceLimits limits;
  limits.set_max_rows(100);
  limits.set_max_bytes(5000);
  EXPECT_EQ(MakeSliceRule(64, 1 << 20, limits)->max_rows, 78u);
  EXPECT_EQ(MakeSliceRule(8, 1 << 20, limits)->max_rows, 100u);
  EXPECT_EQ(MakeSliceRule(8, 80, limits)->max_rows, 10u);
  EXPECT_EQ(MakeSliceRule(4000, 80, limits)->max_rows, 1u);
  EXPECT_EQ(MakeSliceRule(8, 80, limits)->row_grid, 0u);
  limits.set_row_grid(7);
  EXPECT_EQ(MakeSliceRule(8, 80, limits)->row_grid, 7u);
  EXPECT_EQ(MakeSliceRule(8, std::nullopt, limits)->max_rows_in_region, 0u);
  limits.set_max_bytes_in_region(720);
  EXPECT_EQ(*MakeSliceRule(8, std::nullopt, limits), (SliceRule{100, 7, 90}));
  EXPECT_EQ(*MakeSliceRule(4, std::nullopt, limits), (SliceRule{100, 7, 100}));
  EXPECT_EQ(*MakeSliceRule(8, 80, limits), (SliceRule{10, 7, 0}));
  EXPECT_EQ(MakeSliceRule(5001, 1 << 20, limits).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(LossPlanTest, UnsentRowsAreWhatNoSliceCovers) {
  const std::vector<Rows> slices{{2, 3}, {3, 5}, {6, 8}};
  EXPECT_THAT(UnsentRows({1, 9}, slices), ::testing::ElementsAre(Rows{1, 2}, Rows{5, 6}, Rows{8, 9}));
  EXPECT_THAT(UnsentRows({2, 8}, slices), ::testing::ElementsAre(Rows{5, 6}));
  EXPECT_THAT(UnsentRows({4, 9}, {}), ::testing::ElementsAre(Rows{4, 9}));
  EXPECT_THAT(UnsentRows({4, 4}, {}), ::testing::IsEmpty());
}

TEST(LossPlanTest, SlicesInARegionAreEqualAndAsLargeAsWanted) {
  const SliceRule rule{100, 0, 400};
  EXPECT_EQ(InRegion(rule, 1000, uint64_t{1} << 40).max_rows, 334u);
  EXPECT_EQ(InRegion(rule, 800, uint64_t{1} << 40).max_rows, 400u);
  EXPECT_EQ(InRegion(rule, 300, 200).max_rows, 150u);
  EXPECT_EQ(InRegion(rule, 300, 7).max_rows, 100u) << "no smaller than those in messages";
  EXPECT_EQ(InRegion(rule, 0, 200).max_rows, 200u);
  EXPECT_EQ(InRegion(rule, 300, uint64_t{1} << 40).max_rows, 400u)
      << "ignored rows between valid ones do not cut it";
  EXPECT_EQ(InRegion({100}, 250, 200).max_rows, 84u);
}

TEST(LossPlanTest, ASliceWithoutRoomIsCutForMessages) {
  EXPECT_THAT(CutForMessages({5, 255}, {100}),
              ::testing::ElementsAre(Rows{5, 105}, Rows{105, 205}, Rows{205, 255}));
  EXPECT_THAT(CutForMessages({5, 85}, {100, 40}),
              ::testing::ElementsAre(Rows{5, 40}, Rows{40, 80}, Rows{80, 85}));
}

// Classes of each row, and one list for all rows; over several streams and slices.
TEST_F(LossTest, SingleClasses) {
  for (const bool shared : {false, true}) {
    Batch batch(random_, 700, 17);
    Microbatch microbatch = batch.AsMicrobatch(shared ? 5 : 4);
    std::vector<int32_t> classes;
    for (uint64_t i = 0; i < (shared ? 1 : batch.n) * 3; ++i)
      classes.push_back(static_cast<int32_t>(i % kVocab));
    microbatch.classes = classes;
    std::vector<float> given(batch.n * 3, NAN), top(batch.n * 2, NAN);
    std::vector<int32_t> top_classes(batch.n * 2, 7777);
    LossOutputs outputs = batch.Outputs();
    outputs.class_logprobs = absl::MakeSpan(given);
    outputs.class_count = 3;
    outputs.top_logprobs = absl::MakeSpan(top);
    outputs.top_classes = absl::MakeSpan(top_classes);
    outputs.top_k = 2;
    ComputeOptions options;
    options.streams = 3;
    options.slice_bytes = 1024;
    const auto result = client_->ComputeLoss(microbatch, outputs, options);
    ASSERT_TRUE(result.ok()) << result.status();
    batch.ExpectOutputs();
    for (uint64_t row = 0; row < batch.n; ++row) {
      for (uint64_t i = 0; i < 3; ++i) {
        const float named = -0.5f * static_cast<float>(classes[(shared ? 0 : row * 3) + i]);
        ASSERT_EQ(given[row * 3 + i], batch.Valid(row) ? named : 0.0f) << "row " << row;
      }
      for (uint64_t i = 0; i < 2; ++i) {
        ASSERT_EQ(top[row * 2 + i], batch.Valid(row) ? -static_cast<float>(i) : 0.0f) << "row " << row;
        ASSERT_EQ(top_classes[row * 2 + i],
                  batch.Valid(row) ? batch.targets[row] + static_cast<int32_t>(i) : -1);
      }
    }
  }
}

TEST(LossPlanTest, RowsOfSlicesWithClasses) {
  EXPECT_EQ(MostRowsWithClasses({}), ~uint64_t{0});
  EXPECT_EQ(MostRowsWithClasses({.class_count = 256, .top_k = 128}), 240);
  EXPECT_EQ(MostRowsWithClasses({.top_k = 64}), 910);
}

TEST(LossPlanTest, UnsentRowsHaveNoClasses) {
  std::vector<float> given(6 * 2, 9), top(6, 9);
  std::vector<int32_t> top_classes(6, 9);
  LossOutputs outputs{.class_logprobs = absl::MakeSpan(given),
                      .class_count = 2,
                      .top_logprobs = absl::MakeSpan(top),
                      .top_classes = absl::MakeSpan(top_classes),
                      .top_k = 1};
  FillUnsentRows(outputs, sizeof(float), {1, 6}, std::vector<Rows>{{2, 3}, {4, 5}});
  EXPECT_THAT(given, ::testing::ElementsAre(9, 9, 0, 0, 9, 9, 0, 0, 9, 9, 0, 0));
  EXPECT_THAT(top, ::testing::ElementsAre(9, 0, 9, 0, 9, 0));
  EXPECT_THAT(top_classes, ::testing::ElementsAre(9, -1, 9, -1, 9, -1));
}

TEST(LossPlanTest, UnsentRowsAreFilled) {
  std::vector<float> dx(6 * 2, 9), loss(6, 9);
  std::vector<int32_t> argmax(6, 9);
  LossOutputs outputs{
      .grad_hidden = dx.data(), .row_loss = absl::MakeSpan(loss), .row_argmax = absl::MakeSpan(argmax)};
  FillUnsentRows(outputs, 2 * sizeof(float), {1, 6}, std::vector<Rows>{{2, 3}, {4, 5}});
  EXPECT_THAT(dx, ::testing::ElementsAre(9, 9, 0, 0, 9, 9, 0, 0, 9, 9, 0, 0));
  EXPECT_THAT(loss, ::testing::ElementsAre(9, 0, 9, 0, 9, 0));
  EXPECT_THAT(argmax, ::testing::ElementsAre(9, -1, 9, -1, 9, -1));
}

TEST(LossPlanTest, WrongCallsAreNamed) {
  const std::vector<int32_t> targets(4, 1);
  const std::vector<float> hidden(4 * 3), weights(3);
  std::vector<float> loss(5);
  const Microbatch good{.head = "h",
                        .step = 1,
                        .hidden_size = 3,
                        .hidden_dtype = v1::DTYPE_FP32,
                        .hidden = hidden.data(),
                        .targets = targets};
  ASSERT_TRUE(ValidateCall(good, {}, {}).ok());
  const auto message = [](const Microbatch& m, const LossOutputs& outputs, const ComputeOptions& options) {
    const absl::Status status = ValidateCall(m, outputs, options);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  Microbatch bad = good;
  bad.head = "";
  EXPECT_THAT(message(bad, {}, {}), ::testing::HasSubstr("microbatch.head"));
  bad = good;
  bad.hidden = nullptr;
  EXPECT_THAT(message(bad, {}, {}), ::testing::HasSubstr("microbatch.hidden"));
  bad = good;
  bad.hidden_size = 0;
  EXPECT_THAT(message(bad, {}, {}), ::testing::HasSubstr("hidden_size is 0"));
  bad = good;
  bad.hidden_size = ~uint64_t{0} / 8;
  EXPECT_THAT(message(bad, {}, {}), ::testing::HasSubstr("too large"));
  bad = good;
  bad.row_weights = weights;
  EXPECT_THAT(message(bad, {}, {}), ::testing::HasSubstr("row_weights has 3 entries for 4 rows"));
  ComputeOptions soft;
  soft.loss.set_rest(v1::REST_NONE);
  EXPECT_THAT(message(good, {}, soft), ::testing::HasSubstr("microbatch.target_classes is not given"));
  bad = good;
  bad.target_count = 2;
  EXPECT_THAT(message(bad, {}, {}), ::testing::HasSubstr("goes with options.loss.rest only"));
  EXPECT_THAT(message(bad, {}, soft),
              ::testing::HasSubstr("target_classes has 0 entries; with target_count 2"));
  const std::vector<int32_t> eight(8, 1);
  bad.target_classes = eight;
  bad.target_weights = weights;
  EXPECT_THAT(message(bad, {}, soft), ::testing::HasSubstr("target_weights has 3 entries"));
  bad = good;
  bad.step = std::nullopt;
  EXPECT_THAT(message(bad, {}, {.accumulate_gradients = true}), ::testing::HasSubstr("microbatch.step"));
  EXPECT_THAT(message(good, {.row_loss = absl::MakeSpan(loss)}, {}),
              ::testing::HasSubstr("row_loss has 5 entries"));
  EXPECT_THAT(message(good, {}, {.normalizer = -1.0}), ::testing::HasSubstr("normalizer is -1"));
  EXPECT_THAT(message(good, {}, {.reduction = v1::REDUCTION_SUM, .normalizer = 2.0}),
              ::testing::HasSubstr("normalizer"));
  EXPECT_THAT(message(good, {}, {.grad_output = INFINITY}), ::testing::HasSubstr("grad_output is inf"));
  EXPECT_THAT(message(good, {}, {.retain = true}), ::testing::HasSubstr("options.retain"));
  EXPECT_THAT(message(good, {}, {.reduction = v1::REDUCTION_NONE, .accumulate_gradients = true}),
              ::testing::HasSubstr("accumulate_gradients"));
  EXPECT_THAT(message(good, {.grad_hidden = loss.data()}, {.reduction = v1::REDUCTION_NONE}),
              ::testing::HasSubstr("grad_hidden"));
  RetainedGradients gradients{.head = "h", .hidden_size = 3, .grad_loss = weights, .grad_lse = loss};
  EXPECT_EQ(ValidateBackward(gradients, {}).message(), "gradients.grad_lse has 5 entries for 3 rows");
  gradients = {.head = "h", .hidden_size = 3, .grad_loss = weights, .grad_entropy = loss};
  EXPECT_EQ(ValidateBackward(gradients, {}).message(), "gradients.grad_entropy has 5 entries for 3 rows");
  ComputeOptions weighted;
  weighted.loss.set_use_class_weights(true);
  EXPECT_THAT(message(good, {}, weighted), ::testing::HasSubstr("normalizer is absent"));
}

// ---- Answer tracker ----

v1::RowRange Range(uint64_t begin, uint64_t end) {
  v1::RowRange rows;
  rows.set_begin(begin);
  rows.set_end(end);
  return rows;
}

TEST(AnswerTrackerTest, ExactlyTakesEachSliceOnce) {
  AnswerTracker tracker = AnswerTracker::Exactly({{0, 5}, {7, 9}});
  EXPECT_FALSE(tracker.Complete());
  EXPECT_TRUE(tracker.Take(Range(7, 9)).ok());
  for (const auto& wrong : {Range(7, 9), Range(0, 4), Range(1, 5), Range(5, 7), Range(0, 9), Range(5, 0)}) {
    EXPECT_EQ(tracker.Take(wrong).code(), absl::StatusCode::kInternal);
  }
  EXPECT_EQ(tracker.answered_rows(), 2u);
  EXPECT_TRUE(tracker.Take(Range(0, 5)).ok());
  EXPECT_TRUE(tracker.Complete());
  EXPECT_EQ(tracker.answered_rows(), 7u);
  EXPECT_THAT(std::string(tracker.Take(Range(0, 5)).message()), ::testing::HasSubstr("rows [0, 5) twice"));
}

TEST(AnswerTrackerTest, PartsOfASliceTakeItsPlace) {
  AnswerTracker tracker = AnswerTracker::Exactly({{0, 10}, {10, 20}});
  tracker.Replace({10, 20}, {{10, 15}, {15, 20}});
  EXPECT_TRUE(tracker.Take(Range(15, 20)).ok());
  EXPECT_FALSE(tracker.Take(Range(10, 20)).ok());
  EXPECT_TRUE(tracker.Take(Range(0, 10)).ok());
  EXPECT_FALSE(tracker.Complete());
  EXPECT_TRUE(tracker.Take(Range(10, 15)).ok());
  EXPECT_TRUE(tracker.Complete());
}

TEST(AnswerTrackerTest, NothingExpectedIsComplete) {
  EXPECT_TRUE(AnswerTracker::Exactly({}).Complete());
  EXPECT_FALSE(AnswerTracker::Exactly({}).Take(Range(0, 0)).ok());
}

TEST(AnswerTrackerTest, WithinTakesDisjointRows) {
  AnswerTracker tracker = AnswerTracker::Within({10, 20});
  EXPECT_TRUE(tracker.Complete());
  EXPECT_TRUE(tracker.Take(Range(14, 16)).ok());
  for (const auto& wrong : {Range(14, 16), Range(13, 15), Range(15, 16), Range(15, 18), Range(12, 18),
                            Range(9, 11), Range(19, 21), Range(12, 12), Range(13, 12), Range(0, 100)}) {
    EXPECT_EQ(tracker.Take(wrong).code(), absl::StatusCode::kInternal) << wrong.ShortDebugString();
  }
  EXPECT_TRUE(tracker.Take(Range(10, 14)).ok());
  EXPECT_TRUE(tracker.Take(Range(16, 20)).ok());
  EXPECT_EQ(tracker.answered_rows(), 10u);
}

// ---- Executor ----

TEST(ExecutorTest, RunsTasksInTheOrderOfTheirTimesAndOfPosting) {
  std::vector<int> order;
  absl::Notification done;
  Executor executor;
  const absl::Time soon = clocks::SteadyNow() + absl::Milliseconds(30);
  executor.PostAt(soon + absl::Milliseconds(10), [&] {
    order.push_back(4);
    done.Notify();
  });
  executor.PostAt(soon, [&] { order.push_back(2); });
  executor.PostAt(soon, [&] { order.push_back(3); });
  executor.Post([&] { order.push_back(1); });
  done.WaitForNotification();
  EXPECT_THAT(order, ElementsAre(1, 2, 3, 4));
}

TEST(ExecutorTest, AnIdleOneRunsATaskOnTheCallersThread) {
  Executor executor;
  std::thread::id ran;
  executor.RunOrPost([&] { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
}

TEST(ExecutorTest, ATaskOnTheCallersThreadWaitsForNoneThatIsNotDue) {
  Executor executor;
  bool late = false;
  executor.PostAt(clocks::SteadyNow() + absl::Hours(1), [&] { late = true; });
  std::thread::id ran;
  executor.RunOrPost([&] { ran = std::this_thread::get_id(); });
  EXPECT_EQ(ran, std::this_thread::get_id());
  EXPECT_FALSE(late);
}

TEST(ExecutorTest, ABusyOneRunsItLater) {
  absl::Notification begun;
  absl::Notification go_on;
  absl::Notification done;
  std::vector<int> order;
  std::thread::id ran;
  Executor executor;
  executor.Post([&] {
    begun.Notify();
    go_on.WaitForNotification();
    order.push_back(1);
  });
  begun.WaitForNotification();
  executor.RunOrPost([&] {
    order.push_back(2);
    ran = std::this_thread::get_id();
    done.Notify();
  });
  go_on.Notify();
  done.WaitForNotification();
  EXPECT_THAT(order, ElementsAre(1, 2));
  EXPECT_NE(ran, std::this_thread::get_id());
}

TEST(ExecutorTest, WhatATaskOnTheCallersThreadPostsRunsAfterIt) {
  absl::Notification done;
  std::vector<int> order;
  Executor executor;
  executor.RunOrPost([&] {
    executor.Post([&] { order.push_back(2); });
    executor.RunOrPost([&] {
      order.push_back(3);
      done.Notify();
    });
    absl::SleepFor(absl::Milliseconds(5));
    order.push_back(1);
  });
  done.WaitForNotification();
  EXPECT_THAT(order, ElementsAre(1, 2, 3));
}

TEST(ExecutorTest, TasksOfManyThreadsRunOneAtATimeAndAllOfThem) {
  std::atomic<int> inside{0};
  std::atomic<int> ran{0};
  std::atomic<bool> overlapped{false};
  const auto task = [&] {
    if (++inside != 1) overlapped = true;
    ++ran;
    --inside;
  };
  {
    Executor executor;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        for (int i = 0; i < 2000; ++i) {
          if ((i + thread) % 3 == 0) {
            executor.Post(task);
          } else {
            executor.RunOrPost(task);
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_FALSE(overlapped);
  EXPECT_EQ(ran, 4 * 2000);
}

TEST(ExecutorTest, ItsEndWaitsForATaskOnAnotherThread) {
  absl::Notification begun;
  std::atomic<bool> ended{false};
  auto executor = std::make_unique<Executor>();
  Executor* const raw = executor.get();
  std::thread other([&] {
    raw->RunOrPost([&] {
      begun.Notify();
      absl::SleepFor(absl::Milliseconds(20));
      ended = true;
    });
  });
  begun.WaitForNotification();
  executor = nullptr;
  EXPECT_TRUE(ended);
  other.join();
}

}  // namespace
}  // namespace lossd::client::internal::loss_test
