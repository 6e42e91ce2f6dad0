// SPDX-License-Identifier: Apache-2.0
#include "server/engine/work_queue.h"

#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/engine/stream_specs.h"

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
