// SPDX-License-Identifier: Apache-2.0
// An engine on the fake backend with one head, and gradients for it from outside.
#ifndef LOSSD_TESTS_SERVER_ENGINE_CONTRIBUTIONS_FIXTURE_H_
#define LOSSD_TESTS_SERVER_ENGINE_CONTRIBUTIONS_FIXTURE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "tests/server/engine/fake_backend.h"

namespace lossd::engine {

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
  // What reached the device: the first elements of rows.
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

#endif  // LOSSD_TESTS_SERVER_ENGINE_CONTRIBUTIONS_FIXTURE_H_
