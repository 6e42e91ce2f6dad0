// SPDX-License-Identifier: Apache-2.0
// Loss computations against a server, or a network, that misbehaves.
#include <gmock/gmock.h>
#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "tests/client/cpp/faults_fixture.h"

namespace lossd::client::faults_test {
namespace {

using lossd::fake::Fault;
using lossd::fake::Faults;
using ::testing::HasSubstr;

TEST_F(FaultsTest, ErrorInTheMiddleComesWithItsDetail) {
  server_.SetFaults({.fail_slice = [](uint64_t n) { return n == 5 ? grpc::StatusCode::OUT_OF_RANGE : 0; }});
  const auto result = Compute();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kOutOfRange) << result.status();
  EXPECT_EQ(result.status().message(), "injected fault");
  const auto detail = ErrorDetailOf(result.status());
  ASSERT_TRUE(detail.has_value());
  EXPECT_EQ(detail->field(), "slice.rows");
  EXPECT_EQ(detail->incarnation(), server_.incarnation());
}

TEST_F(FaultsTest, WrongHeadStepTargetAndSizeAreRefused) {
  Microbatch bad = AsMicrobatch();
  bad.head = "other";
  EXPECT_EQ(client_->ComputeLoss(bad, {}, Options()).status().code(), absl::StatusCode::kNotFound);
  bad = AsMicrobatch();
  bad.step = 5;
  EXPECT_EQ(client_->ComputeLoss(bad, {}, Options()).status().code(), absl::StatusCode::kFailedPrecondition);
  bad = AsMicrobatch();
  bad.hidden_size = 4;
  const auto status = client_->ComputeLoss(bad, {}, Options()).status();
  EXPECT_EQ(status.message(), "microbatch.hidden_size is 4, but head \"head\" has 8");
  targets_[77] = 10;
  const auto target = client_->ComputeLoss(AsMicrobatch(), {}, {.streams = 1}).status();
  EXPECT_EQ(target.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorDetailOf(target)->field(), "open.targets[77]");
}

TEST_F(FaultsTest, BadArgumentsReachTheCallback) {
  Microbatch bad = AsMicrobatch();
  bad.hidden = nullptr;
  absl::Status seen;
  PendingLoss pending = client_->ComputeLossAsync(
      bad, {}, {}, [&seen](const absl::StatusOr<LossResult>& result) { seen = result.status(); });
  EXPECT_EQ(pending.Wait().status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(seen.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(FaultsTest, CutStreamsAreSentAgainAndAccumulateOnce) {
  server_.SetFaults(
      {.fail_slice = [](uint64_t n) { return n == 7 || n == 20 ? grpc::StatusCode::UNAVAILABLE : 0; }});
  const auto result = Compute();
  ASSERT_NO_FATAL_FAILURE(ExpectComplete(result));
  EXPECT_EQ(result->repeats, 2);
  EXPECT_GT(result->repeated_rows, 0u);
}

TEST_F(FaultsTest, LostConnectionsAreSentAgain) {
  server_.SetFaults({.slice_delay_seconds = 0.02});
  ComputeOptions options = Options();
  options.max_attempts = 50;
  PendingLoss pending = client_->ComputeLossAsync(AsMicrobatch(), Outputs(), options);
  while (server_.slices_received() < 4) absl::SleepFor(absl::Milliseconds(1));
  server_.StopListening();
  server_.SetFaults({});
  server_.Listen();
  const auto result = pending.Wait();
  ASSERT_NO_FATAL_FAILURE(ExpectComplete(result));
  EXPECT_GE(result->repeats, 1);
}

TEST_F(FaultsTest, EndlessUnavailabilityEndsAfterMaxAttempts) {
  server_.SetFaults({.refuse_streams = 1000});
  const auto result = client_->ComputeLoss(AsMicrobatch(), {}, {.streams = 1, .max_attempts = 4});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("tried 4 times"));
  EXPECT_THAT(std::string(result.status().message()), HasSubstr(server_.target()));
  EXPECT_EQ(server_.streams_opened(), 4u);
}

TEST_F(FaultsTest, DrainingServerIsTriedAgain) {
  server_.SetFaults({.refuse_calls = 1, .refuse_streams = 2});
  ExpectComplete(Compute());
}

TEST_F(FaultsTest, CancelEndsTheCall) {
  server_.SetFaults({.slice_delay_seconds = 0.2});
  PendingLoss pending = client_->ComputeLossAsync(AsMicrobatch(), Outputs(), Options());
  EXPECT_FALSE(pending.WaitFor(absl::Milliseconds(50)));
  const absl::Time start = clocks::SteadyNow();
  pending.Cancel();
  pending.Cancel();
  EXPECT_EQ(pending.Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_LT(clocks::SteadyNow() - start, absl::Seconds(2));
}

// A call's end gives the caller's memory back: what is in it afterwards is not sent.
TEST_F(FaultsTest, CancelledCallsSendNothingThatComesLater) {
  constexpr float kLater = 12345;
  std::atomic<int> slices = 0, later = 0;
  Faults faults{.slice_delay_seconds = 0.002};
  faults.on_request = [&](const v1::ComputeLossRequest& request) {
    float first = 0;
    if (request.payload().size() >= sizeof(first))
      std::memcpy(&first, request.payload().data(), sizeof(first));
    ++slices;
    if (first == kLater) ++later;
    return Fault{};
  };
  server_.SetFaults(faults);
  const std::vector<float> before = x_;
  for (int n = 0; n < 20; ++n) {
    x_ = before;
    const int begun = slices;
    PendingLoss pending = client_->ComputeLossAsync(AsMicrobatch(n), Outputs(), Options());
    while (slices < begun + n && !pending.Done()) absl::SleepFor(absl::Milliseconds(1));
    pending.Cancel();
    (void)pending.Wait();
    std::fill(x_.begin(), x_.end(), kLater);
  }
  server_.StopListening();  // ends what it reads
  EXPECT_EQ(later, 0);
}

TEST_F(FaultsTest, CancelDuringBackoffDoesNotWait) {
  auto client =
      Client::Connect({.target = server_.target(),
                       .retry = {.initial_backoff = absl::Seconds(30), .max_backoff = absl::Seconds(30)}})
          .value();
  server_.SetFaults({.refuse_streams = 1000});
  PendingLoss pending = client->ComputeLossAsync(AsMicrobatch(), Outputs(), Options());
  EXPECT_FALSE(pending.WaitFor(absl::Milliseconds(100)));
  const absl::Time start = clocks::SteadyNow();
  pending.Cancel();
  EXPECT_EQ(pending.Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_LT(clocks::SteadyNow() - start, absl::Seconds(2));
}

// Both streams begin again, whichever of them notices.
TEST_F(FaultsTest, CallsOfSeveralStreamsBeginAgainAsAWhole) {
  for (int change : {1, 3, 13, 20, 26}) {
    auto messages = std::make_shared<std::atomic<int>>(0);
    Faults faults;
    faults.on_request = [messages, change](const v1::ComputeLossRequest&) {
      return Fault{.new_weights = ++*messages == change};
    };
    server_.SetFaults(faults);
    ComputeOptions options = Options();
    options.accumulate_gradients = false;
    const auto result = client_->ComputeLoss(AsMicrobatch(), Outputs(), options);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->valid_rows, kRows);
    EXPECT_EQ(result->streams, 2);
    for (size_t i = 0; i < x_.size(); ++i) ASSERT_EQ(dx_[i], 2 * x_[i]);
  }
}

TEST_F(FaultsTest, CancelBeforeBeginningAgainDoesNotWait) {
  auto client =
      Client::Connect({.target = server_.target(),
                       .retry = {.initial_backoff = absl::Seconds(300), .max_backoff = absl::Seconds(300)}})
          .value();
  auto aborted = std::make_shared<std::atomic<bool>>(false);
  Faults faults;
  faults.on_request = [aborted](const v1::ComputeLossRequest& request) {
    if (request.has_slice()) *aborted = true;
    return Fault{.new_weights = request.has_slice()};
  };
  server_.SetFaults(faults);
  ComputeOptions options = Options();
  options.accumulate_gradients = false;
  PendingLoss pending = client->ComputeLossAsync(AsMicrobatch(), Outputs(), options);
  while (!*aborted) absl::SleepFor(absl::Milliseconds(1));
  pending.Cancel();
  EXPECT_EQ(pending.Wait().status().code(), absl::StatusCode::kCancelled);
}

TEST_F(FaultsTest, DroppedHandlesAndClientsCancel) {
  server_.SetFaults({.slice_delay_seconds = 0.2});
  const absl::Time start = clocks::SteadyNow();
  { PendingLoss dropped = client_->ComputeLossAsync(AsMicrobatch(1), Outputs(), Options()); }
  PendingLoss left = client_->ComputeLossAsync(AsMicrobatch(2), Outputs(), Options());
  client_ = nullptr;
  EXPECT_TRUE(left.Done());
  EXPECT_EQ(left.Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_LT(clocks::SteadyNow() - start, absl::Seconds(4));
}

TEST_F(FaultsTest, DeadlineEndsTheCall) {
  server_.SetFaults({.slice_delay_seconds = 0.2});
  ComputeOptions options = Options();
  options.timeout = absl::Milliseconds(150);
  const absl::Time start = clocks::SteadyNow();
  const auto result = client_->ComputeLoss(AsMicrobatch(), Outputs(), options);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded) << result.status();
  EXPECT_LT(clocks::SteadyNow() - start, absl::Seconds(2));
}

TEST_F(FaultsTest, LoweredLimitsAreLearnt) {
  ASSERT_TRUE(Compute().ok());
  server_.SetFaults({.sudden_max_rows = 5});
  const auto result = client_->ComputeLoss(AsMicrobatch(2), Outputs(), Options());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->accumulated_rows, kRows);
  EXPECT_EQ(result->repeats, 2);
}

TEST_F(FaultsTest, NonsenseFromTheServerIsAnError) {
  ExpectError({.on_slice =
                   [](v1::ComputeLossResponse* response) {
                     response->mutable_payload()->pop_back();
                     return true;
                   }},
              absl::StatusCode::kInternal, "bytes of gradients");
  ExpectError({.on_slice =
                   [](v1::ComputeLossResponse* response) {
                     response->mutable_slice()->add_row_loss(1);
                     return true;
                   }},
              absl::StatusCode::kInternal, "values of row_loss");
  ExpectError({.on_slice =
                   [](v1::ComputeLossResponse* response) {
                     response->mutable_slice()->add_row_entropy(1);
                     return true;
                   }},
              absl::StatusCode::kInternal, "values of row_entropy");
  ExpectError({.on_slice =
                   [](v1::ComputeLossResponse* response) {
                     v1::RowRange* rows = response->mutable_slice()->mutable_rows();
                     rows->set_begin(rows->begin() + (uint64_t{1} << 60));
                     rows->set_end(rows->end() + (uint64_t{1} << 60));
                     return true;
                   }},
              absl::StatusCode::kInternal, "no slice of this call");
  ExpectError({.on_slice = [](v1::ComputeLossResponse*) { return false; }}, absl::StatusCode::kInternal,
              "the summary of");
  ExpectError({.on_slice =
                   [](v1::ComputeLossResponse* response) {
                     response->clear_kind();
                     return true;
                   }},
              absl::StatusCode::kInternal, "unknown kind");
  ExpectError({.no_summary = true}, absl::StatusCode::kInternal, "no summary");
  ExpectError({.on_summary = [](v1::MicrobatchSummary* summary) { summary->set_valid_rows(3); }},
              absl::StatusCode::kInternal, "valid rows");
  ExpectError(
      {.on_summary = [](v1::MicrobatchSummary* summary) { summary->mutable_state()->set_incarnation(3); }},
      absl::StatusCode::kInternal, "another incarnation");
  ExpectError({.on_accepted = [](v1::MicrobatchAccepted* accepted) { accepted->clear_state(); }},
              absl::StatusCode::kInternal, "incarnation 0");
  ExpectError(
      {.on_accepted = [](v1::MicrobatchAccepted* accepted) { accepted->mutable_state()->set_step(8); }},
      absl::StatusCode::kInternal, "step 8");
}

TEST_F(FaultsTest, DuplicateResultsAreAnError) {
  const auto repeat = [](const v1::ComputeLossResponse& response) {
    return [response] { return std::vector<v1::ComputeLossResponse>{response}; };
  };
  v1::ComputeLossResponse accepted;
  accepted.mutable_accepted()->mutable_state()->set_incarnation(1);
  ExpectError({.extra = repeat(accepted)}, absl::StatusCode::kInternal, "`accepted` twice");
  v1::ComputeLossResponse summary;
  summary.mutable_summary()->mutable_state()->set_incarnation(server_.incarnation());
  ExpectError({.extra = repeat(summary)}, absl::StatusCode::kInternal, "a message after the summary");
  v1::ComputeLossResponse slice;  // the first one of the first stream
  slice.mutable_slice()->mutable_rows()->set_end(16);
  ExpectError({.extra = repeat(slice)}, absl::StatusCode::kInternal, "results of rows [0, 16)");
}

TEST_F(FaultsTest, CutBackwardIsSentAgain) {
  ASSERT_TRUE(
      client_->ComputeLoss(AsMicrobatch(), {}, {.reduction = v1::REDUCTION_NONE, .retain = true}).ok());
  const uint64_t before = server_.slices_received();
  server_.SetFaults(
      {.fail_slice = [before](uint64_t n) { return n == before + 1 ? grpc::StatusCode::UNAVAILABLE : 0; }});
  const std::vector<float> ones(kRows, 1.0f);
  const RetainedGradients gradients{.head = "head",
                                    .step = 0,
                                    .id = 1,
                                    .hidden_size = kD,
                                    .hidden_dtype = v1::DTYPE_FP32,
                                    .grad_loss = ones};
  const auto result = client_->Backward(gradients, dx_.data(), {.accumulate_gradients = true});
  ASSERT_NO_FATAL_FAILURE(ExpectComplete(result));
  EXPECT_EQ(result->repeats, 1);
}

TEST_F(FaultsTest, CutContributionsAreSentAgainAndAddedOnce) {
  server_.SetFaults({.fail_add = [](uint64_t n) { return n <= 2 ? grpc::StatusCode::UNAVAILABLE : 0; }});
  const Addition addition(7);
  const auto added = addition.Send(*client_);
  ASSERT_TRUE(added.ok()) << added.status();
  EXPECT_EQ(added->added_rows(), 10u);
  const auto again = addition.Send(*client_);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->repeated_rows(), 10u);
  EXPECT_EQ(server_.accumulated("head"), 55.0);
  server_.SetFaults({.fail_add = [](uint64_t) { return grpc::StatusCode::UNAVAILABLE; }});
  EXPECT_EQ(Addition(8).Send(*client_).status().code(), absl::StatusCode::kUnavailable);
  server_.SetFaults({.fail_add = [](uint64_t) { return grpc::StatusCode::OUT_OF_RANGE; }});
  EXPECT_EQ(Addition(8).Send(*client_).status().code(), absl::StatusCode::kOutOfRange);
}

TEST_F(FaultsTest, RandomCutsNeverLoseOrRepeatARow) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  double expected = 0;
  for (uint64_t id = 0; id < 30; ++id) {
    server_.SetFaults({.fail_slice = [&random](uint64_t) {
      return random() % 40 == 0 ? grpc::StatusCode::UNAVAILABLE : 0;
    }});
    ComputeOptions options = Options();
    options.max_attempts = 100;
    options.streams = 1 + static_cast<int>(id % 5);
    const auto result = client_->ComputeLoss(AsMicrobatch(id), Outputs(), options);
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_EQ(result->valid_rows, kRows);
    expected += GradientSum();
    ASSERT_NEAR(server_.accumulated("head"), expected, 1e-6);
  }
}

}  // namespace
}  // namespace lossd::client::faults_test
