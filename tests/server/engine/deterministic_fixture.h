// SPDX-License-Identifier: Apache-2.0
// An engine in deterministic mode on a scripted device, and streams whose slices wait for their turn.
#ifndef LOSSD_TESTS_SERVER_ENGINE_DETERMINISTIC_FIXTURE_H_
#define LOSSD_TESTS_SERVER_ENGINE_DETERMINISTIC_FIXTURE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "tests/server/engine/fake_backend.h"
#include "tests/server/engine/row_collector.h"
#include "tests/server/engine/sent_slice.h"
#include "tests/server/engine/stream_specs.h"

namespace lossd::engine {

class DeterministicTest : public ::testing::Test {
 protected:
  static constexpr int64_t kHidden = 3;
  static constexpr int64_t kGroup = 16;  // rows; the fake's chunk

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
  // Hands over a slice without waiting for its turn.
  static SentSlice Begin(const Call& call, uint64_t id, RowRange rows) {
    return SentSlice(*call.stream, rows, Hidden(id, rows));
  }
  // Sends and waits for the end.
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

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_SERVER_ENGINE_DETERMINISTIC_FIXTURE_H_
