// SPDX-License-Identifier: Apache-2.0
// Tests of the engine in deterministic mode (deterministic_schedule.h).
#include <algorithm>
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
#include "server/engine/deterministic_schedule.h"
#include "server/engine/engine.h"
#include "tests/server/engine/deterministic_fixture.h"
#include "tests/server/engine/row_collector.h"
#include "tests/server/engine/sent_slice.h"
#include "tests/server/engine/silent_observer.h"

// ---- Order ----
// Order, waiting and repeats, on a scripted device.

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

// ---- Decisions about sampling ----
// On the CPU backend with gradients `auto`: what a group has decided holds for its
// repeats.

namespace lossd::engine::deterministic_decisions_test {
namespace {

using kernels::Gradients;

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

}  // namespace
}  // namespace lossd::engine::deterministic_decisions_test

// ---- Deferred microbatches ----
// On a scripted device.

namespace lossd::engine::deterministic_deferred_test {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

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

}  // namespace
}  // namespace lossd::engine::deterministic_deferred_test

// ---- Decisions of groups ----

namespace lossd::engine::group_decisions_test {
namespace {

using kernels::Gradients;

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
}  // namespace lossd::engine::group_decisions_test
