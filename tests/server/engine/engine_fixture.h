// SPDX-License-Identifier: Apache-2.0
// An engine on the fake backend with one head, and streams to it.
#ifndef LOSSD_TESTS_SERVER_ENGINE_ENGINE_FIXTURE_H_
#define LOSSD_TESTS_SERVER_ENGINE_ENGINE_FIXTURE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "tests/server/engine/fake_backend.h"
#include "tests/server/engine/row_collector.h"
#include "tests/server/engine/sent_slice.h"
#include "tests/server/engine/stream_specs.h"

namespace lossd::engine {

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

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_SERVER_ENGINE_ENGINE_FIXTURE_H_
