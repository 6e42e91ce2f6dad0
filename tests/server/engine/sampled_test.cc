// SPDX-License-Identifier: Apache-2.0
// Sampled gradients in the engine: every row is given the random numbers of its place in its microbatch,
// however it comes to the device; and the sums of the predicted error reach the summary, the observers and
// the head's description.
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/work_queue.h"
#include "tests/server/engine/deterministic_fixture.h"
#include "tests/server/engine/engine_fixture.h"
#include "tests/server/engine/silent_observer.h"

namespace lossd::engine::sampled_test {
namespace {

using kernels::Gradients;

// Seed and row number of every row that is computed, by its name.
class Numbers {
 public:
  void Note(const kernels::Chunk& chunk) {
    for (const kernels::Slice& slice : chunk.slices) {
      const auto* hidden = static_cast<const float*>(slice.hidden);
      if (hidden == nullptr) {
        hidden = reinterpret_cast<const float*>(static_cast<FakeRetained*>(chunk.retained)->data() +
                                                slice.retained_offset);
      }
      for (int64_t i = 0; i < slice.rows; ++i) {
        if (hidden[3 * i] == 0.0f) continue;  // a row of zeros in place of one that was not sent again
        seen_[hidden[3 * i]].insert({slice.sample_seed, slice.first_row + i});
      }
    }
  }
  // All rows of the microbatch were computed, with these numbers and no others.
  void Expect(uint64_t id, RowRange rows, uint64_t step) {
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (RowName(id, row) == 0.0f) continue;
      const std::set<std::pair<uint64_t, int64_t>> want = {{SampleSeed("head", step, id), row}};
      EXPECT_EQ(seen_[RowName(id, row)], want) << "microbatch " << id << " row " << row;
    }
  }
  void Forget() { seen_.clear(); }

 private:
  std::map<float, std::set<std::pair<uint64_t, int64_t>>> seen_;  // read when no chunk is under way
};

struct Observer : SilentObserver {
  void OnChunk(const ChunkReport& report) override {
    variance += report.sampling_variance;
    square += report.squared_gradient;
    if (report.gradients == Gradients::kSampled) error = report.gradient_error();
  }
  double variance = 0.0, square = 0.0, error = 0.0;  // read when no chunk is under way
};

class SampledTest : public EngineTest {};

TEST_F(SampledTest, RowsHaveTheNumbersOfTheirPlace) {
  Numbers numbers;
  device_.on_chunk = [&](const kernels::Chunk& chunk) { numbers.Note(chunk); };
  Start();
  for (uint64_t step : {0, 1}) {
    numbers.Forget();
    for (int repeat = 0; repeat < 2; ++repeat) {  // a repeat is cut in another way
      auto first = std::make_shared<RowCollector>(), second = std::make_shared<RowCollector>();
      auto one = Open(Spec(7, 20, {0, 12}, step), first);
      auto other = Open(Spec(7, 20, {12, 20}, step), second);
      Send(*other, 7, {15, 20});
      for (int64_t row = 0; row < 12; row += 4 - repeat)
        Send(*one, 7, {row, std::min<int64_t>(12, row + 4 - repeat)});
      Send(*other, 7, {12, 15});
      ASSERT_TRUE(first->Wait().ok()) << first->Wait();
      ASSERT_TRUE(second->Wait().ok()) << second->Wait();
    }
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(Spec(8, 5, {0, 5}, step), collector);
    Send(*stream, 8, {0, 5});
    ASSERT_TRUE(collector->Wait().ok());
    numbers.Expect(7, {0, 20}, step);
    numbers.Expect(8, {0, 5}, step);
    ASSERT_TRUE(
        engine_
            ->ApplyStep("head", {.step = step, .optimizer = {.kind = kernels::OptimizerOptions::Kind::kSgd}})
            .ok());
  }
}

TEST_F(SampledTest, BackwardHasTheNumbersOfADirectComputation) {
  Numbers numbers;
  device_.on_chunk = [&](const kernels::Chunk& chunk) { numbers.Note(chunk); };
  Start({.retained_bytes = 4096});
  auto collector = std::make_shared<RowCollector>();
  StreamSpec spec = Spec(3, 12, {0, 12});
  spec.reduction = Reduction::kNone;
  spec.retain = true;
  spec.want_grad_hidden = spec.accumulate_gradients = false;
  auto forward = Open(spec, collector);
  Send(*forward, 3, {0, 7});
  Send(*forward, 3, {7, 12});
  ASSERT_TRUE(collector->Wait().ok());
  for (const RowRange rows : {RowRange{0, 5}, {5, 12}, {0, 12}}) {
    BackwardSpec backward{.head = "head", .step = 0, .microbatch_id = 3, .rows = rows};
    backward.want_grad_hidden = true;
    backward.grad_loss.assign(static_cast<size_t>(rows.size()), 1.0f);
    auto results = std::make_shared<RowCollector>();
    auto stream = engine_->OpenBackward(backward, results);
    ASSERT_TRUE(stream.ok()) << stream.status();
    (*stream)->Start();
    for (RowRange part : (*stream)->RetainedSlices()) EXPECT_TRUE(SentSlice(**stream, part).Wait());
    ASSERT_TRUE(results->Wait().ok());
  }
  numbers.Expect(3, {0, 12}, 0);
}

TEST_F(SampledTest, SumsReachTheSummaryTheObserversAndTheDescription) {
  Observer observer;
  device_.sampling_variance = 0.25;
  device_.squared_gradient = 4.0;
  Start({}, {&observer});
  EXPECT_EQ(engine_->Describe("head")->gradient_error, 0.0);
  auto collector = std::make_shared<RowCollector>();
  StreamSpec spec = Whole(1, 8);
  spec.options.gradients = Gradients::kSampled;
  spec.targets[2] = spec.ignore_index;
  auto stream = Open(spec, collector);
  Send(*stream, 1, {0, 3});
  Send(*stream, 1, {3, 8});
  ASSERT_TRUE(collector->Wait().ok()) << collector->Wait();
  EXPECT_EQ(collector->summary().sampling_variance, 7 * 0.25);
  EXPECT_EQ(collector->summary().squared_gradient, 7 * 4.0);
  EXPECT_EQ(engine_->Describe("head")->gradient_error, 0.25);
  auto exact = std::make_shared<RowCollector>();
  stream = Open(Whole(2, 8), exact);
  Send(*stream, 2, {0, 8});
  ASSERT_TRUE(exact->Wait().ok());
  EXPECT_EQ(exact->summary().squared_gradient, 0.0);
  EXPECT_EQ(engine_->Describe("head")->gradient_error, 0.25) << "of the last chunk that was sampled";
  EXPECT_EQ(observer.variance, 7 * 0.25);
  EXPECT_EQ(observer.square, 7 * 4.0);
  EXPECT_EQ(observer.error, 0.25);
  engine_ = nullptr;  // before the observer
}

class DeterministicSampledTest : public DeterministicTest {};

TEST_F(DeterministicSampledTest, RowsHaveTheNumbersOfTheirPlace) {
  Numbers numbers;
  Observer observer;
  device_.on_chunk = [&](const kernels::Chunk& chunk) { numbers.Note(chunk); };
  device_.sampling_variance = 0.25;
  device_.squared_gradient = 4.0;
  Start({}, {&observer});
  StreamSpec spec = Spec(0, 40, {0, 40});
  spec.options.gradients = Gradients::kSampled;
  Call call = Open(spec);
  for (const RowRange rows : {RowRange{0, 10}, {10, 16}, {16, 32}, {32, 40}})
    ASSERT_TRUE(Send(call, 0, rows));
  ASSERT_TRUE(call.results->Wait().ok()) << call.results->Wait();
  EXPECT_EQ(call.results->summary().sampling_variance, 40 * 0.25);
  EXPECT_EQ(call.results->summary().squared_gradient, 40 * 4.0);
  EXPECT_EQ(observer.variance, 40 * 0.25);
  numbers.Expect(0, {0, 40}, 0);
  spec = Spec(0, 40, {20, 40});  // a repeat of some rows: zeros are computed in place of the others
  spec.options.gradients = Gradients::kSampled;
  Call repeat = Open(spec);
  ASSERT_TRUE(Send(repeat, 0, {20, 32}));
  ASSERT_TRUE(Send(repeat, 0, {32, 40}));
  ASSERT_TRUE(repeat.results->Wait().ok()) << repeat.results->Wait();
  EXPECT_EQ(repeat.results->summary().squared_gradient, 20 * 4.0);
  numbers.Expect(0, {0, 40}, 0);
  call.stream.reset();
  repeat.stream.reset();
  engine_ = nullptr;  // before the observer
}

}  // namespace
}  // namespace lossd::engine::sampled_test
