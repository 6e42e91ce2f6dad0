// SPDX-License-Identifier: Apache-2.0
// Tests of flight.h: a chunk on its way through the backend; and, on the CPU backend, rows of weight 0 that
// may hold anything, and what is refused because it is not finite.
#include "server/engine/flight.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/clocks/clock.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/engine.h"
#include "tests/server/engine/engine_fixture.h"
#include "tests/server/engine/fake_backend.h"

namespace lossd::engine::flight_test {
namespace {

using kernels::Param;
using kernels::Role;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// ---- Flight ----

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
  EXPECT_EQ(a_.results->summary().sums.loss, 1000 + 1001 + 1002 + 1003);
  EXPECT_EQ(a_.results->summary().sums.z_loss, 4 * 0.25);
  EXPECT_EQ(a_.results->summary().sums.entropy, 4 * 0.5);
  EXPECT_EQ(a_.results->summary().sums.dropped_mass, 4 * 0.125);
  EXPECT_EQ(a_.results->summary().sums.correct_rows, 1) << "row 1, with target 1";
  EXPECT_EQ(b_.results->summary().sums.correct_rows, 0);
  EXPECT_EQ(a_.results->summary().accumulated_rows, 4);
  EXPECT_EQ(a_.results->summary().repeated_rows, 0);
  EXPECT_EQ(b_.results->summary().accumulated_rows, 2);
  EXPECT_EQ(b_.results->summary().repeated_rows, 2);
  EXPECT_EQ(Unsettled({0, 8}), 0);
  ASSERT_EQ(observer_.chunks.size(), 1u);
  EXPECT_EQ(observer_.chunks[0].rows, 6);
  EXPECT_EQ(observer_.chunks[0].sums.valid_rows, 6);
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
  EXPECT_TRUE(b_.results->Wait().ok()) << b_.results->Wait();
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

// ---- Rows that are not finite ----
// An engine on the CPU backend: rows of weight 0 may hold anything, directly, deferred and in deterministic
// mode; and what is refused because it is not finite leaves no bit behind.

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Mode {
  bool deterministic;
  bool deferred;
};

class FiniteRowsTest : public ::testing::TestWithParam<Mode> {
 protected:
  static constexpr int64_t kD = 12, kV = 60, kRows = 20;

  void SetUp() override {
    auto backend = kernels::CreateCpuBackend({.threads = 2, .workspace_bytes = 1 << 20});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < kV * kD; ++i) weight_.push_back(0.3f * normal(rng_));
    bias_.assign(kV, 0.0f);
    for (int64_t i = 0; i < kRows * kD; ++i) hidden_.push_back(normal(rng_));
    for (int64_t i = 0; i < kRows; ++i) {
      targets_.push_back(static_cast<int32_t>(rng_() % 40));
      weights_.push_back(i % 3 == 1 ? 0.0f : 1.5f);
    }
  }
  // A fresh engine whose head has the test's values.
  std::unique_ptr<Engine> Start() {
    const EngineOptions options{.slice_bytes = 8192,
                                .staging_bytes = 16384,
                                .retained_bytes = 1 << 16,
                                .deterministic = GetParam().deterministic};
    auto engine = Engine::Create(options, backend_.get(), 42, {});
    EXPECT_TRUE(engine.ok()) << engine.status();
    EXPECT_TRUE(
        (*engine)
            ->CreateHead("head", {.hidden_size = kD, .vocab_size = kV, .has_bias = true, .trainable = true})
            .ok());
    EXPECT_TRUE((*engine)->PublishHead("head").ok());
    const auto write = [&](head::Head& head) {
      absl::Status status;
      for (const auto& [param, values] : {std::pair{Param::kWeight, &weight_}, {Param::kBias, &bias_}}) {
        status.Update(head.kernels().WriteTensor(
            {param, Role::kValue}, 0, kV, kernels::DType::kFloat32,
            {reinterpret_cast<const uint8_t*>(values->data()), values->size() * sizeof(float)}));
      }
      return status;
    };
    EXPECT_TRUE((*engine)->OnDevice("head", write).ok());
    return *std::move(engine);
  }
  // The microbatch, forward and, in deferred mode, backward. Returns the status of the call that ends it.
  absl::Status Send(Engine& engine, uint64_t id, const std::vector<float>& hidden,
                    std::shared_ptr<RowCollector>& results) {
    StreamSpec spec = Spec(id, kRows, {0, kRows});
    spec.targets = targets_;
    spec.row_weights = weights_;
    spec.want_rows.entropy = spec.want_rows.lse = true;
    if (GetParam().deferred) {
      spec.reduction = Reduction::kNone;
      spec.retain = true;
      spec.want_grad_hidden = spec.accumulate_gradients = false;
    } else {
      spec.reduction = Reduction::kMean;
    }
    results = std::make_shared<RowCollector>();
    auto stream = engine.Open(spec, results);
    if (!stream.ok()) return stream.status();
    (*stream)->Start();
    EXPECT_TRUE(SendSlice(**stream, {0, kRows}, hidden));
    if (!results->Wait().ok() || !GetParam().deferred) return results->Wait();
    BackwardSpec backward;
    backward.head = "head";
    backward.step = 0;
    backward.microbatch_id = id;
    backward.rows = {0, kRows};
    backward.want_grad_hidden = backward.accumulate_gradients = true;
    backward.grad_loss.assign(kRows, 0.5f);
    backward.grad_entropy.assign(kRows, 0.25f);
    for (size_t i = 0; i < weights_.size(); ++i) {
      if (weights_[i] == 0.0f) backward.grad_entropy[i] = 0.0f;
    }
    losses_ = results->losses();
    results = std::make_shared<RowCollector>();
    auto gradients = engine.OpenBackward(backward, results);
    if (!gradients.ok()) return gradients.status();
    (*gradients)->Start();
    for (RowRange rows : (*gradients)->RetainedSlices()) {
      EXPECT_TRUE(SentSlice(**gradients, rows).Wait());
    }
    return results->Wait();
  }
  // The bits of the gradients of weight and bias.
  std::vector<uint32_t> GradientBits(Engine& engine) {
    std::vector<uint32_t> bits(static_cast<size_t>(kV * (kD + 1)));
    const auto read = [&](head::Head& head) {
      auto* const bytes = reinterpret_cast<uint8_t*>(bits.data());
      absl::Status status =
          head.kernels().ReadTensor({Param::kWeight, Role::kGradient}, 0, kV, kernels::DType::kFloat32,
                                    {bytes, static_cast<size_t>(kV * kD) * sizeof(float)});
      status.Update(
          head.kernels().ReadTensor({Param::kBias, Role::kGradient}, 0, kV, kernels::DType::kFloat32,
                                    {bytes + kV * kD * 4, static_cast<size_t>(kV) * sizeof(float)}));
      return status;
    };
    EXPECT_TRUE(engine.OnDevice("head", read).ok());
    return bits;
  }
  // The hidden states with rows of weight 0 that are not finite.
  std::vector<float> Poisoned() const {
    std::vector<float> hidden = hidden_;
    for (int64_t i = 0; i < kRows * kD; ++i) {
      if (weights_[static_cast<size_t>(i / kD)] == 0.0f) hidden[static_cast<size_t>(i)] = NAN;
    }
    return hidden;
  }

  std::mt19937_64 rng_{std::random_device{}()};
  std::unique_ptr<kernels::Backend> backend_;
  std::vector<float> weight_, bias_, hidden_, weights_;
  std::vector<int32_t> targets_;
  std::map<int64_t, float> losses_;  // of the forward pass of the last deferred microbatch
};

INSTANTIATE_TEST_SUITE_P(Modes, FiniteRowsTest,
                         ::testing::Values(Mode{false, false}, Mode{false, true}, Mode{true, false},
                                           Mode{true, true}));

TEST_P(FiniteRowsTest, RowsOfWeightZeroMayHoldAnything) {
  std::shared_ptr<RowCollector> want, got;
  const auto finite = Start();
  ASSERT_TRUE(Send(*finite, 0, hidden_, want).ok()) << want->Wait();
  const auto losses = GetParam().deferred ? losses_ : want->losses();
  const auto poisoned = Start();
  ASSERT_TRUE(Send(*poisoned, 0, Poisoned(), got).ok()) << got->Wait();
  EXPECT_EQ(GetParam().deferred ? losses_ : got->losses(), losses);
  EXPECT_EQ(got->grads(), want->grads());
  EXPECT_EQ(got->summary().normalizer, want->summary().normalizer);
  EXPECT_EQ(got->summary().sums.valid_rows, kRows) << "they count as valid, whatever they hold";
  EXPECT_EQ(got->summary().accumulated_rows, kRows);
  EXPECT_EQ(GradientBits(*poisoned), GradientBits(*finite));
  for (int64_t row = 0; row < kRows; ++row) {
    if (weights_[static_cast<size_t>(row)] != 0.0f) continue;
    EXPECT_EQ(got->grads()[row], std::vector<float>(kD, 0.0f)) << "row " << row;
    EXPECT_EQ(losses.at(row), 0.0f) << "row " << row;
  }
}

TEST_P(FiniteRowsTest, ZeroProbabilitiesTrain) {
  std::fill_n(bias_.begin() + 40, 10, -kInf);
  std::shared_ptr<RowCollector> results;
  const auto engine = Start();
  ASSERT_TRUE(Send(*engine, 0, hidden_, results).ok()) << results->Wait();
  for (const auto& [row, gradient] : results->grads()) {
    for (const float value : gradient) ASSERT_TRUE(std::isfinite(value)) << "row " << row;
  }
  for (const uint32_t bits : GradientBits(*engine)) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    ASSERT_TRUE(std::isfinite(value));
  }
}

// Neither a row whose loss is not finite nor one whose dx is not: the gradients keep their bits.
TEST_P(FiniteRowsTest, RefusedRowsLeaveNoBit) {
  for (int64_t row = 0; row < kRows; ++row) hidden_[static_cast<size_t>(row * kD)] = 1.0f;
  for (const bool by_gradient : {false, true}) {
    bias_.assign(kV, 0.0f);
    const auto engine = Start();
    std::shared_ptr<RowCollector> good, bad;
    ASSERT_TRUE(Send(*engine, 0, hidden_, good).ok()) << good->Wait();
    const auto before = GradientBits(*engine);
    if (by_gradient) {
      // Class 50 gets probability 0, and dx 0 times infinity.
      const float value = -kInf;
      const auto write = [&](head::Head& head) {
        std::vector<float> row(kD, 0.0f);
        row[0] = value;
        return head.kernels().WriteTensor({Param::kWeight, Role::kValue}, 50, 1, kernels::DType::kFloat32,
                                          {reinterpret_cast<const uint8_t*>(row.data()), kD * sizeof(float)});
      };
      ASSERT_TRUE(engine->OnDevice("head", write).ok());
    }
    std::vector<float> hidden = hidden_;
    if (!by_gradient) hidden[5 * kD + 1] = NAN;  // its weight is not 0
    const absl::Status status = Send(*engine, 1, hidden, bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(by_gradient ? "row 0" : "row 5"));
    EXPECT_EQ(GradientBits(*engine), before);
  }
}

}  // namespace
}  // namespace lossd::engine::flight_test
