// The engine in deterministic mode: order, waiting, repeats and failures on a scripted device.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/errors.h"
#include "tests/server/engine/deterministic_fixture.h"

namespace lossd::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(DeterministicTest, TellsItsRules) {
  Start();
  EXPECT_EQ(engine_->Describe("head")->limits.row_grid, kGroup);
  EXPECT_EQ(engine_->Describe("head")->limits.max_rows, kGroup);
  EXPECT_EQ(Open(0, 4).stream->limits().row_grid, kGroup);
  StreamSpec loss_only = Spec(9, 4, {0, 4});
  loss_only.accumulate_gradients = false;
  EXPECT_EQ(Open(loss_only).stream->limits().row_grid, 0);
}

TEST_F(DeterministicTest, ChunksAreIndependent) {
  int chunks = 0;
  device_.on_chunk = [&](const kernels::Chunk& chunk) {
    ++chunks;
    EXPECT_TRUE(chunk.independent);
  };
  Start();
  Call accumulates = Open(0, 4);
  ASSERT_TRUE(Send(accumulates, 0, {0, 4}));
  EXPECT_TRUE(accumulates.results->Wait().ok());
  StreamSpec loss_only = Spec(9, 4, {0, 4});
  loss_only.accumulate_gradients = false;
  Call other = Open(loss_only);
  ASSERT_TRUE(Send(other, 9, {0, 4}));
  EXPECT_TRUE(other.results->Wait().ok());
  EXPECT_EQ(chunks, 2);
}

TEST_F(DeterministicTest, GroupsAreLimitedByTheStagingMemory) {
  // 8192 bytes in three areas of 12-byte rows are 227 rows; the fake's chunk has more.
  device_.chunk_rows = 1000;
  EngineOptions options{.slice_bytes = 4096, .staging_bytes = 8192, .deterministic = true};
  auto engine = Engine::Create(options, &backend_, 42, nullptr);
  ASSERT_TRUE(engine.ok());
  const kernels::HeadConfig config{.hidden_size = kHidden, .vocab_size = 10, .trainable = true};
  ASSERT_TRUE((*engine)->CreateHead("head", config).ok());
  EXPECT_EQ((*engine)->Describe("head")->limits.row_grid, 227);
}

TEST_F(DeterministicTest, MicrobatchesAccumulateInTheOrderOfTheirIds) {
  Start();
  Call second = Open(1, 20), third = Open(2, 3), first = Open(0, 5);
  Room waits2 = Request(second, {0, 16});
  Room waits3 = Request(third, {0, 3});
  EXPECT_FALSE(waits2.granted());
  EXPECT_EQ(engine_->stats().waiting_slices, 2);
  EXPECT_EQ(engine_->Describe("head")->waits_for, "microbatch 0, rows [0, 5)");
  ASSERT_TRUE(Send(first, 0, {0, 5}));
  Submit(second, 1, {0, 16}, waits2.Wait());
  EXPECT_TRUE(first.results->Wait().ok());
  Settle();
  EXPECT_FALSE(waits3.granted());
  EXPECT_EQ(engine_->Describe("head")->waits_for, "microbatch 1, rows [16, 20)");
  ASSERT_TRUE(Send(second, 1, {16, 20}));
  Submit(third, 2, {0, 3}, waits3.Wait());
  EXPECT_TRUE(second.results->Wait().ok());
  EXPECT_TRUE(third.results->Wait().ok());
  std::vector<float> expected = Names(0, {0, 5});
  for (float name : Names(1, {0, 20})) expected.push_back(name);
  for (float name : Names(2, {0, 3})) expected.push_back(name);
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(expected));
  EXPECT_THAT(second.results->grads()[17], ElementsAre(RowName(1, 17), 0.5f, 0.5f));
  EXPECT_EQ(second.results->summary().accumulated_rows, 20);
  EXPECT_EQ(engine_->Describe("head")->waits_for, "");
  auto applied = engine_->ApplyStep("head", {.step = 0, .expected_microbatches = {0, 1, 2}}, nullptr);
  EXPECT_TRUE(applied.ok()) << applied.status();
}

TEST_F(DeterministicTest, AGroupIsOneChunkHoweverItArrives) {
  Start();
  Call left = Open(0, 16, {0, 9}), right = Open(0, 16, {9, 16});
  ASSERT_TRUE(Send(right, 0, {9, 10}));
  ASSERT_TRUE(Send(right, 0, {10, 16}));
  ASSERT_TRUE(Send(left, 0, {0, 4}));
  Settle();
  EXPECT_THAT(device_.chunks(), IsEmpty());
  ASSERT_TRUE(Send(left, 0, {4, 9}));
  EXPECT_TRUE(left.results->Wait().ok());
  EXPECT_TRUE(right.results->Wait().ok());
  EXPECT_THAT(device_.chunks(), ElementsAre(ElementsAre(4, 5, 1, 6)));
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(Names(0, {0, 16})));
  EXPECT_EQ(left.results->summary().loss_sum, 0 + 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8);
}

TEST_F(DeterministicTest, IgnoredRowsNeedNotBeSent) {
  Start();
  StreamSpec spec = Spec(0, 40, {0, 40});
  for (size_t i = 4; i < 36; ++i) spec.targets[i] = -100;  // all of the second group
  Call call = Open(spec);
  Call nothing = Open(Spec(1, 0, {0, 0}));
  EXPECT_TRUE(nothing.results->Wait().ok());
  Call next = Open(2, 1);
  Room waits = Request(next, {0, 1});
  ASSERT_TRUE(Send(call, 0, {0, 4}));
  EXPECT_FALSE(waits.granted());
  ASSERT_TRUE(Send(call, 0, {36, 40}));
  call.stream->HalfClose();
  EXPECT_TRUE(call.results->Wait().ok());
  Submit(next, 2, {0, 1}, waits.Wait());
  EXPECT_TRUE(next.results->Wait().ok());
  EXPECT_THAT(device_.chunks(), ElementsAre(ElementsAre(4), ElementsAre(4), ElementsAre(1)));
}

TEST_F(DeterministicTest, ASlotInOrderOpensWithTheTargetsOfAllItsRows) {
  Start();
  // The other half of the group is all ignored, but nobody has said so yet.
  Call call = Open(0, 16, {0, 8});
  ASSERT_TRUE(Send(call, 0, {0, 8}));
  Settle();
  EXPECT_FALSE(call.results->finished());
  StreamSpec ignored = Spec(0, 16, {8, 16});
  ignored.targets.assign(8, -100);
  Call other = Open(ignored);
  EXPECT_TRUE(call.results->Wait().ok());
}

TEST_F(DeterministicTest, RepeatsKeepTheirPlacesAndNeedNoTurn) {
  Start();
  SendWhole(0, 20);
  device_.Close();
  Call again = Open(0, 20, {3, 20});
  Call later = Open(2, 4);  // waits for microbatch 1
  Room waits = Request(later, {0, 4});
  ASSERT_TRUE(Send(again, 0, {3, 5}));
  device_.Open();
  ASSERT_TRUE(Send(again, 0, {5, 16}));
  ASSERT_TRUE(Send(again, 0, {16, 20}));
  ASSERT_TRUE(again.results->Wait().ok()) << again.results->Wait();
  EXPECT_EQ(again.results->summary().repeated_rows, 17);
  EXPECT_EQ(again.results->summary().accumulated_rows, 0);
  EXPECT_THAT(again.results->grads()[4], ElementsAre(RowName(0, 4), 0.5f, 0.5f));
  EXPECT_EQ(device_.accumulated().size(), 20u);
  for (const auto& chunk : device_.chunks()) {
    int64_t rows = 0;
    for (int64_t slice : chunk) rows += slice;
    EXPECT_TRUE(rows == 16 || rows == 4) << rows;  // always the whole group
  }
  EXPECT_FALSE(waits.granted());
}

TEST_F(DeterministicTest, RowsSentByTwoCallsAreComputedOnceForBoth) {
  Start();
  Call first = Open(0, 16, {0, 10}), second = Open(0, 16, {4, 16});
  ASSERT_TRUE(Send(first, 0, {0, 10}));
  ASSERT_TRUE(Send(second, 0, {4, 12}));
  ASSERT_TRUE(Send(second, 0, {12, 16}));
  EXPECT_TRUE(first.results->Wait().ok());
  EXPECT_TRUE(second.results->Wait().ok());
  EXPECT_THAT(device_.chunks(), ElementsAre(ElementsAre(4, 6, 2, 4)));
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(Names(0, {0, 16})));
  EXPECT_EQ(first.results->summary().accumulated_rows, 10);
  EXPECT_EQ(second.results->summary().accumulated_rows, 6);
  EXPECT_EQ(second.results->summary().repeated_rows, 6);
  EXPECT_EQ(second.results->summary().loss_sum, 4 + 5 + 6 + 7 + 8 + 9 + 10 + 11 + 12 + 13 + 14 + 15);
  EXPECT_EQ(second.results->grads().size(), 12u);
}

TEST_F(DeterministicTest, RowsThatAreBeingCopiedAreLentOnce) {
  Start();
  Call first = Open(0, 8), second = Open(0, 8);
  Room one = Request(first, {0, 8});
  EXPECT_TRUE(one.granted());
  Room two = Request(second, {2, 4});
  EXPECT_FALSE(two.granted());
  first.stream->Cancel(absl::CancelledError("cut"));
  EXPECT_FALSE(two.granted());  // the room is still being written
  one.Wait().Release();
  Submit(second, 0, {2, 4}, two.Wait());
  EXPECT_FALSE(first.results->Wait().ok());
}

// A trainer that goes away in any state leaves the order as it was, and what it held comes back.
TEST_F(DeterministicTest, CallsMayEndInEveryState) {
  Start();
  {
    Call waiting = Open(1, 4);
    Room room = Request(waiting, {0, 4});
    waiting.stream->Cancel(absl::DeadlineExceededError("too late"));
    EXPECT_EQ(waiting.results->Wait().code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(waiting.results->Wait().message()), HasSubstr("waited for microbatch 0"));
    EXPECT_FALSE(static_cast<bool>(room.Wait()));
  }
  {
    Call lent = Open(0, 4);
    Room room = Request(lent, {0, 4});
    StagingBuffer buffer = room.Wait();
    lent.stream->Cancel(absl::CancelledError("cut"));
    Submit(lent, 0, {0, 4}, std::move(buffer));
    EXPECT_FALSE(lent.results->Wait().ok());
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
  Room waits = Request(next, {0, 4});
  Call call = Open(0, 4);
  ASSERT_TRUE(Send(call, 0, {0, 4}));
  EXPECT_EQ(call.results->Wait().code(), absl::StatusCode::kInternal);
  StagingBuffer early = waits.Wait();  // its turn had come when the chunk was launched
  ASSERT_TRUE(static_cast<bool>(early));
  Submit(next, 1, {0, 4}, std::move(early));
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
  Room waits = Request(next, {0, 4});
  ASSERT_TRUE(SendSlice(*bad.stream, {0, 8}, poisoned));
  EXPECT_EQ(bad.results->Wait().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(bad.results->Wait().message()), HasSubstr("row 3"));
  EXPECT_TRUE(good.results->Wait().ok());
  Submit(next, 1, {0, 4}, waits.Wait());
  Settle();
  EXPECT_FALSE(next.results->finished());
  std::vector<std::string> missing;
  EXPECT_FALSE(engine_->ApplyStep("head", {.step = 0, .expected_microbatches = {0, 1}}, &missing).ok());
  EXPECT_THAT(missing, ElementsAre("microbatch 0: rows [0, 8) of 16", "microbatch 1: rows [0, 4) of 4",
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

TEST_F(DeterministicTest, ZeroingEndsThoseWhoWait) {
  Start();
  Call waiting = Open(3, 4), attached = Open(0, 8);
  Room room = Request(waiting, {0, 4});
  ASSERT_TRUE(Send(attached, 0, {0, 4}));
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_EQ(waiting.results->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(attached.results->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(static_cast<bool>(room.Wait()));
  SendWhole(0, 4);
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(Names(0, {0, 4})));
}

TEST_F(DeterministicTest, ADeviceThatMayHaveHalfAccumulatedEndsEveryCall) {
  device_.fail_done = [](int64_t chunk) {
    return chunk == 0 ? absl::InternalError("boom") : absl::OkStatus();
  };
  Start();
  Call waiting = Open(3, 4), call = Open(0, 4);
  Room room = Request(waiting, {0, 4});
  ASSERT_TRUE(Send(call, 0, {0, 4}));
  EXPECT_EQ(call.results->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(waiting.results->Wait().code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  SendWhole(0, 4);
}

TEST_F(DeterministicTest, SlicesThatBreakARuleAreRefused) {
  Start();
  const auto expect = [this](RowRange before, RowRange rows, const char* text) {
    Call call = Open(0, 40);
    if (before.size() > 0) {
      EXPECT_TRUE(Send(call, 0, before));
    }
    EXPECT_FALSE(Send(call, 0, rows));
    EXPECT_EQ(call.results->Wait().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(call.results->Wait().message()), HasSubstr(text));
  };
  expect({}, {8, 17}, "multiple of 16");
  expect({4, 6}, {0, 2}, "ascending order");
  expect({}, {0, 17}, "at most 16 rows");
  expect({}, {5, 5}, "non-empty");
  expect({0, 4}, {3, 5}, "repeats row 3");
  Call bytes = Open(0, 40);
  EXPECT_FALSE(SendSlice(*bytes.stream, {0, 2}, std::vector<float>(7)));
  EXPECT_THAT(std::string(bytes.results->Wait().message()), HasSubstr("24 bytes"));
  StreamSpec other = Spec(0, 40, {0, 40});
  other.want_grad_hidden = false;
  EXPECT_THAT(std::string(engine_->Open(other, std::make_shared<RowCollector>()).status().message()),
              HasSubstr("want_grad_hidden"));
}

TEST_F(DeterministicTest, OperationsSeeWhatWasCompleteBefore) {
  device_.delay = absl::Milliseconds(5);
  Start();
  for (uint64_t id = 0; id < 5; ++id) {
    Call call = Open(id, 4);
    ASSERT_TRUE(Send(call, id, {0, 4}));
    auto norm = engine_->GradNorm("head", std::nullopt);  // the fake's is the number of rows
    ASSERT_TRUE(norm.ok());
    EXPECT_EQ(*norm, 4.0 * static_cast<double>(id + 1));
    ASSERT_TRUE(call.results->Wait().ok());
  }
}

TEST_F(DeterministicTest, OtherStreamsComeBetween) {
  Start();
  Call call = Open(0, 8);
  ASSERT_TRUE(Send(call, 0, {0, 4}));
  StreamSpec spec = Spec(77, 4, {0, 4});
  spec.accumulate_gradients = false;
  Call loss_only = Open(spec);
  ASSERT_TRUE(Send(loss_only, 77, {0, 4}));
  ASSERT_TRUE(loss_only.results->Wait().ok());
  EXPECT_FALSE(call.results->finished());
  ASSERT_TRUE(Send(call, 0, {4, 8}));
  ASSERT_TRUE(call.results->Wait().ok());
}

TEST_F(DeterministicTest, StopsWithCallsInEveryState) {
  device_.asynchronous = true;
  device_.chunks_in_flight = 2;
  device_.delay = absl::Milliseconds(2);
  Start();
  std::vector<Call> calls;
  for (uint64_t id = 0; id < 6; ++id) calls.push_back(Open(id, 20));
  ASSERT_TRUE(Send(calls[0], 0, {0, 16}));
  std::vector<Room> rooms;
  for (size_t id = 1; id < 6; ++id) rooms.push_back(Request(calls[id], {0, 16}));
  ASSERT_TRUE(Send(calls[0], 0, {16, 18}));
  for (Call& call : calls) call.stream.reset();
  engine_.reset();
  for (Call& call : calls) EXPECT_FALSE(call.results->Wait().ok());
  for (Room& room : rooms) EXPECT_FALSE(static_cast<bool>(room.Wait()));
}

// A slice's gradients may be on their way when the head is deleted.
TEST_F(DeterministicTest, RoomsOutliveTheirHead) {
  Start();
  class Keeper : public StreamObserver {
   public:
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
}  // namespace lossd::engine
