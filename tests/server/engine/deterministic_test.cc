// SPDX-License-Identifier: Apache-2.0
// The engine in deterministic mode: order, waiting and repeats on a scripted device.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/engine/deterministic_fixture.h"
#include "tests/server/engine/silent_observer.h"

namespace lossd::engine::deterministic_test {
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
  EXPECT_EQ(second.results->summary().loss_sum, 4 + 5 + 6 + 7 + 8 + 9 + 10 + 11 + 12 + 13 + 14 + 15);
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
      dropped += report.dropped_mass;
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
  EXPECT_EQ(call.results->summary().dropped_mass, 5.0);
  EXPECT_EQ(observer.dropped, 5.0);
  call.stream.reset();
  engine_ = nullptr;  // before the observer
}

}  // namespace
}  // namespace lossd::engine::deterministic_test
