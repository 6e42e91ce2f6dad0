// SPDX-License-Identifier: Apache-2.0
#include "server/engine/flight.h"

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/clocks/clock.h"
#include "tests/server/engine/session_fixture.h"
#include "tests/server/engine/silent_observer.h"

namespace lossd::engine::flight_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// Two streams, one with rows [0, 4) of a microbatch and one with [2, 6), and a chunk with all rows [0, 8), of
// which nothing was sent for the last two.
class FlightTest : public SessionTest {
 protected:
  struct TestChunk final : ChunkWork {
    explicit TestChunk(std::vector<std::string>* calls) : events(calls) {}
    void Prepare() override { events->push_back("prepare"); }
    void OnResults(bool all_good) override { events->push_back(all_good ? "good results" : "bad results"); }
    void OnLeft() override { events->push_back("left"); }
    bool Affects(const StreamState& stream) const override { return stream.spec().microbatch_id == 2; }
    std::vector<std::string>* events;
  };
  struct Observer final : SilentObserver {
    void OnChunk(const ChunkReport& report) override { chunks.push_back(report); }
    void OnChunkLeft(const ChunkReport&) override { ++left; }
    void OnDeviceError(const absl::Status& status) override { ++errors; }
    std::vector<ChunkReport> chunks;
    int left = 0;
    int errors = 0;
  };

  void Prepare() {
    device_.dropped_mass = 0.125;
    Start({}, {&observer_});
    for (int64_t row = 0; row < 6; ++row) hidden_[static_cast<size_t>(row * kHidden)] = RowName(1, row);
    a_ = Open(Spec(1, 8, {0, 4}));
    b_ = Open(Spec(1, 8, {2, 6}));
    other_ = Open(Spec(2, 1, {0, 1}));
    rest_ = Open(Spec(1, 8, {6, 8}));
  }
  std::unique_ptr<SliceWork> MakeSlice(const Call& call, RowRange rows) {
    auto slice = std::make_unique<SliceWork>();
    slice->stream = call.state;
    slice->rows = rows;
    slice->index = static_cast<size_t>(rows.begin);
    slice->queued = clocks::SteadyNow();
    slice->buffer = context_->staging->Acquire(64, [](StagingBuffer) {}).buffer;
    absl::MutexLock lock(&context_->mutex);
    EXPECT_TRUE(call.state->AddSlice(rows, rows.size() * kRowBytes).ok());
    call.state->OnQueued();
    return slice;
  }
  Segment MakeSegment(const Call& call, RowRange rows, std::vector<SliceWork*> slices) {
    Segment segment{.microbatch_id = 1,
                    .rows = rows,
                    .index = static_cast<size_t>(rows.begin),
                    .slices = std::move(slices),
                    .wants = {.loss = true}};
    segment.input =
        InputOf(*call.state, rows, reinterpret_cast<uint8_t*>(hidden_.data()) + rows.begin * kRowBytes);
    return segment;
  }
  void Fly(bool settles_with_results = false) {
    auto chunk = std::make_unique<TestChunk>(&events_);
    chunk->slices.push_back(MakeSlice(a_, {0, 4}));
    chunk->slices.push_back(MakeSlice(b_, {2, 6}));
    SliceWork* const a = chunk->slices[0].get();
    SliceWork* const b = chunk->slices[1].get();
    chunk->segments = {MakeSegment(a_, {0, 2}, {a}), MakeSegment(a_, {2, 4}, {a, b}),
                       MakeSegment(b_, {4, 6}, {b}), MakeSegment(rest_, {6, 8}, {})};
    chunk->rows = 8;
    chunk->hidden_dtype = kernels::DType::kFloat32;
    chunk->options.gradients = kernels::Gradients::kFiltered;
    chunk->accumulates = true;
    chunk->settles_with_results = settles_with_results;
    {
      absl::MutexLock lock(&context_->mutex);
      std::vector<uint8_t> mask(8);
      session_->step().ledger().Reserve(1, {0, 8}, absl::MakeSpan(mask));
    }
    std::make_shared<Flight>(session_, std::move(chunk))->Launch();
  }
  int64_t Unsettled(RowRange rows) {
    absl::MutexLock lock(&context_->mutex);
    return session_->step().ledger().CountUnsettled(1, rows);
  }

  Observer observer_;
  std::vector<float> hidden_ = std::vector<float>(8 * kHidden);
  std::vector<std::string> events_;
  Call a_, b_, other_, rest_;
};

TEST_F(FlightTest, DeliversAndBooksWhatSlicesShare) {
  Prepare();
  Fly();
  EXPECT_THAT(events_, ElementsAre("prepare", "good results", "left"));
  ASSERT_TRUE(a_.results->Wait().ok()) << a_.results->Wait();
  ASSERT_TRUE(b_.results->Wait().ok()) << b_.results->Wait();
  EXPECT_EQ(a_.results->losses().at(3), RowName(1, 3));
  EXPECT_EQ(b_.results->losses().at(3), RowName(1, 3));
  EXPECT_EQ(b_.results->losses().at(5), RowName(1, 5));
  EXPECT_EQ(a_.results->summary().loss_sum, 1000 + 1001 + 1002 + 1003);
  EXPECT_EQ(a_.results->summary().z_loss_sum, 4 * 0.25);
  EXPECT_EQ(a_.results->summary().entropy_sum, 4 * 0.5);
  EXPECT_EQ(a_.results->summary().dropped_mass, 4 * 0.125);
  EXPECT_EQ(a_.results->summary().correct_rows, 1) << "row 1, with target 1";
  EXPECT_EQ(b_.results->summary().correct_rows, 0);
  EXPECT_EQ(a_.results->summary().accumulated_rows, 4);
  EXPECT_EQ(a_.results->summary().repeated_rows, 0);
  EXPECT_EQ(b_.results->summary().accumulated_rows, 2);
  EXPECT_EQ(b_.results->summary().repeated_rows, 2);
  EXPECT_EQ(Unsettled({0, 8}), 0);
  ASSERT_EQ(observer_.chunks.size(), 1u);
  EXPECT_EQ(observer_.chunks[0].rows, 6);
  EXPECT_EQ(observer_.chunks[0].valid_rows, 6);
  EXPECT_EQ(observer_.chunks[0].queue_seconds.size(), 2u);
  EXPECT_EQ(observer_.chunks[0].slices.size(), 2u);
  EXPECT_GE(observer_.chunks[0].device_seconds, observer_.chunks[0].compute_seconds);
  EXPECT_EQ(Snapshot().total_rows, 8) << "rows of slices";
}

TEST_F(FlightTest, ABadRowFailsTheSlicesThatHoldItAndReleasesTheirRows) {
  Prepare();
  hidden_[5 * kHidden] = NAN;  // a row of b alone
  Fly();
  EXPECT_THAT(events_, ElementsAre("prepare", "bad results", "left"));
  EXPECT_TRUE(a_.results->Wait().ok()) << a_.results->Wait();
  EXPECT_EQ(b_.results->Wait().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(b_.results->Wait().message()), HasSubstr("row 5"));
  EXPECT_EQ(Unsettled({0, 4}), 0);
  EXPECT_EQ(Unsettled({4, 6}), 2);
  EXPECT_FALSE(other_.results->finished());
}

TEST_F(FlightTest, AChunkWithoutResultsLeavesNothing) {
  device_.fail_results = [](int64_t) { return absl::InternalError("boom"); };
  Prepare();
  Fly();
  EXPECT_THAT(events_, ElementsAre("prepare", "bad results", "left"));
  for (const Call* call : {&a_, &b_}) {
    EXPECT_EQ(call->results->Wait().code(), absl::StatusCode::kInternal);
    EXPECT_TRUE(call->results->slices().empty());
  }
  EXPECT_EQ(Unsettled({0, 8}), 8);
  EXPECT_EQ(observer_.errors, 1);
  absl::MutexLock lock(&context_->mutex);
  EXPECT_TRUE(session_->step().CheckValid().ok()) << "nothing was accumulated";
}

TEST_F(FlightTest, AFailureWhileAccumulatingEndsAllThatDependsOnIt) {
  device_.fail_done = [](int64_t) { return absl::InternalError("boom"); };
  Prepare();
  Fly();
  for (const Call* call : {&a_, &b_, &other_}) {
    EXPECT_EQ(call->results->Wait().code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(call->results->Wait().message()), HasSubstr("not to be trusted"));
  }
  EXPECT_FALSE(rest_.results->finished()) << "the chunk does not affect it";
  EXPECT_EQ(Unsettled({0, 8}), 8);
  EXPECT_EQ(observer_.errors, 1);
  absl::MutexLock lock(&context_->mutex);
  EXPECT_EQ(session_->step().CheckValid().code(), absl::StatusCode::kInternal);
}

TEST_F(FlightTest, RowsThatAreSettledWithTheResultsDoNotWaitForTheGradient) {
  Prepare();
  absl::Status ended = absl::UnknownError("it has not");
  int64_t unsettled = -1;
  device_.fail_done = [&](int64_t) {  // between results and end
    ended = a_.results->Wait();
    unsettled = Unsettled({0, 6});
    EXPECT_EQ(observer_.chunks.size(), 1u);
    EXPECT_EQ(observer_.left, 0);
    return absl::OkStatus();
  };
  Fly(/*settles_with_results=*/true);
  EXPECT_TRUE(ended.ok()) << ended;
  EXPECT_EQ(unsettled, 0);
  EXPECT_THAT(events_, ElementsAre("prepare", "good results", "left"));
  EXPECT_EQ(a_.results->summary().accumulated_rows, 4);
  EXPECT_EQ(b_.results->summary().accumulated_rows, 2) << "they are settled once";
  EXPECT_EQ(b_.results->summary().repeated_rows, 2);
  EXPECT_EQ(observer_.chunks.size(), 1u);
  EXPECT_EQ(observer_.left, 1);
  EXPECT_EQ(Snapshot().total_rows, 8);
}

TEST_F(FlightTest, AFailureAfterRowsWereSettledLeavesNoStepThatCouldBeApplied) {
  device_.fail_done = [](int64_t) { return absl::InternalError("boom"); };
  Prepare();
  Fly(/*settles_with_results=*/true);
  EXPECT_TRUE(a_.results->Wait().ok()) << a_.results->Wait();
  EXPECT_EQ(other_.results->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(observer_.errors, 1);
  absl::MutexLock lock(&context_->mutex);
  EXPECT_EQ(session_->step().CheckValid().code(), absl::StatusCode::kInternal);
}

TEST_F(FlightTest, AChunkWithoutResultsIsNotSettledWithThem) {
  device_.fail_results = [](int64_t) { return absl::InternalError("boom"); };
  Prepare();
  Fly(/*settles_with_results=*/true);
  EXPECT_EQ(a_.results->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Unsettled({0, 8}), 8);
}

// Of several devices that share a chunk some failed and others accumulated their part.
TEST_F(FlightTest, AChunkWithoutResultsMayHaveAccumulatedAllTheSame) {
  device_.fail_results = [](int64_t) { return absl::InternalError("boom"); };
  device_.fail_done = [](int64_t) { return absl::DataLossError("half of it is in"); };
  Prepare();
  Fly();
  for (const Call* call : {&a_, &b_, &other_}) {
    EXPECT_EQ(call->results->Wait().code(), absl::StatusCode::kInternal);
  }
  EXPECT_THAT(std::string(other_.results->Wait().message()), HasSubstr("not to be trusted"));
  EXPECT_EQ(Unsettled({0, 8}), 8);
  absl::MutexLock lock(&context_->mutex);
  EXPECT_EQ(session_->step().CheckValid().code(), absl::StatusCode::kInternal);
}

// The backend has found out too late that a row is not finite: nobody is told that nothing was accumulated.
TEST_F(FlightTest, AChunkThatHasLostGradientsSaysSo) {
  device_.fail_results = [](int64_t) { return absl::DataLossError("not finite"); };
  Prepare();
  Fly();
  EXPECT_EQ(a_.results->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(a_.results->Wait().message()),
              AllOf(HasSubstr("the gradients of the step are lost"), HasSubstr("not finite"),
                    Not(HasSubstr("nothing of this slice was accumulated"))));
  EXPECT_EQ(Unsettled({0, 8}), 8);
  absl::MutexLock lock(&context_->mutex);
  EXPECT_EQ(session_->step().CheckValid().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace lossd::engine::flight_test
