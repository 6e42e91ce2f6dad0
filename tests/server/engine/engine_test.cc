#include "server/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/errors.h"
#include "tests/server/engine/fake_backend.h"
#include "tests/server/engine/stream_specs.h"

namespace lossd::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using ::testing::UnorderedElementsAreArray;

constexpr int64_t kHidden = 3;

// Collects what a stream reports.
class Collector : public StreamObserver {
 public:
  void OnSlice(SliceOutput output) override {
    absl::MutexLock lock(&mutex_);
    EXPECT_FALSE(finished_.HasBeenNotified()) << "a slice after the end";
    slices_.push_back({output.rows, std::move(output.loss)});
    if (output.grad_hidden) {
      const auto* grad = reinterpret_cast<const float*>(output.grad_hidden.data());
      for (int64_t i = 0; i < output.rows.size(); ++i) grads_.push_back(grad[i * kHidden]);
    }
  }
  void OnFinished(absl::Status status, const StreamSummary& summary) override {
    status_ = std::move(status);
    summary_ = summary;
    finished_.Notify();  // aborts if called twice
  }
  const absl::Status& Wait() {
    finished_.WaitForNotification();
    return status_;
  }
  bool finished() const { return finished_.HasBeenNotified(); }
  const StreamSummary& summary() const { return summary_; }
  std::vector<std::pair<RowRange, std::vector<float>>> slices() {
    absl::MutexLock lock(&mutex_);
    return slices_;
  }
  std::vector<float> grads() {
    absl::MutexLock lock(&mutex_);
    return grads_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<std::pair<RowRange, std::vector<float>>> slices_ ABSL_GUARDED_BY(mutex_);
  std::vector<float> grads_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_;
  StreamSummary summary_;
  absl::Notification finished_;
};

class EngineTest : public ::testing::Test {
 protected:
  void Start(EngineOptions options = {}, EngineObserver* observer = nullptr) {
    options.slice_bytes = std::min<int64_t>(options.slice_bytes, 4096);
    options.staging_bytes = std::min<int64_t>(options.staging_bytes, 64 * 4096);
    auto engine = Engine::Create(options, &backend_, 42, observer);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    AddHead("head");
  }
  void AddHead(const std::string& name, bool trainable = true) {
    const kernels::HeadConfig config{.hidden_size = kHidden, .vocab_size = 10, .trainable = trainable};
    ASSERT_TRUE(engine_->CreateHead(name, config, {}).ok());
    ASSERT_TRUE(engine_->PublishHead(name).ok());
  }

  static StreamSpec Whole(uint64_t id, int64_t rows, uint64_t step = 0) {
    return Spec(id, rows, {0, rows}, step);
  }

  std::unique_ptr<Stream> Open(StreamSpec spec, const std::shared_ptr<Collector>& collector) {
    auto stream = engine_->Open(std::move(spec), collector);
    EXPECT_TRUE(stream.ok()) << stream.status();
    if (!stream.ok()) return nullptr;
    (*stream)->Start();
    return *std::move(stream);
  }

  // The first hidden value of a row names it: 1000 id + row.
  static float RowName(uint64_t id, int64_t row) {
    return static_cast<float>(1000 * id + static_cast<uint64_t>(row));
  }

  void Send(Stream& stream, uint64_t id, RowRange rows, int64_t extra_bytes = 0,
            float poison = std::numeric_limits<float>::infinity()) {
    StagingBuffer buffer = AcquireBuffer();
    auto* x = reinterpret_cast<float*>(buffer.data());
    const int64_t space = engine_->staging().buffer_bytes() / static_cast<int64_t>(sizeof(float));
    for (int64_t i = 0; i < rows.size() * kHidden && i < space; ++i) x[i] = 0.5f;
    for (int64_t i = 0; i < rows.size() && i * kHidden < space; ++i)
      x[i * kHidden] = RowName(id, rows.begin + i);
    if (!std::isinf(poison)) x[0] = poison;
    stream.Submit(rows, std::move(buffer), rows.size() * kHidden * 4 + extra_bytes);
  }

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
    auto collector = std::make_shared<Collector>();
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
  void RunBackward(const BackwardSpec& spec, const std::shared_ptr<Collector>& collector) {
    auto stream = engine_->OpenBackward(spec, collector);
    ASSERT_TRUE(stream.ok()) << stream.status();
    (*stream)->Start();
    for (RowRange rows : (*stream)->RetainedSlices()) (*stream)->SubmitRetained(rows, AcquireBuffer());
    ASSERT_TRUE(collector->Wait().ok());
  }
  StagingBuffer AcquireBuffer() {
    absl::Notification acquired;
    StagingBuffer buffer;
    engine_->staging().Acquire([&](StagingBuffer b) {
      buffer = std::move(b);
      acquired.Notify();
    });
    acquired.WaitForNotification();
    return buffer;
  }

  static std::vector<float> Names(uint64_t id, RowRange rows) {
    std::vector<float> names;
    for (int64_t row = rows.begin; row < rows.end; ++row) names.push_back(RowName(id, row));
    return names;
  }

  FakeDevice device_;
  FakeBackend backend_{&device_};
  std::unique_ptr<Engine> engine_;
};

TEST_F(EngineTest, ComputesAndAccumulatesAMicrobatch) {
  Start();
  auto collector = std::make_shared<Collector>();
  StreamSpec spec = Whole(1, 5);
  spec.reduction = Reduction::kMean;
  auto stream = Open(spec, collector);
  Send(*stream, 1, {0, 3});
  Send(*stream, 1, {3, 5});
  ASSERT_TRUE(collector->Wait().ok());
  const StreamSummary& summary = collector->summary();
  EXPECT_EQ(summary.state.incarnation, 42u);
  EXPECT_EQ(summary.valid_rows, 5);
  EXPECT_EQ(summary.accumulated_rows, 5);
  EXPECT_EQ(summary.repeated_rows, 0);
  EXPECT_EQ(summary.normalizer, 5.0);
  EXPECT_EQ(summary.loss_sum, 1000 + 1001 + 1002 + 1003 + 1004);
  EXPECT_THAT(device_.accumulated(), UnorderedElementsAreArray(Names(1, {0, 5})));
  for (size_t i = 0; i < collector->grads().size(); ++i) {
    EXPECT_FLOAT_EQ(collector->grads()[i], RowName(1, static_cast<int64_t>(i)) / 5.0f);
  }
}

TEST_F(EngineTest, TellsWhenChunksAreComputedOtherwise) {
  struct Observer : EngineObserver {
    void OnChoices(absl::string_view head, absl::Span<const kernels::Choice> choices) override {
      EXPECT_EQ(head, "head");
      seen.push_back(choices.front().choice);
    }
    std::vector<std::string> seen;  // read when no chunk is under way
  } observer;
  Start({}, &observer);
  EXPECT_THAT(engine_->Describe("head")->choices,
              ElementsAre(kernels::Choice{.what = "head", .choice = "fake"}));
  EXPECT_THAT(engine_->Describe("head")->last_chunk_choices, IsEmpty());
  using kernels::Algorithm;
  uint64_t id = 0;
  for (Algorithm algorithm : {Algorithm::kAuto, Algorithm::kAuto, Algorithm::kExact, Algorithm::kAuto}) {
    StreamSpec spec = Whole(++id, 2);
    spec.options.algorithm = algorithm;
    auto collector = std::make_shared<Collector>();
    auto stream = Open(spec, collector);
    Send(*stream, id, {0, 2});
    ASSERT_TRUE(collector->Wait().ok());
    EXPECT_EQ(engine_->Describe("head")->last_chunk_choices.front().choice, Name(algorithm));
  }
  EXPECT_THAT(observer.seen, ElementsAre("auto", "exact", "auto"));
  engine_ = nullptr;  // before the observer
}

TEST_F(EngineTest, EmptyAndAllIgnoredMicrobatchesFinish) {
  Start();
  auto empty = std::make_shared<Collector>();
  auto stream = Open(Whole(1, 0), empty);
  EXPECT_TRUE(empty->Wait().ok());

  auto ignored = std::make_shared<Collector>();
  StreamSpec spec = Whole(2, 3);
  spec.reduction = Reduction::kMean;
  spec.targets.assign(3, spec.ignore_index);
  auto second = Open(spec, ignored);
  second->HalfClose();
  EXPECT_TRUE(ignored->Wait().ok());
  EXPECT_EQ(ignored->summary().valid_rows, 0);

  auto sent = std::make_shared<Collector>();
  spec.microbatch_id = 3;
  auto third = Open(spec, sent);
  Send(*third, 3, {0, 3});
  EXPECT_TRUE(sent->Wait().ok());
  EXPECT_THAT(sent->grads(), ElementsAre(0, 0, 0));
  EXPECT_THAT(device_.accumulated(), IsEmpty());
  EXPECT_TRUE(
      engine_->ApplyStep("head", {.expected_microbatches = {1, 2, 3}, .expected_rows = 0}, nullptr).ok());
}

TEST_F(EngineTest, FillsChunksFromSeveralStreams) {
  Start();
  device_.Close();  // let a queue build up behind the first chunk
  std::vector<std::shared_ptr<Collector>> collectors;
  std::vector<std::unique_ptr<Stream>> streams;
  for (uint64_t id = 0; id < 5; ++id) {
    collectors.push_back(std::make_shared<Collector>());
    streams.push_back(Open(Whole(id, 6), collectors.back()));
  }
  StreamSpec other = Whole(9, 6);
  other.options.z_loss = 0.5f;
  collectors.push_back(std::make_shared<Collector>());
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

TEST_F(EngineTest, ResentRowsAreNotAccumulatedAgain) {
  Start();
  auto first = std::make_shared<Collector>();
  {
    auto stream = Open(Whole(1, 8), first);
    Send(*stream, 1, {0, 4});
    while (first->slices().empty()) absl::SleepFor(absl::Milliseconds(1));
  }  // dropped half-way: cancelled
  EXPECT_EQ(first->Wait().code(), absl::StatusCode::kCancelled);

  auto second = std::make_shared<Collector>();
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
  auto a = std::make_shared<Collector>();
  auto b = std::make_shared<Collector>();
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

TEST_F(EngineTest, BadSlicesFailTheirStreamAndNothingElse) {
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
    auto collector = std::make_shared<Collector>();
    auto stream = Open(Whole(++id, 8), collector);
    Send(*stream, id, bad.rows, bad.extra_bytes);
    EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(collector->Wait().message()), HasSubstr(bad.message));
    EXPECT_TRUE(collector->Wait().GetPayload(kFieldPayload).has_value());
  }
  auto repeated = std::make_shared<Collector>();
  auto stream = Open(Whole(100, 8), repeated);
  Send(*stream, 100, {0, 2});
  Send(*stream, 100, {1, 3});
  EXPECT_EQ(repeated->Wait().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(repeated->Wait().message()), HasSubstr("repeats row 1"));

  auto early = std::make_shared<Collector>();
  auto short_stream = Open(Whole(101, 8), early);
  short_stream->HalfClose();
  EXPECT_EQ(early->Wait().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(early->Wait().message()), HasSubstr("row 0"));

  auto good = std::make_shared<Collector>();
  auto next = Open(Whole(102, 2), good);
  Send(*next, 102, {0, 2});
  EXPECT_TRUE(good->Wait().ok());
}

TEST_F(EngineTest, BadSpecsAreRefusedAndChangeNothing) {
  Start();
  const auto code_of = [this](auto change) {
    StreamSpec spec = Whole(1, 4);
    change(spec);
    return engine_->Open(spec, std::make_shared<Collector>()).status();
  };
  const auto expect = [&](const char* text, absl::StatusCode code, auto change) {
    const absl::Status status = code_of(change);
    EXPECT_EQ(status.code(), code) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  using enum absl::StatusCode;
  expect("no head named 'x'", kNotFound, [](StreamSpec& s) { s.head = "x"; });
  expect("open.targets[2]", kInvalidArgument, [](StreamSpec& s) { s.targets[2] = 10; });
  expect("open.targets[0]", kInvalidArgument, [](StreamSpec& s) { s.targets[0] = -1; });
  expect("open.targets", kInvalidArgument, [](StreamSpec& s) { s.targets.pop_back(); });
  expect("open.row_weights", kInvalidArgument, [](StreamSpec& s) { s.row_weights = {1.0f}; });
  expect("open.row_weights[1]", kInvalidArgument, [](StreamSpec& s) { s.row_weights = {1, NAN, 1, 1}; });
  expect("open.rows", kInvalidArgument, [](StreamSpec& s) { s.rows = {0, 5}; });
  expect("open.rows", kInvalidArgument, [](StreamSpec& s) { s.rows = {3, 2}; });
  expect("open.microbatch_rows", kInvalidArgument, [](StreamSpec& s) { s.microbatch_rows = -1; });
  expect("open.grad_output", kInvalidArgument, [](StreamSpec& s) { s.grad_output = INFINITY; });
  expect("open.options.label_smoothing", kInvalidArgument,
         [](StreamSpec& s) { s.options.label_smoothing = 1.5f; });
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

TEST_F(EngineTest, FrozenHeadsRefuseAccumulation) {
  Start();
  AddHead("frozen", false);
  StreamSpec spec = Whole(1, 2);
  spec.head = "frozen";
  EXPECT_EQ(engine_->Open(spec, std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  spec.accumulate_gradients = false;
  auto collector = std::make_shared<Collector>();
  auto stream = Open(spec, collector);
  Send(*stream, 1, {0, 2});
  EXPECT_TRUE(collector->Wait().ok());
  EXPECT_THAT(device_.accumulated(), IsEmpty());
}

TEST_F(EngineTest, ANonFiniteRowFailsItsSliceOnly) {
  Start();
  auto bad = std::make_shared<Collector>();
  auto good = std::make_shared<Collector>();
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
  std::vector<std::string> missing;
  EXPECT_FALSE(engine_->ApplyStep("head", {.expected_microbatches = {1, 2}}, &missing).ok());
  EXPECT_THAT(missing, ElementsAre("microbatch 1: rows [0, 4) of 4"));
}

TEST_F(EngineTest, StepsApplyOnceAndSeeEverythingBefore) {
  Start();
  auto collector = std::make_shared<Collector>();
  auto stream = Open(Whole(1, 4), collector);
  Send(*stream, 1, {0, 4});
  std::vector<std::string> missing;
  StepRequest request{.step = 0, .expected_microbatches = {1, 2}, .expected_rows = 5};
  EXPECT_EQ(engine_->ApplyStep("head", request, &missing).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(missing, ElementsAre("microbatch 2: never opened", "rows: 4 accumulated, 5 expected"));
  EXPECT_EQ(device_.steps, 0);

  request = {.step = 0, .expected_microbatches = {1}, .expected_rows = 4};
  auto result = engine_->ApplyStep("head", request, nullptr);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->state.step, 1u);
  EXPECT_EQ(result->grad_norm, 4.0);
  EXPECT_EQ(result->rows, 4);
  EXPECT_FALSE(result->repeated);

  auto repeat = engine_->ApplyStep("head", request, nullptr);
  ASSERT_TRUE(repeat.ok());
  EXPECT_TRUE(repeat->repeated);
  EXPECT_EQ(repeat->grad_norm, 4.0);
  EXPECT_EQ(device_.steps, 1);
  request.optimizer.learning_rate = 0.5;
  EXPECT_EQ(engine_->ApplyStep("head", request, nullptr).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 7}, nullptr).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine_->GradNorm("head", 0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(engine_->GradNorm("head", 1).ok());
  EXPECT_EQ(device_.steps, 1);
  EXPECT_TRUE(collector->Wait().ok());
}

TEST_F(EngineTest, ARepeatedStepMustBeTheOneThatWasApplied) {
  Start();
  auto collector = std::make_shared<Collector>();
  auto stream = Open(Whole(1, 4), collector);
  Send(*stream, 1, {0, 4});
  ASSERT_TRUE(collector->Wait().ok());
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0, .expected_microbatches = {1}}, nullptr).ok());
  std::vector<std::string> missing;
  const StepRequest other{.step = 0, .expected_microbatches = {1, 2}, .expected_rows = 5};
  const absl::Status refused = engine_->ApplyStep("head", other, &missing).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(missing, ElementsAre("microbatch 2: was not in it", "rows: 4 were in it, 5 expected"));
  const auto repeat = engine_->ApplyStep("head", {.step = 0, .expected_rows = 4}, nullptr);
  ASSERT_TRUE(repeat.ok()) << repeat.status();
  EXPECT_TRUE(repeat->repeated);
  EXPECT_EQ(device_.steps, 1);
}

// A microbatch that a trainer has begun and given up for another one.
TEST_F(EngineTest, AStepDoesNotCountHalfAMicrobatch) {
  Start();
  for (uint64_t id : {1, 2}) {
    auto collector = std::make_shared<Collector>();
    auto stream = Open(Whole(id, 4), collector);
    Send(*stream, id, {0, id == 1 ? 2 : 4});
    ASSERT_TRUE(engine_->GradNorm("head", 0).ok());  // it is computed
    stream->Cancel(absl::CancelledError("given up"));
    collector->Wait().ok();
  }
  std::vector<std::string> missing;
  const StepRequest request{.step = 0, .expected_microbatches = {2}};
  EXPECT_EQ(engine_->ApplyStep("head", request, &missing).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(missing, ElementsAre("microbatch 1: rows [2, 4) of 4 (not expected, but begun)"));
  auto collector = std::make_shared<Collector>();
  auto stream = Open(Whole(1, 4), collector);
  Send(*stream, 1, {0, 4});
  ASSERT_TRUE(collector->Wait().ok());
  EXPECT_TRUE(engine_->ApplyStep("head", request, nullptr).ok()) << "whole, it is welcome";
}

TEST_F(EngineTest, AHalfAppliedStepIsNotTrustedUntilWeightsAreLoaded) {
  Start();
  device_.fail_step = absl::InternalError("boom");
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}, nullptr).status().code(), absl::StatusCode::kInternal);
  device_.fail_step = absl::OkStatus();
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_EQ(engine_->Open(Whole(1, 2), std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->GradNorm("head", 0).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}, nullptr).status().code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(engine_->ResetStep("head", {}, std::nullopt).ok());
  EXPECT_TRUE(engine_->ApplyStep("head", {.step = 0}, nullptr).ok());
}

TEST_F(EngineTest, WeightsThatAreBeingReplacedServeNobody) {
  Start();
  ASSERT_TRUE(engine_->DistrustWeights("head", absl::UnavailableError("replaced")).ok());
  StreamSpec loss_only = Whole(1, 2);
  loss_only.accumulate_gradients = false;
  loss_only.step.reset();
  EXPECT_EQ(engine_->Open(loss_only, std::make_shared<Collector>()).status().message(), "replaced");
  EXPECT_EQ(engine_->Open(Whole(1, 2), std::make_shared<Collector>()).status().message(), "replaced");
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}, nullptr).status().message(), "replaced");
  ASSERT_TRUE(engine_->ResetStep("head", {.step = 3, .updates = 2}, std::nullopt).ok());
  EXPECT_TRUE(engine_->Open(loss_only, std::make_shared<Collector>()).ok());
}

TEST_F(EngineTest, HalfZeroedGradientsAreNotTrusted) {
  Start();
  device_.fail_zero = absl::InternalError("boom");
  EXPECT_EQ(engine_->ZeroGradients("head", 0).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}, nullptr).status().code(), absl::StatusCode::kInternal);
  device_.fail_zero = absl::OkStatus();
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_TRUE(engine_->ApplyStep("head", {.step = 0}, nullptr).ok());
}

TEST_F(EngineTest, StreamsOfAClosedStepEnd) {
  Start();
  auto collector = std::make_shared<Collector>();
  auto stream = Open(Whole(1, 8), collector);
  Send(*stream, 1, {0, 4});
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}, nullptr).ok());
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(collector->Wait().GetPayload(kCurrentStepPayload), absl::Cord("1"));
  Send(*stream, 1, {4, 8});  // too late: dropped, and the buffer comes back
  EXPECT_TRUE(engine_->OnDevice("head", [](head::Head&) { return absl::OkStatus(); }).ok());
  EXPECT_THAT(device_.accumulated(), IsEmpty());
  EXPECT_EQ(engine_->stats().staging_buffers_free, engine_->stats().staging_buffers);
}

TEST_F(EngineTest, ZeroGradientsForgetsTheStep) {
  Start();
  auto collector = std::make_shared<Collector>();
  auto stream = Open(Whole(1, 2), collector);
  Send(*stream, 1, {0, 2});
  ASSERT_TRUE(collector->Wait().ok());
  EXPECT_EQ(engine_->ZeroGradients("head", 3).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  auto again = std::make_shared<Collector>();
  StreamSpec spec = Whole(1, 2);
  spec.targets = {3, 4};  // other contents are fine now
  auto second = Open(spec, again);
  Send(*second, 1, {0, 2});
  ASSERT_TRUE(again->Wait().ok());
  EXPECT_EQ(again->summary().accumulated_rows, 2);
}

TEST_F(EngineTest, AFailedChunkAccumulatesNothing) {
  Start();
  device_.fail_results = [](int64_t chunk) {
    return chunk == 0 ? absl::InternalError("boom") : absl::OkStatus();
  };
  auto collector = std::make_shared<Collector>();
  auto stream = Open(Whole(1, 2), collector);
  Send(*stream, 1, {0, 2});
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kInternal);
  auto again = std::make_shared<Collector>();
  auto second = Open(Whole(1, 2), again);
  Send(*second, 1, {0, 2});
  ASSERT_TRUE(again->Wait().ok());
  EXPECT_EQ(again->summary().accumulated_rows, 2);
}

TEST_F(EngineTest, AHalfAccumulatedChunkIsNotTrusted) {
  Start();
  device_.fail_done = [](int64_t chunk) {
    return chunk == 0 ? absl::InternalError("boom") : absl::OkStatus();
  };
  auto collector = std::make_shared<Collector>();
  auto stream = Open(Whole(1, 2), collector);
  Send(*stream, 1, {0, 2});
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->Open(Whole(2, 2), std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kInternal);
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}, nullptr).status().code(), absl::StatusCode::kInternal);
  ASSERT_TRUE(engine_->ZeroGradients("head", 0).ok());
  EXPECT_TRUE(engine_->ApplyStep("head", {.step = 0}, nullptr).ok());
}

TEST_F(EngineTest, LimitsAreEnforced) {
  Start({.max_streams = 2, .max_heads = 2, .max_ledger_rows = 10});
  auto a = Open(Whole(1, 6), std::make_shared<Collector>());
  EXPECT_EQ(engine_->Open(Whole(2, 6), std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kResourceExhausted);  // ledger rows
  auto b = Open(Whole(2, 4), std::make_shared<Collector>());
  EXPECT_EQ(engine_->Open(Whole(3, 0), std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kResourceExhausted);  // streams
  AddHead("second");
  const kernels::HeadConfig config{.hidden_size = kHidden, .vocab_size = 10};
  EXPECT_EQ(engine_->CreateHead("third", config, {}).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->CreateHead("head", config, {}).code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(EngineTest, HeadsComeAndGo) {
  Start();
  EXPECT_EQ(engine_->CreateHead("big", {.hidden_size = 1 << 20, .vocab_size = 2}, {}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->CreateHead("big", {.hidden_size = 1, .vocab_size = 2'000'000}, {}).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->List().size(), 1u);
  ASSERT_TRUE(engine_->CreateHead("half", {.hidden_size = 1, .vocab_size = 2}, {}).ok());
  EXPECT_EQ(engine_->List().size(), 1u);  // not published
  EXPECT_TRUE(engine_->DeleteHead("half").ok());
  EXPECT_EQ(engine_->DeleteHead("half").code(), absl::StatusCode::kNotFound);

  auto collector = std::make_shared<Collector>();
  auto stream = Open(Whole(1, 2), collector);
  EXPECT_EQ(engine_->DeleteHead("head").code(), absl::StatusCode::kFailedPrecondition);
  stream->Cancel(absl::CancelledError("enough"));
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(engine_->DeleteHead("head").ok());
  EXPECT_EQ(engine_->Describe("head").status().code(), absl::StatusCode::kNotFound);
  AddHead("head");
}

// ---- Deferred microbatches ----

TEST_F(EngineTest, RetainedRowsComeBackWithTheirOwnGradients) {
  Start({.retained_bytes = 4096});
  ForwardRetained(1, 12, {0, 5});
  ForwardRetained(1, 12, {5, 12});
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 1);
  EXPECT_THAT(device_.accumulated(), IsEmpty());

  BackwardSpec spec = Backward(1, {2, 9});
  for (size_t i = 0; i < 7; ++i) spec.grad_loss[i] = static_cast<float>(i);
  auto collector = std::make_shared<Collector>();
  RunBackward(spec, collector);
  ASSERT_TRUE(collector->Wait().ok()) << collector->Wait();
  EXPECT_EQ(collector->summary().accumulated_rows, 7);
  ASSERT_EQ(collector->grads().size(), 7u);
  for (const auto& [range, loss] : collector->slices())
    EXPECT_TRUE(range == RowRange({2, 5}) || range == RowRange({5, 9}));
  std::vector<float> expected;
  for (int64_t i = 0; i < 7; ++i) expected.push_back(static_cast<float>(i) * RowName(1, 2 + i));
  EXPECT_THAT(collector->grads(), UnorderedElementsAreArray(expected));
  EXPECT_THAT(device_.accumulated(), UnorderedElementsAreArray(Names(1, {2, 9})));

  auto again = std::make_shared<Collector>();  // a repeat computes, but accumulates nothing
  RunBackward(spec, again);
  ASSERT_TRUE(again->Wait().ok());
  EXPECT_EQ(again->summary().repeated_rows, 7);
  spec.grad_loss[0] = 5.0f;
  EXPECT_EQ(engine_->OpenBackward(spec, std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kFailedPrecondition);  // other gradients under the same id
}

TEST_F(EngineTest, RetainedRowsAreBoundedReleasedAndExpired) {
  Start({.retained_bytes = 1024});  // 85 rows of 12 bytes, in blocks of 256
  ForwardRetained(1, 40, {0, 40});
  ForwardRetained(2, 40, {0, 40});
  EXPECT_EQ(engine_->stats().retained_bytes_used, 1024);
  StreamSpec third = Retaining(3, 1, {0, 1});
  const absl::Status full = engine_->Open(third, std::make_shared<Collector>()).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), HasSubstr("12 bytes; 1024 of 1024"));

  EXPECT_EQ(engine_->OpenBackward(Backward(9, {0, 1}), std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->OpenBackward(Backward(1, {39, 41}), std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(*engine_->Release("head", 1));
  EXPECT_FALSE(*engine_->Release("head", 1));
  EXPECT_EQ(engine_->Release("nobody", 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 512);
  EXPECT_EQ(engine_->OpenBackward(Backward(1, {0, 1}), std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->ExpireRetained(absl::Now() - absl::Hours(1)), 0);
  EXPECT_EQ(engine_->ExpireRetained(absl::Now() + absl::Hours(1)), 1);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 0);
}

TEST_F(EngineTest, RetainedRowsEndWithTheirStep) {
  Start({.retained_bytes = 1024});
  ForwardRetained(1, 4, {0, 4});
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}, nullptr).ok());
  BackwardSpec spec = Backward(1, {0, 4});
  EXPECT_EQ(engine_->OpenBackward(spec, std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  spec.step = 1;
  EXPECT_EQ(engine_->OpenBackward(spec, std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->stats().retained_bytes_used, 0);
}

// Its losses would come from two different weights, and its rows be kept for the wrong step.
TEST_F(EngineTest, AForwardThatRetainsEndsWithItsStep) {
  Start({.retained_bytes = 1024});
  auto collector = std::make_shared<Collector>();
  auto stream = Open(Retaining(1, 4, {0, 4}), collector);
  Send(*stream, 1, {0, 2});
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}, nullptr).ok());
  Send(*stream, 1, {2, 4});
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kFailedPrecondition) << collector->Wait();
  stream.reset();
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 0);
}

TEST_F(EngineTest, ABackwardEndsWithItsStepEvenIfItDoesNotAccumulate) {
  Start({.retained_bytes = 1024});
  ForwardRetained(1, 4, {0, 4});
  BackwardSpec spec = Backward(1, {0, 4});
  spec.accumulate_gradients = false;
  auto collector = std::make_shared<Collector>();
  auto stream = engine_->OpenBackward(spec, collector);
  ASSERT_TRUE(stream.ok()) << stream.status();
  (*stream)->Start();
  ASSERT_TRUE(engine_->ApplyStep("head", {.step = 0}, nullptr).ok());
  EXPECT_EQ(collector->Wait().code(), absl::StatusCode::kFailedPrecondition) << collector->Wait();
}

TEST_F(EngineTest, AFailedForwardRetainsNothing) {
  Start({.retained_bytes = 1024});
  auto collector = std::make_shared<Collector>();
  auto stream = Open(Retaining(1, 4, {0, 4}), collector);
  Send(*stream, 1, {0, 2});
  stream->Cancel(absl::CancelledError("cut"));
  EXPECT_FALSE(collector->Wait().ok());
  stream.reset();
  EXPECT_EQ(engine_->Describe("head")->retained_microbatches, 0);
  ForwardRetained(1, 4, {0, 4});
  ForwardRetained(1, 4, {0, 4});  // a repeat replaces
  EXPECT_EQ(engine_->Open(Retaining(1, 4, {1, 4}), std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kAlreadyExists);
}

TEST_F(EngineTest, BadBackwardsAreRefused) {
  Start({.retained_bytes = 1024});
  ForwardRetained(1, 4, {0, 4});
  const auto expect = [&](const char* text, auto change) {
    BackwardSpec spec = Backward(1, {0, 4});
    change(spec);
    const absl::Status status = engine_->OpenBackward(spec, std::make_shared<Collector>()).status();
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
  EXPECT_EQ(engine_->Open(spec, std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kInvalidArgument);
  spec = Whole(2, 4);
  spec.retain = true;
  EXPECT_EQ(engine_->Open(spec, std::make_shared<Collector>()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(EngineTest, StopsWithStreamsOpenAndWorkQueued) {
  device_.asynchronous = true;
  device_.chunks_in_flight = 2;
  device_.delay = absl::Milliseconds(2);
  Start();
  std::vector<std::shared_ptr<Collector>> collectors;
  std::vector<std::unique_ptr<Stream>> streams;
  for (uint64_t id = 0; id < 8; ++id) {
    collectors.push_back(std::make_shared<Collector>());
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
          auto collector = std::make_shared<Collector>();
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
        "head", {.step = step, .expected_microbatches = {0, 1, 2, 3}, .expected_rows = kThreads * kRows},
        nullptr);
    ASSERT_TRUE(result.ok()) << result.status();
  }
  EXPECT_EQ(engine_->stats().staging_buffers_free, engine_->stats().staging_buffers);
}

}  // namespace
}  // namespace lossd::engine
