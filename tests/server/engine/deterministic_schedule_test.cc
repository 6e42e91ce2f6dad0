// SPDX-License-Identifier: Apache-2.0
// Tests of deterministic_schedule.h: the sequencer and the groups alone, and the engine in deterministic
// mode.
#include "server/engine/deterministic_schedule.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/engine.h"
#include "tests/server/engine/engine_fixture.h"
#include "tests/server/engine/fake_backend.h"

namespace lossd::engine::deterministic_schedule_test {
namespace {

using kernels::Gradients;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// ---- Sequencer ----

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

// ---- Order ----
// Order, waiting and repeats, on a scripted device.

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
  auto engine = Engine::Create(options, &backend_, 42, {});
  ASSERT_TRUE(engine.ok());
  const kernels::HeadConfig config{.hidden_size = kHidden, .vocab_size = 10, .trainable = true};
  ASSERT_TRUE((*engine)->CreateHead("head", config).ok());
  ASSERT_TRUE((*engine)->PublishHead("head").ok());
  auto head = (*engine)->Describe("head");
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ(head->limits.row_grid, 227);
}

// As on several devices, of which each computes whole groups; which, says the turn of the chunk.
TEST_F(DeterministicTest, AGroupIsOneDevicesAndItsRepeatsTheSameOnes) {
  device_.slice_rows = kGroup / 2;
  std::vector<uint64_t> turns;
  device_.on_chunk = [&turns](const kernels::Chunk& chunk) {
    EXPECT_TRUE(chunk.independent);
    turns.push_back(chunk.turn);
  };
  Start();
  EXPECT_EQ(engine_->Describe("head")->limits.row_grid, kGroup / 2);
  for (const uint64_t id : {0, 1}) {
    Call call = Open(id, kGroup);
    ASSERT_TRUE(Send(call, id, {0, kGroup / 2}));
    ASSERT_TRUE(Send(call, id, {kGroup / 2, kGroup}));
    ASSERT_TRUE(call.results->Wait().ok()) << call.results->Wait();
  }
  Call repeat = Open(0, kGroup, {kGroup / 2, kGroup});
  ASSERT_TRUE(Send(repeat, 0, {kGroup / 2, kGroup / 2 + 1}));
  ASSERT_TRUE(Send(repeat, 0, {kGroup / 2 + 1, kGroup}));
  ASSERT_TRUE(repeat.results->Wait().ok()) << repeat.results->Wait();
  Settle();
  EXPECT_THAT(turns,
              ::testing::AllOf(::testing::Contains(0), ::testing::Contains(1), ::testing::Contains(2)));
  EXPECT_THAT(std::vector<uint64_t>(turns.begin(), turns.begin() + 4), ElementsAre(0, 1, 1, 2));
  for (size_t i = 4; i < turns.size(); ++i) EXPECT_EQ(turns[i], 1u) << "of the group that is repeated";
}

TEST_F(DeterministicTest, MicrobatchesAccumulateInTheOrderOfTheirIds) {
  Start();
  Call second = Open(1, 20), third = Open(2, 3), first = Open(0, 5);
  const SentSlice waits2 = Begin(second, 1, {0, 16});
  const SentSlice waits3 = Begin(third, 2, {0, 3});
  EXPECT_FALSE(waits2.copied());
  EXPECT_EQ(engine_->stats().waiting_slices, 2);
  EXPECT_EQ(engine_->Describe("head")->waits_for, "microbatch 0, rows [0, 5)");
  ASSERT_TRUE(Send(first, 0, {0, 5}));
  EXPECT_TRUE(waits2.Wait());
  EXPECT_TRUE(first.results->Wait().ok());
  Settle();
  EXPECT_FALSE(waits3.copied());
  EXPECT_EQ(engine_->Describe("head")->waits_for, "microbatch 1, rows [16, 20)");
  ASSERT_TRUE(Send(second, 1, {16, 20}));
  EXPECT_TRUE(waits3.Wait());
  EXPECT_TRUE(second.results->Wait().ok());
  EXPECT_TRUE(third.results->Wait().ok());
  std::vector<float> expected = Names(0, {0, 5});
  for (float name : Names(1, {0, 20})) expected.push_back(name);
  for (float name : Names(2, {0, 3})) expected.push_back(name);
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(expected));
  EXPECT_THAT(second.results->grads()[17], ElementsAre(RowName(1, 17), 0.5f, 0.5f));
  EXPECT_EQ(second.results->summary().accumulated_rows, 20);
  EXPECT_EQ(engine_->Describe("head")->waits_for, "");
  auto applied = engine_->ApplyStep("head", {.step = 0, .expected_microbatches = {0, 1, 2}});
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
  EXPECT_EQ(left.results->summary().sums.loss, 0 + 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8);
}

TEST_F(DeterministicTest, IgnoredRowsNeedNotBeSent) {
  Start();
  StreamSpec spec = Spec(0, 40, {0, 40});
  for (size_t i = 4; i < 36; ++i) spec.targets[i] = -100;  // all of the second group
  Call call = Open(spec);
  Call nothing = Open(Spec(1, 0, {0, 0}));
  EXPECT_TRUE(nothing.results->Wait().ok());
  Call next = Open(2, 1);
  const SentSlice waits = Begin(next, 2, {0, 1});
  ASSERT_TRUE(Send(call, 0, {0, 4}));
  EXPECT_FALSE(waits.copied());
  ASSERT_TRUE(Send(call, 0, {36, 40}));
  call.stream->HalfClose();
  EXPECT_TRUE(call.results->Wait().ok());
  EXPECT_TRUE(waits.Wait());
  EXPECT_TRUE(next.results->Wait().ok());
  EXPECT_THAT(device_.chunks(), ElementsAre(ElementsAre(4), ElementsAre(4), ElementsAre(1)));
}

TEST_F(DeterministicTest, ASlotInOrderOpensWithTheTargetsOfAllItsRows) {
  Start();
  // The other half of the group is all ignored, but no stream has said so yet.
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
  const SentSlice waits = Begin(later, 2, {0, 4});
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
  EXPECT_FALSE(waits.copied());
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
  EXPECT_EQ(second.results->summary().sums.loss, 4 + 5 + 6 + 7 + 8 + 9 + 10 + 11 + 12 + 13 + 14 + 15);
  EXPECT_EQ(second.results->grads().size(), 12u);
}

TEST_F(DeterministicTest, RowsThatAreBeingCopiedAreLentOnce) {
  Start();
  Call first = Open(0, 8), second = Open(0, 8);
  std::optional<SentSlice> two;
  bool copied = false;
  first.stream->Receive({.rows = {0, 8},
                         .bytes = 8 * kHidden * 4,
                         .copy =
                             [&](uint8_t*) {
                               copied = true;
                               two.emplace(Begin(second, 0, {2, 4}));
                               EXPECT_FALSE(two->copied());
                               first.stream->Cancel(absl::CancelledError("cut"));
                               EXPECT_FALSE(two->copied());  // their place is still being written
                             },
                         .on_queued = [](int64_t) { FAIL() << "its stream had ended"; }});
  EXPECT_TRUE(copied);
  EXPECT_TRUE(two->Wait());
  EXPECT_FALSE(first.results->Wait().ok());
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
  const Call open = Open(0, 40);
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
    EXPECT_EQ(norm->grad_norm, 4.0 * static_cast<double>(id + 1));
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

TEST_F(DeterministicTest, TellsWhatFilteredGradientsLeaveOut) {
  struct Observer : SilentObserver {
    void OnChunk(const ChunkReport& report) override {
      EXPECT_EQ(report.head, "head");
      dropped += report.sums.dropped_mass;
    }
    double dropped = 0.0;  // read when no chunk is under way
  } observer;
  device_.dropped_mass = 0.25;
  Start({}, {&observer});
  StreamSpec spec = Spec(0, 20, {0, 20});
  spec.options.gradients = kernels::Gradients::kFiltered;
  Call call = Open(spec);
  ASSERT_TRUE(Send(call, 0, {0, 16}));
  ASSERT_TRUE(Send(call, 0, {16, 20}));
  ASSERT_TRUE(call.results->Wait().ok()) << call.results->Wait();
  EXPECT_EQ(call.results->summary().sums.dropped_mass, 5.0);
  EXPECT_EQ(observer.dropped, 5.0);
  call.stream.reset();
  engine_ = nullptr;  // before the observer
}

// ---- Decisions about sampling ----
// On the CPU backend with gradients `auto`: what a group has decided holds for its
// repeats.

struct Observer : SilentObserver {
  void OnChunk(const ChunkReport& report) override {
    absl::MutexLock lock(&mutex);
    gradients.push_back(report.gradients);
  }
  Gradients Last() {
    absl::MutexLock lock(&mutex);
    return gradients.back();
  }
  absl::Mutex mutex;
  std::vector<Gradients> gradients ABSL_GUARDED_BY(mutex);  // of every chunk
};

// A head of which rows with large hidden states have peaked softmaxes, and are computed without an error if
// they are sampled; rows with small ones have flat softmaxes and an error of about 0.22.
class DeterministicDecisionsTest : public ::testing::Test {
 protected:
  static constexpr int64_t kD = 24, kV = 300, kRows = 40;  // one group
  using Grads = std::map<int64_t, std::vector<float>>;

  void SetUp() override {
    auto backend = kernels::CreateCpuBackend({.threads = 2, .workspace_bytes = 1 << 20});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    const EngineOptions options{.slice_bytes = 8192, .staging_bytes = 16384, .deterministic = true};
    auto engine = Engine::Create(options, backend_.get(), 42, {&observer_});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    ASSERT_TRUE(engine_->CreateHead("head", {.hidden_size = kD, .vocab_size = kV, .trainable = true}).ok());
    ASSERT_TRUE(engine_->PublishHead("head").ok());
    ASSERT_GE(engine_->Describe("head")->limits.row_grid, kRows);
    WriteWeights();
    MakeRows();
  }
  void TearDown() override { engine_ = nullptr; }  // before the observer

  // Sends rows of a microbatch of kRows, of which the first `peaked` are peaked; returns their gradients.
  Grads Send(uint64_t id, int64_t peaked, RowRange rows, Gradients gradients = Gradients::kAuto) {
    StreamSpec spec;
    spec.head = "head";
    spec.step = 0;
    spec.microbatch_id = id;
    spec.microbatch_rows = kRows;
    spec.rows = rows;
    spec.hidden_dtype = kernels::DType::kFloat32;
    spec.targets.assign(targets_.begin() + rows.begin, targets_.begin() + rows.end);
    spec.want_grad_hidden = spec.accumulate_gradients = true;
    spec.options.gradients = gradients;
    spec.options.sample_threshold = 0.05f;
    spec.options.max_gradient_error = 0.1f;
    auto results = std::make_shared<RowCollector>();
    auto stream = engine_->Open(spec, results);
    EXPECT_TRUE(stream.ok()) << stream.status();
    if (!stream.ok()) return {};
    (*stream)->Start();
    std::vector<float> hidden;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      for (int64_t d = 0; d < kD; ++d)
        hidden.push_back((row < peaked ? 1000.0f : 1.0f) * rows_[static_cast<size_t>(row * kD + d)]);
    }
    EXPECT_TRUE(SendSlice(**stream, rows, std::move(hidden)));
    EXPECT_TRUE(results->Wait().ok()) << results->Wait();
    EXPECT_TRUE(engine_->OnDevice("head", [](head::Head&) { return absl::OkStatus(); }).ok());
    return results->grads();
  }
  // Every row of the repeat has the bits that it had.
  static void ExpectSameBits(const Grads& repeat, const Grads& before) {
    for (const auto& [row, gradient] : repeat) ASSERT_EQ(gradient, before.at(row)) << "row " << row;
  }

  Observer observer_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Engine> engine_;

 private:
  void WriteWeights() {
    std::mt19937_64 rng(5);
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(kV * kD));
    for (float& value : values) value = 0.02f * normal(rng);
    const auto write = [&](head::Head& head) {
      return head.kernels().WriteTensor({kernels::Param::kWeight, kernels::Role::kValue}, 0, kV,
                                        kernels::DType::kFloat32,
                                        {reinterpret_cast<const uint8_t*>(values.data()), values.size() * 4});
    };
    ASSERT_TRUE(engine_->OnDevice("head", write).ok());
  }
  void MakeRows() {
    std::mt19937_64 rng(7);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < kRows * kD; ++i) rows_.push_back(normal(rng));
    for (int64_t i = 0; i < kRows; ++i)
      targets_.push_back(static_cast<int32_t>(rng() % static_cast<uint64_t>(kV)));
  }

  std::vector<float> rows_;
  std::vector<int32_t> targets_;
};

// The zeros in place of rows that are not sent again have flat softmaxes; they would make it exact.
TEST_F(DeterministicDecisionsTest, ZerosInPlaceOfOtherRowsDecideNothing) {
  const Grads all = Send(0, kRows, {0, kRows});
  ASSERT_EQ(observer_.Last(), Gradients::kSampled);
  for (const RowRange rows : {RowRange{0, kRows}, {0, 5}, {7, 20}, {39, 40}}) {
    const Grads repeat = Send(0, kRows, rows);
    EXPECT_EQ(observer_.Last(), Gradients::kSampled) << rows.begin;
    ExpectSameBits(repeat, all);
  }
}

// Alone, the peaked rows would be sampled, and in another group are.
TEST_F(DeterministicDecisionsTest, ARepeatIsComputedAsItsGroupWas) {
  constexpr int64_t kPeaked = 8;
  const Grads all = Send(0, kPeaked, {0, kRows});
  ASSERT_EQ(observer_.Last(), Gradients::kExact);
  for (const RowRange rows : {RowRange{0, kPeaked}, {3, 4}, {0, kRows}}) {
    const Grads repeat = Send(0, kPeaked, rows);
    EXPECT_EQ(observer_.Last(), Gradients::kExact) << rows.begin;
    ExpectSameBits(repeat, all);
  }
  Send(1, kRows, {0, kRows});
  EXPECT_EQ(observer_.Last(), Gradients::kSampled);
}

// A flat row among peaked ones would be exact by itself.
TEST_F(DeterministicDecisionsTest, ARepeatIsSampledIfItsGroupWas) {
  const Grads all = Send(0, kRows - 2, {0, kRows});
  ASSERT_EQ(observer_.Last(), Gradients::kSampled);
  const Grads repeat = Send(0, kRows - 2, {kRows - 2, kRows});
  EXPECT_EQ(observer_.Last(), Gradients::kSampled);
  ExpectSameBits(repeat, all);
}

// The next step's groups decide for themselves.
TEST_F(DeterministicDecisionsTest, ZeroedGradientsForgetWhatWasDecided) {
  Send(0, 0, {0, kRows});
  ASSERT_EQ(observer_.Last(), Gradients::kExact);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  const Grads all = Send(0, kRows, {0, kRows});
  ASSERT_EQ(observer_.Last(), Gradients::kSampled);
  ExpectSameBits(Send(0, kRows, {4, 9}), all);
  EXPECT_EQ(observer_.Last(), Gradients::kSampled);
}

// ---- Deferred microbatches ----
// On a scripted device.

class DeterministicDeferredTest : public DeterministicTest {
 protected:
  // The forward pass of a whole microbatch whose rows are kept.
  void Forward(uint64_t id, int64_t rows) {
    StreamSpec spec = Spec(id, rows, {0, rows});
    spec.reduction = Reduction::kNone;
    spec.retain = true;
    spec.want_grad_hidden = spec.accumulate_gradients = false;
    Call call = Open(spec);
    for (int64_t row = 0; row < rows; row += 10) ASSERT_TRUE(Send(call, id, {row, std::min(rows, row + 10)}));
    ASSERT_TRUE(call.results->Wait().ok()) << call.results->Wait();
  }
  static BackwardSpec Backward(uint64_t id, RowRange rows) {
    BackwardSpec spec{.head = "head", .step = 0, .microbatch_id = id, .rows = rows};
    spec.want_grad_hidden = spec.accumulate_gradients = true;
    spec.grad_loss.assign(static_cast<size_t>(rows.size()), 2.0f);
    return spec;
  }
  Call Open(const BackwardSpec& spec) {
    Call call;
    auto stream = engine_->OpenBackward(spec, call.results);
    EXPECT_TRUE(stream.ok()) << stream.status();
    (*stream)->Start();
    call.stream = *std::move(stream);
    return call;
  }
  using DeterministicTest::Open;
  // Sends all of the call's slices, one after the other.
  static void SendRetained(const Call& call) {
    for (RowRange rows : call.stream->RetainedSlices()) ASSERT_TRUE(SentSlice(*call.stream, rows).Wait());
  }
};

TEST_F(DeterministicDeferredTest, RetainedRowsTakeTheirTurn) {
  Start({.retained_bytes = 4096});
  for (uint64_t id : {1, 0}) Forward(id, 20);
  Call second = Open(Backward(1, {0, 20}));
  EXPECT_THAT(second.stream->RetainedSlices(), ElementsAre(RowRange{0, 16}, RowRange{16, 20}));
  const SentSlice waits(*second.stream, {0, 16});
  EXPECT_FALSE(waits.queued());
  Call first = Open(Backward(0, {0, 20}));
  SendRetained(first);
  ASSERT_TRUE(first.results->Wait().ok()) << first.results->Wait();
  EXPECT_TRUE(waits.Wait());
  EXPECT_TRUE(SentSlice(*second.stream, {16, 20}).Wait());
  ASSERT_TRUE(second.results->Wait().ok());
  EXPECT_THAT(second.results->grads()[18], ElementsAre(2 * RowName(1, 18), 1.0f, 1.0f));
  std::vector<float> expected = Names(0, {0, 20});
  for (float name : Names(1, {0, 20})) expected.push_back(name);
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(expected));
}

// The largest factor of a group's gradients may decide about the bits of them all.
TEST_F(DeterministicDeferredTest, RowsThatAreNotSentAgainKeepTheirGradients) {
  Start({.retained_bytes = 4096});
  Forward(0, 8);
  std::vector<float> lse, entropy;
  device_.inspect = [&](const kernels::Slice& slice) {
    ASSERT_TRUE(slice.grad_loss != nullptr && slice.grad_lse != nullptr && slice.grad_entropy != nullptr);
    lse.insert(lse.end(), slice.grad_lse, slice.grad_lse + slice.rows);
    entropy.insert(entropy.end(), slice.grad_entropy, slice.grad_entropy + slice.rows);
  };
  for (RowRange rows : {RowRange{0, 8}, {0, 8}, {3, 5}}) {  // once, and twice again
    BackwardSpec spec = Backward(0, rows);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      spec.grad_lse.push_back(static_cast<float>(row));
      spec.grad_entropy.push_back(static_cast<float>(10 * row));
    }
    lse.clear();
    entropy.clear();
    Call call = Open(spec);
    SendRetained(call);
    ASSERT_TRUE(call.results->Wait().ok()) << call.results->Wait();
    EXPECT_THAT(lse, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
    EXPECT_THAT(entropy, ElementsAre(0, 10, 20, 30, 40, 50, 60, 70));
  }
}

// ---- Decisions of groups ----

kernels::Chunk Computed(Gradients asked, Gradients gradients, float threshold = 0x1p-10f) {
  kernels::Chunk chunk;
  chunk.options.gradients = asked;
  chunk.gradients = gradients;
  chunk.sample_threshold = threshold;
  return chunk;
}

kernels::LossOptions Asked(Gradients gradients) {
  kernels::LossOptions options;
  options.gradients = gradients;
  return options;
}

TEST(GroupDecisionsTest, APartIsComputedAsItsGroupWas) {
  GroupDecisions decisions;
  const kernels::LossOptions asked = Asked(Gradients::kAuto);
  EXPECT_EQ(decisions.For({3, 1}, asked), asked) << "nothing is known";
  decisions.Note({3, 1}, Computed(Gradients::kAuto, Gradients::kExact));
  decisions.Note({3, 2}, Computed(Gradients::kAuto, Gradients::kSampled, 0x1p-8f));
  EXPECT_EQ(decisions.For({3, 1}, asked).gradients, Gradients::kExact);
  EXPECT_EQ(decisions.For({3, 2}, asked).gradients, Gradients::kAuto);
  EXPECT_EQ(decisions.For({3, 2}, asked).sample_threshold, 0x1p-8f);
  EXPECT_GT(decisions.For({3, 2}, asked).max_gradient_error, 1e30f);
  EXPECT_EQ(decisions.For({4, 1}, asked), asked);
  decisions.Note({3, 1}, Computed(Gradients::kFiltered, Gradients::kFiltered));  // another attempt
  EXPECT_EQ(decisions.For({3, 1}, Asked(Gradients::kFiltered)), Asked(Gradients::kFiltered));
  decisions.Clear();
  EXPECT_EQ(decisions.For({3, 2}, asked), asked);
}

TEST(GroupDecisionsTest, ManyGroupsAreRememberedButNotAll) {
  GroupDecisions decisions;
  const auto groups = static_cast<int64_t>(GroupDecisions::kMostGroups);
  for (int64_t i = 0; i <= groups; ++i) decisions.Note({0, i}, Computed(Gradients::kAuto, Gradients::kExact));
  for (int64_t i = 0; i < groups; ++i) {
    ASSERT_EQ(decisions.For({0, i}, Asked(Gradients::kAuto)).gradients, Gradients::kExact) << i;
  }
  EXPECT_EQ(decisions.For({0, groups}, Asked(Gradients::kAuto)), Asked(Gradients::kAuto));
}

}  // namespace
}  // namespace lossd::engine::deterministic_schedule_test
