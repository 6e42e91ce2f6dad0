// SPDX-License-Identifier: Apache-2.0
// Tests of work_queue.h: the queue and its policy for chunks, the seeds of sampled gradients, and what the
// engine reports of chunks.
#include "server/engine/work_queue.h"

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/engine/engine_fixture.h"
#include "tests/server/engine/silent_observer.h"
#include "tests/server/engine/stream_specs.h"

// ---- Work queue ----

namespace lossd::engine::work_queue_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

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

}  // namespace
}  // namespace lossd::engine::work_queue_test

// ---- Sample seed ----

namespace lossd::engine::sample_seed_test {
namespace {

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

}  // namespace
}  // namespace lossd::engine::sample_seed_test

// ---- Chunk reports ----
// What the engine tells of the chunks it has computed: how, and how their gradients turned out.

namespace lossd::engine::chunk_reports_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

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

}  // namespace
}  // namespace lossd::engine::chunk_reports_test
