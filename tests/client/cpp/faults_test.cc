// SPDX-License-Identifier: Apache-2.0
// Loss computations and other calls against a server, or a network, that misbehaves; what a client notices of
// a server that was restarted; and resets, heads that exist already, and the run that every call of a trainer
// names.
#include <gmock/gmock.h>
#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/cpp/connections.h"
#include "kernels/clocks/clock.h"
#include "tests/client/fake_server.h"

namespace lossd::client::faults_test {
namespace {

using lossd::fake::Fault;
using lossd::fake::Faults;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::SizeIs;

constexpr uint64_t kD = 8;
constexpr uint64_t kRows = 400;

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

// ---- Faults ----
// Loss computations against a server, or a network, that misbehaves.

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

// Each computation calls its callback once, with the result that Wait returns, and before Wait returns. A
// short callback of a computation that succeeds runs on the thread that brings the end; any other callback on
// the thread of all callbacks.
TEST_F(FaultsTest, CallbacksGetTheResultOnce) {
  std::thread::id of_callbacks;
  int elsewhere = 0;
  for (const bool is_short : {false, true}) {
    ComputeOptions options = Options();
    options.short_callback = is_short;
    options.max_attempts = 1;
    for (const bool fails : {false, true}) {
      server_.SetFaults({.refuse_streams = fails ? 1000 : 0});
      for (int n = 0; n < 8; ++n) {
        int calls = 0;
        absl::Status told;
        double loss = 0;
        std::thread::id thread;
        PendingLoss pending = client_->ComputeLossAsync(AsMicrobatch(n), Outputs(), options,
                                                        [&](const absl::StatusOr<LossResult>& result) {
                                                          ++calls;
                                                          told = result.status();
                                                          loss = result.ok() ? result->loss : 0;
                                                          thread = std::this_thread::get_id();
                                                        });
        const absl::StatusOr<LossResult> result = pending.Wait();
        EXPECT_EQ(calls, 1);
        EXPECT_EQ(result.ok(), !fails) << result.status();
        EXPECT_EQ(told, result.status());
        EXPECT_EQ(loss, result.ok() ? result->loss : 0);
        EXPECT_NE(thread, std::this_thread::get_id());
        if (is_short && !fails) {
          elsewhere += thread != of_callbacks ? 1 : 0;
          continue;
        }
        if (of_callbacks == std::thread::id()) of_callbacks = thread;
        EXPECT_EQ(thread, of_callbacks);
      }
    }
  }
  EXPECT_GT(elsewhere, 0) << "all short callbacks ran on the thread of all callbacks";
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
  EXPECT_LT(clocks::SteadyNow() - start, absl::Seconds(20));
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

// The error may be that of a head with another shape, which has gone again when the client asks.
TEST_F(FaultsTest, ErrorsOfAHeadThatWasMadeAgainSayIt) {
  for (const int code : {grpc::StatusCode::INVALID_ARGUMENT, grpc::StatusCode::FAILED_PRECONDITION}) {
    const lossd::fake::Fault fault{.code = code, .make_again = true};
    server_.SetFaults({.on_write = [&](const v1::OpenTensor&) { return fault; },
                       .on_add = [&](const v1::OpenGradient&) { return fault; },
                       .on_read = [&](uint64_t) { return fault; }});
    const std::vector<float> bias(10, 1.0f);
    const absl::Status statuses[] = {client_->WriteTensor("head", v1::PARAM_BIAS, bias).status(),
                                     Addition(7).Send(*client_).status(),
                                     client_->ReadTensor("head", v1::PARAM_WEIGHT).status()};
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
      EXPECT_THAT(
          std::string(status.message()),
          HasSubstr("head \"head\" was made again during the call, which failed with: injected fault"));
    }
  }
}

TEST_F(FaultsTest, ErrorsOfAHeadThatHasAnotherShapeNowSayIt) {
  const lossd::fake::Fault fault{
      .code = grpc::StatusCode::INVALID_ARGUMENT, .make_again = true, .again_with = 9};
  server_.SetFaults({.on_write = [&](const v1::OpenTensor&) { return fault; }});
  const std::vector<float> bias(10, 1.0f);
  const absl::Status status = client_->WriteTensor("head", v1::PARAM_BIAS, bias).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_EQ(status.message(),
            "head \"head\" was made again during the call: its tensor has 9 x 1 values, and had 10 x 1");
}

TEST_F(FaultsTest, ErrorsOfTheHeadThatIsMeantStay) {
  const lossd::fake::Fault fault{.code = grpc::StatusCode::INVALID_ARGUMENT};
  server_.SetFaults({.on_write = [&](const v1::OpenTensor&) { return fault; },
                     .on_add = [&](const v1::OpenGradient&) { return fault; }});
  const std::vector<float> bias(10, 1.0f);
  EXPECT_EQ(client_->WriteTensor("head", v1::PARAM_BIAS, bias).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Addition(7).Send(*client_).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(EarlierServersTest, OneThatDoesNotNumberHeadsIsTakenAtItsWord) {
  lossd::fake::FakeServer server({.versions = false});
  server.AddHead("head", kD, 10);
  server.SetFaults({.on_write = [](const v1::OpenTensor&) {
    return lossd::fake::Fault{.code = grpc::StatusCode::INVALID_ARGUMENT, .make_again = true};
  }});
  const auto client = Client::Connect({.target = server.target()}).value();
  const std::vector<float> bias(10, 1.0f);
  EXPECT_EQ(client->WriteTensor("head", v1::PARAM_BIAS, bias).status().code(),
            absl::StatusCode::kInvalidArgument);
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

// ---- Restarts ----
// What a client notices of a server that was restarted, and when that is an error.

using RestartTest = FaultsTest;

TEST_F(RestartTest, DuringTheCallAborts) {
  Faults faults{.fail_slice = [](uint64_t n) { return n == 7 ? grpc::StatusCode::UNAVAILABLE : 0; },
                .restart_on_failure = true};
  server_.SetFaults(faults);
  const uint64_t before = server_.incarnation();
  const auto result = client_->ComputeLoss(AsMicrobatch(), Outputs(),
                                           {.accumulate_gradients = true, .streams = 1, .slice_bytes = 512});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted) << result.status();
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("server restarted (incarnation "));
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("gradients of step 0 are lost"));
  EXPECT_NE(server_.incarnation(), before);
}

TEST_F(RestartTest, BetweenMicrobatchesAbortsUntilAcknowledged) {
  ASSERT_TRUE(Compute().ok());
  server_.Restart();
  for (uint64_t id : {2, 3}) {
    const auto result = client_->ComputeLoss(AsMicrobatch(id), Outputs(), Options());
    EXPECT_EQ(result.status().code(), absl::StatusCode::kAborted) << result.status();
  }
  EXPECT_EQ(client_->GradNorm("head").status().code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(client_->ComputeLoss(AsMicrobatch(), Outputs(), {}).ok()) << "loss alone loses nothing";
  client_->AcknowledgeRestart("head");
  EXPECT_TRUE(Compute().ok());
}

TEST_F(RestartTest, IsSeenInErrorsToo) {
  ASSERT_TRUE(Compute().ok());
  ASSERT_TRUE(Connect()->DeleteHead("head").ok());
  server_.Restart();
  EXPECT_EQ(Compute().status().code(), absl::StatusCode::kAborted);
  v1::ApplyStepRequest apply;
  apply.set_head("head");
  EXPECT_EQ(client_->ApplyStep(apply).status().code(), absl::StatusCode::kAborted);
  v1::CreateHeadRequest create;
  create.mutable_spec()->set_name("head");
  create.mutable_spec()->set_hidden_size(kD);
  create.mutable_spec()->set_vocab_size(10);
  ASSERT_TRUE(client_->CreateHead(create).ok());
  EXPECT_TRUE(Compute().ok()) << "creating the head acknowledges the restart";
}

TEST_F(RestartTest, GradientsOfADeletedHeadAreNotMissed) {
  ASSERT_TRUE(Compute().ok());
  ASSERT_TRUE(client_->DeleteHead("head").ok());
  v1::CreateHeadRequest create;
  create.mutable_spec()->set_name("head");
  create.mutable_spec()->set_hidden_size(kD);
  create.mutable_spec()->set_vocab_size(10);
  ASSERT_TRUE(Connect()->CreateHead(create).ok());
  const auto result = Compute();
  EXPECT_TRUE(result.ok()) << result.status();
}

TEST_F(RestartTest, BetweenStepsLosesNothing) {
  ASSERT_TRUE(Compute().ok());
  v1::ApplyStepRequest apply;
  apply.set_head("head");
  apply.set_expected_rows(kRows);
  ASSERT_TRUE(client_->ApplyStep(apply).ok());
  server_.Restart();
  Microbatch next = AsMicrobatch();
  next.step = 1;
  const auto result = client_->ComputeLoss(next, Outputs(), Options());
  EXPECT_TRUE(result.ok()) << result.status();
}

// Another thread may get the answer to its repeat when the next step has begun.
TEST_F(RestartTest, RepeatedStepDoesNotForgetTheNextOne) {
  ASSERT_TRUE(Compute().ok());
  v1::ApplyStepRequest apply;
  apply.set_head("head");
  ASSERT_TRUE(client_->ApplyStep(apply).ok());
  Microbatch next = AsMicrobatch();
  next.step = 1;
  ASSERT_TRUE(client_->ComputeLoss(next, Outputs(), Options()).ok());
  const auto repeat = client_->ApplyStep(apply);
  ASSERT_TRUE(repeat.ok()) << repeat.status();
  EXPECT_TRUE(repeat->repeated_call());
  server_.Restart();
  next.id = 2;
  EXPECT_EQ(client_->ComputeLoss(next, Outputs(), Options()).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(server_.accumulated("head"), 0) << "refused before anything was accumulated";
}

TEST_F(RestartTest, StepAppliedWithoutLostRowsIsAnError) {
  ASSERT_TRUE(Compute().ok());
  server_.Restart();
  v1::ApplyStepRequest apply;
  apply.set_head("head");
  EXPECT_EQ(client_->ApplyStep(apply).status().code(), absl::StatusCode::kAborted);
}

TEST_F(RestartTest, ContributionsNoticeARestart) {
  ASSERT_TRUE(Compute().ok());
  server_.Restart();
  const absl::Status status = Addition(7).Send(*client_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  const auto restart = RestartOf(status);
  ASSERT_TRUE(restart.has_value());
  EXPECT_EQ(restart->now, server_.incarnation());
  EXPECT_NE(restart->before, restart->now);
  EXPECT_EQ(server_.accumulated("head"), 0.0) << "left behind in the new process";
  client_->AcknowledgeRestart("head");
  EXPECT_TRUE(Addition(7).Send(*client_).ok());
  server_.Restart();
  EXPECT_EQ(Compute().status().code(), absl::StatusCode::kAborted) << "contributions count as gradients";
}

TEST_F(RestartTest, AnExpectedIncarnationIsInsistedOn) {
  const uint64_t before = server_.incarnation();
  const auto connect = [&] {
    return Client::Connect({.target = server_.target(), .expected_incarnation = before});
  };
  auto client = connect();
  ASSERT_TRUE(client.ok()) << client.status();
  server_.Restart();
  const auto restart = RestartOf(connect().status());
  ASSERT_TRUE(restart.has_value()) << connect().status();
  EXPECT_EQ(restart->before, before);
  EXPECT_EQ(restart->now, server_.incarnation());
  for (const absl::Status& status : {(*client)->ComputeLoss(AsMicrobatch(), Outputs(), Options()).status(),
                                     Addition(7).Send(**client).status()}) {
    EXPECT_TRUE(RestartOf(status).has_value()) << status;
  }
  (*client)->AcknowledgeRestart("head");
  EXPECT_TRUE((*client)->ComputeLoss(AsMicrobatch(), Outputs(), Options()).ok());
  EXPECT_FALSE(RestartOf(absl::AbortedError("the step's gradients were zeroed")).has_value());
}

// ---- Resets and runs ----
// Resets, heads that exist already, and the run that every call of a trainer names.

v1::ResetHeadRequest ResetOf(v1::ResetScope scope) {
  v1::ResetHeadRequest request;
  request.set_head("head");
  request.set_scope(scope);
  return request;
}

class ResetsTest : public FaultsTest {
 protected:
  absl::StatusOr<v1::ApplyStepResponse> Apply(uint64_t step) {
    v1::ApplyStepRequest request;
    request.set_head("head");
    request.set_step(step);
    request.mutable_optimizer()->mutable_sgd()->set_learning_rate(1.0);
    return client_->ApplyStep(request);
  }
  v1::CreateHeadRequest Same() {
    v1::CreateHeadRequest request;
    *request.mutable_spec() = client_->DescribeHead("head")->spec();
    return request;
  }
};

TEST_F(ResetsTest, AResetWhoseAnswerIsLostIsDoneOnce) {
  ASSERT_TRUE(Apply(0).ok());
  std::vector<v1::ResetHeadRequest> seen;
  const uint64_t incarnation = client_->DescribeHead("head")->state().incarnation();
  server_.SetFaults({.refuse_calls = 1, .on_reset = [&](const v1::ResetHeadRequest& request) {
                       seen.push_back(request);
                       return lossd::fake::Fault();
                     }});
  v1::ResetHeadRequest request = ResetOf(v1::RESET_SCOPE_ALL);
  request.set_incarnation(incarnation);
  const auto reset = client_->ResetHead(request);
  ASSERT_TRUE(reset.ok()) << reset.status();
  EXPECT_TRUE(reset->repeated_call());
  EXPECT_EQ(reset->head().state().step(), 0u);
  ASSERT_THAT(seen, SizeIs(2));
  EXPECT_EQ(seen[0].SerializeAsString(), seen[1].SerializeAsString());
  EXPECT_THAT(seen[0].reset_id(), SizeIs(32));
  // Another reset has another id.
  ASSERT_TRUE(client_->ResetHead(ResetOf(v1::RESET_SCOPE_OPTIMIZER)).ok());
  EXPECT_NE(seen.back().reset_id(), seen[0].reset_id());
  EXPECT_EQ(seen.back().incarnation(), incarnation);
  // One that the caller names stays.
  v1::ResetHeadRequest named = ResetOf(v1::RESET_SCOPE_OPTIMIZER);
  named.set_reset_id("mine");
  ASSERT_TRUE(client_->ResetHead(named).ok());
  EXPECT_EQ(seen.back().reset_id(), "mine");
}

TEST_F(ResetsTest, AResetMeansTheProcessThatHasTheHead) {
  server_.SetFaults(
      {.on_reset = [&](const v1::ResetHeadRequest&) { return lossd::fake::Fault{.restart = true}; }});
  const uint64_t before = server_.incarnation();
  const absl::Status reset = client_->ResetHead(ResetOf(v1::RESET_SCOPE_ALL)).status();
  EXPECT_EQ(reset.code(), absl::StatusCode::kAborted) << reset;
  ASSERT_TRUE(RestartOf(reset).has_value()) << reset;
  EXPECT_EQ(RestartOf(reset)->before, before);
}

TEST_F(ResetsTest, RowsOfTheStepAreForgotten) {
  for (const v1::ResetScope scope : {v1::RESET_SCOPE_OPTIMIZER, v1::RESET_SCOPE_ALL}) {
    ASSERT_TRUE(Compute().ok());
    ASSERT_TRUE(client_->ResetHead(ResetOf(scope)).ok());
    const auto again = Compute();
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->accumulated_rows, kRows);
    ASSERT_TRUE(client_->ZeroGradients("head", 0).ok());
  }
  EXPECT_EQ(client_->ResetHead(ResetOf(v1::RESET_SCOPE_ALL)).status(), absl::OkStatus());
  v1::ResetHeadRequest unknown = ResetOf(v1::RESET_SCOPE_ALL);
  unknown.set_head("none");
  EXPECT_EQ(client_->ResetHead(unknown).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ResetsTest, WhatBecomesOfAHeadThatExists) {
  ASSERT_TRUE(Apply(0).ok());
  EXPECT_EQ(client_->CreateHead(Same()).status().code(), absl::StatusCode::kAlreadyExists);
  const auto kept = client_->CreateHead(Same(), absl::ZeroDuration(), IfExists::kKeep);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(kept->state().step(), 1u);
  for (const IfExists choice : {IfExists::kKeep, IfExists::kReset}) {
    v1::CreateHeadRequest other = Same();
    other.mutable_spec()->set_vocab_size(11);
    other.mutable_spec()->set_frozen(true);
    const absl::Status refused = client_->CreateHead(other, absl::ZeroDuration(), choice).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("vocab_size 10 instead of 11"), HasSubstr("frozen false instead of true")));
    EXPECT_EQ(ErrorDetailOf(refused)->field(), "spec.vocab_size");
  }
  std::vector<v1::ResetHeadRequest> seen;
  server_.SetFaults({.on_reset = [&](const v1::ResetHeadRequest& request) {
    seen.push_back(request);
    return lossd::fake::Fault();
  }});
  v1::CreateHeadRequest seeded = Same();
  seeded.mutable_kaiming_uniform()->set_seed(5);
  const auto reset = client_->CreateHead(seeded, absl::ZeroDuration(), IfExists::kReset);
  ASSERT_TRUE(reset.ok()) << reset.status();
  EXPECT_EQ(reset->state().step(), 0u);
  ASSERT_THAT(seen, SizeIs(1));
  EXPECT_EQ(seen[0].scope(), v1::RESET_SCOPE_ALL);
  EXPECT_EQ(seen[0].kaiming_uniform().seed(), 5u);
}

TEST_F(ResetsTest, EveryCallOfATrainerNamesItsRun) {
  const auto named = Client::Connect({.target = server_.target(), .run = "job 17"});
  ASSERT_TRUE(named.ok()) << named.status();
  std::set<std::string> runs;
  server_.SetFaults({.on_request =
                         [&](const v1::ComputeLossRequest& request) {
                           if (request.has_open()) runs.insert("open " + request.open().run());
                           if (request.has_backward()) runs.insert("backward " + request.backward().run());
                           return lossd::fake::Fault();
                         },
                     .on_add =
                         [&](const v1::OpenGradient& open) {
                           runs.insert("add " + open.run());
                           return lossd::fake::Fault();
                         },
                     .on_apply =
                         [&](const v1::ApplyStepRequest& request) {
                           runs.insert("apply " + request.run());
                           return lossd::fake::Fault();
                         }});
  ASSERT_TRUE((*named)->ComputeLoss(AsMicrobatch(), Outputs(), Options()).ok());
  v1::OpenGradient open;
  open.set_head("head");
  open.set_param(v1::PARAM_WEIGHT);
  open.set_contribution_id(9);
  open.set_dtype(v1::DTYPE_FP32);
  const std::vector<char> values(10 * kD * sizeof(float));
  ASSERT_TRUE((*named)->AddGradient(open, values).ok());
  v1::ApplyStepRequest request;
  request.set_head("head");
  request.mutable_optimizer()->mutable_sgd()->set_learning_rate(1.0);
  ASSERT_TRUE((*named)->ApplyStep(request).ok());
  EXPECT_EQ(runs, (std::set<std::string>{"add job 17", "apply job 17", "open job 17"}));
}

TEST_F(ResetsTest, ARunHasAName) {
  ::unsetenv("LOSSD_RUN");
  EXPECT_THAT(RunFromEnvironment(), MatchesRegex(".*:[0-9]+-[0-9a-f]{8}"));
  EXPECT_NE(RunFromEnvironment(), RunFromEnvironment());
  ::setenv("LOSSD_RUN", "from the environment", 1);
  EXPECT_EQ(ClientOptions().run, "from the environment");
  ::unsetenv("LOSSD_RUN");
  EXPECT_TRUE(Client::Connect({.target = server_.target(), .run = ""}).ok());
  std::string long_name;
  for (int i = 0; i < 128; ++i) long_name += "\u00e4";
  EXPECT_TRUE(Client::Connect({.target = server_.target(), .run = long_name}).ok());
  for (const std::string& run : {long_name + "x", std::string("a\nb"), std::string("\xff")}) {
    const absl::Status refused = Client::Connect({.target = server_.target(), .run = run}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ErrorDetailOf(refused)->field(), "options.run");
  }
}

// ---- Calls that another thread ends ----

TEST_F(FaultsTest, ACancelledThreadsCallsEndAtOnce) {
  internal::Cancellation cancellation;
  cancellation.Cancel();
  {
    const internal::CancellableCalls cancellable(&cancellation);
    EXPECT_TRUE(absl::IsCancelled(client_->DescribeHead("head").status()));
    EXPECT_TRUE(absl::IsCancelled(client_->ReadTensor("head", v1::PARAM_WEIGHT).status()));
  }
  EXPECT_TRUE(client_->DescribeHead("head").ok());
}

TEST_F(FaultsTest, ACancelledCallDoesNotWaitForItsRepeat) {
  const auto patient =
      Client::Connect({.target = server_.target(),
                       .channels = 1,
                       .retry = {.initial_backoff = absl::Minutes(5), .max_backoff = absl::Minutes(5)}});
  ASSERT_TRUE(patient.ok()) << patient.status();
  const auto asked =
      std::make_shared<absl::Notification>();  // the server's threads go on behind the test's end
  server_.SetFaults({.on_describe = [asked] {
    if (!asked->HasBeenNotified()) asked->Notify();
    return Fault{.code = grpc::StatusCode::UNAVAILABLE};
  }});
  internal::Cancellation cancellation;
  std::thread other([&] {
    asked->WaitForNotification();
    absl::SleepFor(absl::Milliseconds(50));  // so that most of the time it waits for the repeat
    cancellation.Cancel();
  });
  const internal::CancellableCalls cancellable(&cancellation);
  EXPECT_TRUE(absl::IsCancelled((*patient)->DescribeHead("head", absl::Hours(1)).status()));
  other.join();
}

TEST_F(FaultsTest, ACallThatIsUnderWayIsCancelled) {
  const auto asked = std::make_shared<absl::Notification>(), go_on = std::make_shared<absl::Notification>();
  server_.SetFaults({.on_describe = [asked, go_on] {
    if (!asked->HasBeenNotified()) asked->Notify();
    go_on->WaitForNotification();
    return Fault();
  }});
  internal::Cancellation cancellation;
  std::thread other([&] {
    asked->WaitForNotification();
    cancellation.Cancel();
  });
  {
    const internal::CancellableCalls cancellable(&cancellation);
    EXPECT_TRUE(absl::IsCancelled(client_->DescribeHead("head", absl::Hours(1)).status()));
  }
  other.join();
  go_on->Notify();
}

// Each computation has a stream, and few have more.
TEST_F(FaultsTest, StreamsBeyondTheFirstAreLent) {
  std::vector<PendingLoss> pending;
  for (uint64_t id = 1; id <= 40; ++id) {
    pending.push_back(client_->ComputeLossAsync(AsMicrobatch(id), {}, {.streams = 6}));
  }
  for (PendingLoss& each : pending) {
    const auto result = each.Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_GE(result->streams, 1);
    EXPECT_LE(result->streams, 6);
  }
  const auto alone = client_->ComputeLoss(AsMicrobatch(), {}, {.streams = 6});
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_GT(alone->streams, 1) << "they were given back";
}

}  // namespace
}  // namespace lossd::client::faults_test
