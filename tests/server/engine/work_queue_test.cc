#include "server/engine/work_queue.h"

#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/engine/stream_specs.h"

namespace lossd::engine {
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
    work->stream = *std::move(stream);
    work->rows = spec.rows;
    queue_.Push(std::move(work));
  }
  void Push(uint64_t id, int64_t rows) { Push(Spec(id, rows, {0, rows})); }
  // The microbatches of the chunk taken.
  std::vector<uint64_t> Take() {
    std::vector<uint64_t> ids;
    for (const auto& work : queue_.TakeChunk(kChunkRows, ledger_))
      ids.push_back(work->stream->spec().microbatch_id);
    return ids;
  }
  NextChunk Next() const { return queue_.Next(kChunkRows); }

  Ledger ledger_{1000, 100};
  WorkQueue queue_;
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

TEST(ChunkPolicyTest, OnlyAnOpenChunkThatAccumulatesWaitsAndOnlyForOneThatIsComputing) {
  const NextChunk open{.rows = 6, .accumulates = true, .closed = false};
  EXPECT_TRUE(WaitsForRows(open, 1));
  EXPECT_TRUE(WaitsForRows(open, 2));
  EXPECT_FALSE(WaitsForRows(open, 0)) << "the device would idle";
  EXPECT_FALSE(WaitsForRows({.rows = 6, .accumulates = true, .closed = true}, 1));
  EXPECT_FALSE(WaitsForRows({.rows = 6, .accumulates = false, .closed = false}, 1));
}

}  // namespace
}  // namespace lossd::engine
