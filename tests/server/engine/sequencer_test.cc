// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/deterministic_schedule.h"

namespace lossd::engine::sequencer_test {
namespace {

using ::testing::ElementsAre;

constexpr int64_t kRows = 10;  // of a group

// A ledger, its sequencer, and streams that act on them like the engine does.
class SequencerTest : public ::testing::Test {
 protected:
  using StreamPtr = std::shared_ptr<StreamState>;

  StreamPtr Open(uint64_t id, int64_t rows, RowRange range, int32_t target = 1) {
    StreamSpec spec;
    spec.step = 0;
    spec.microbatch_id = id;
    spec.microbatch_rows = rows;
    spec.rows = range;
    spec.accumulate_gradients = true;
    spec.targets.assign(static_cast<size_t>(range.size()), target);
    const SliceLimits limits{.max_rows = kRows, .max_bytes = 1 << 20, .row_grid = kRows};
    auto stream = StreamState::Create(spec, {.hidden_size = 1, .vocab_size = 5, .trainable = true},
                                      {.incarnation = 1, .step = 0}, limits, nullptr);
    EXPECT_TRUE(stream.ok()) << stream.status();
    EXPECT_TRUE(ledger_.Declare(id, (*stream)->terms(), range, (*stream)->contents()).ok());
    sequencer_.OnDeclared(id);
    return *stream;
  }
  StreamPtr Open(uint64_t id, int64_t rows) { return Open(id, rows, {0, rows}); }

  // Asks for memory; returns the number of the loan if it is granted now, else 0.
  uint64_t Request(const StreamPtr& stream, RowRange rows) {
    auto work = std::make_unique<SliceWork>();
    work->stream = stream;
    work->rows = rows;
    sequencer_.Request(std::move(work));
    for (Sequencer::Grant& grant : sequencer_.TakeGrants()) granted_.push_back(std::move(grant));
    if (granted_.empty() || granted_.back().slice->stream != stream) return 0;
    return granted_.back().loan;
  }
  bool Attach(const StreamPtr& stream, RowRange rows) {
    auto work = std::make_unique<SliceWork>();
    work->stream = stream;
    work->rows = rows;
    return sequencer_.Attach(work, ++arrivals_);
  }
  bool Send(const StreamPtr& stream, RowRange rows) {
    return Request(stream, rows) != 0 && Attach(stream, rows);
  }
  // All that was lent so far comes back.
  void ReturnLoans() {
    for (const Sequencer::Grant& grant : granted_) sequencer_.Return(grant.area, grant.loan);
    granted_.clear();
  }
  void Reserve(const GroupAssembly& group) {
    std::vector<uint8_t> mask(static_cast<size_t>(group.rows().size()));
    ledger_.Reserve(group.key().microbatch_id, group.rows(), absl::MakeSpan(mask));
  }
  void Finish(const GroupAssembly& group, bool good) {
    if (good) sequencer_.OnResultsGood(group);
    sequencer_.ReleaseArea(group);
    if (good) ledger_.Commit(group.key().microbatch_id, group.rows());
    if (!good) ledger_.Release(group.key().microbatch_id, group.rows());
    sequencer_.OnLeft(group);
    ReturnLoans();
  }
  void Compute() {
    auto group = sequencer_.TakeReady();
    ASSERT_NE(group, nullptr);
    Reserve(*group);
    Finish(*group, true);
  }

  // Groups 0 and 1 of microbatch 0, which has 40 rows, are sent again, and then nothing of it is left to do.
  void RepeatFirstGroups() {
    auto again = Open(0, 40, {0, 20});
    ASSERT_TRUE(Send(again, {0, 10}));
    Compute();
    ASSERT_TRUE(Send(again, {10, 20}));
    Compute();
    Compute();
    EXPECT_EQ(sequencer_.turn(), (GroupKey{1, 0}));
  }

  // The stream ends badly, as in HeadSession::OnStreamEnd.
  void Break(const StreamPtr& stream) {
    stream->Fail(absl::CancelledError("cut"));
    sequencer_.TakeFailed();
    const uint64_t id = stream->spec().microbatch_id;
    for (const RowRange rows : sequencer_.Withdrawable(id, stream->spec().rows)) {
      ledger_.Withdraw(id, rows, /*forget_empty=*/false);
    }
    sequencer_.OnDeclared(id);
  }

  Ledger ledger_{1000, 1000};
  ContributionLedger contributions_{1000, 1000};
  Sequencer sequencer_{kRows, &ledger_, &contributions_};
  std::vector<Sequencer::Grant> granted_;
  uint64_t arrivals_ = 0;
};

TEST_F(SequencerTest, OneGroupAfterTheOther) {
  auto second = Open(1, 5);
  EXPECT_EQ(Request(second, {0, 5}), 0u);
  auto first = Open(0, 12);
  EXPECT_TRUE(Send(first, {0, 6}));
  EXPECT_EQ(sequencer_.WaitsFor(), "microbatch 0, rows [6, 10)");
  EXPECT_FALSE(sequencer_.HasReady());
  EXPECT_TRUE(Send(first, {6, 10}));
  EXPECT_TRUE(sequencer_.HasReady());
  EXPECT_FALSE(sequencer_.HasReady(/*before=*/2));
  auto group = sequencer_.TakeReady();
  ASSERT_NE(group, nullptr);
  EXPECT_EQ(group->key(), (GroupKey{0, 0}));
  Reserve(*group);
  EXPECT_EQ(sequencer_.turn(), (GroupKey{0, 1}));  // assembles while the first is computed
  EXPECT_TRUE(Send(first, {10, 12}));
  EXPECT_EQ(sequencer_.TakeReady(), nullptr);  // but waits for its results
  sequencer_.OnResultsGood(*group);
  EXPECT_TRUE(sequencer_.HasReady());
  Finish(*group, true);
  Compute();
  EXPECT_EQ(sequencer_.turn(), (GroupKey{1, 0}));
  EXPECT_EQ(sequencer_.TakeGrants().size(), 1u);  // the one that waited from the start
}

TEST_F(SequencerTest, NothingToDoIsPassedOver) {
  Open(0, 0);
  Open(1, 25, {0, 12}, -100);
  EXPECT_EQ(sequencer_.turn(), (GroupKey{1, 1}));
  Open(1, 25, {12, 25}, -100);
  EXPECT_EQ(sequencer_.turn(), (GroupKey{2, 0}));
}

TEST_F(SequencerTest, AContributionHasItsTurn) {
  auto next = Open(1, 5);
  const ContributionTerms terms{.rows = {0, 2}};
  ASSERT_TRUE(contributions_.Declare(0, terms).ok());
  sequencer_.OnContribution();
  EXPECT_EQ(Request(next, {0, 5}), 0u);
  const std::vector<uint64_t> checksums = {7, 8};
  contributions_.Commit(0, {0, 1}, absl::MakeConstSpan(checksums).subspan(0, 1));
  sequencer_.OnContribution();
  EXPECT_EQ(sequencer_.turn(), (GroupKey{0, 0}));
  EXPECT_EQ(sequencer_.WaitsFor(), "contribution 0: rows [1, 2) of [0, 2)");
  contributions_.Commit(0, {1, 2}, absl::MakeConstSpan(checksums).subspan(1, 1));
  sequencer_.OnContribution();
  EXPECT_EQ(sequencer_.turn(), (GroupKey{1, 0}));
  EXPECT_EQ(sequencer_.TakeGrants().size(), 1u);
}

TEST_F(SequencerTest, AFailedGroupKeepsItsTurn) {
  auto first = Open(0, 5), second = Open(1, 5);
  ASSERT_TRUE(Send(first, {0, 5}));
  auto group = sequencer_.TakeReady();
  Reserve(*group);
  ASSERT_TRUE(Send(second, {0, 5}));
  Finish(*group, false);
  EXPECT_EQ(sequencer_.turn(), (GroupKey{0, 0}));
  EXPECT_EQ(sequencer_.TakeReady(), nullptr);  // the second is whole but has to wait
  auto again = Open(0, 5);
  ASSERT_TRUE(Send(again, {0, 5}));
  Compute();
  Compute();
  EXPECT_EQ(sequencer_.turn(), (GroupKey{2, 0}));
}

TEST_F(SequencerTest, RepeatsLeaveAnAreaToTheGroupInTurn) {
  auto stream = Open(0, 30);
  for (int64_t row = 0; row < 30; row += 10) {
    ASSERT_TRUE(Send(stream, {row, row + 10}));
    Compute();
  }
  auto a = Open(0, 30), b = Open(0, 30), c = Open(0, 30), next = Open(1, 10);
  EXPECT_NE(Request(a, {0, 10}), 0u);
  EXPECT_NE(Request(b, {10, 20}), 0u);
  EXPECT_EQ(Request(c, {20, 30}), 0u);  // the last area is not for repeats
  EXPECT_NE(Request(next, {0, 10}), 0u);
  EXPECT_TRUE(Attach(a, {0, 10}));
  Compute();
  EXPECT_EQ(sequencer_.turn(), (GroupKey{1, 0}));  // a repeat has no turn
  EXPECT_EQ(sequencer_.TakeGrants().size(), 1u);   // c, in the area of a; b's came back unused
}

// Rows of group 1 fail when slices of group 2, which has nothing to accumulate, and of group 3 are there. The
// call that is to bring the rows of group 1 again repeats group 0 first.
class TurnTakenBackTest : public SequencerTest {
 protected:
  void SetUp() override {
    first_ = Open(0, 40, {0, 20});
    auto last = Open(0, 40, {30, 40});
    nothing_ = Open(0, 40, {20, 30}, -100);
    ASSERT_TRUE(Send(first_, {0, 10}));
    Compute();
    ASSERT_TRUE(Send(first_, {10, 20}));
    auto group = sequencer_.TakeReady();
    Reserve(*group);
    EXPECT_EQ(sequencer_.turn(), (GroupKey{0, 3}));
    ASSERT_TRUE(Send(nothing_, {20, 30}));
    ASSERT_TRUE(Send(last, {30, 40}));
    Finish(*group, false);
    EXPECT_EQ(sequencer_.turn(), (GroupKey{0, 1}));
  }
  StreamPtr first_, nothing_;
};

TEST_F(TurnTakenBackTest, AGroupWithNothingToAccumulateIsComputedAllTheSame) {
  ASSERT_TRUE(sequencer_.HasReady()) << "it holds an area that others need";
  Compute();
  RepeatFirstGroups();
}

TEST_F(TurnTakenBackTest, AGroupWithNothingToAccumulateIsClosedWithItsStreams) {
  nothing_->Fail(absl::CancelledError("cut"));
  EXPECT_EQ(sequencer_.TakeFailed().queued.size(), 1u);
  EXPECT_NE(Request(Open(0, 40, {0, 20}), {0, 10}), 0u);
}

// Rows of two streams that have no target are group 2. The turn has passed it when it goes back to group 1,
// and one of the two breaks. If its rows were withdrawn, the slice of the other one would wait for the turn
// and keep its area, and there would be none in which group 0 can be repeated before group 1 is sent again.
TEST_F(SequencerTest, RowsWithoutTargetThatWerePassedStayWhenTheirStreamBreaks) {
  auto first = Open(0, 40, {0, 20}), last = Open(0, 40, {30, 40});
  auto breaks = Open(0, 40, {20, 25}, -100), stays = Open(0, 40, {25, 30}, -100);
  ASSERT_TRUE(Send(first, {0, 10}));
  Compute();
  ASSERT_TRUE(Send(first, {10, 20}));
  auto group = sequencer_.TakeReady();
  Reserve(*group);
  ASSERT_TRUE(Send(stays, {25, 30}));
  ASSERT_TRUE(Send(last, {30, 40}));
  Finish(*group, false);
  Break(first);
  Break(breaks);
  ASSERT_TRUE(sequencer_.HasReady()) << "it holds an area that others need";
  Compute();
  RepeatFirstGroups();
}

// The rows of the group that failed may come again with other contents, or not at all.
TEST_F(TurnTakenBackTest, RowsOfTheGroupThatFailedLeaveWithTheirStream) {
  EXPECT_EQ(sequencer_.TakeReady()->key(), (GroupKey{0, 2}));
  Break(first_);
  EXPECT_TRUE(ledger_.Declare(0, first_->terms(), {10, 20}, {.targets = std::vector<int32_t>(10, 2)}).ok());
  EXPECT_FALSE(ledger_.Declare(0, first_->terms(), {0, 10}, {.targets = std::vector<int32_t>(10, 2)}).ok());
  EXPECT_EQ(ledger_.CountUnsettled(0, {20, 30}), 0);
}

// What was lent for its slice comes back when its rows are to be declared again.
TEST_F(SequencerTest, AGroupWhoseRowsWereWithdrawnBeyondTheTurnKeepsNoArea) {
  auto first = Open(0, 40, {0, 20}), nothing = Open(0, 40, {20, 30}, -100), last = Open(0, 40, {30, 40});
  ASSERT_TRUE(Send(first, {0, 10}));
  Compute();
  ASSERT_TRUE(Send(first, {10, 20}));
  auto group = sequencer_.TakeReady();
  Reserve(*group);
  ASSERT_NE(Request(nothing, {20, 30}), 0u);
  ASSERT_TRUE(Send(last, {30, 40}));
  sequencer_.ReleaseArea(*group);
  ledger_.Release(0, group->rows());
  sequencer_.OnLeft(*group);
  EXPECT_EQ(sequencer_.turn(), (GroupKey{0, 1}));
  nothing->Fail(absl::CancelledError("cut"));
  sequencer_.TakeFailed();
  ledger_.Withdraw(0, {20, 30}, /*forget_empty=*/false);
  sequencer_.OnDeclared(0);
  ReturnLoans();
  EXPECT_NE(Request(Open(0, 40, {0, 20}), {0, 10}), 0u);
}

TEST_F(SequencerTest, RepeatsDoNotGoBeforeAnOlderGroup) {
  auto first = Open(0, 10), next = Open(1, 10);
  ASSERT_TRUE(Send(first, {0, 10}));
  Compute();
  ASSERT_TRUE(Send(next, {0, 10}));
  ASSERT_TRUE(Send(Open(0, 10), {0, 10}));
  EXPECT_EQ(sequencer_.TakeReady()->key(), (GroupKey{1, 0}));
  EXPECT_EQ(sequencer_.TakeReady()->key(), (GroupKey{0, 0}));
}

TEST_F(SequencerTest, RowsThatAreThereAreNotReceivedAgainIntoAGroupThatNeedsNoMore) {
  auto first = Open(0, 10), again = Open(0, 10), third = Open(0, 10);
  ASSERT_TRUE(Send(first, {0, 6}));
  EXPECT_TRUE(Send(again, {4, 8})) << "the group may need what comes with them";
  ASSERT_TRUE(Send(first, {6, 10}));
  EXPECT_EQ(Request(third, {0, 5}), 0u) << "the group is complete";
  Compute();
  EXPECT_EQ(sequencer_.TakeGrants().size(), 1u) << "now it is a repeat";
  ASSERT_TRUE(Attach(third, {0, 5}));
  EXPECT_EQ(Request(Open(0, 10), {4, 10}), 0u) << "they are among the next ones";
  EXPECT_TRUE(Send(third, {5, 10}));
  Compute();
  EXPECT_EQ(sequencer_.TakeGrants().size(), 1u);
}

TEST_F(SequencerTest, FailedStreamsLeaveNothing) {
  auto attached = Open(0, 10, {0, 5}), stays = Open(0, 10, {5, 10}), waits = Open(1, 5);
  ASSERT_TRUE(Send(attached, {0, 5}));
  ASSERT_TRUE(Send(stays, {5, 10}));
  EXPECT_EQ(Request(waits, {0, 5}), 0u);
  EXPECT_TRUE(sequencer_.IsWaiting(*attached));
  attached->Fail(absl::CancelledError("cut"));
  waits->Fail(absl::CancelledError("cut"));
  auto dropped = sequencer_.TakeFailed();
  EXPECT_EQ(dropped.queued.size(), 1u);
  EXPECT_EQ(dropped.waiting.size(), 1u);
  EXPECT_FALSE(sequencer_.HasReady());
  EXPECT_EQ(sequencer_.WaitsFor(), "microbatch 0, rows [0, 5)");
  auto again = Open(0, 10, {0, 5});
  ASSERT_TRUE(Send(again, {0, 5}));
  EXPECT_TRUE(sequencer_.HasReady());
}

TEST_F(SequencerTest, SegmentsEndWhereSlicesDo) {
  auto a = Open(0, 10), b = Open(0, 10);
  ASSERT_TRUE(Send(a, {1, 4}));
  ASSERT_TRUE(Send(b, {3, 6}));
  GroupAssembly group({0, 0}, {0, 10}, 0, ledger_);
  EXPECT_EQ(group.Segments().size(), 1u);  // a gap
  for (auto [stream, rows] : {std::pair{a, RowRange{1, 4}}, std::pair{b, RowRange{3, 6}}}) {
    auto work = std::make_unique<SliceWork>();
    work->stream = stream;
    work->rows = rows;
    EXPECT_FALSE(group.Attach(work, 1));  // nothing was lent
    group.Lend(7, stream.get(), rows);
    EXPECT_FALSE(group.IsFree({3, 4}));
    EXPECT_TRUE(group.Attach(work, 1));
    EXPECT_TRUE(group.IsFree({3, 4}));
  }
  std::vector<RowRange> rows;
  std::vector<size_t> slices;
  for (const auto& segment : group.Segments()) {
    rows.push_back(segment.rows);
    slices.push_back(segment.slices.size());
  }
  EXPECT_THAT(rows,
              ElementsAre(RowRange{0, 1}, RowRange{1, 3}, RowRange{3, 4}, RowRange{4, 6}, RowRange{6, 10}));
  EXPECT_THAT(slices, ElementsAre(0, 1, 2, 1, 0));
  EXPECT_EQ(group.FirstMissing(), (RowRange{0, 1}));
  EXPECT_FALSE(group.IsComplete());
}

TEST_F(SequencerTest, ANewStepStartsOver) {
  auto stream = Open(0, 20);
  ASSERT_TRUE(Send(stream, {0, 10}));
  Compute();
  ASSERT_TRUE(Send(stream, {10, 15}));
  stream->Fail(absl::AbortedError("zeroed"));
  EXPECT_EQ(sequencer_.TakeFailed().queued.size(), 1u);
  ledger_.Clear();
  sequencer_.Clear();
  EXPECT_EQ(sequencer_.turn(), (GroupKey{0, 0}));
  EXPECT_EQ(sequencer_.WaitsFor(), "");
  ReturnLoans();
  auto again = Open(0, 10);
  ASSERT_TRUE(Send(again, {0, 10}));
  Compute();
}

TEST_F(SequencerTest, AContributionHasItsTurnUntilItIsAdded) {
  ASSERT_TRUE(contributions_.Declare(1, {.rows = {0, 3}}).ok());
  sequencer_.OnContribution();
  EXPECT_EQ(sequencer_.turn(), (GroupKey{0, 0})) << "microbatch 0 is before it";
  ASSERT_TRUE(contributions_.Declare(0, {.rows = {0, 2}}).ok());
  sequencer_.OnContribution();
  EXPECT_EQ(sequencer_.turn(), (GroupKey{0, 0}));
  contributions_.Commit(0, {0, 2}, {1, 1});
  sequencer_.OnContribution();
  EXPECT_EQ(sequencer_.turn(), (GroupKey{1, 0}));
  contributions_.Commit(1, {1, 3}, {1, 1});
  sequencer_.OnContribution();
  EXPECT_EQ(sequencer_.turn(), (GroupKey{1, 0})) << "a row is missing";
  contributions_.Commit(1, {0, 1}, {1});
  sequencer_.OnContribution();
  EXPECT_EQ(sequencer_.turn(), (GroupKey{2, 0}));
}

}  // namespace
}  // namespace lossd::engine::sequencer_test
