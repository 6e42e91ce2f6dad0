// SPDX-License-Identifier: Apache-2.0
#include "server/engine/engine_observer.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::engine::engine_observer_test {
namespace {

using ::testing::ElementsAre;

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

}  // namespace
}  // namespace lossd::engine::engine_observer_test
