// SPDX-License-Identifier: Apache-2.0
// Tests of schedule.h: the queue and its policy for chunks, the seeds of sampled gradients,
// what the engine reports of chunks, and what comes next to the device, by arrival and in deterministic mode.
#include "server/engine/schedule.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/deterministic_schedule.h"
#include "tests/server/engine/engine_fixture.h"
#include "tests/server/engine/fake_backend.h"

namespace lossd::engine::schedule_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// ---- Work queue ----

constexpr int64_t kChunkRows = 16;

class WorkQueueTest : public ::testing::Test {
 protected:
  // Declares the rows and puts them into the queue as one slice.
  void Push(const StreamSpec& spec) {
    const kernels::HeadConfig config{.hidden_size = 3, .vocab_size = 10};
    auto stream = StreamState::Create(spec, config, {.incarnation = 1, .step = 0}, {}, nullptr);
    ASSERT_TRUE(stream.ok()) << stream.status();
    if (spec.accumulate_gradients) {
      ASSERT_TRUE(
          ledger_.Declare(spec.microbatch_id, (*stream)->terms(), spec.rows, (*stream)->contents()).ok());
    }
    auto work = std::make_unique<SliceWork>();
    work->stream = last_ = *std::move(stream);
    work->rows = spec.rows;
    queue_.Push(std::move(work));
  }
  void Push(uint64_t id, int64_t rows) { Push(Spec(id, rows, {0, rows})); }
  void PushOf(const char* peer, uint64_t id, int64_t rows, bool accumulate = true) {
    StreamSpec spec = Spec(id, rows, {0, rows});
    spec.peer = peer;
    spec.accumulate_gradients = accumulate;
    Push(spec);
  }
  // The microbatches of the chunk taken.
  std::vector<uint64_t> Take() {
    std::vector<uint64_t> ids;
    for (const auto& work : queue_.TakeChunk(kChunkRows, ledger_))
      ids.push_back(work->stream->spec().microbatch_id);
    return ids;
  }
  NextChunk Next() const { return queue_.Next(kChunkRows); }

  Ledger ledger_{1000, 100};
  std::shared_ptr<StreamState> last_;  // whose slice was pushed
  WorkQueue queue_{kChunkRows};
};

TEST_F(WorkQueueTest, AChunkIsClosedWhenItIsFull) {
  EXPECT_EQ(Next().rows, 0);
  EXPECT_FALSE(Next().closed);
  Push(1, 6);
  Push(2, 6);
  EXPECT_EQ(Next().rows, 12);
  EXPECT_TRUE(Next().accumulates);
  EXPECT_FALSE(Next().closed);
  Push(3, 6);  // would be too much
  EXPECT_EQ(Next().rows, 12);
  EXPECT_TRUE(Next().closed);
  EXPECT_THAT(Take(), ElementsAre(1, 2));
  EXPECT_EQ(queue_.rows(), 6);
  Push(4, 10);
  EXPECT_EQ(Next().rows, kChunkRows);
  EXPECT_TRUE(Next().closed);
  EXPECT_THAT(Take(), ElementsAre(3, 4));
  EXPECT_TRUE(queue_.empty());
}

TEST_F(WorkQueueTest, AnOperationClosesTheChunkBeforeIt) {
  const auto nothing = [](head::Head&) { return absl::OkStatus(); };
  Operation operation{.run = nothing};
  Push(1, 6);
  queue_.Push(&operation);
  Push(2, 6);
  EXPECT_EQ(Next().rows, 6);
  EXPECT_TRUE(Next().closed);
  EXPECT_THAT(Take(), ElementsAre(1));
  EXPECT_EQ(Next().rows, 0);
  EXPECT_THAT(Take(), IsEmpty());
  EXPECT_EQ(queue_.TakeOperation(), &operation);
  EXPECT_THAT(Take(), ElementsAre(2));
}

TEST_F(WorkQueueTest, OtherOptionsWaitForTheirOwnChunk) {
  StreamSpec other = Spec(2, 6, {0, 6});
  other.options.z_loss = 0.5f;
  StreamSpec loss_only = Spec(3, 5, {0, 5});
  loss_only.accumulate_gradients = false;
  Push(1, 6);
  Push(other);
  Push(loss_only);
  Push(4, 6);
  EXPECT_EQ(Next().rows, 12);
  EXPECT_FALSE(Next().closed);
  EXPECT_THAT(Take(), ElementsAre(1, 4));
  EXPECT_THAT(Take(), ElementsAre(2));
  EXPECT_FALSE(Next().accumulates);
  EXPECT_THAT(Take(), ElementsAre(3));
  EXPECT_EQ(queue_.slices(), 0);
}

TEST_F(WorkQueueTest, RowsThatAreBeingComputedEndTheChunk) {
  Push(1, 6);
  Push(1, 6);
  EXPECT_THAT(Take(), ElementsAre(1));
  EXPECT_THAT(Take(), IsEmpty());
  ledger_.Commit(1, {0, 6});
  EXPECT_THAT(Take(), ElementsAre(1));
}

TEST_F(WorkQueueTest, APeerThatQueuesMuchIsNotBeforeTheOthers) {
  for (uint64_t id = 1; id <= 8; ++id) PushOf("greedy", id, 8);
  EXPECT_THAT(Take(), ElementsAre(1, 2));
  PushOf("late", 21, 4);
  PushOf("later", 31, 8);
  EXPECT_THAT(Take(), ElementsAre(21, 31)) << "of the round that has begun";
  EXPECT_THAT(Take(), ElementsAre(3, 4));
  PushOf("late", 22, 16);
  PushOf("late", 23, 4);  // of the next round
  EXPECT_THAT(Take(), ElementsAre(22));
  EXPECT_THAT(Take(), ElementsAre(5, 6));
  EXPECT_THAT(Take(), ElementsAre(23, 7)) << "a chunk is filled with rows of the round after it";
  EXPECT_THAT(Take(), ElementsAre(8));
  EXPECT_TRUE(queue_.empty());
}

// Slices of teachers that live in host memory; one is on the device.
class PooledQueueTest : public ::testing::Test {
 protected:
  // Rows with teacher 0 need no values of others.
  std::unique_ptr<SliceWork> Taught(uint64_t teacher, uint64_t id, int64_t rows, const char* peer = "peer") {
    StreamSpec spec = Spec(id, rows, {0, rows});
    spec.peer = peer;
    spec.accumulate_gradients = false;
    spec.options.distillation.teacher = teacher;
    auto stream =
        StreamState::Create(spec, {.hidden_size = 3, .vocab_size = 10}, {.incarnation = 1}, {}, nullptr);
    EXPECT_TRUE(stream.ok()) << stream.status();
    auto work = std::make_unique<SliceWork>();
    work->stream = *std::move(stream);
    work->rows = spec.rows;
    return work;
  }
  void Push(uint64_t teacher, uint64_t id, int64_t rows = kChunkRows) {
    queue_.Push(Taught(teacher, id, rows));
  }
  static uint64_t TeacherOf(const SliceWork& slice) {
    return slice.stream->spec().options.distillation.teacher;
  }
  // The microbatches of the chunk taken, whose teacher is on the device then.
  std::vector<uint64_t> Take() {
    std::vector<uint64_t> ids;
    for (const auto& work : queue_.TakeChunk(kChunkRows, ledger_)) {
      ids.push_back(work->stream->spec().microbatch_id);
      if (TeacherOf(*work) != 0) here_ = TeacherOf(*work);
    }
    return ids;
  }

  uint64_t here_ = 0;
  Ledger ledger_{1000, 100};
  WorkQueue queue_{kChunkRows, [this](const SliceWork& slice) {
                     if (TeacherOf(slice) == 0) return ValuesAre::kHome;
                     return TeacherOf(slice) == here_ ? ValuesAre::kHere : ValuesAre::kAway;
                   }};
};

TEST_F(PooledQueueTest, RowsOfATeacherThatIsThereComeFirst) {
  EXPECT_EQ(queue_.Values(), ValuesAre::kHome);
  Push(1, 11);
  Push(2, 21, 8);
  Push(1, 12);
  Push(2, 22, 8);
  EXPECT_EQ(queue_.Values(), ValuesAre::kAway);
  EXPECT_THAT(Take(), ElementsAre(11)) << "none is there";
  EXPECT_EQ(queue_.Values(), ValuesAre::kHere);
  EXPECT_THAT(Take(), ElementsAre(12));
  EXPECT_EQ(queue_.Values(), ValuesAre::kAway);
  EXPECT_THAT(Take(), ElementsAre(21, 22));
  EXPECT_TRUE(queue_.empty());
}

TEST_F(PooledQueueTest, RowsWithoutATeacherTakeTheirTurnInOrder) {
  here_ = 1;
  Push(2, 21);
  Push(0, 1);
  Push(1, 11);
  EXPECT_EQ(queue_.Values(), ValuesAre::kHome);
  EXPECT_THAT(Take(), ElementsAre(1)) << "it needs no copy";
  EXPECT_THAT(Take(), ElementsAre(11));
  EXPECT_THAT(Take(), ElementsAre(21));
}

TEST_F(PooledQueueTest, NoSlicePassesAnOperation) {
  here_ = 1;
  const auto nothing = [](head::Head&) { return absl::OkStatus(); };
  Operation operation{.run = nothing};
  Push(2, 21);
  queue_.Push(&operation);
  Push(1, 11);
  EXPECT_EQ(queue_.Values(), ValuesAre::kAway);
  EXPECT_THAT(Take(), ElementsAre(21));
  EXPECT_EQ(queue_.Values(), ValuesAre::kHome);
  EXPECT_THAT(Take(), IsEmpty());
  EXPECT_EQ(queue_.TakeOperation(), &operation);
  EXPECT_THAT(Take(), ElementsAre(11));
}

TEST_F(PooledQueueTest, ATeacherThatIsAwayWaitsForSoManyChunks) {
  here_ = 1;
  Push(2, 21);
  for (uint64_t id = 1; id <= 20; ++id) Push(1, id);
  for (uint64_t id = 1; id <= uint64_t{kMostPassedOver}; ++id) EXPECT_THAT(Take(), ElementsAre(id));
  EXPECT_THAT(Take(), ElementsAre(21));
  EXPECT_EQ(here_, 2u);
}

// Whatever comes and whoever is there: at most kMostPassedOver chunks of slices that came later, and that a
// queue in order would not have computed together with earlier ones, go before a slice; the slices of one
// teacher keep their order; and there are fewer copies than where slices wait in order.
TEST_F(PooledQueueTest, RandomSlicesAreBounded) {
  int64_t copies = 0, copies_in_order = 0;
  for (uint32_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](uint32_t n) { return random() % n; };
    struct Waiting {
      uint64_t id = 0;
      uint64_t teacher = 0;
      int passed_over = 0;
    };
    std::vector<Waiting> waiting;  // in order of arrival
    uint64_t next = 0, there_in_order = 0;
    WorkQueue in_order(kChunkRows);
    here_ = 0;
    for (int i = 0; i < 400; ++i) {
      if (waiting.size() < 12 && below(5) < 3) {
        const uint64_t teacher = below(4);
        const int64_t rows = 1 + below(kChunkRows);
        queue_.Push(Taught(teacher, ++next, rows));
        in_order.Push(Taught(teacher, next, rows));
        waiting.push_back({next, teacher});
        continue;
      }
      for (const auto& work : in_order.TakeChunk(kChunkRows, ledger_)) {
        if (TeacherOf(*work) == 0 || TeacherOf(*work) == there_in_order) continue;
        ++copies_in_order;
        there_in_order = TeacherOf(*work);
      }
      const uint64_t before = here_;
      const std::vector<uint64_t> taken = Take();
      ASSERT_EQ(taken.empty(), waiting.empty());
      if (taken.empty()) continue;
      const auto is_taken = [&](const Waiting& one) {
        return std::find(taken.begin(), taken.end(), one.id) != taken.end();
      };
      const auto last = std::find_if(waiting.rbegin(), waiting.rend(), is_taken);
      const uint64_t teacher = last->teacher;
      copies += teacher != 0 && teacher != before ? 1 : 0;
      bool skipped = false;
      for (Waiting& one : waiting) {
        if (one.teacher == teacher && skipped) {
          EXPECT_FALSE(is_taken(one)) << "it passed one of its teacher";
        }
        if (one.teacher == teacher && !is_taken(one)) skipped = true;
      }
      // Those before the first of the chunk have been passed over.
      for (Waiting& one : waiting) {
        if (is_taken(one)) break;
        ++one.passed_over;
        EXPECT_LE(one.passed_over, kMostPassedOver) << one.id;
      }
      std::erase_if(waiting, is_taken);
    }
    while (!Take().empty()) {
    }
  }
  EXPECT_LT(copies, copies_in_order);
}

TEST_F(WorkQueueTest, NeitherPeersOfOtherKindsWait) {
  for (uint64_t id = 1; id <= 4; ++id) PushOf("greedy", id, 16, /*accumulate=*/false);
  PushOf("trainer", 21, 8);
  EXPECT_THAT(Take(), ElementsAre(1));
  EXPECT_THAT(Take(), ElementsAre(21));
  EXPECT_THAT(Take(), ElementsAre(2));
}

TEST_F(WorkQueueTest, WhatAPeerDidBeforeDoesNotCount) {
  for (uint64_t id = 1; id <= 3; ++id) PushOf("once", id, 16);
  for (uint64_t id = 1; id <= 3; ++id) EXPECT_THAT(Take(), ElementsAre(id));
  PushOf("new", 21, 16);
  PushOf("new", 22, 16);
  PushOf("once", 4, 16);
  EXPECT_THAT(Take(), ElementsAre(21));
  EXPECT_THAT(Take(), ElementsAre(4));
  EXPECT_THAT(Take(), ElementsAre(22));
}

TEST_F(WorkQueueTest, WhatWasDroppedDoesNotCount) {
  for (uint64_t id = 1; id <= 3; ++id) PushOf("other", id, 16);
  for (uint64_t id = 21; id <= 23; ++id) {
    PushOf("breaks", id, 16);
    last_->Fail(absl::CancelledError("cut"));
  }
  EXPECT_EQ(queue_.TakeFailed().size(), 3u);
  PushOf("breaks", 24, 16);
  EXPECT_THAT(Take(), ElementsAre(1));
  EXPECT_THAT(Take(), ElementsAre(24));
}

TEST_F(WorkQueueTest, NoPeerPassesAnOperation) {
  const auto nothing = [](head::Head&) { return absl::OkStatus(); };
  Operation operation{.run = nothing};
  for (uint64_t id = 1; id <= 2; ++id) PushOf("greedy", id, 16);
  queue_.Push(&operation);
  PushOf("late", 21, 16);
  EXPECT_THAT(Take(), ElementsAre(1));
  EXPECT_THAT(Take(), ElementsAre(2));
  EXPECT_THAT(Take(), IsEmpty());
  EXPECT_EQ(queue_.TakeOperation(), &operation);
  EXPECT_THAT(Take(), ElementsAre(21));
}

TEST(ChunkPolicyTest, OnlyAnOpenChunkThatAccumulatesWaitsAndOnlyForOneThatIsComputing) {
  const NextChunk open{.rows = 6, .accumulates = true, .closed = false};
  EXPECT_TRUE(WaitsForRows(open, 1));
  EXPECT_TRUE(WaitsForRows(open, 2));
  EXPECT_FALSE(WaitsForRows(open, 0)) << "the device would idle";
  EXPECT_FALSE(WaitsForRows({.rows = 6, .accumulates = true, .closed = true}, 1));
  EXPECT_FALSE(WaitsForRows({.rows = 6, .accumulates = false, .closed = false}, 1));
}

// ---- Sample seed ----

// The same in every process, and in every version from now on.
TEST(SampleSeed, GoldenValues) {
  EXPECT_EQ(SampleSeed("", 0, 0), 0x5a103ecf0aced9f3u);
  EXPECT_EQ(SampleSeed("head", 0, 0), 0xc23ec26e590eac17u);
  EXPECT_EQ(SampleSeed("head", 1, 0), 0x228fbb2d4b1eb1fbu);
  EXPECT_EQ(SampleSeed("head", 0, 1), 0x5367f5d3b94e128u);
  EXPECT_EQ(SampleSeed("head", ~uint64_t{0}, ~uint64_t{0}), 0xccfc09a255cf1dd7u);
}

TEST(SampleSeed, EachMicrobatchHasItsOwn) {
  std::set<uint64_t> seeds;
  for (const char* head : {"", "a", "b", "ab", "lm_head"}) {
    for (uint64_t step = 0; step < 100; ++step) {
      for (uint64_t id = 0; id < 100; ++id) seeds.insert(SampleSeed(head, step, id));
    }
  }
  EXPECT_EQ(seeds.size(), 5u * 100 * 100);
}

// ---- Chunk reports ----
// What the engine tells of the chunks it has computed: how, and how their gradients turned out.

TEST_F(EngineTest, TellsWhenChunksAreComputedOtherwise) {
  struct Observer : SilentObserver {
    void OnChoices(const ChoicesReport& report) override {
      EXPECT_EQ(report.head, "head");
      seen.push_back(report.choices.front().choice);
    }
    std::vector<std::string> seen;  // read when no chunk is under way
  } observer;
  Start({}, {&observer});
  EXPECT_THAT(engine_->Describe("head")->choices,
              ElementsAre(kernels::Choice{.what = "head", .choice = "fake"}));
  EXPECT_THAT(engine_->Describe("head")->last_chunk_choices, IsEmpty());
  using kernels::Gradients;
  uint64_t id = 0;
  for (Gradients gradients : {Gradients::kAuto, Gradients::kAuto, Gradients::kExact, Gradients::kAuto}) {
    StreamSpec spec = Whole(++id, 2);
    spec.options.gradients = gradients;
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(spec, collector);
    Send(*stream, id, {0, 2});
    ASSERT_TRUE(collector->Wait().ok());
    EXPECT_EQ(engine_->Describe("head")->last_chunk_choices.front().choice, Name(gradients));
  }
  EXPECT_THAT(observer.seen, ElementsAre("auto", "exact", "auto"));
  engine_ = nullptr;  // before the observer
}

TEST_F(EngineTest, TellsHowTheGradientsOfChunksTurnedOut) {
  using kernels::Gradients;
  struct Observer : SilentObserver {
    void OnChunk(const ChunkReport& report) override { seen.push_back(report.gradients); }
    std::vector<Gradients> seen;  // read when no chunk is under way
  } observer;
  Start({}, {&observer});
  uint64_t id = 0;
  device_.on_chunk = [](const kernels::Chunk& chunk) { EXPECT_FALSE(chunk.independent); };
  for (const Gradients gradients : {Gradients::kSampled, Gradients::kExact}) {
    device_.decide = [gradients](const kernels::Chunk&) { return gradients; };
    StreamSpec spec = Whole(++id, 2);
    spec.options.gradients = Gradients::kAuto;
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(spec, collector);
    Send(*stream, id, {0, 2});
    ASSERT_TRUE(collector->Wait().ok());
  }
  EXPECT_THAT(observer.seen, ElementsAre(Gradients::kSampled, Gradients::kExact));
  engine_ = nullptr;  // before the observer
}

// ---- Schedules ----
// What comes next to the device, by arrival and in deterministic mode.

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
}  // namespace lossd::engine::schedule_test
