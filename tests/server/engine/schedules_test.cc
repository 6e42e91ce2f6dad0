// SPDX-License-Identifier: Apache-2.0
// What comes next to the device, by arrival and in deterministic mode.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/deterministic_schedule.h"
#include "server/engine/schedule.h"
#include "tests/server/engine/session_fixture.h"

namespace lossd::engine::schedules_test {
namespace {

using ::testing::ElementsAre;

// The schedule is that of a session, whose device does nothing: what is taken is only looked at.
class SchedulesTest : public SessionTest {
 protected:
  static constexpr DeviceLoad kIdle{.max_chunks = 3};

  void Start(bool deterministic) {
    device_.chunk_rows = 16;
    SessionTest::Start({.deterministic = deterministic});
  }
  ScheduledWork Take(const DeviceLoad& load = kIdle, bool head_is_idle = true) {
    absl::MutexLock lock(&context_->mutex);
    return session_->schedule().TakeNext(load, head_is_idle);
  }
  // The microbatches of the slices of the chunk that comes next; empty if no chunk does. The chunk leaves the
  // device at once.
  std::vector<uint64_t> TakeChunk(const DeviceLoad& load = kIdle) {
    ScheduledWork next = Take(load, /*head_is_idle=*/false);
    auto* const chunk = std::get_if<std::unique_ptr<ChunkWork>>(&next);
    if (chunk == nullptr) return {};
    std::vector<uint64_t> ids;
    for (const auto& slice : (*chunk)->slices) ids.push_back(slice->stream->spec().microbatch_id);
    absl::MutexLock lock(&context_->mutex);
    (*chunk)->OnResults(true);
    for (const Segment& segment : (*chunk)->segments) {
      if ((*chunk)->accumulates) session_->step().ledger().Commit(segment.microbatch_id, segment.rows);
    }
    (*chunk)->OnLeft();
    for (const auto& slice : (*chunk)->slices) slice->stream->AddOutstanding(-1);
    context_->notifier.Post([slices = std::move((*chunk)->slices)]() mutable { slices.clear(); });
    return ids;
  }
  Backlog TakeBacklog() {
    absl::MutexLock lock(&context_->mutex);
    return session_->schedule().backlog();
  }
  void Push(Operation* operation) {
    absl::MutexLock lock(&context_->mutex);
    session_->schedule().Push(operation);
  }
  bool TakesOperation(const Operation* operation, bool head_is_idle) {
    ScheduledWork next = Take(kIdle, head_is_idle);
    auto* const taken = std::get_if<Operation*>(&next);
    return taken != nullptr && *taken == operation;
  }

  std::function<absl::Status(head::Head&)> nothing_ = [](head::Head&) { return absl::OkStatus(); };
};

TEST_F(SchedulesTest, ByArrivalAChunkHasASegmentForEachSlice) {
  Start(/*deterministic=*/false);
  Call a = Open(Spec(1, 6, {0, 6})), b = Open(Spec(2, 10, {0, 10}));
  ASSERT_TRUE(Send(a, {0, 6}).queued());
  ASSERT_TRUE(Send(b, {2, 7}).queued());
  EXPECT_EQ(TakeBacklog().queued_slices, 2);
  EXPECT_EQ(TakeBacklog().queued_rows, 11);
  ScheduledWork next = Take();
  const ChunkWork& chunk = **std::get_if<std::unique_ptr<ChunkWork>>(&next);
  EXPECT_TRUE(chunk.accumulates);
  EXPECT_EQ(chunk.rows, 11u);
  ASSERT_EQ(chunk.segments.size(), 2u);
  EXPECT_EQ(chunk.segments[1].microbatch_id, 2u);
  EXPECT_EQ(chunk.segments[1].rows, (RowRange{2, 7}));
  EXPECT_EQ(chunk.segments[1].index, 6u);
  EXPECT_THAT(chunk.segments[1].slices, ElementsAre(chunk.slices[1].get()));
  EXPECT_EQ(chunk.segments[1].input.hidden, chunk.slices[1]->buffer.data());
  EXPECT_EQ(chunk.segments[1].input.accumulate, nullptr) << "no row is a repeat";
  EXPECT_EQ(TakeBacklog().queued_slices, 0);
}

// As on several devices: a slice is one device's, a chunk is shared.
TEST_F(SchedulesTest, ByArrivalAChunkMayHaveMoreRowsThanASlice) {
  device_.slice_rows = 8;
  Start(/*deterministic=*/false);
  Call a = Open(Spec(1, 20, {0, 20})), b = Open(Spec(2, 20, {0, 20}));
  EXPECT_EQ(a.stream->limits().max_rows, 8);
  ASSERT_TRUE(Send(a, {0, 8}).queued());
  ASSERT_TRUE(Send(b, {0, 8}).queued());
  ASSERT_TRUE(Send(a, {8, 16}).queued());
  EXPECT_THAT(TakeChunk(), ElementsAre(1, 2));
  EXPECT_THAT(TakeChunk(), ElementsAre(1));
  Send(b, {8, 17});
  EXPECT_THAT(std::string(b.results->Wait().message()), ::testing::HasSubstr("at most 8 rows"));
}

TEST_F(SchedulesTest, ByArrivalAnOperationWaitsForAnIdleHeadAndHoldsWhatIsBehindIt) {
  Start(/*deterministic=*/false);
  Call a = Open(Spec(1, 4, {0, 4})), b = Open(Spec(2, 4, {0, 4}));
  Operation operation{.run = nothing_};
  ASSERT_TRUE(Send(a, {0, 4}).queued());
  Push(&operation);
  ASSERT_TRUE(Send(b, {0, 4}).queued());
  EXPECT_THAT(TakeChunk(), ElementsAre(1));
  EXPECT_FALSE(TakesOperation(&operation, /*head_is_idle=*/false));
  EXPECT_TRUE(TakesOperation(&operation, /*head_is_idle=*/true));
  EXPECT_THAT(TakeChunk(), ElementsAre(2));
}

TEST_F(SchedulesTest, ByArrivalAChunkThatIsNotFullWaitsForResults) {
  Start(/*deterministic=*/false);
  Call a = Open(Spec(1, 20, {0, 20}));
  ASSERT_TRUE(Send(a, {0, 4}).queued());
  EXPECT_THAT(TakeChunk({.chunks = 1, .max_chunks = 3, .without_results = 1}), ElementsAre());
  EXPECT_THAT(TakeChunk({.chunks = 3, .max_chunks = 3}), ElementsAre());
  ASSERT_TRUE(Send(a, {4, 16}).queued());
  EXPECT_THAT(TakeChunk({.chunks = 1, .max_chunks = 3, .without_results = 1}), ElementsAre(1, 1));
}

TEST_F(SchedulesTest, ByArrivalAContributionHasNoTurnToWaitFor) {
  Start(/*deterministic=*/false);
  absl::MutexLock lock(&context_->mutex);
  EXPECT_EQ(session_->order(), nullptr);
}

TEST_F(SchedulesTest, InOrderAGroupIsAChunkAndItsGapsAreZeros) {
  Start(/*deterministic=*/true);
  StreamSpec spec = Spec(0, 10, {0, 10});
  spec.targets[4] = spec.ignore_index;  // alone between two slices
  Call first = Open(spec);
  ASSERT_TRUE(Send(first, {0, 4}).queued());
  ASSERT_TRUE(Send(first, {5, 10}).queued());
  EXPECT_THAT(TakeChunk(), ElementsAre(0, 0));
  Call again = Open(spec);
  ASSERT_TRUE(Send(again, {6, 8}).queued());
  ScheduledWork next = Take();
  ChunkWork& chunk = **std::get_if<std::unique_ptr<ChunkWork>>(&next);
  std::vector<RowRange> rows;
  for (const Segment& segment : chunk.segments) rows.push_back(segment.rows);
  EXPECT_THAT(rows, ElementsAre(RowRange{0, 6}, RowRange{6, 8}, RowRange{8, 10}));
  EXPECT_EQ(chunk.rows, 10u);
  EXPECT_EQ(chunk.segments[2].index, 8u);
  EXPECT_TRUE(chunk.segments[2].slices.empty());
  chunk.Prepare();
  const auto* const gap = static_cast<const float*>(chunk.segments[2].input.hidden);
  EXPECT_THAT(std::vector<float>(gap, gap + 2 * kHidden), ::testing::Each(0.0f));
  const auto* const sent = static_cast<const float*>(chunk.segments[1].input.hidden);
  EXPECT_EQ(sent[0], RowName(0, 6));
  EXPECT_TRUE(chunk.Affects(*again.state));
}

TEST_F(SchedulesTest, InOrderTheNextGroupHasMemoryWhileOneIsComputed) {
  Start(/*deterministic=*/true);
  Call call = Open(Spec(0, 32, {0, 32}));
  ASSERT_TRUE(Send(call, {0, 16}).queued());
  const SentSlice next = Send(call, {16, 32});
  EXPECT_EQ(TakeBacklog().waiting_slices, 1);
  const ScheduledWork computed = Take();
  ASSERT_EQ(TakeBacklog().waiting_slices, 0);
  EXPECT_TRUE(next.Wait());
}

TEST_F(SchedulesTest, InOrderGroupsAndOtherChunksTakeTurns) {
  Start(/*deterministic=*/true);
  Call in_order = Open(Spec(0, 32, {0, 32}));
  std::vector<Call> others;
  for (uint64_t id = 10; id < 13; ++id) {
    others.push_back(Open(LossOnly(id, 16)));
    ASSERT_TRUE(Send(others.back(), {0, 16}).queued());
  }
  ASSERT_TRUE(Send(in_order, {0, 16}).queued());
  EXPECT_THAT(TakeChunk(), ElementsAre(0));
  ASSERT_TRUE(Send(in_order, {16, 32}).queued());
  EXPECT_THAT(TakeChunk(), ElementsAre(10));
  EXPECT_THAT(TakeChunk(), ElementsAre(0));
  EXPECT_THAT(TakeChunk(), ElementsAre(11));
  EXPECT_THAT(TakeChunk(), ElementsAre(12)) << "no group is complete";
}

TEST_F(SchedulesTest, InOrderAnOperationWaitsForGroupsThatWereCompleteBefore) {
  Start(/*deterministic=*/true);
  Call first = Open(Spec(0, 4, {0, 4})), second = Open(Spec(1, 4, {0, 4}));
  Operation operation{.run = nothing_};
  ASSERT_TRUE(Send(first, {0, 4}).queued());
  Push(&operation);
  EXPECT_FALSE(TakesOperation(&operation, true)) << "a group goes first, and has been taken";
  const SentSlice later = Send(second, {0, 4});
  EXPECT_TRUE(later.Wait());
  EXPECT_TRUE(TakesOperation(&operation, true));
}

TEST_F(SchedulesTest, InOrderContributionsAreCalledWhenItIsTheirTurn) {
  Start(/*deterministic=*/true);
  std::vector<uint64_t> called;
  absl::Mutex called_mutex;
  const auto await = [&](uint64_t id) {
    absl::MutexLock lock(&context_->mutex);
    return session_->order()->AwaitTurn(id, /*ticket=*/id, [&, id] {
      absl::MutexLock note(&called_mutex);
      called.push_back(id);
    });
  };
  const auto expect_called = [&](const std::vector<uint64_t>& ids) {
    absl::MutexLock lock(&called_mutex);
    const auto all = [&] { return called.size() == ids.size(); };
    called_mutex.Await(absl::Condition(&all));
    EXPECT_EQ(called, ids);
  };
  EXPECT_FALSE(await(0));
  EXPECT_TRUE(await(1));
  EXPECT_TRUE(await(2));
  EXPECT_TRUE(await(3));
  {
    absl::MutexLock lock(&context_->mutex);
    EXPECT_TRUE(session_->order()->ForgetTurn(2));
    EXPECT_FALSE(session_->order()->ForgetTurn(2));
  }
  Call call = Open(Spec(0, 4, {0, 4}));
  ASSERT_TRUE(Send(call, {0, 4}).queued());
  EXPECT_THAT(TakeChunk(), ElementsAre(0));
  expect_called({1});
  {
    absl::MutexLock lock(&context_->mutex);
    session_->order()->EndTurns();
  }
  expect_called({1, 3});
}

}  // namespace
}  // namespace lossd::engine::schedules_test
