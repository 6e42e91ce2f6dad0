// SPDX-License-Identifier: Apache-2.0
// Tests of engine.h: the engine as its callers see it, its context and observers, what it refuses, the
// versions of weights, shares of a head on several devices, and random steps with extreme options.
#include "server/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/errors/field_error.h"
#include "server/engine/engine_context.h"
#include "server/engine/engine_options.h"
#include "server/engine/errors.h"
#include "server/engine/staging.h"
#include "server/engine/stream.h"
#include "server/head/manifest.h"
#include "tests/kernels/group/member_group.h"
#include "tests/server/engine/engine_fixture.h"
#include "tests/server/engine/fake_backend.h"

namespace lossd::engine::engine_test {
namespace {

using kernels::OptimizerOptions;
using kernels::Param;
using kernels::Role;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAreArray;

// ---- The engine ----

TEST_F(EngineTest, ComputesAndAccumulatesAMicrobatch) {
  Start();
  auto collector = std::make_shared<RowCollector>();
  StreamSpec spec = Whole(1, 5);
  spec.reduction = Reduction::kMean;
  auto stream = Open(spec, collector);
  Send(*stream, 1, {0, 3});
  Send(*stream, 1, {3, 5});
  ASSERT_TRUE(collector->Wait().ok());
  const StreamSummary& summary = collector->summary();
  EXPECT_EQ(summary.state.incarnation, 42u);
  EXPECT_EQ(summary.sums.valid_rows, 5);
  EXPECT_EQ(summary.accumulated_rows, 5);
  EXPECT_EQ(summary.repeated_rows, 0);
  EXPECT_EQ(summary.normalizer, 5.0);
  EXPECT_EQ(summary.sums.loss, 1000 + 1001 + 1002 + 1003 + 1004);
  EXPECT_THAT(device_.accumulated(), UnorderedElementsAreArray(Names(1, {0, 5})));
  EXPECT_EQ(collector->grads().size(), 5u);
  for (const auto& [row, grad] : collector->grads()) EXPECT_FLOAT_EQ(grad[0], RowName(1, row) / 5.0f);
}

TEST_F(EngineTest, EmptyAndAllIgnoredMicrobatchesFinish) {
  Start();
  auto empty = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 0), empty);
  EXPECT_TRUE(empty->Wait().ok());

  auto ignored = std::make_shared<RowCollector>();
  StreamSpec spec = Whole(2, 3);
  spec.reduction = Reduction::kMean;
  spec.targets.assign(3, spec.ignore_index);
  auto second = Open(spec, ignored);
  second->HalfClose();
  EXPECT_TRUE(ignored->Wait().ok());
  EXPECT_EQ(ignored->summary().sums.valid_rows, 0);

  auto sent = std::make_shared<RowCollector>();
  spec.microbatch_id = 3;
  auto third = Open(spec, sent);
  Send(*third, 3, {0, 3});
  EXPECT_TRUE(sent->Wait().ok());
  EXPECT_EQ(sent->grads().size(), 3u);
  for (const auto& [row, grad] : sent->grads()) EXPECT_THAT(grad, Each(0.0f));
  EXPECT_THAT(device_.accumulated(), IsEmpty());
  EXPECT_TRUE(engine_->ApplyStep("head", {.expected_microbatches = {1, 2, 3}, .expected_rows = 0}).ok());
}

TEST_F(EngineTest, FillsChunksFromSeveralStreams) {
  Start();
  device_.Close();  // let a queue build up behind the first chunk
  std::vector<std::shared_ptr<RowCollector>> collectors;
  std::vector<std::unique_ptr<Stream>> streams;
  for (uint64_t id = 0; id < 5; ++id) {
    collectors.push_back(std::make_shared<RowCollector>());
    streams.push_back(Open(Whole(id, 6), collectors.back()));
  }
  StreamSpec other = Whole(9, 6);
  other.options.z_loss = 0.5f;
  collectors.push_back(std::make_shared<RowCollector>());
  streams.push_back(Open(other, collectors.back()));
  Send(*streams[0], 0, {0, 6});
  Send(*streams[1], 1, {0, 6});
  Send(*streams[5], 9, {0, 6});  // other options: must not share a chunk
  for (uint64_t id = 2; id < 5; ++id) Send(*streams[id], id, {0, 6});
  device_.Open();
  for (auto& collector : collectors) EXPECT_TRUE(collector->Wait().ok());
  // At most 16 rows a chunk: two slices of six. The first chunk holds what was there when it was formed.
  int64_t slices = 0;
  for (const auto& chunk : device_.chunks()) {
    EXPECT_LE(chunk.size(), 2u);
    slices += static_cast<int64_t>(chunk.size());
  }
  EXPECT_EQ(slices, 6);
  EXPECT_LE(device_.chunks().size(), 5u);
  EXPECT_EQ(device_.accumulated().size(), 36u);
}

// The staging memory goes by bytes: slices smaller than the largest share its place.
TEST_F(EngineTest, SmallSlicesShareTheStagingMemory) {
  constexpr int64_t kRows = 24;
  Start({.staging_bytes = 2 * kSliceBytes});
  device_.Close();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, kRows), collector);
  for (int64_t row = 0; row < kRows; ++row)
    Send(*stream, 1, {row, row + 1});  // with two places it would wait
  EXPECT_EQ(engine_->stats().staging_used_bytes, kRows * RangeAllocator::kAlignment);
  device_.Open();
  EXPECT_TRUE(collector->Wait().ok());
  EXPECT_EQ(engine_->stats().staging_peak_bytes, kRows * RangeAllocator::kAlignment);
}

// A chunk on the device does not have its results yet: what comes meanwhile makes one chunk, not several.
TEST_F(EngineTest, ChunksFillWhileTheDeviceComputes) {
  device_.asynchronous = true;
  device_.chunks_in_flight = 2;
  Start();
  AddHead("other");
  device_.Close();
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 16), collector);
  Send(*stream, 1, {0, 4});
  while (engine_->stats().queued_slices != 0) absl::SleepFor(absl::Milliseconds(1));  // it went at once
  for (int64_t row = 4; row < 16; row += 4) {
    Send(*stream, 1, {row, row + 4});
    for (int turn = 0; turn < 2; ++turn) {  // heads take turns: this one had its own in between
      ASSERT_TRUE(engine_->OnDevice("other", [](head::Head&) { return absl::OkStatus(); }).ok());
    }
    EXPECT_EQ(engine_->stats().queued_slices, row / 4);
  }
  device_.Open();
  ASSERT_TRUE(collector->Wait().ok()) << collector->Wait();
  EXPECT_THAT(device_.chunks(), ElementsAre(ElementsAre(4), ElementsAre(4, 4, 4)));
}

TEST_F(EngineTest, FullChunksAndThoseThatDoNotAccumulateGoAtOnce) {
  device_.asynchronous = true;
  device_.chunks_in_flight = 3;
  Start();
  device_.Close();
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::shared_ptr<RowCollector>> collectors;
  const auto send = [&](const StreamSpec& spec) {
    collectors.push_back(std::make_shared<RowCollector>());
    streams.push_back(Open(spec, collectors.back()));
    Send(*streams.back(), spec.microbatch_id, spec.rows);
    while (engine_->stats().queued_slices != 0) absl::SleepFor(absl::Milliseconds(1));
  };
  send(Whole(1, 4));
  send(Whole(2, 16));
  StreamSpec loss_only = Whole(3, 4);
  loss_only.accumulate_gradients = false;
  send(loss_only);
  device_.Open();
  for (auto& collector : collectors) EXPECT_TRUE(collector->Wait().ok());
}

TEST_F(EngineTest, ResentRowsAreNotAccumulatedAgain) {
  Start();
  auto first = std::make_shared<RowCollector>();
  {
    auto stream = Open(Whole(1, 8), first);
    Send(*stream, 1, {0, 4});
    while (first->slices().empty()) absl::SleepFor(absl::Milliseconds(1));
  }  // dropped half-way: cancelled
  EXPECT_EQ(first->Wait().code(), absl::StatusCode::kCancelled);

  auto second = std::make_shared<RowCollector>();
  auto again = Open(Whole(1, 8), second);
  Send(*again, 1, {2, 8});  // other slices than before
  Send(*again, 1, {0, 2});
  ASSERT_TRUE(second->Wait().ok());
  EXPECT_EQ(second->summary().repeated_rows, 4);
  EXPECT_EQ(second->summary().accumulated_rows, 4);
  EXPECT_EQ(second->grads().size(), 8u);
  EXPECT_THAT(device_.accumulated(), UnorderedElementsAreArray(Names(1, {0, 8})));
}

TEST_F(EngineTest, TheSameRowsInFlightTwiceAreAccumulatedOnce) {
  device_.asynchronous = true;
  device_.chunks_in_flight = 3;
  Start();
  device_.Close();
  auto a = std::make_shared<RowCollector>();
  auto b = std::make_shared<RowCollector>();
  auto stream_a = Open(Whole(1, 4), a);
  auto stream_b = Open(Whole(1, 4), b);
  Send(*stream_a, 1, {0, 4});
  Send(*stream_b, 1, {0, 4});
  device_.Open();
  ASSERT_TRUE(a->Wait().ok());
  ASSERT_TRUE(b->Wait().ok());
  EXPECT_EQ(a->summary().accumulated_rows + b->summary().accumulated_rows, 4);
  EXPECT_EQ(a->summary().repeated_rows + b->summary().repeated_rows, 4);
  EXPECT_THAT(device_.accumulated(), UnorderedElementsAreArray(Names(1, {0, 4})));
}

TEST_F(EngineTest, AHeadSaysWhatAStreamLeavesOpen) {
  using kernels::Gradients;
  kernels::LossOptions seen;
  device_.on_chunk = [&](const kernels::Chunk& chunk) { seen = chunk.options; };
  Start();
  uint64_t id = 0;
  const auto options_of = [&](const std::string& head, const StreamSpec& like) {
    StreamSpec spec = like;
    spec.head = head;
    spec.microbatch_id = ++id;
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(std::move(spec), collector);
    if (stream == nullptr) return;
    Send(*stream, id, {0, 2});
    EXPECT_TRUE(collector->Wait().ok()) << collector->Wait();
  };
  for (const kernels::Logits logits : {kernels::Logits::kStored, kernels::Logits::kRecomputed}) {
    for (const Gradients of_head :
         {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
      const std::string head = absl::StrCat(kernels::Name(logits), "-", kernels::Name(of_head));
      const kernels::HeadConfig config = {
          .hidden_size = kHidden, .vocab_size = 10, .logits = logits, .gradients = of_head};
      ASSERT_TRUE(engine_->CreateHead(head, config).ok());
      ASSERT_TRUE(engine_->PublishHead(head).ok());
      StreamSpec spec = Whole(1, 2);
      spec.options.filter_epsilon = 0.25f;
      spec.gradients_of_head = true;
      options_of(head, spec);
      EXPECT_EQ(seen.gradients, of_head);
      EXPECT_EQ(seen.filter_epsilon, 0.25f);
      spec.gradients_of_head = false;
      for (const Gradients asked :
           {Gradients::kExact, Gradients::kFiltered, Gradients::kSampled, Gradients::kAuto}) {
        spec.options.gradients = asked;
        options_of(head, spec);
        EXPECT_EQ(seen.gradients, asked) << head;
      }
    }
  }
}

TEST_F(EngineTest, HeadsComeAndGo) {
  Start();
  EXPECT_EQ(engine_->CreateHead("big", {.hidden_size = 1 << 20, .vocab_size = 2}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->CreateHead("big", {.hidden_size = 1, .vocab_size = 2'000'000}).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->List().size(), 1u);
  ASSERT_TRUE(engine_->CreateHead("half", {.hidden_size = 1, .vocab_size = 2}).ok());
  EXPECT_EQ(engine_->List().size(), 1u);  // not published
  EXPECT_EQ(engine_->Describe("half").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(engine_->DeleteHead("half").ok());
  EXPECT_EQ(engine_->DeleteHead("half").code(), absl::StatusCode::kNotFound);

  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(Whole(1, 2), collector);
  EXPECT_EQ(engine_->DeleteHead("head").code(), absl::StatusCode::kFailedPrecondition);
  stream->Cancel(absl::CancelledError("enough"));
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(engine_->DeleteHead("head").ok());
  EXPECT_EQ(engine_->Describe("head").status().code(), absl::StatusCode::kNotFound);
  AddHead("head");
}

TEST_F(EngineTest, CreationsAndDeletionsOfOneNameAtOnce) {
  Start();
  constexpr int kRounds = 1000;
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([this] {
      for (int round = 0; round < kRounds; ++round) {
        const absl::Status created = engine_->CreateHead("x", {.hidden_size = 1, .vocab_size = 2});
        EXPECT_TRUE(created.ok() || absl::IsAlreadyExists(created) || absl::IsNotFound(created)) << created;
        if (created.ok()) engine_->PublishHead("x").IgnoreError();
      }
    });
    threads.emplace_back([this] {
      for (int round = 0; round < kRounds; ++round) {
        const absl::Status deleted = engine_->DeleteHead("x");
        EXPECT_TRUE(deleted.ok() || absl::IsNotFound(deleted)) << deleted;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  engine_->DeleteHead("x").IgnoreError();
  EXPECT_EQ(engine_->List().size(), 1u);
  EXPECT_TRUE(engine_->CreateHead("x", {.hidden_size = 1, .vocab_size = 2}).ok());
}

TEST_F(EngineTest, ADeletionEndsTheOperationsThatWait) {
  absl::Notification computes, goes_on;
  device_.on_step = [&] {
    computes.Notify();
    goes_on.WaitForNotification();
  };
  Start();
  std::thread step([this] { EXPECT_TRUE(engine_->ApplyStep("head", {}).ok()); });
  computes.WaitForNotification();
  std::atomic<int> begun = 0;
  std::vector<std::thread> waiting;
  for (int i = 0; i < 4; ++i) {
    waiting.emplace_back([&] {
      ++begun;
      EXPECT_FALSE(engine_->GradNorm("head", std::nullopt).ok());
    });
  }
  while (begun < 4) absl::SleepFor(absl::Milliseconds(1));
  absl::SleepFor(absl::Milliseconds(20));  // if it is too short, fewer of them wait
  std::thread deletion([this] { EXPECT_TRUE(engine_->DeleteHead("head").ok()); });
  while (engine_->Describe("head").ok()) absl::SleepFor(absl::Milliseconds(1));
  goes_on.Notify();
  step.join();
  deletion.join();
  for (std::thread& each : waiting) each.join();
}

TEST_F(EngineTest, StopsWithStreamsOpenAndWorkQueued) {
  device_.asynchronous = true;
  device_.chunks_in_flight = 2;
  device_.delay = absl::Milliseconds(2);
  Start();
  std::vector<std::shared_ptr<RowCollector>> collectors;
  std::vector<std::unique_ptr<Stream>> streams;
  for (uint64_t id = 0; id < 8; ++id) {
    collectors.push_back(std::make_shared<RowCollector>());
    streams.push_back(Open(Whole(id, 12), collectors.back()));
    Send(*streams.back(), id, {0, 6});
  }
  // A stream outlives the engine only as a bug; let them go first, as the rpc layer does.
  streams.clear();
  engine_.reset();
  for (auto& collector : collectors) EXPECT_FALSE(collector->Wait().ok());
}

// Many threads, random slices, random cancellations and resends: after each step every row of every
// microbatch was accumulated exactly once.
TEST_F(EngineTest, ExactlyOnceUnderRandomCancellations) {
  device_.asynchronous = true;
  device_.chunks_in_flight = 3;
  Start();
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  static constexpr int kThreads = 4;
  static constexpr int kSteps = 10;
  static constexpr int64_t kRows = 30;
  for (uint64_t step = 0; step < kSteps; ++step) {
    std::vector<std::thread> trainers;
    for (uint64_t t = 0; t < kThreads; ++t) {
      trainers.emplace_back([this, t, step, seed] {
        std::mt19937_64 rng(seed + 100 * step + t);
        while (true) {  // send until one attempt survives
          auto collector = std::make_shared<RowCollector>();
          auto stream = Open(Whole(t, kRows, step), collector);
          const bool give_up = rng() % 2 == 0;
          std::vector<RowRange> slices;
          for (int64_t row = 0; row < kRows;) {
            const int64_t end = std::min<int64_t>(kRows, row + 1 + static_cast<int64_t>(rng() % 7));
            slices.push_back({row, end});
            row = end;
          }
          std::shuffle(slices.begin(), slices.end(), rng);
          const size_t count = give_up ? rng() % slices.size() : slices.size();
          for (size_t i = 0; i < count; ++i) Send(*stream, t, slices[i]);
          if (give_up) stream->Cancel(absl::CancelledError("cut"));
          if (collector->Wait().ok()) return;
        }
      });
    }
    for (std::thread& trainer : trainers) trainer.join();
    ASSERT_TRUE(engine_->OnDevice("head", [](head::Head&) { return absl::OkStatus(); }).ok());
    std::vector<float> expected;
    for (uint64_t t = 0; t < kThreads; ++t) {
      const auto names = Names(t, {0, kRows});
      expected.insert(expected.end(), names.begin(), names.end());
    }
    ASSERT_THAT(device_.accumulated(), UnorderedElementsAreArray(expected));
    auto result = engine_->ApplyStep(
        "head", {.step = step, .expected_microbatches = {0, 1, 2, 3}, .expected_rows = kThreads * kRows});
    ASSERT_TRUE(result.ok()) << result.status();
  }
  EXPECT_EQ(engine_->stats().staging_used_bytes, 0);
}

// ---- Engine context ----

// Each part of the memory is too much once.
TEST(EngineContextTest, MemoryThatCannotBeHadIsAnError) {
  constexpr int64_t kMebibyte = int64_t{1} << 20;
  EngineOptions fits;
  fits.slice_bytes = 8192;
  fits.staging_bytes = fits.retained_bytes = fits.ledger_bytes = kMebibyte;
  EngineOptions staging = fits, retained = fits, ledger = fits;
  staging.staging_bytes = retained.retained_bytes = ledger.ledger_bytes = 64 * kMebibyte;
  for (const EngineOptions& options : {fits, staging, retained, ledger}) {
    auto backend = kernels::CreateCpuBackend({.threads = 1, .memory_limit_bytes = 8 * kMebibyte});
    ASSERT_TRUE(backend.ok()) << backend.status();
    const auto engine = Engine::Create(options, backend->get(), 42, {});
    const bool large = options.staging_bytes + options.retained_bytes + options.ledger_bytes > 8 * kMebibyte;
    EXPECT_EQ(engine.status().code(), large ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kOk)
        << engine.status();
    EXPECT_THAT(std::string(engine.status().message()), HasSubstr(large ? "memory" : ""));
  }
}

// ---- Engine observer ----

class Recorder final : public EngineObserver {
 public:
  void OnChunk(const ChunkReport& report) override { rows.push_back(report.rows); }
  void OnChunkLeft(const ChunkReport& report) override { rows.push_back(-report.rows); }
  void OnChoices(const ChoicesReport& report) override { choices.push_back(report.choices.back().choice); }
  void OnContribution(const ContributionReport& report) override { rows.push_back(report.added_rows); }
  void OnStep(const StepReport& report) override { steps.push_back(report.skipped); }
  void OnDeviceError(const absl::Status& status) override { errors.emplace_back(status.message()); }
  std::vector<int64_t> rows;
  std::vector<std::string> choices;
  std::vector<bool> steps;
  std::vector<std::string> errors;
};

TEST(EngineObserversTest, EveryObserverIsToldEverything) {
  Recorder first, second;
  const EngineObservers observers({&first, &second});
  const kernels::Choice choice = {.what = "loss", .choice = "fused"};
  observers.Tell(&EngineObserver::OnChunk, {.head = "head", .rows = 7});
  observers.Tell(&EngineObserver::OnChunkLeft, {.head = "head", .rows = 7});
  observers.Tell(&EngineObserver::OnChoices, {.head = "head", .choices = absl::MakeConstSpan(&choice, 1)});
  observers.Tell(&EngineObserver::OnContribution, {.head = "head", .added_rows = 3});
  observers.Tell(&EngineObserver::OnStep, {.head = "head", .skipped = true});
  observers.Tell(&EngineObserver::OnDeviceError, absl::InternalError("boom"));
  for (const Recorder* recorder : {&first, &second}) {
    EXPECT_THAT(recorder->rows, ElementsAre(7, -7, 3));
    EXPECT_THAT(recorder->choices, ElementsAre("fused"));
    EXPECT_THAT(recorder->steps, ElementsAre(true));
    EXPECT_THAT(recorder->errors, ElementsAre("boom"));
  }
}

// ---- Refusals ----
// What the engine refuses, and that nothing else changes: bad slices, bad streams, rows that are not finite,
// requests over a limit.

using RefusalsTest = EngineTest;

TEST_F(RefusalsTest, BadSlicesFailTheirStreamAndNothingElse) {
  Start();
  struct Case {
    RowRange rows;
    int64_t extra_bytes;
    const char* message;
  };
  const std::vector<Case> cases = {{{3, 3}, 0, "slice.rows"}, {{4, 9}, 0, "slice.rows"},
                                   {{2, 1}, 0, "slice.rows"}, {{-1, 2}, 0, "slice.rows"},
                                   {{0, 2}, 4, "payload"},    {{0, 2}, -4, "payload"}};
  uint64_t id = 1;
  for (const Case& bad : cases) {
    SCOPED_TRACE(absl::StrCat(bad.rows.begin, " ", bad.rows.end, " ", bad.extra_bytes));
    auto collector = std::make_shared<RowCollector>();
    auto stream = Open(Whole(++id, 8), collector);
    Send(*stream, id, bad.rows, bad.extra_bytes);
    EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(collector->Wait().message()), HasSubstr(bad.message));
    EXPECT_TRUE(errors::GetFieldViolation(collector->Wait()).has_value());
  }
  auto repeated = std::make_shared<RowCollector>();
  auto stream = Open(Whole(100, 8), repeated);
  Send(*stream, 100, {0, 2});
  Send(*stream, 100, {1, 3});
  EXPECT_EQ(repeated->Wait().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(repeated->Wait().message()), HasSubstr("repeats row 1"));

  auto early = std::make_shared<RowCollector>();
  auto short_stream = Open(Whole(101, 8), early);
  short_stream->HalfClose();
  EXPECT_EQ(early->Wait().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(early->Wait().message()), HasSubstr("row 0"));

  auto middle = std::make_shared<RowCollector>();
  StreamSpec with_ignored = Whole(103, 8);
  with_ignored.targets[2] = with_ignored.ignore_index;
  auto cut_stream = Open(with_ignored, middle);
  Send(*cut_stream, 103, {0, 2});
  Send(*cut_stream, 103, {4, 8});
  cut_stream->HalfClose();
  EXPECT_THAT(std::string(middle->Wait().message()), HasSubstr("nothing for row 3"))
      << "rows 0 and 1 were sent, and row 2 has no target";

  auto good = std::make_shared<RowCollector>();
  auto next = Open(Whole(102, 2), good);
  Send(*next, 102, {0, 2});
  EXPECT_TRUE(good->Wait().ok());
}

TEST_F(RefusalsTest, BadSpecsAreRefusedAndChangeNothing) {
  Start();
  const auto code_of = [this](auto change) {
    StreamSpec spec = Whole(1, 4);
    change(spec);
    return engine_->Open(spec, std::make_shared<RowCollector>()).status();
  };
  const auto expect = [&](const char* text, absl::StatusCode code, auto change) {
    const absl::Status status = code_of(change);
    EXPECT_EQ(status.code(), code) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  using enum absl::StatusCode;
  expect("open.head must name a head of this server, got x", kNotFound, [](StreamSpec& s) { s.head = "x"; });
  expect("open.targets[2]", kInvalidArgument, [](StreamSpec& s) { s.targets[2] = 10; });
  expect("open.targets[0]", kInvalidArgument, [](StreamSpec& s) { s.targets[0] = -1; });
  expect("open.targets", kInvalidArgument, [](StreamSpec& s) { s.targets.pop_back(); });
  expect("open.row_weights", kInvalidArgument, [](StreamSpec& s) { s.row_weights = {1.0f}; });
  expect("open.row_weights[1]", kInvalidArgument, [](StreamSpec& s) { s.row_weights = {1, NAN, 1, 1}; });
  expect("open.rows", kInvalidArgument, [](StreamSpec& s) { s.rows = {0, 5}; });
  expect("open.rows", kInvalidArgument, [](StreamSpec& s) { s.rows = {3, 2}; });
  expect("open.microbatch_rows", kInvalidArgument, [](StreamSpec& s) { s.microbatch_rows = -1; });
  expect("open.grad_output", kInvalidArgument, [](StreamSpec& s) { s.grad_output = INFINITY; });
  expect("open.options.use_class_weights", kInvalidArgument,
         [](StreamSpec& s) { s.options.use_class_weights = true; });
  expect("open.normalizer", kInvalidArgument, [](StreamSpec& s) { s.normalizer = 3.0; });
  expect("open.normalizer", kInvalidArgument, [](StreamSpec& s) {
    s.reduction = Reduction::kMean;
    s.normalizer = 0.0;
  });
  expect("open.normalizer", kInvalidArgument, [](StreamSpec& s) {
    s.reduction = Reduction::kMean;
    s.microbatch_rows = 9;
  });
  expect("open.step", kInvalidArgument, [](StreamSpec& s) { s.step.reset(); });
  expect("open.step", kFailedPrecondition, [](StreamSpec& s) { s.step = 1; });
  EXPECT_EQ(engine_->stats().open_streams, 0);
  EXPECT_EQ(engine_->stats().ledger_rows, 0);
}

TEST_F(RefusalsTest, FrozenHeadsRefuseAccumulation) {
  Start();
  AddHead("frozen", false);
  StreamSpec spec = Whole(1, 2);
  spec.head = "frozen";
  EXPECT_EQ(engine_->Open(spec, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  spec.accumulate_gradients = false;
  auto collector = std::make_shared<RowCollector>();
  auto stream = Open(spec, collector);
  Send(*stream, 1, {0, 2});
  EXPECT_TRUE(collector->Wait().ok());
  EXPECT_THAT(device_.accumulated(), IsEmpty());
}

TEST_F(RefusalsTest, ANonFiniteRowFailsItsSliceOnly) {
  Start();
  auto bad = std::make_shared<RowCollector>();
  auto good = std::make_shared<RowCollector>();
  auto bad_stream = Open(Whole(1, 4), bad);
  auto good_stream = Open(Whole(2, 4), good);
  device_.Close();
  Send(*good_stream, 2, {0, 2});
  Send(*bad_stream, 1, {2, 4}, 0, NAN);
  Send(*good_stream, 2, {2, 4});
  device_.Open();
  EXPECT_EQ(bad->Wait().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(bad->Wait().message()), HasSubstr("row 2"));
  EXPECT_TRUE(good->Wait().ok());
  EXPECT_THAT(device_.accumulated(), UnorderedElementsAreArray(Names(2, {0, 4})));
  const absl::Status missing = engine_->ApplyStep("head", {.expected_microbatches = {1, 2}}).status();
  EXPECT_FALSE(missing.ok());
  EXPECT_THAT(GetMissing(missing), ElementsAre("microbatch 1: never opened"));
}

TEST_F(RefusalsTest, LimitsAreEnforced) {
  Start({.max_streams = 2, .max_heads = 2, .max_ledger_rows = 10});
  auto a = Open(Whole(1, 6), std::make_shared<RowCollector>());
  EXPECT_EQ(engine_->Open(Whole(2, 6), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kResourceExhausted);  // ledger rows
  auto b = Open(Whole(2, 4), std::make_shared<RowCollector>());
  EXPECT_EQ(engine_->Open(Whole(3, 0), std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kResourceExhausted);  // streams
  AddHead("second");
  const kernels::HeadConfig config{.hidden_size = kHidden, .vocab_size = 10};
  EXPECT_EQ(engine_->CreateHead("third", config).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->CreateHead("head", config).code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(RefusalsTest, ARefusedStreamDoesNotBeginTheStep) {
  Start({.max_ledger_rows = 10});
  StreamSpec refused = Whole(1, 11);
  refused.run = "refused";
  EXPECT_EQ(engine_->Open(refused, std::make_shared<RowCollector>()).status().code(),
            absl::StatusCode::kResourceExhausted);
  StreamSpec first = Whole(1, 10);
  first.run = "first";
  auto stream = Open(first, std::make_shared<RowCollector>());
  EXPECT_EQ(engine_->Describe("head")->open_run, "first");
}

TEST_F(RefusalsTest, MicrobatchesOfAStepAreBoundedEvenWithoutRows) {
  Start({.max_step_microbatches = 2});
  for (uint64_t id : {1, 2}) EXPECT_NE(Open(Whole(id, 0), std::make_shared<RowCollector>()), nullptr);
  const absl::Status full = engine_->Open(Whole(3, 0), std::make_shared<RowCollector>()).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(errors::GetFieldViolation(full).value_or(errors::FieldViolation()).field, "open.microbatch_id");
  EXPECT_NE(Open(Whole(2, 0), std::make_shared<RowCollector>()), nullptr) << "it is known";
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}).ok());
  EXPECT_NE(Open(Whole(3, 0, 1), std::make_shared<RowCollector>()), nullptr);
}

// ---- Versions of weights ----

TEST(HeadVersionsTest, NoTwoHeadsAndNoTwoVersionsHaveTheSameNumber) {
  VersionCounter counter;
  HeadVersions a(&counter), b(&counter);
  std::set<uint64_t> numbers;
  const auto see = [&](const HeadVersions& versions) {
    numbers.insert({versions.generation(), versions.weights(), versions.moments(), versions.accumulation()});
  };
  see(a), see(b);
  EXPECT_EQ(numbers.size(), 8u);
  a.NewGeneration("zeroed");  // and another accumulation
  b.NewWeights("applied");
  see(a), see(b);
  EXPECT_EQ(numbers.size(), 11u);
  EXPECT_FALSE(numbers.contains(0));
}

TEST(HeadVersionsTest, SaysWhatHasChanged) {
  VersionCounter counter;
  HeadVersions versions(&counter);
  const Binding binding{.step = 0,
                        .generation = versions.generation(),
                        .weights = versions.weights(),
                        .moments = versions.moments(),
                        .accumulation = versions.accumulation()};
  EXPECT_TRUE(versions.Check(binding).ok());
  versions.NewWeights("a checkpoint was loaded");
  EXPECT_EQ(versions.Check(binding).code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(versions.Check(binding).message()), HasSubstr("a checkpoint was loaded"));
  EXPECT_TRUE(versions.Check({.generation = binding.generation, .moments = binding.moments}).ok());
  versions.SetStep(1, "step 0 was applied");
  EXPECT_THAT(std::string(versions.Check(binding).message()), HasSubstr("step 0 was applied"));
}

TEST(HeadVersionsTest, AWriteIsAChangeAtItsFirstRowAndAtItsEnd) {
  VersionCounter counter;
  HeadVersions versions(&counter);
  const uint64_t before = versions.weights();
  const uint64_t write = versions.BeginWrite(Written::kValue);
  const uint64_t begun = versions.weights();
  EXPECT_GT(begun, before);
  EXPECT_TRUE(versions.values_being_written());
  versions.EndWrite(write, /*several=*/true);
  EXPECT_GT(versions.weights(), begun);
  EXPECT_FALSE(versions.being_written());
  const uint64_t ended = versions.weights();
  versions.EndWrite(write, /*several=*/true);
  EXPECT_EQ(versions.weights(), ended) << "it has ended";

  const uint64_t single = versions.BeginWrite(Written::kValue);
  const uint64_t written = versions.weights();
  versions.EndWrite(single, /*several=*/false);
  EXPECT_EQ(versions.weights(), written);
}

TEST(HeadVersionsTest, AMomentIsNoValue) {
  VersionCounter counter;
  HeadVersions versions(&counter);
  const uint64_t weights = versions.weights(), moments = versions.moments();
  const uint64_t write = versions.BeginWrite(Written::kMoment);
  EXPECT_TRUE(versions.being_written());
  EXPECT_FALSE(versions.values_being_written());
  EXPECT_EQ(versions.weights(), weights);
  EXPECT_GT(versions.moments(), moments);
  EXPECT_TRUE(versions.IsWriting(write));
  versions.EndWrites();
  EXPECT_FALSE(versions.IsWriting(write));
  EXPECT_FALSE(versions.being_written());
}

// ---- Shares ----
// Shares of a head that lies on several devices by vocabulary: when they change, and what the engine then
// says of the head.

constexpr kernels::TensorId kWeight = {kernels::Param::kWeight, kernels::Role::kValue};

class SharesTest : public ::testing::Test {
 protected:
  static constexpr int64_t kHidden = 3, kClasses = 10;

  void Start(EngineOptions options = {}) {
    options.slice_bytes = 4096;
    options.staging_bytes = int64_t{1} << 20;
    auto engine = Engine::Create(options, backend_.get(), 42, {});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    const kernels::HeadConfig config{
        .hidden_size = kHidden, .vocab_size = kClasses, .split = kernels::Split::kVocabulary};
    ASSERT_TRUE(engine_->CreateHead("head", config).ok());
    ASSERT_TRUE(engine_->PublishHead("head").ok());
  }
  std::vector<float> Weight() {
    std::vector<float> values(kHidden * kClasses);
    EXPECT_TRUE(engine_
                    ->OnDevice("head",
                               [&](head::Head& head) {
                                 return head.ReadRows(kWeight, 0, kClasses, kernels::DType::kFloat32,
                                                      {reinterpret_cast<uint8_t*>(values.data()),
                                                       values.size() * sizeof(float)});
                               })
                    .ok());
    return values;
  }

  std::unique_ptr<kernels::Backend> backend_ = kernels::testing::MakeCpuGroup(3, 0);
  std::unique_ptr<Engine> engine_;
};

TEST_F(SharesTest, TheHeadSaysWhatItHas) {
  Start();
  std::vector<float> values(kHidden * kClasses);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 0.1f * static_cast<float>(i) - 1.0f;
  ASSERT_TRUE(engine_
                  ->OnDevice("head",
                             [&](head::Head& head) {
                               return head.WriteRows(kWeight, 0, kClasses, kernels::DType::kFloat32,
                                                     {reinterpret_cast<const uint8_t*>(values.data()),
                                                      values.size() * sizeof(float)});
                             })
                  .ok());
  const HeadSnapshot before = *engine_->Describe("head");
  EXPECT_THAT(before.config.shares, IsEmpty());
  ASSERT_EQ(before.devices.size(), 3u);
  EXPECT_EQ(before.devices[0].classes + before.devices[1].classes + before.devices[2].classes, kClasses);
  EXPECT_EQ(before.devices[1].share, 1);
  for (const std::vector<int32_t>& shares : {std::vector<int32_t>{2, 0, 3}, {0, 0, 1}, {}}) {
    ASSERT_TRUE(engine_->SetShares("head", shares).ok());
    const HeadSnapshot head = *engine_->Describe("head");
    EXPECT_EQ(head.config.shares, shares);
    EXPECT_EQ(head.state.step, before.state.step);
    EXPECT_EQ(head.state.generation, before.state.generation);
    EXPECT_EQ(head.state.weights_version, before.state.weights_version);
    EXPECT_EQ(head.limits.max_rows, head.chunk_rows);
    EXPECT_EQ(head.memory.by_kind, engine_->PlanHead("other", head.config)->memory.by_kind);
    EXPECT_EQ(Weight(), values);
  }
  ASSERT_TRUE(engine_->SetShares("head", {2, 0, 3}).ok());
  EXPECT_EQ(engine_->Describe("head")->devices[1].classes, 0);
  EXPECT_EQ(engine_->Describe("head")->devices[2].share, 3);
}

TEST_F(SharesTest, WhileRowsAreUnderWayTheyStay) {
  Start();
  auto collector = std::make_shared<RowCollector>();
  StreamSpec spec = Spec(1, 4, {0, 4}, 0);
  auto stream = engine_->Open(std::move(spec), collector);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const absl::Status refused = engine_->SetShares("head", {2, 0, 3});
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("open ComputeLoss or Backward calls: 1"));
  EXPECT_THAT(engine_->Describe("head")->config.shares, IsEmpty());
  stream->reset();
}

TEST_F(SharesTest, WhatIsWrongChangesNothing) {
  Start();
  for (const std::vector<int32_t>& wrong : {std::vector<int32_t>{1, 1}, {0, 0, 0}, {1, -1, 1}}) {
    EXPECT_EQ(engine_->SetShares("head", wrong).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(engine_->SetShares("none", {1, 1, 1}).code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(engine_->Describe("head")->config.shares, IsEmpty());
}

// Where they stay as they are, a head whose chunks become smaller cannot follow.
TEST_F(SharesTest, GroupsOfADeterministicEngineStay) {
  EngineOptions options;
  options.deterministic = true;
  Start(options);
  const HeadSnapshot before = *engine_->Describe("head");
  const absl::Status status = engine_->SetShares("head", {0, 0, 1});
  const HeadSnapshot after = *engine_->Describe("head");
  EXPECT_EQ(after.limits.row_grid, before.limits.row_grid);
  if (status.ok()) {
    EXPECT_THAT(after.config.shares, ElementsAre(0, 0, 1));
    EXPECT_GE(after.chunk_rows, before.limits.row_grid);
  } else {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(after.config.shares, IsEmpty());
  }
}

class UndividedTest : public EngineTest {};

TEST_F(UndividedTest, HasNoShares) {
  Start();
  EXPECT_EQ(engine_->SetShares("head", {1}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(engine_->Describe("head")->devices.empty());
}

// ---- Random steps ----
// Random steps with extreme options that are valid, on an engine with the CPU backend: a step that says OK
// leaves numbers, one that is refused leaves every bit, and one that fails says so until other weights come.

using Kind = OptimizerOptions::Kind;
using Tensors = std::map<std::string, std::vector<float>>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();
constexpr char kHead[] = "head";

// Random numbers of a seed that changes with each run, unless LOSSD_TEST_SEED says it.
uint64_t Seed() {
  const char* fixed = std::getenv("LOSSD_TEST_SEED");
  return fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : rng_(seed) {}
  bool Chance(double p) { return std::uniform_real_distribution<double>(0, 1)(rng_) < p; }
  double Uniform(double a, double b) { return std::uniform_real_distribution<double>(a, b)(rng_); }
  double Power(double a, double b) { return std::pow(10.0, Uniform(a, b)); }
  double One(std::initializer_list<double> list) { return list.begin()[rng_() % list.size()]; }
  // Mostly what is used, else the ends of what a double has.
  double Rate() { return Chance(0.6) ? Power(-5, 0) : Chance(0.2) ? 0.0 : Power(-320, 39); }
  double Share() {
    return Chance(0.5)   ? One({0.9, 0.95, 0.99, 0.999})
           : Chance(0.5) ? Uniform(0, 1) * 0.999999
                         : One({0.0, 1e-300, 1e-30, 0.5, 1 - 1e-9, std::nextafter(1.0, 0.0)});
  }
  OptimizerOptions Options(bool calm) {
    OptimizerOptions o;
    o.kind = Chance(0.5) ? Kind::kAdamW : Kind::kSgd;
    o.learning_rate = calm ? Power(-4, 0) : Rate();
    o.weight_decay = Chance(0.4)   ? 0.0
                     : Chance(0.5) ? 0.1
                                   : 1.0 / std::max(1e-30, o.learning_rate) * One({0.5, 1, 2, 2.1, 1e3});
    o.decay_vectors = Chance(0.4);
    o.lazy_rows = Chance(0.4);
    o.grad_multiplier = Chance(0.6) ? 1.0 : (Chance(0.5) ? 1 : -1) * Power(-60, 38);
    if (o.kind == Kind::kAdamW) {
      o.beta1 = Share();
      o.beta2 = Share();
      o.epsilon = Chance(0.6) ? 1e-8 : One({0.0, 1e-15, 1e-38, 1e-40, 1e-60, 1.0, 1e30});
      return o;
    }
    o.momentum = Chance(0.4) ? 0.0 : Chance(0.5) ? 0.9 : One({1e-60, 1.0, 1.5, 1e10, 1e30});
    o.nesterov = o.momentum > 0 && Chance(0.4);
    o.dampening = o.nesterov ? 0.0 : One({0.0, 0.0, 0.9, 1.0, -3.0, 1e30});
    return o;
  }
  // Of a tensor: of one order of magnitude, or of many.
  std::vector<float> Values(size_t n, double low, double high) {
    std::vector<float> values(n);
    const bool mixed = Chance(0.3);
    const double order = Uniform(low, high);
    for (float& value : values) {
      const double magnitude = std::pow(10.0, mixed ? Uniform(low, high) : order) * Uniform(0.1, 1.0);
      value = static_cast<float>(std::min<double>(kMost, magnitude) * (Chance(0.5) ? 1 : -1));
      if (Chance(0.1)) value = 0.0f;
    }
    return values;
  }
  std::vector<float> Gradients(size_t n) {
    if (Chance(0.5)) return Values(n, -6, 2);
    if (Chance(0.3)) return Values(n, -45, -36);  // subnormal, too
    return Chance(0.3) ? Values(n, 36, 38.5) : Values(n, -30, 36);
  }

 private:
  std::mt19937_64 rng_;
};

std::string Describe(const OptimizerOptions& o) {
  return absl::StrCat(o.kind == Kind::kAdamW ? "adamw" : "sgd", " lr=", o.learning_rate,
                      " wd=", o.weight_decay, " decay_vectors=", o.decay_vectors, " lazy_rows=", o.lazy_rows,
                      " multiplier=", o.grad_multiplier, " beta1=", o.beta1, " beta2=", o.beta2,
                      " epsilon=", o.epsilon, " momentum=", o.momentum, " dampening=", o.dampening,
                      " nesterov=", o.nesterov);
}

class Listener final : public SilentObserver {
 public:
  void OnStep(const StepReport& report) override { values += report.made_not_finite; }
  int64_t values = 0;
};

class UpdatePropertyTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto backend = kernels::CreateCpuBackend({.threads = 1, .workspace_bytes = 1 << 20});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    auto engine = Engine::Create({.slice_bytes = 8192, .staging_bytes = 16384, .retained_bytes = 1 << 16},
                                 backend_.get(), 42, {&listener_});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    ASSERT_TRUE(engine_->CreateHead(kHead, config_).ok());
    ASSERT_TRUE(engine_->PublishHead(kHead).ok());
    Load(Calm());
  }
  std::vector<kernels::TensorId> Ids() const { return head::CheckpointTensors(config_); }
  size_t SizeOf(kernels::TensorId id) const {
    return static_cast<size_t>(kernels::ShapeOf(config_, id.param).elements());
  }
  // Weights as of a network, a masked class, moments of 0.
  Tensors Calm() {
    Tensors tensors;
    for (const kernels::TensorId id : Ids()) {
      auto& values = tensors[head::TensorName(id)];
      values = id.role == Role::kValue ? draw_.Values(SizeOf(id), -2, 0) : std::vector<float>(SizeOf(id));
      if (masked_ && id == kernels::TensorId{Param::kBias, Role::kValue}) values[2] = -kInf;
    }
    return tensors;
  }
  // As a checkpoint may hold them: every value is a number, moments 2 are not negative.
  Tensors Wild() {
    Tensors tensors = Calm();
    for (const kernels::TensorId id : Ids()) {
      if (draw_.Chance(0.5)) continue;
      auto& values = tensors[head::TensorName(id)];
      values = draw_.Values(values.size(), draw_.Chance(0.5) ? -40 : 30, 38.53);
      if (id.role != Role::kMoment2) continue;
      for (float& value : values) value = std::fabs(value);
    }
    return tensors;
  }
  absl::Status Write(kernels::TensorId id, const std::vector<float>& values) {
    return engine_->OnDevice(kHead, [&](head::Head& head) {
      return head.WriteRows(id, 0, kernels::ShapeOf(config_, id.param).rows, kernels::DType::kFloat32,
                            {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)});
    });
  }
  void Load(const Tensors& tensors) {
    ASSERT_TRUE(engine_->BeginLoad(kHead, {.step = step_, .updates = updates_}, std::nullopt).ok());
    for (const kernels::TensorId id : Ids()) ASSERT_TRUE(Write(id, tensors.at(head::TensorName(id))).ok());
    ASSERT_TRUE(engine_->EndLoad(kHead).ok());
  }
  Tensors Read(bool gradients) {
    Tensors tensors;
    std::vector<kernels::TensorId> ids = Ids();
    for (const kernels::TensorId id : Ids()) {
      if (gradients && id.role == Role::kValue) ids.push_back({id.param, Role::kGradient});
    }
    for (const kernels::TensorId id : ids) {
      std::vector<float> values(SizeOf(id));
      EXPECT_TRUE(engine_
                      ->OnDevice(kHead,
                                 [&](head::Head& head) {
                                   return head.ReadRows(id, 0, kernels::ShapeOf(config_, id.param).rows,
                                                        kernels::DType::kFloat32,
                                                        {reinterpret_cast<uint8_t*>(values.data()),
                                                         values.size() * sizeof(float)});
                                 })
                      .ok());
      tensors[head::TensorName(id)] = std::move(values);
    }
    return tensors;
  }
  static bool SameBits(const Tensors& a, const Tensors& b) {
    for (const auto& [name, values] : a) {
      if (std::memcmp(values.data(), b.at(name).data(), values.size() * sizeof(float)) != 0) return false;
    }
    return a.size() == b.size();
  }
  // What is no number any more, or is another infinity.
  static std::string Broken(const Tensors& before, const Tensors& after) {
    for (const auto& [name, values] : after) {
      for (size_t i = 0; i < values.size(); ++i) {
        const float was = before.at(name)[i];
        if (!std::isfinite(values[i]) && !(values[i] == was))
          return absl::StrCat(name, "[", i, "] was ", was, ", is ", values[i]);
      }
    }
    return "";
  }
  void SetGradients() {
    for (const kernels::TensorId id : Ids()) {
      if (id.role != Role::kValue) continue;
      std::vector<float> values = draw_.Gradients(SizeOf(id));
      if (masked_ && id.param == Param::kBias) values[2] = 0.0f;  // as it is
      const auto cols = static_cast<size_t>(kernels::ShapeOf(config_, id.param).cols);
      for (size_t i = 0; i < values.size(); i += cols) {
        if (draw_.Chance(0.2)) std::fill_n(values.data() + i, cols, 0.0f);  // idle, if rows are lazy
      }
      ASSERT_TRUE(Write({id.param, Role::kGradient}, values).ok());
    }
  }
  // One step; false if it broke what this file is about.
  void Step(const OptimizerOptions& options) {
    SetGradients();
    const Tensors before = Read(true);
    const int64_t told = listener_.values;
    StepRequest request{.step = step_, .optimizer = options};
    request.begin_optimizer = draw_.Chance(0.1);
    const auto result = engine_->ApplyStep(kHead, request);
    const absl::Status usable = engine_->Describe(kHead)->tensors_status;
    SCOPED_TRACE(absl::StrCat("seed ", seed_, ", update ", updates_ + 1, ", ", Describe(options), ": ",
                              result.status().ToString()));
    if (result.ok()) {
      ++counts_["applied"];
      EXPECT_EQ(Broken(before, Read(false)), "");
      step_ = result->state.step;
      updates_ = request.begin_optimizer ? 1 : updates_ + 1;
      EXPECT_TRUE(usable.ok()) << usable;
      EXPECT_EQ(listener_.values, told);
    } else if (absl::IsInvalidArgument(result.status())) {
      ++counts_["refused"];
      EXPECT_TRUE(SameBits(before, Read(true)));
      EXPECT_TRUE(usable.ok()) << usable;
      EXPECT_THAT(std::string(result.status().message()), HasSubstr("optimizer."));
      EXPECT_EQ(listener_.values, told);
    } else {
      ++counts_["diverged"];
      EXPECT_TRUE(absl::IsFailedPrecondition(result.status()));
      EXPECT_THAT(std::string(result.status().message()), HasSubstr("not finite any more"));
      EXPECT_EQ(usable, result.status()) << "the head says it to whoever asks";
      EXPECT_GT(listener_.values, told);
      EXPECT_NE(Broken(before, Read(false)), "");
      Load(Calm());
    }
  }

  const uint64_t seed_ = Seed();
  Draw draw_{seed_};
  bool masked_ = false;
  kernels::HeadConfig config_{.hidden_size = 6,
                              .vocab_size = 5,
                              .has_bias = true,
                              .norm = kernels::Norm::kLayerNorm,
                              .optimizer_state = kernels::OptimizerState::kAdam};
  uint64_t step_ = 0, updates_ = 0;
  Listener listener_;
  std::map<std::string, int> counts_;
  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Engine> engine_;
};

// The bias goes from -infinity to NaN, so as many values as before are not finite.
TEST_F(UpdatePropertyTest, AMaskThatBecomesNanIsTold) {
  masked_ = true;
  Tensors tensors = Calm();
  tensors.at(head::TensorName({Param::kBias, Role::kMoment1}))[2] = -1e37f;
  for (int i = 0; i < 20 && counts_["diverged"] == 0; ++i) {  // some begin with moments of 0
    Load(tensors);
    Step({.learning_rate = 1e-4, .beta2 = 0.0, .epsilon = 1e-8});
  }
  EXPECT_EQ(counts_["diverged"], 1);
}

TEST_F(UpdatePropertyTest, AStepThatSaysOkLeavesNumbers) {
  for (int i = 0; i < 4000 && !HasFailure(); ++i) {
    if (draw_.Chance(0.02)) {
      masked_ = draw_.Chance(0.5);
      Load(draw_.Chance(0.5) ? Wild() : Calm());
    }
    Step(draw_.Options(draw_.Chance(0.3)));
  }
  for (const auto& [what, count] : counts_) RecordProperty(what, count);
  for (const char* what : {"applied", "refused", "diverged"})
    EXPECT_GT(counts_[what], 20) << what << ", seed " << seed_;
}

}  // namespace
}  // namespace lossd::engine::engine_test
