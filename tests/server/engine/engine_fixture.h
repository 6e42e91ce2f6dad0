// SPDX-License-Identifier: Apache-2.0
// The fixtures of engine tests, which start engines and sessions of heads on the fake backend (EngineTest,
// SessionTest, DeterministicTest, ContributionsTest), and what they share: streams, their slices, and
// RowCollector, which collects results.
#ifndef LOSSD_TESTS_SERVER_ENGINE_ENGINE_FIXTURE_H_
#define LOSSD_TESTS_SERVER_ENGINE_ENGINE_FIXTURE_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "server/engine/engine_context.h"
#include "server/engine/head_session.h"
#include "server/engine/stream.h"
#include "tests/server/engine/fake_backend.h"

namespace lossd::engine {

// Collects the results of a stream, row by row. Thread-safe. Hidden states are fp32.
class RowCollector : public StreamObserver {
 public:
  void OnMemory(absl::AnyInvocable<void()> receive) override { receive(); }
  void OnSlice(SliceOutput output) override {
    absl::MutexLock lock(&mutex_);
    EXPECT_FALSE(finished_.HasBeenNotified()) << "a slice after the end";
    slices_.push_back(output.rows);
    const auto row_floats =
        static_cast<size_t>(output.grad_bytes / output.rows.size()) / sizeof(float);  // 0: no gradients
    for (int64_t i = 0; i < output.rows.size(); ++i) {
      const int64_t row = output.rows.begin + i;
      EXPECT_FALSE(losses_.contains(row)) << "row " << row << " twice";
      losses_[row] = output.loss.empty() ? 0.0f : output.loss[static_cast<size_t>(i)];
      if (!output.grad_hidden) continue;
      const auto* grad =
          reinterpret_cast<const float*>(output.grad_hidden.data()) + static_cast<size_t>(i) * row_floats;
      grads_[row].assign(grad, grad + row_floats);
    }
  }
  void OnFinished(absl::Status status, const StreamSummary& summary) override {
    status_ = std::move(status);
    summary_ = summary;
    finished_.Notify();  // aborts if it is called twice
  }
  const absl::Status& Wait() {
    finished_.WaitForNotification();
    return status_;
  }
  bool finished() const { return finished_.HasBeenNotified(); }
  const StreamSummary& summary() const { return summary_; }
  // The slices in the order in which they were completed.
  std::vector<RowRange> slices() {
    absl::MutexLock lock(&mutex_);
    return slices_;
  }
  std::map<int64_t, float> losses() {
    absl::MutexLock lock(&mutex_);
    return losses_;
  }
  std::map<int64_t, std::vector<float>> grads() {
    absl::MutexLock lock(&mutex_);
    return grads_;
  }

 private:
  absl::Mutex mutex_;
  std::vector<RowRange> slices_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, float> losses_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, std::vector<float>> grads_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_;
  StreamSummary summary_;
  absl::Notification finished_;
};

// A slice that was given to a stream, and what happened to it. Thread-safe.
class SentSlice {
 public:
  // Gives the stream rows with their hidden states. The caller claims to have `extra_bytes` more than there
  // are.
  SentSlice(Stream& stream, RowRange rows, std::vector<float> hidden, int64_t extra_bytes = 0) {
    const auto bytes = static_cast<int64_t>(hidden.size() * sizeof(float));
    stream.Receive({.rows = rows,
                    .bytes = bytes + extra_bytes,
                    .copy =
                        [state = state_, hidden = std::move(hidden)](uint8_t* to) {
                          std::memcpy(to, hidden.data(), hidden.size() * sizeof(float));
                          absl::MutexLock lock(&state->mutex);
                          state->copied = true;
                        },
                    .on_queued = Queued()});
  }
  // Gives the stream rows whose hidden states the engine retains.
  SentSlice(Stream& stream, RowRange rows) { stream.Receive({.rows = rows, .on_queued = Queued()}); }

  // Whether the engine had memory for the slice and has copied it.
  bool copied() const {
    absl::MutexLock lock(&state_->mutex);
    return state_->copied;
  }
  bool queued() const {
    absl::MutexLock lock(&state_->mutex);
    return state_->queued;
  }
  // Waits until the slice is queued. False if the stream ended first.
  bool Wait() const {
    absl::MutexLock lock(&state_->mutex);
    state_->mutex.Await(absl::Condition(state_.get(), &State::IsOver));
    return state_->queued;
  }

 private:
  struct State {
    absl::Mutex mutex;
    bool copied ABSL_GUARDED_BY(mutex) = false;
    bool queued ABSL_GUARDED_BY(mutex) = false;
    bool ended ABSL_GUARDED_BY(mutex) = false;
    bool IsOver() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return queued || ended; }
  };
  struct Ended {
    explicit Ended(std::shared_ptr<State> s) : state(std::move(s)) {}
    ~Ended() {
      absl::MutexLock lock(&state->mutex);
      state->ended = true;
    }
    std::shared_ptr<State> state;
  };
  // The function also records, when it is destroyed, that the engine does not have the slice any more.
  absl::AnyInvocable<void(int64_t)> Queued() {
    return [state = state_, ended = std::make_unique<Ended>(state_)](int64_t) {
      absl::MutexLock lock(&state->mutex);
      state->queued = true;
    };
  }

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Sends rows as one slice and waits until it is queued. False if the stream ended first.
inline bool SendSlice(Stream& stream, RowRange rows, const std::vector<float>& hidden) {
  return SentSlice(stream, rows, hidden).Wait();
}

// ---- The streams and rows that engine tests usually send ----

// Rows [begin, end) of a microbatch of `rows` rows that accumulates for `step`.
inline StreamSpec Spec(uint64_t id, int64_t rows, RowRange range, uint64_t step = 0) {
  StreamSpec spec;
  spec.head = "head";
  spec.step = step;
  spec.microbatch_id = id;
  spec.microbatch_rows = rows;
  spec.rows = range;
  spec.hidden_dtype = kernels::DType::kFloat32;
  spec.want_grad_hidden = true;
  spec.accumulate_gradients = true;
  spec.want_rows.loss = true;
  spec.targets.assign(static_cast<size_t>(range.size()), 1);
  return spec;
}

// The first hidden value of a row identifies the row: 1000 id + row.
inline float RowName(uint64_t id, int64_t row) {
  return static_cast<float>(1000 * id + static_cast<uint64_t>(row));
}
inline std::vector<float> Names(uint64_t id, RowRange rows) {
  std::vector<float> names;
  for (int64_t row = rows.begin; row < rows.end; ++row) names.push_back(RowName(id, row));
  return names;
}

// An engine on the fake backend with one head, and streams to it.
class EngineTest : public ::testing::Test {
 protected:
  static constexpr int64_t kHidden = 3;
  static constexpr int64_t kSliceBytes = 4096;

  void Start(EngineOptions options = {}, std::vector<EngineObserver*> observers = {}) {
    options.slice_bytes = std::min(options.slice_bytes, kSliceBytes);
    options.staging_bytes = std::min(options.staging_bytes, 64 * kSliceBytes);
    auto engine = Engine::Create(options, &backend_, 42, std::move(observers));
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    AddHead("head");
  }
  void AddHead(const std::string& name, bool trainable = true) {
    const kernels::HeadConfig config{.hidden_size = kHidden, .vocab_size = 10, .trainable = trainable};
    ASSERT_TRUE(engine_->CreateHead(name, config).ok());
    ASSERT_TRUE(engine_->PublishHead(name).ok());
  }

  static StreamSpec Whole(uint64_t id, int64_t rows, uint64_t step = 0) {
    return Spec(id, rows, {0, rows}, step);
  }

  std::unique_ptr<Stream> Open(StreamSpec spec, const std::shared_ptr<RowCollector>& collector) {
    auto stream = engine_->Open(std::move(spec), collector);
    EXPECT_TRUE(stream.ok()) << stream.status();
    if (!stream.ok()) return nullptr;
    (*stream)->Start();
    return *std::move(stream);
  }

  // Sends a slice and waits until it is queued or its stream has ended.
  void Send(Stream& stream, uint64_t id, RowRange rows, int64_t extra_bytes = 0,
            float poison = std::numeric_limits<float>::infinity()) {
    std::vector<float> x(static_cast<size_t>(std::max<int64_t>(0, rows.size() * kHidden)), 0.5f);
    for (int64_t row = rows.begin; row < rows.end; ++row)
      x[static_cast<size_t>((row - rows.begin) * kHidden)] = RowName(id, row);
    if (!std::isinf(poison)) x[0] = poison;
    SentSlice(stream, rows, std::move(x), extra_bytes).Wait();
  }

  FakeDevice device_;
  FakeBackend backend_{&device_};
  std::unique_ptr<Engine> engine_;
};

// The session of a head on the fake backend, without a device thread: the test runs the work that the session
// offers.
class SessionTest : public ::testing::Test {
 protected:
  static constexpr int64_t kHidden = 3;
  static constexpr int64_t kRowBytes = kHidden * 4;

  void Start(EngineOptions options = {}, std::vector<EngineObserver*> observers = {}) {
    options.slice_bytes = 4096;
    options.staging_bytes = 2 * 4096;
    auto context = EngineContext::Create(options, &backend_, 42, std::move(observers));
    ASSERT_TRUE(context.ok()) << context.status();
    context_ = *std::move(context);
    const kernels::HeadConfig config{.hidden_size = kHidden, .vocab_size = 10, .trainable = true};
    auto session = HeadSession::Create(context_.get(), "head", *backend_.CreateHead(config));
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
  }

  struct Call {
    std::shared_ptr<RowCollector> results = std::make_shared<RowCollector>();
    std::shared_ptr<StreamState> state;
    std::unique_ptr<Stream> stream;
  };
  Call Open(StreamSpec spec) {
    Call call;
    {
      absl::MutexLock lock(&context_->mutex);
      auto state = session_->admission().Open(std::move(spec), call.results);
      EXPECT_TRUE(state.ok()) << state.status();
      if (!state.ok()) return call;
      call.state = *std::move(state);
    }
    call.stream = std::make_unique<Stream>(session_, call.state);
    call.stream->Start();
    return call;
  }
  absl::Status OpenStatus(StreamSpec spec) {
    absl::MutexLock lock(&context_->mutex);
    return session_->admission().Open(std::move(spec), std::make_shared<RowCollector>()).status();
  }
  // A stream whose rows do not accumulate.
  static StreamSpec LossOnly(uint64_t id, int64_t rows) {
    StreamSpec spec = Spec(id, rows, {0, rows});
    spec.accumulate_gradients = spec.want_grad_hidden = false;
    return spec;
  }
  static std::vector<float> Hidden(uint64_t id, RowRange rows) {
    std::vector<float> hidden;
    for (float name : Names(id, rows)) hidden.insert(hidden.end(), {name, 0.5f, 0.5f});
    return hidden;
  }
  static SentSlice Send(const Call& call, RowRange rows) {
    return SentSlice(*call.stream, rows, Hidden(call.state->spec().microbatch_id, rows));
  }
  // Runs one piece of work. False if the session offers none.
  bool RunNext(const DeviceLoad& load = {.max_chunks = 1}) {
    DeviceLoop::Work work;
    {
      absl::MutexLock lock(&context_->mutex);
      work = session_->TakeWork(load);
    }
    if (!work) return false;
    work();
    return true;
  }
  HeadSnapshot Snapshot() {
    absl::MutexLock lock(&context_->mutex);
    return session_->Snapshot();
  }

  FakeDevice device_;
  FakeBackend backend_{&device_};
  std::unique_ptr<EngineContext> context_;
  std::shared_ptr<HeadSession> session_;
};

// An engine in deterministic mode on a scripted device, and streams whose slices wait for their turn.
class DeterministicTest : public ::testing::Test {
 protected:
  static constexpr int64_t kHidden = 3;
  static constexpr int64_t kGroup = 16;  // rows; the chunk size of the fake backend

  void Start(EngineOptions options = {}, std::vector<EngineObserver*> observers = {}) {
    options.deterministic = true;
    options.slice_bytes = 4096;
    options.staging_bytes = std::min<int64_t>(options.staging_bytes, 8 * 4096);
    device_.chunk_rows = kGroup;
    auto engine = Engine::Create(options, &backend_, 42, std::move(observers));
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
    const kernels::HeadConfig config{.hidden_size = kHidden, .vocab_size = 10, .trainable = true};
    ASSERT_TRUE(engine_->CreateHead("head", config).ok());
    ASSERT_TRUE(engine_->PublishHead("head").ok());
  }

  // An open stream and what it reported.
  struct Call {
    std::shared_ptr<RowCollector> results = std::make_shared<RowCollector>();
    std::unique_ptr<Stream> stream;
  };
  Call Open(StreamSpec spec) {
    Call call;
    auto stream = engine_->Open(std::move(spec), call.results);
    EXPECT_TRUE(stream.ok()) << stream.status();
    if (!stream.ok()) return call;
    (*stream)->Start();
    call.stream = *std::move(stream);
    return call;
  }
  Call Open(uint64_t id, int64_t rows, RowRange range) { return Open(Spec(id, rows, range)); }
  Call Open(uint64_t id, int64_t rows) { return Open(id, rows, {0, rows}); }

  static std::vector<float> Hidden(uint64_t id, RowRange rows) {
    std::vector<float> hidden;
    for (float name : Names(id, rows)) hidden.insert(hidden.end(), {name, 0.5f, 0.5f});
    return hidden;
  }
  static bool Send(const Call& call, uint64_t id, RowRange rows) {
    return SendSlice(*call.stream, rows, Hidden(id, rows));
  }
  // Gives the stream a slice without waiting for its turn.
  static SentSlice Begin(const Call& call, uint64_t id, RowRange rows) {
    return SentSlice(*call.stream, rows, Hidden(id, rows));
  }
  // Sends all rows and waits for the end of the stream.
  void SendWhole(uint64_t id, int64_t rows) {
    Call call = Open(id, rows);
    for (int64_t row = 0; row < rows; row += kGroup)
      ASSERT_TRUE(Send(call, id, {row, std::min(rows, row + kGroup)}));
    ASSERT_TRUE(call.results->Wait().ok()) << call.results->Wait();
  }
  void Settle() {
    ASSERT_TRUE(engine_->OnDevice("head", [](head::Head&) { return absl::OkStatus(); }).ok());
  }

  FakeDevice device_;
  FakeBackend backend_{&device_};
  std::unique_ptr<Engine> engine_;
};

// An engine on the fake backend with one head, and contributions to its gradients.
class ContributionsTest : public ::testing::Test {
 protected:
  static constexpr int64_t kHidden = 2;
  static constexpr int64_t kVocab = 10;

  ContributionsTest() { Start({.max_ledger_rows = 25}); }

  void Start(EngineOptions options) {
    options.slice_bytes = 4096;
    options.staging_bytes = 16 * 4096;
    engine_ = *Engine::Create(options, &backend_, 42, {});
    AddHead();
  }
  void AddHead() {
    kernels::HeadConfig config{.hidden_size = kHidden, .vocab_size = kVocab};
    config.has_class_weights = true;
    ASSERT_TRUE(engine_->CreateHead("head", config).ok());
    ASSERT_TRUE(engine_->PublishHead("head").ok());
  }
  static ContributionSpec Spec(uint64_t id, uint64_t step = 0) {
    return {.head = "head", .step = step, .contribution_id = id};
  }
  static StreamSpec Stream(uint64_t id) {
    StreamSpec spec;
    spec.head = "head";
    spec.step = 0;
    spec.microbatch_id = id;
    spec.microbatch_rows = 1;
    spec.rows = {0, 1};
    spec.accumulate_gradients = true;
    spec.targets = {1};
    return spec;
  }
  // Row r of a contribution is {100 id + r, 0}.
  static std::vector<float> Values(uint64_t id, RowRange rows) {
    std::vector<float> values;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      values.push_back(static_cast<float>(100 * id + static_cast<uint64_t>(row)));
      values.push_back(0.0f);
    }
    return values;
  }
  static absl::Span<const uint8_t> Bytes(const std::vector<float>& values) {
    return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)};
  }
  absl::StatusOr<int64_t> Add(const Contribution& contribution, RowRange rows) {
    const std::vector<float> values = Values(contribution.id, rows);
    const absl::StatusOr<AddedRows> added = engine_->AddRows(contribution, rows, Bytes(values));
    if (!added.ok()) return added.status();
    return added->rows;
  }
  absl::StatusOr<StepResult> Apply(StepRequest request) { return engine_->ApplyStep("head", request); }
  // The rows that reached the device: their first elements.
  std::vector<float> Added() {
    std::vector<float> rows;
    const std::vector<float> all = device_.accumulated();
    for (size_t i = 0; i < all.size(); i += kHidden) rows.push_back(all[i]);
    return rows;
  }

  FakeDevice device_;
  FakeBackend backend_{&device_};
  std::unique_ptr<Engine> engine_;
};

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_SERVER_ENGINE_ENGINE_FIXTURE_H_
