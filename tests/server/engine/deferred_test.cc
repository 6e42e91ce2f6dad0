// SPDX-License-Identifier: Apache-2.0
// Microbatches whose rows the engine keeps until their gradients come.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/clocks/clock.h"
#include "server/engine/engine.h"
#include "server/engine/stream_state.h"
#include "tests/server/engine/engine_fixture.h"

namespace lossd::engine::deferred_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using ::testing::UnorderedElementsAreArray;

class DeferredTest : public EngineTest {
 protected:
  // A forward pass whose rows are kept.
  static StreamSpec Retaining(uint64_t id, int64_t rows, RowRange range) {
    StreamSpec spec = Spec(id, rows, range);
    spec.reduction = Reduction::kNone;
    spec.retain = true;
    spec.want_grad_hidden = false;
    spec.accumulate_gradients = false;
    return spec;
  }
  void ForwardRetained(uint64_t id, int64_t rows, RowRange range) {
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(Retaining(id, rows, range), collector);
    ASSERT_NE(stream, nullptr);
    for (int64_t row = range.begin; row < range.end; row += 10) {
      Send(*stream, id, {row, std::min(range.end, row + 10)});
    }
    ASSERT_TRUE(collector->Wait().ok()) << collector->Wait();
  }
  static BackwardSpec Backward(uint64_t id, RowRange rows) {
    BackwardSpec spec;
    spec.head = "head";
    spec.step = 0;
    spec.microbatch_id = id;
    spec.rows = rows;
    spec.want_grad_hidden = true;
    spec.accumulate_gradients = true;
    spec.grad_loss.assign(static_cast<size_t>(rows.size()), 1.0f);
    return spec;
  }
  void RunBackward(const BackwardSpec& spec, const std::shared_ptr<RowCollector>& collector) {
    auto stream = engine_->OpenBackward(spec, collector);
    ASSERT_TRUE(stream.ok()) << stream.status();
    (*stream)->Start();
    for (RowRange rows : (*stream)->RetainedSlices()) EXPECT_TRUE(SentSlice(**stream, rows).Wait());
    ASSERT_TRUE(collector->Wait().ok());
  }
};

TEST_F(DeferredTest, RetainedRowsComeBackWithTheirOwnGradients) {
  Start({.retained_bytes = 4096});
  ForwardRetained(1, 12, {0, 5});
  ForwardRetained(1, 12, {5, 12});
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 1);
  EXPECT_THAT(device_.accumulated(), IsEmpty());

  BackwardSpec spec = Backward(1, {2, 9});
  for (size_t i = 0; i < 7; ++i) spec.grad_loss[i] = static_cast<float>(i);
  auto collector = std::make_shared<RowCollector>();
  RunBackward(spec, collector);
  ASSERT_TRUE(collector->Wait().ok()) << collector->Wait();
  EXPECT_EQ(collector->summary().accumulated_rows, 7);
  ASSERT_EQ(collector->grads().size(), 7u);
  EXPECT_THAT(collector->slices(), UnorderedElementsAre(RowRange{2, 5}, RowRange{5, 9}));
  for (int64_t i = 0; i < 7; ++i)
    EXPECT_EQ(collector->grads()[2 + i][0], static_cast<float>(i) * RowName(1, 2 + i));
  EXPECT_THAT(device_.accumulated(), UnorderedElementsAreArray(Names(1, {2, 9})));

  auto again = std::make_shared<RowCollector>();  // a repeat computes, but accumulates nothing
  RunBackward(spec, again);
  ASSERT_TRUE(again->Wait().ok());
  EXPECT_EQ(again->summary().repeated_rows, 7);
}

TEST_F(DeferredTest, OtherGradientsUnderTheSameIdAreRefused) {
  Start({.retained_bytes = 4096});
  ForwardRetained(1, 4, {0, 4});
  BackwardSpec spec = Backward(1, {0, 4});
  spec.grad_lse = {0.0f, 0.5f, -1.0f, 0.0f};
  spec.grad_entropy = {1.0f, 0.0f, 2.0f, 0.0f};
  RunBackward(spec, std::make_shared<RowCollector>());
  const auto expect_refused = [&](auto change) {
    BackwardSpec other = spec;
    change(other);
    const absl::Status status = engine_->OpenBackward(other, std::make_shared<RowCollector>()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("row 2"));
  };
  expect_refused([](BackwardSpec& s) { s.grad_loss[2] = 5.0f; });
  expect_refused([](BackwardSpec& s) { s.grad_lse[2] = -2.0f; });
  expect_refused([](BackwardSpec& s) { s.grad_entropy[2] = 0.0f; });
  auto again = std::make_shared<RowCollector>();
  RunBackward(spec, again);
  EXPECT_EQ(again->summary().repeated_rows, 4);
}

TEST_F(DeferredTest, NoRowsLeaveNothingBehind) {
  Start({.retained_bytes = 1024});
  ForwardRetained(1, 0, {0, 0});
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 0);
}

TEST_F(DeferredTest, RetainedRowsAreBoundedReleasedAndExpired) {
  Start({.retained_bytes = 1024});  // 85 rows of 12 bytes, in blocks of 256
  ForwardRetained(1, 40, {0, 40});
  ForwardRetained(2, 40, {0, 40});
  EXPECT_EQ(engine_->stats().retained_bytes_used, 1024);
  StreamSpec third = Retaining(3, 1, {0, 1});
  const absl::Status full = engine_->Open(third, std::make_shared<RowCollector>()).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("needs 12 bytes; 1024 bytes of 1024 bytes are in use"));

  EXPECT_EQ(engine_->OpenBackward(Backward(9, {0, 1}), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->OpenBackward(Backward(1, {39, 41}), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(engine_->Release("head", 1)->released);
  EXPECT_FALSE(engine_->Release("head", 1)->released);
  EXPECT_EQ(engine_->Release("missing", 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 512);
  EXPECT_EQ(engine_->OpenBackward(Backward(1, {0, 1}), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->ExpireRetained(clocks::SteadyNow() - absl::Hours(1)), 0);
  EXPECT_EQ(engine_->ExpireRetained(clocks::SteadyNow() + absl::Hours(1)), 1);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 0);
}

TEST_F(DeferredTest, RetainedRowsEndWithTheirStep) {
  Start({.retained_bytes = 1024});
  ForwardRetained(1, 4, {0, 4});
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  BackwardSpec spec = Backward(1, {0, 4});
  EXPECT_EQ(engine_->OpenBackward(spec, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  spec.step = 1;
  EXPECT_EQ(engine_->OpenBackward(spec, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 0);
}

// Its losses would come from two different weights, and its rows be kept for the wrong step.
TEST_F(DeferredTest, AForwardThatRetainsEndsWithItsStep) {
  Start({.retained_bytes = 1024});
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Retaining(1, 4, {0, 4}), collector);
  Send(*stream, 1, {0, 2});
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  Send(*stream, 1, {2, 4});
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kAborted) << collector->Wait();
  stream.reset();
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 0);
}

TEST_F(DeferredTest, ABackwardEndsWithItsStepEvenIfItDoesNotAccumulate) {
  Start({.retained_bytes = 1024});
  ForwardRetained(1, 4, {0, 4});
  BackwardSpec spec = Backward(1, {0, 4});
  spec.accumulate_gradients = false;
  auto collector = std::make_shared<RowCollector>();
  auto stream = engine_->OpenBackward(spec, collector);
  ASSERT_TRUE(stream.ok()) << stream.status();
  (*stream)->Start();
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kAborted) << collector->Wait();
}

TEST_F(DeferredTest, AFailedForwardRetainsNothing) {
  Start({.retained_bytes = 1024});
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Retaining(1, 4, {0, 4}), collector);
  Send(*stream, 1, {0, 2});
  stream->Cancel(absl::CancelledError("cut"));
  EXPECT_FALSE(collector->Wait().ok());
  stream.reset();
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 0);
  ForwardRetained(1, 4, {0, 4});
  ForwardRetained(1, 4, {0, 4});  // a repeat replaces
  EXPECT_EQ(engine_->Open(Retaining(1, 4, {1, 4}), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kAlreadyExists);
}

TEST_F(DeferredTest, BadBackwardsAreRefused) {
  Start({.retained_bytes = 1024});
  ForwardRetained(1, 4, {0, 4});
  const auto expect = [&](const char* text, auto change) {
    BackwardSpec spec = Backward(1, {0, 4});
    change(spec);
    const absl::Status status = engine_->OpenBackward(spec, std::make_shared<RowCollector>()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  expect("rows", [](BackwardSpec& s) { s.rows = {2, 2}; });
  expect("rows", [](BackwardSpec& s) { s.rows = {-1, 2}; });
  expect("step", [](BackwardSpec& s) { s.step.reset(); });
  expect("grad_loss", [](BackwardSpec& s) { s.grad_loss.clear(); });
  expect("grad_loss[1]", [](BackwardSpec& s) { s.grad_loss[1] = NAN; });
  expect("grad_lse", [](BackwardSpec& s) { s.grad_lse = {1.0f}; });
  expect("grad_entropy[3]", [](BackwardSpec& s) { s.grad_entropy = {0, 0, 0, INFINITY}; });
  StreamSpec spec = Retaining(2, 4, {0, 4});
  spec.want_grad_hidden = true;
  EXPECT_EQ(engine_->Open(spec, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kInvalidArgument);
  spec = Whole(2, 4);
  spec.retain = true;
  EXPECT_EQ(engine_->Open(spec, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(DeferredTest, ABackwardOfNoRowsIsRefused) {
  Start({.retained_bytes = 4096});
  ForwardRetained(1, 4, {0, 4});
  for (const RowRange rows : {RowRange{2, 2}, RowRange{3, 2}, RowRange{-1, 2}}) {
    BackwardSpec spec = Backward(1, {0, 4});
    spec.rows = rows;
    spec.grad_loss.assign(static_cast<size_t>(std::max<int64_t>(0, rows.size())), 1.0f);
    const absl::Status status = engine_->OpenBackward(spec, std::make_shared<RowCollector>()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("backward.rows must be a non-empty range"));
  }
}

// A slice that comes when its stream has ended asks, without a lock, what kind of stream it was.
TEST(StreamRowsTest, StaysABackwardWhenItsValuesAreGone) {
  const RowRange rows{0, 2};
  auto created = StreamRows::Create(Spec(1, 2, rows), {.hidden_size = 4, .vocab_size = 3}, HeadState(), {});
  ASSERT_TRUE(created.ok()) << created.status();
  EXPECT_FALSE(created->is_backward());
  created->SetRetained({}, {.loss = {1.0f, 1.0f}});
  EXPECT_TRUE(created->is_backward());
  (void)created->TakeValues();
  EXPECT_TRUE(created->is_backward());
}

// As row memory and streams: who has something may have its share, and who has nothing what is free.
TEST_F(DeferredTest, RetainedMemoryIsSharedByPeer) {
  Start({.peer_share = 0.5, .retained_bytes = 2048});
  const auto open = [&](const std::string& peer, uint64_t id) {
    StreamSpec spec = Retaining(id, 40, {0, 40});  // 512 bytes
    spec.peer = peer;
    return engine_->Open(spec, std::make_shared<RowCollector>());
  };
  const auto a1 = open("a", 1);
  const auto a2 = open("a", 2);
  ASSERT_TRUE(a1.ok() && a2.ok());
  const absl::Status third = open("a", 3).status();
  EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(third.message()), HasSubstr("peer a has 1024 bytes of 2048 bytes"));
  EXPECT_THAT(std::string(third.message()), HasSubstr("--peer_share"));
  EXPECT_TRUE(open("b", 4).ok());
}

TEST_F(DeferredTest, OnlyTheirOwnersReleaseMicrobatches) {
  Start({.retained_bytes = 4096});
  const auto retain = [&](uint64_t id, const std::string& identity, const std::string& run) {
    StreamSpec spec = Retaining(id, 4, {0, 4});
    spec.identity = identity;
    spec.run = run;
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(spec, collector);
    Send(*stream, id, {0, 4});
    ASSERT_TRUE(collector->Wait().ok()) << collector->Wait();
  };
  retain(1, "token:a", "run-a");
  const absl::Status other = engine_->Release("head", 1, {.identity = "token:b", .run = "run-a"}).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(other.message()), HasSubstr("microbatch_id is retained by token:a"));
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 1);
  EXPECT_TRUE(engine_->Release("head", 1, {.identity = "token:a", .run = "another run of it"})->released);
  retain(1, "token:a", "run-a");
  EXPECT_TRUE(engine_->Release("head", 1, {.identity = "token:ops", .may_all = true})->released);
  EXPECT_FALSE(engine_->Release("head", 1, {.identity = "token:b"})->released) << "there is nothing";

  // A server that does not ask knows runs alone.
  retain(2, "", "run-a");
  EXPECT_EQ(engine_->Release("head", 2, {.run = "run-b"}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(engine_->Release("head", 2, {.run = "run-a"})->released);
  retain(2, "", "run-a");
  EXPECT_TRUE(engine_->Release("head", 2)->released) << "an older client says no run";
}

// The rows would be exchanged under their owner.
TEST_F(DeferredTest, NobodyElseRetainsTheSameRows) {
  Start({.retained_bytes = 4096});
  StreamSpec spec = Retaining(1, 4, {0, 4});
  spec.identity = "token:a";
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(spec, collector);
  Send(*stream, 1, {0, 4});
  ASSERT_TRUE(collector->Wait().ok());
  spec.identity = "token:b";
  EXPECT_EQ(engine_->Open(spec, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kPermissionDenied);
  spec.identity = "token:a";
  EXPECT_TRUE(engine_->Open(spec, std::make_shared<RowCollector>()).ok());
}

}  // namespace
}  // namespace lossd::engine::deferred_test
