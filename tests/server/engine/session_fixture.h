// SPDX-License-Identifier: Apache-2.0
// The session of a head on the fake backend, without a device thread: a test runs what the session offers.
#ifndef LOSSD_TESTS_SERVER_ENGINE_SESSION_FIXTURE_H_
#define LOSSD_TESTS_SERVER_ENGINE_SESSION_FIXTURE_H_

#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/engine/engine_context.h"
#include "server/engine/head_session.h"
#include "tests/server/engine/fake_backend.h"
#include "tests/server/engine/row_collector.h"
#include "tests/server/engine/sent_slice.h"
#include "tests/server/engine/stream_specs.h"

namespace lossd::engine {

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
  // A loss of rows that do not accumulate.
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
  // Runs one piece of work; false if none is offered.
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

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_SERVER_ENGINE_SESSION_FIXTURE_H_
