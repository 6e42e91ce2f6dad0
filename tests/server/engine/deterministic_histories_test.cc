// SPDX-License-Identifier: Apache-2.0
// The engine in deterministic mode when things end early and come in any order: calls, groups and heads that
// end before they are done, and random arrivals, cuts and cancellations.
#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "server/engine/errors.h"
#include "tests/server/engine/engine_fixture.h"
#include "tests/server/engine/fake_backend.h"

namespace lossd::engine::deterministic_histories_test {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class RowCounter final : public SilentObserver {
 public:
  void OnChunk(const ChunkReport& report) override {
    rows += report.rows;
    valid_rows += report.sums.valid_rows;
  }
  std::atomic<int64_t> rows{0};
  std::atomic<int64_t> valid_rows{0};
};

// A trainer that goes away in any state leaves the order as it was, and what it held comes back.
TEST_F(DeterministicTest, CallsMayEndInEveryState) {
  Start();
  {
    Call waiting = Open(1, 4);
    const SentSlice slice = Begin(waiting, 1, {0, 4});
    waiting.stream->Cancel(absl::DeadlineExceededError("too late"));
    EXPECT_EQ(waiting.results->Wait().code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(waiting.results->Wait().message()), HasSubstr("waited for microbatch 0"));
    EXPECT_FALSE(slice.Wait());
    EXPECT_FALSE(slice.copied());
  }
  {
    Call copying = Open(0, 4);
    copying.stream->Receive({.rows = {0, 4},
                             .bytes = 4 * kHidden * 4,
                             .copy = [&](uint8_t*) { copying.stream->Cancel(absl::CancelledError("cut")); },
                             .on_queued = [](int64_t) { FAIL() << "its stream had ended"; }});
    EXPECT_FALSE(copying.results->Wait().ok());
  }
  {
    Call attached = Open(0, 4);
    ASSERT_TRUE(Send(attached, 0, {0, 2}));
    attached.stream.reset();
    EXPECT_THAT(std::string(attached.results->Wait().message()),
                HasSubstr("waited for microbatch 0, rows [2, 4)"));
  }
  {
    device_.asynchronous = false;
    device_.Close();
    Call flying = Open(0, 4);
    ASSERT_TRUE(Send(flying, 0, {0, 4}));
    absl::SleepFor(absl::Milliseconds(20));
    flying.stream->Cancel(absl::CancelledError("cut"));
    device_.Open();
    EXPECT_FALSE(flying.results->Wait().ok());
  }
  Settle();
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(Names(0, {0, 4})));  // it was on the device already
  SendWhole(0, 4);
  SendWhole(1, 4);
  EXPECT_EQ(device_.accumulated().size(), 8u);
  EXPECT_EQ(engine_->stats().waiting_slices, 0);
}

TEST_F(DeterministicTest, AGroupThatFailsKeepsItsTurn) {
  device_.fail_results = [](int64_t chunk) {
    return chunk == 0 ? absl::InternalError("boom") : absl::OkStatus();
  };
  Start();
  Call next = Open(1, 4);
  const SentSlice early = Begin(next, 1, {0, 4});
  Call call = Open(0, 4);
  ASSERT_TRUE(Send(call, 0, {0, 4}));
  EXPECT_EQ(call.results->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(early.Wait());  // its turn had come when the chunk was launched
  Settle();
  EXPECT_THAT(device_.accumulated(), IsEmpty());
  EXPECT_FALSE(next.results->finished());
  SendWhole(0, 4);
  EXPECT_TRUE(next.results->Wait().ok());
  std::vector<float> expected = Names(0, {0, 4});
  for (float name : Names(1, {0, 4})) expected.push_back(name);
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(expected));
}

TEST_F(DeterministicTest, ARowThatIsNotFiniteHoldsTheStep) {
  Start();
  Call bad = Open(0, 16, {0, 8}), good = Open(0, 16, {8, 16}), next = Open(1, 4);
  std::vector<float> poisoned = Hidden(0, {0, 8});
  poisoned[3 * kHidden] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(Send(good, 0, {8, 16}));
  const SentSlice waits = Begin(next, 1, {0, 4});
  ASSERT_TRUE(SendSlice(*bad.stream, {0, 8}, poisoned));
  EXPECT_EQ(bad.results->Wait().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(bad.results->Wait().message()), HasSubstr("row 3"));
  EXPECT_TRUE(good.results->Wait().ok());
  EXPECT_TRUE(waits.Wait());
  Settle();
  EXPECT_FALSE(next.results->finished());
  const absl::Status missing =
      engine_->ApplyStep("head", {.step = 0, .expected_microbatches = {0, 1}}).status();
  EXPECT_FALSE(missing.ok());
  EXPECT_THAT(GetMissing(missing),
              ElementsAre("microbatch 0: rows [0, 8) of 16", "microbatch 1: rows [0, 4) of 4",
                          "in order: slices wait for microbatch 0, rows [0, 16)"));
  // Sent again with good values, the rows that are settled stay as they are.
  Call again = Open(0, 16, {0, 8});
  ASSERT_TRUE(Send(again, 0, {0, 8}));
  EXPECT_TRUE(again.results->Wait().ok());
  EXPECT_EQ(again.results->summary().accumulated_rows, 8);
  EXPECT_TRUE(next.results->Wait().ok());
  EXPECT_EQ(device_.accumulated().size(), 20u);

  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  SendWhole(0, 20);
}

// Rows of a group that were not sent again are computed as zeros; they are no rows that anybody sent.
TEST_F(DeterministicTest, ReportsCountTheRowsThatWereSent) {
  RowCounter counter;
  Start({}, {&counter});
  SendWhole(0, kGroup);
  Settle();
  EXPECT_EQ(counter.rows, kGroup);
  Call again = Open(0, kGroup, {5, 6});
  ASSERT_TRUE(Send(again, 0, {5, 6}));
  ASSERT_TRUE(again.results->Wait().ok());
  Settle();
  EXPECT_EQ(counter.rows, kGroup + 1);
  EXPECT_EQ(counter.valid_rows, kGroup + 1);
}

// Rows behind those that a second call sent, too, are computed apart from the row that is bad.
TEST_F(DeterministicTest, ABadSliceThatSharesRowsSaysWhatBecameOfThem) {
  Start();
  Call bad = Open(0, 16), good = Open(0, 16, {4, 8});
  std::vector<float> poisoned = Hidden(0, {0, 16});
  poisoned[1 * kHidden] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(SendSlice(*bad.stream, {0, 12}, {poisoned.begin(), poisoned.begin() + 12 * kHidden}));
  ASSERT_TRUE(Send(good, 0, {4, 8}));
  ASSERT_TRUE(Send(bad, 0, {12, 16}));
  EXPECT_EQ(bad.results->Wait().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(bad.results->Wait().message()),
              HasSubstr("rows of its slice may have been accumulated"));
  EXPECT_TRUE(good.results->Wait().ok());
  EXPECT_EQ(good.results->summary().accumulated_rows, 4) << "for the call that is told of them";
  EXPECT_EQ(good.results->summary().repeated_rows, 0);
  Call again = Open(0, 16);
  ASSERT_TRUE(Send(again, 0, {0, 16}));
  EXPECT_TRUE(again.results->Wait().ok());
  EXPECT_EQ(again.results->summary().accumulated_rows, 4);
  EXPECT_EQ(again.results->summary().repeated_rows, 12);
  EXPECT_EQ(device_.accumulated().size(), 16u);
}

TEST_F(DeterministicTest, ZeroingEndsThoseWhoWait) {
  Start();
  Call waiting = Open(3, 4), attached = Open(0, 8);
  const SentSlice slice = Begin(waiting, 3, {0, 4});
  ASSERT_TRUE(Send(attached, 0, {0, 4}));
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_EQ(waiting.results->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(attached.results->Wait().code(), absl::StatusCode::kAborted);
  EXPECT_FALSE(slice.Wait());
  SendWhole(0, 4);
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(Names(0, {0, 4})));
}

TEST_F(DeterministicTest, ADeviceThatMayHaveHalfAccumulatedEndsEveryCall) {
  device_.fail_done = [](int64_t chunk) {
    return chunk == 0 ? absl::InternalError("boom") : absl::OkStatus();
  };
  Start();
  Call waiting = Open(3, 4), call = Open(0, 4);
  const SentSlice slice = Begin(waiting, 3, {0, 4});
  ASSERT_TRUE(Send(call, 0, {0, 4}));
  EXPECT_EQ(call.results->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(waiting.results->Wait().code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  SendWhole(0, 4);
}

TEST_F(DeterministicTest, StopsWithCallsInEveryState) {
  device_.asynchronous = true;
  device_.chunks_in_flight = 2;
  device_.delay = absl::Milliseconds(2);
  Start();
  std::vector<Call> calls;
  for (uint64_t id = 0; id < 6; ++id) calls.push_back(Open(id, 20));
  ASSERT_TRUE(Send(calls[0], 0, {0, 16}));
  std::vector<SentSlice> slices;
  for (size_t id = 1; id < 6; ++id) slices.push_back(Begin(calls[id], id, {0, 16}));
  ASSERT_TRUE(Send(calls[0], 0, {16, 18}));
  for (Call& call : calls) call.stream.reset();
  engine_.reset();
  for (Call& call : calls) EXPECT_FALSE(call.results->Wait().ok());
  for (const SentSlice& slice : slices) EXPECT_FALSE(slice.Wait());
}

// A slice's gradients may be on their way when the head is deleted.
TEST_F(DeterministicTest, BuffersOutliveTheirHead) {
  Start();
  class Keeper : public StreamObserver {
   public:
    void OnMemory(absl::AnyInvocable<void()> receive) override { receive(); }
    void OnSlice(SliceOutput output) override { kept = std::move(output.grad_hidden); }
    void OnFinished(absl::Status, const StreamSummary&) override { finished.Notify(); }
    StagingBuffer kept;
    absl::Notification finished;
  };
  auto keeper = std::make_shared<Keeper>();
  auto stream = engine_->Open(Spec(0, 2, {0, 2}), keeper);
  ASSERT_TRUE(stream.ok());
  (*stream)->Start();
  ASSERT_TRUE(SendSlice(**stream, {0, 2}, Hidden(0, {0, 2})));
  keeper->finished.WaitForNotification();
  stream->reset();
  ASSERT_TRUE(engine_->DeleteHead("head").ok());
  EXPECT_EQ(reinterpret_cast<const float*>(keeper->kept.data())[kHidden], RowName(0, 1));
  keeper->kept.Release();
}

// ---- Random histories ----
// Deterministic mode under random arrivals, cuts and cancellations: what reaches a scripted device, and the
// bits of weights and gradients on the CPU backend.

// How a trainer cuts and disturbs a microbatch.
struct Habits {
  uint64_t seed = 0;
  int max_streams = 1;
  int64_t max_slice = 16;
  double give_up = 0.0;  // chance that an attempt is cut off half-way
};

// Rows [begin, end) cut into contiguous pieces at random, none across a multiple of `grid`.
std::vector<RowRange> Cut(RowRange rows, int64_t max_rows, int64_t grid, std::mt19937_64& rng) {
  std::vector<RowRange> pieces;
  for (int64_t row = rows.begin; row < rows.end; row = pieces.back().end) {
    const int64_t most = std::min({max_rows, rows.end - row, grid - row % grid});
    pieces.push_back({row, row + 1 + static_cast<int64_t>(rng() % static_cast<uint64_t>(most))});
  }
  return pieces;
}

// Sends one microbatch over several streams at once, each again until it succeeds. `spec` is that of all
// rows. Returns the results row by row.
void SendMicrobatch(Engine& engine, const StreamSpec& spec, const std::vector<float>& hidden,
                    int64_t hidden_size, const Habits& habits, std::map<int64_t, float>* losses,
                    std::map<int64_t, std::vector<float>>* grads) {
  std::mt19937_64 rng(habits.seed);
  const int64_t grid = engine.Describe(spec.head)->limits.row_grid;
  std::vector<RowRange> ranges = {spec.rows};
  const int streams = 1 + static_cast<int>(rng() % static_cast<uint64_t>(habits.max_streams));
  if (streams > 1 && spec.rows.size() > 0)
    ranges = Cut(spec.rows, spec.rows.size() / streams + 1, std::numeric_limits<int64_t>::max(), rng);
  absl::Mutex mutex;
  std::vector<std::thread> threads;
  for (RowRange range : ranges) {
    threads.emplace_back([&, range, seed = rng()] {
      std::mt19937_64 random(seed);
      while (true) {
        StreamSpec part = spec;
        part.rows = range;
        part.targets.assign(spec.targets.begin() + range.begin, spec.targets.begin() + range.end);
        const auto cut = [range](const std::vector<float>& whole, std::vector<float>& out) {
          if (!whole.empty()) out.assign(whole.begin() + range.begin, whole.begin() + range.end);
        };
        cut(spec.row_weights, part.row_weights);
        cut(spec.numbers.advantages, part.numbers.advantages);
        cut(spec.numbers.old_logprobs, part.numbers.old_logprobs);
        cut(spec.numbers.ref_logprobs, part.numbers.ref_logprobs);
        const int64_t each = spec.soft.count;
        const auto cut_targets = [&](const auto& whole, auto& out) {
          out.assign(whole.begin() + range.begin * each, whole.begin() + range.end * each);
        };
        cut_targets(spec.soft.classes, part.soft.classes);
        cut_targets(spec.soft.weights, part.soft.weights);
        auto results = std::make_shared<RowCollector>();
        auto stream = engine.Open(part, results);
        ASSERT_TRUE(stream.ok()) << stream.status();
        (*stream)->Start();
        const auto slices = Cut(range, habits.max_slice, grid, random);
        const bool give_up = std::uniform_real_distribution<>()(random) < habits.give_up;
        const size_t count = give_up ? random() % (slices.size() + 1) : slices.size();
        bool sent = true;
        for (size_t i = 0; i < count && sent; ++i) {
          const auto first = hidden.begin() + slices[i].begin * hidden_size;
          sent = SendSlice(**stream, slices[i], {first, first + slices[i].size() * hidden_size});
        }
        if (give_up) (*stream)->Cancel(absl::CancelledError("cut"));
        if (!results->Wait().ok()) continue;
        absl::MutexLock lock(&mutex);
        if (losses != nullptr) losses->merge(results->losses());
        if (grads != nullptr) grads->merge(results->grads());
        return;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Trainers with shuffled microbatches, streams that break and come again, tiny memory: the device sees
// exactly one order.
TEST_F(DeterministicTest, OneOrderUnderRandomArrivalsAndCancellations) {
  device_.asynchronous = true;
  device_.chunks_in_flight = 3;
  Start();
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  for (uint64_t step = 0; step < 6; ++step) {
    constexpr uint64_t kMicrobatches = 7;
    std::vector<int64_t> rows;
    std::vector<uint64_t> order;
    for (uint64_t id = 0; id < kMicrobatches; ++id) {
      rows.push_back(static_cast<int64_t>(rng() % 60));
      order.push_back(id);
    }
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<std::thread> trainers;
    for (uint64_t id : order) {
      trainers.emplace_back([&, id, habits = Habits{rng(), 4, 1 + static_cast<int64_t>(rng() % 16), 0.4}] {
        const RowRange all = {0, rows[id]};
        SendMicrobatch(*engine_, Spec(id, rows[id], all, step), Hidden(id, all), kHidden, habits, nullptr,
                       nullptr);
      });
    }
    for (std::thread& trainer : trainers) trainer.join();
    Settle();
    std::vector<float> expected;
    for (uint64_t id = 0; id < kMicrobatches; ++id) {
      for (float name : Names(id, {0, rows[id]})) expected.push_back(name);
    }
    ASSERT_THAT(device_.accumulated(), ElementsAreArray(expected));
    ASSERT_TRUE(engine_->ApplyStep("head", {.step = step, .expected_microbatches = order}).ok());
  }
  EXPECT_EQ(engine_->stats().waiting_slices, 0);
  EXPECT_EQ(engine_->stats().queued_slices, 0);
  for (int i = 0; i < 1000 && engine_->stats().area_buffers_lent > 0; ++i)
    absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(engine_->stats().area_buffers_lent, 0);  // they come back on another thread
}

// ---- Bits, on the CPU backend ----

struct Outcome {
  std::vector<std::vector<uint8_t>> weights;  // after each step
  std::vector<std::map<int64_t, std::vector<float>>> grads;
  std::vector<std::map<int64_t, float>> losses;
};

class BitsTest : public ::testing::TestWithParam<kernels::Norm> {
 protected:
  static constexpr int64_t kD = 33, kV = 211;
  static constexpr uint64_t kSteps = 3, kMicrobatches = 4;

  struct Data {
    StreamSpec spec;
    std::vector<float> hidden;
  };

  // The microbatches of a run: the same for a seed.
  static std::vector<Data> MakeData(uint64_t seed) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    std::vector<Data> all;
    for (uint64_t i = 0; i < kSteps * kMicrobatches; ++i) {
      Data data;
      StreamSpec& spec = data.spec;
      spec.head = "head";
      spec.step = i / kMicrobatches;
      spec.microbatch_id = i % kMicrobatches;
      spec.microbatch_rows = 1 + static_cast<int64_t>(rng() % 150);
      spec.rows = {0, spec.microbatch_rows};
      spec.hidden_dtype = kernels::DType::kFloat32;
      spec.reduction = Reduction::kMean;
      spec.normalizer = 100.0;
      spec.want_grad_hidden = spec.accumulate_gradients = spec.want_rows.loss = true;
      constexpr kernels::Gradients kGradients[] = {kernels::Gradients::kExact, kernels::Gradients::kFiltered,
                                                   kernels::Gradients::kSampled, kernels::Gradients::kAuto};
      spec.options.gradients = kGradients[rng() % 4];
      spec.options.filter_epsilon = 0.003f;
      spec.options.sample_threshold = 0.01f;
      spec.options.max_gradient_error = 0.05f + 0.01f * static_cast<float>(rng() % 10);
      const bool with_objective = rng() % 3 == 0;
      const bool with_soft_targets = !with_objective && rng() % 2 == 0;
      if (with_soft_targets) {
        spec.options.rest = static_cast<kernels::Rest>(1 + rng() % 3);
        spec.soft.count = static_cast<int32_t>(1 + rng() % 5);
      }
      if (with_objective) {
        spec.options.objective = {
            .kind = kernels::ObjectiveKind::kPpo, .clip_low = 0.2f, .clip_high = 0.3f, .kl_coef = 0.1f};
      }
      for (int64_t row = 0; row < spec.microbatch_rows; ++row) {
        if (with_objective) {
          spec.numbers.advantages.push_back(normal(rng));
          spec.numbers.old_logprobs.push_back(-4.0f + 0.3f * normal(rng));
          spec.numbers.ref_logprobs.push_back(-4.0f + 0.3f * normal(rng));
        }
        for (int32_t entry = 0; entry < spec.soft.count; ++entry) {
          spec.soft.classes.push_back(static_cast<int32_t>(rng() % static_cast<uint64_t>(kV)));
          spec.soft.weights.push_back(0.2f / static_cast<float>(1 + rng() % 4));
        }
        const bool ignored = rng() % 8 == 0;
        spec.targets.push_back(ignored ? -100 : static_cast<int32_t>(rng() % static_cast<uint64_t>(kV)));
        spec.row_weights.push_back(static_cast<float>(rng() % 3));
        for (int64_t d = 0; d < kD; ++d) data.hidden.push_back(normal(rng));
      }
      all.push_back(std::move(data));
    }
    return all;
  }

  static Outcome Train(const std::vector<Data>& data, kernels::Norm norm, uint64_t seed, bool disturbed) {
    Outcome run;
    auto backend = kernels::CreateCpuBackend({.threads = 2, .workspace_bytes = 1 << 20});
    EXPECT_TRUE(backend.ok());
    // Groups of 41 rows.
    EngineOptions options{.slice_bytes = 8192, .staging_bytes = 16384, .deterministic = true};
    auto engine = Engine::Create(options, backend->get(), 42, {});
    EXPECT_TRUE(engine.ok()) << engine.status();
    const kernels::HeadConfig config{
        .hidden_size = kD, .vocab_size = kV, .has_bias = true, .norm = norm, .trainable = true};
    EXPECT_TRUE((*engine)->CreateHead("head", config).ok());
    EXPECT_TRUE((*engine)->PublishHead("head").ok());
    EXPECT_EQ((*engine)->Describe("head")->limits.row_grid, 41);
    WriteWeights(**engine);
    std::mt19937_64 rng(seed);
    run.grads.resize(data.size());
    run.losses.resize(data.size());
    for (uint64_t step = 0; step < kSteps; ++step) {
      std::vector<size_t> order;
      for (size_t i = step * kMicrobatches; i < (step + 1) * kMicrobatches; ++i) order.push_back(i);
      if (disturbed) std::shuffle(order.begin(), order.end(), rng);
      std::vector<std::thread> trainers;
      for (size_t i : order) {
        Habits habits{rng(), 5, 1 + static_cast<int64_t>(rng() % 41), 0.3};
        if (!disturbed) habits = {0, 1, 41, 0.0};
        trainers.emplace_back([&, i, habits] {
          SendMicrobatch(**engine, data[i].spec, data[i].hidden, kD, habits, &run.losses[i], &run.grads[i]);
        });
        if (!disturbed) {
          trainers.back().join();
          trainers.pop_back();
        }
      }
      for (std::thread& trainer : trainers) trainer.join();
      StepRequest request{.step = step, .expected_microbatches = {0, 1, 2, 3}};
      request.optimizer.learning_rate = 0.05;
      auto applied = (*engine)->ApplyStep("head", request);
      EXPECT_TRUE(applied.ok()) << applied.status();
      run.weights.push_back(ReadWeights(**engine));
    }
    return run;
  }

  static void WriteWeights(Engine& engine) {
    std::mt19937_64 rng(5);
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(kV * kD));
    for (float& value : values) value = 0.3f * normal(rng);
    EXPECT_TRUE(engine
                    .OnDevice("head",
                              [&](head::Head& head) {
                                return head.kernels().WriteTensor(
                                    {kernels::Param::kWeight, kernels::Role::kValue}, 0, kV,
                                    kernels::DType::kFloat32,
                                    {reinterpret_cast<const uint8_t*>(values.data()), values.size() * 4});
                              })
                    .ok());
  }
  static std::vector<uint8_t> ReadWeights(Engine& engine) {
    std::vector<uint8_t> bytes(static_cast<size_t>(kV * kD) * 4);
    EXPECT_TRUE(engine
                    .OnDevice("head",
                              [&](head::Head& head) {
                                return head.kernels().ReadTensor(
                                    {kernels::Param::kWeight, kernels::Role::kValue}, 0, kV,
                                    kernels::DType::kFloat32, absl::MakeSpan(bytes));
                              })
                    .ok());
    return bytes;
  }
};

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::ranges::equal(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

TEST_P(BitsTest, WeightsAndGradientsAreTheSameHoweverRowsArrive) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  const std::vector<Data> data = MakeData(seed);
  const Outcome calm = Train(data, GetParam(), 0, /*disturbed=*/false);
  for (uint64_t round = 0; round < 4; ++round) {
    const Outcome other = Train(data, GetParam(), seed + round, /*disturbed=*/true);
    for (uint64_t step = 0; step < kSteps; ++step) ASSERT_EQ(other.weights[step], calm.weights[step]) << step;
    for (size_t i = 0; i < data.size(); ++i) {
      const StreamSpec& spec = data[i].spec;
      for (int64_t row = 0; row < spec.microbatch_rows; ++row) {
        ASSERT_TRUE(SameBits(other.grads[i].at(row), calm.grads[i].at(row)))
            << "microbatch " << i << " row " << row;
        ASSERT_EQ(other.losses[i].at(row), calm.losses[i].at(row)) << "microbatch " << i << " row " << row;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Norms, BitsTest,
                         ::testing::Values(kernels::Norm::kNone, kernels::Norm::kLayerNorm,
                                           kernels::Norm::kRmsNorm));

}  // namespace
}  // namespace lossd::engine::deterministic_histories_test
