// SPDX-License-Identifier: Apache-2.0
// Deterministic mode on the CPU backend with gradients `auto`: what a group has decided holds for its
// repeats.
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/engine.h"
#include "tests/server/engine/row_collector.h"
#include "tests/server/engine/sent_slice.h"
#include "tests/server/engine/silent_observer.h"

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
