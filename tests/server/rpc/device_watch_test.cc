#include "server/rpc/device_watch.h"

#include <gtest/gtest.h>

namespace lossd::rpc {
namespace {

class Counter final : public engine::EngineObserver {
 public:
  void OnChunk(absl::string_view, int64_t, int64_t chunk_rows, int64_t, kernels::Algorithm algorithm,
               double) override {
    rows += chunk_rows;
    last_algorithm = algorithm;
  }
  void OnSlice(absl::string_view, double) override { ++slices; }
  void OnStep(absl::string_view, bool) override { ++steps; }
  void OnChoices(absl::string_view, absl::Span<const kernels::Choice> choices) override {
    last_choice = choices.back().choice;
  }
  void OnDeviceError(const absl::Status&) override { ++errors; }
  int64_t rows = 0;
  int slices = 0;
  int steps = 0;
  int errors = 0;
  std::string last_choice;
  kernels::Algorithm last_algorithm = kernels::Algorithm::kExact;
};

TEST(DeviceWatchTest, PassesEventsOn) {
  Counter counter;
  int lost = 0;
  DeviceWatch watch(&counter, [&](const absl::Status&) { ++lost; });
  watch.OnChunk("head", 1, 7, 7, kernels::Algorithm::kFiltered, 0.1);
  watch.OnSlice("head", 0.1);
  watch.OnStep("head", false);
  const kernels::Choice choice = {.what = "loss", .choice = "fused"};
  watch.OnChoices("head", absl::MakeConstSpan(&choice, 1));
  watch.OnDeviceError(absl::InternalError("one chunk failed"));
  EXPECT_EQ(counter.rows, 7);
  EXPECT_EQ(counter.last_algorithm, kernels::Algorithm::kFiltered);
  EXPECT_EQ(counter.slices, 1);
  EXPECT_EQ(counter.steps, 1);
  EXPECT_EQ(counter.errors, 1);
  EXPECT_EQ(counter.last_choice, "fused");
  EXPECT_FALSE(watch.lost());
  EXPECT_EQ(lost, 0);
}

TEST(DeviceWatchTest, ReportsALostDeviceOnce) {
  Counter counter;
  int lost = 0;
  DeviceWatch watch(&counter, [&](const absl::Status&) { ++lost; });
  for (int i = 0; i < 3; ++i) watch.OnDeviceError(absl::UnavailableError("the device fell off the bus"));
  EXPECT_TRUE(watch.lost());
  EXPECT_EQ(lost, 1);
  EXPECT_EQ(counter.errors, 3);
}

}  // namespace
}  // namespace lossd::rpc
