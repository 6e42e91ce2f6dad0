// SPDX-License-Identifier: Apache-2.0
// The engine in deterministic mode: calls, groups and heads that end before they are done, on a scripted
// device.
#include <atomic>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/errors.h"
#include "tests/server/engine/deterministic_fixture.h"
#include "tests/server/engine/silent_observer.h"

namespace lossd::engine::deterministic_ends_test {
namespace {

class RowCounter final : public SilentObserver {
 public:
  void OnChunk(const ChunkReport& report) override {
    rows += report.rows;
    valid_rows += report.valid_rows;
  }
  std::atomic<int64_t> rows{0};
  std::atomic<int64_t> valid_rows{0};
};

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A trainer that goes away in any state leaves the order as it was, and what it held comes back.
TEST_F(DeterministicTest, CallsMayEndInEveryState) {
  Start();
  {
    Call waiting = Open(1, 4);
    const SentSlice slice = Begin(waiting, 1, {0, 4});
    waiting.stream->Cancel(absl::DeadlineExceededError("too late"));
    EXPECT_EQ(waiting.results->Wait().code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(waiting.results->Wait().message()), HasSubstr("waited for microbatch 0"));
    EXPECT_FALSE(slice.Wait());
    EXPECT_FALSE(slice.copied());
  }
  {
    Call copying = Open(0, 4);
    copying.stream->Receive({.rows = {0, 4},
                             .bytes = 4 * kHidden * 4,
                             .copy = [&](uint8_t*) { copying.stream->Cancel(absl::CancelledError("cut")); },
                             .on_queued = [](int64_t) { FAIL() << "its stream had ended"; }});
    EXPECT_FALSE(copying.results->Wait().ok());
  }
  {
    Call attached = Open(0, 4);
    ASSERT_TRUE(Send(attached, 0, {0, 2}));
    attached.stream.reset();
    EXPECT_THAT(std::string(attached.results->Wait().message()),
                HasSubstr("waited for microbatch 0, rows [2, 4)"));
  }
  {
    device_.asynchronous = false;
    device_.Close();
    Call flying = Open(0, 4);
    ASSERT_TRUE(Send(flying, 0, {0, 4}));
    absl::SleepFor(absl::Milliseconds(20));
    flying.stream->Cancel(absl::CancelledError("cut"));
    device_.Open();
    EXPECT_FALSE(flying.results->Wait().ok());
  }
  Settle();
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(Names(0, {0, 4})));  // it was on the device already
  SendWhole(0, 4);
  SendWhole(1, 4);
  EXPECT_EQ(device_.accumulated().size(), 8u);
  EXPECT_EQ(engine_->stats().waiting_slices, 0);
}

TEST_F(DeterministicTest, AGroupThatFailsKeepsItsTurn) {
  device_.fail_results = [](int64_t chunk) {
    return chunk == 0 ? absl::InternalError("boom") : absl::OkStatus();
  };
  Start();
  Call next = Open(1, 4);
  const SentSlice early = Begin(next, 1, {0, 4});
  Call call = Open(0, 4);
  ASSERT_TRUE(Send(call, 0, {0, 4}));
  EXPECT_EQ(call.results->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(early.Wait());  // its turn had come when the chunk was launched
  Settle();
  EXPECT_THAT(device_.accumulated(), IsEmpty());
  EXPECT_FALSE(next.results->finished());
  SendWhole(0, 4);
  EXPECT_TRUE(next.results->Wait().ok());
  std::vector<float> expected = Names(0, {0, 4});
  for (float name : Names(1, {0, 4})) expected.push_back(name);
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(expected));
}

TEST_F(DeterministicTest, ARowThatIsNotFiniteHoldsTheStep) {
  Start();
  Call bad = Open(0, 16, {0, 8}), good = Open(0, 16, {8, 16}), next = Open(1, 4);
  std::vector<float> poisoned = Hidden(0, {0, 8});
  poisoned[3 * kHidden] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(Send(good, 0, {8, 16}));
  const SentSlice waits = Begin(next, 1, {0, 4});
  ASSERT_TRUE(SendSlice(*bad.stream, {0, 8}, poisoned));
  EXPECT_EQ(bad.results->Wait().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(bad.results->Wait().message()), HasSubstr("row 3"));
  EXPECT_TRUE(good.results->Wait().ok());
  EXPECT_TRUE(waits.Wait());
  Settle();
  EXPECT_FALSE(next.results->finished());
  const absl::Status missing =
      engine_->ApplyStep("head", {.step = 0, .expected_microbatches = {0, 1}}).status();
  EXPECT_FALSE(missing.ok());
  EXPECT_THAT(GetMissing(missing),
              ElementsAre("microbatch 0: rows [0, 8) of 16", "microbatch 1: rows [0, 4) of 4",
                          "in order: slices wait for microbatch 0, rows [0, 16)"));
  // Sent again with good values, the rows that are settled stay as they are.
  Call again = Open(0, 16, {0, 8});
  ASSERT_TRUE(Send(again, 0, {0, 8}));
  EXPECT_TRUE(again.results->Wait().ok());
  EXPECT_EQ(again.results->summary().accumulated_rows, 8);
  EXPECT_TRUE(next.results->Wait().ok());
  EXPECT_EQ(device_.accumulated().size(), 20u);

  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  SendWhole(0, 20);
}

// Rows of a group that were not sent again are computed as zeros; they are no rows that anybody sent.
TEST_F(DeterministicTest, ReportsCountTheRowsThatWereSent) {
  RowCounter counter;
  Start({}, {&counter});
  SendWhole(0, kGroup);
  Settle();
  EXPECT_EQ(counter.rows, kGroup);
  Call again = Open(0, kGroup, {5, 6});
  ASSERT_TRUE(Send(again, 0, {5, 6}));
  ASSERT_TRUE(again.results->Wait().ok());
  Settle();
  EXPECT_EQ(counter.rows, kGroup + 1);
  EXPECT_EQ(counter.valid_rows, kGroup + 1);
}

// Rows behind those that a second call sent, too, are computed apart from the row that is bad.
TEST_F(DeterministicTest, ABadSliceThatSharesRowsSaysWhatBecameOfThem) {
  Start();
  Call bad = Open(0, 16), good = Open(0, 16, {4, 8});
  std::vector<float> poisoned = Hidden(0, {0, 16});
  poisoned[1 * kHidden] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(SendSlice(*bad.stream, {0, 12}, {poisoned.begin(), poisoned.begin() + 12 * kHidden}));
  ASSERT_TRUE(Send(good, 0, {4, 8}));
  ASSERT_TRUE(Send(bad, 0, {12, 16}));
  EXPECT_EQ(bad.results->Wait().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(bad.results->Wait().message()),
              HasSubstr("rows of its slice may have been accumulated"));
  EXPECT_TRUE(good.results->Wait().ok());
  EXPECT_EQ(good.results->summary().accumulated_rows, 4) << "for the call that is told of them";
  EXPECT_EQ(good.results->summary().repeated_rows, 0);
  Call again = Open(0, 16);
  ASSERT_TRUE(Send(again, 0, {0, 16}));
  EXPECT_TRUE(again.results->Wait().ok());
  EXPECT_EQ(again.results->summary().accumulated_rows, 4);
  EXPECT_EQ(again.results->summary().repeated_rows, 12);
  EXPECT_EQ(device_.accumulated().size(), 16u);
}

TEST_F(DeterministicTest, ZeroingEndsThoseWhoWait) {
  Start();
  Call waiting = Open(3, 4), attached = Open(0, 8);
  const SentSlice slice = Begin(waiting, 3, {0, 4});
  ASSERT_TRUE(Send(attached, 0, {0, 4}));
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_EQ(waiting.results->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(attached.results->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(slice.Wait());
  SendWhole(0, 4);
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(Names(0, {0, 4})));
}

TEST_F(DeterministicTest, ADeviceThatMayHaveHalfAccumulatedEndsEveryCall) {
  device_.fail_done = [](int64_t chunk) {
    return chunk == 0 ? absl::InternalError("boom") : absl::OkStatus();
  };
  Start();
  Call waiting = Open(3, 4), call = Open(0, 4);
  const SentSlice slice = Begin(waiting, 3, {0, 4});
  ASSERT_TRUE(Send(call, 0, {0, 4}));
  EXPECT_EQ(call.results->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(waiting.results->Wait().code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  SendWhole(0, 4);
}

TEST_F(DeterministicTest, StopsWithCallsInEveryState) {
  device_.asynchronous = true;
  device_.chunks_in_flight = 2;
  device_.delay = absl::Milliseconds(2);
  Start();
  std::vector<Call> calls;
  for (uint64_t id = 0; id < 6; ++id) calls.push_back(Open(id, 20));
  ASSERT_TRUE(Send(calls[0], 0, {0, 16}));
  std::vector<SentSlice> slices;
  for (size_t id = 1; id < 6; ++id) slices.push_back(Begin(calls[id], id, {0, 16}));
  ASSERT_TRUE(Send(calls[0], 0, {16, 18}));
  for (Call& call : calls) call.stream.reset();
  engine_.reset();
  for (Call& call : calls) EXPECT_FALSE(call.results->Wait().ok());
  for (const SentSlice& slice : slices) EXPECT_FALSE(slice.Wait());
}

// A slice's gradients may be on their way when the head is deleted.
TEST_F(DeterministicTest, BuffersOutliveTheirHead) {
  Start();
  class Keeper : public StreamObserver {
   public:
    void OnMemory(absl::AnyInvocable<void()> receive) override { receive(); }
    void OnSlice(SliceOutput output) override { kept = std::move(output.grad_hidden); }
    void OnFinished(absl::Status, const StreamSummary&) override { finished.Notify(); }
    StagingBuffer kept;
    absl::Notification finished;
  };
  auto keeper = std::make_shared<Keeper>();
  auto stream = engine_->Open(Spec(0, 2, {0, 2}), keeper);
  ASSERT_TRUE(stream.ok());
  (*stream)->Start();
  ASSERT_TRUE(SendSlice(**stream, {0, 2}, Hidden(0, {0, 2})));
  keeper->finished.WaitForNotification();
  stream->reset();
  ASSERT_TRUE(engine_->DeleteHead("head").ok());
  EXPECT_EQ(reinterpret_cast<const float*>(keeper->kept.data())[kHidden], RowName(0, 1));
  keeper->kept.Release();
}

}  // namespace
}  // namespace lossd::engine::deterministic_ends_test
