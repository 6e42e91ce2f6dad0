// SPDX-License-Identifier: Apache-2.0
// What the engine tells as a failure of the device: what the backend has said, and nothing that it says
// itself. The server ends when it is told UNAVAILABLE.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/engine.h"
#include "server/engine/engine_observer.h"
#include "tests/server/engine/engine_fixture.h"
#include "tests/server/engine/silent_observer.h"

namespace lossd::engine::device_errors_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class DeviceErrorsTest : public EngineTest {
 protected:
  struct Errors final : SilentObserver {
    void OnDeviceError(const absl::Status& status) override { told.emplace_back(status.message()); }
    std::vector<std::string> told;
  };

  void SetUp() override { Start({}, {&errors_}); }
  absl::Status Read() {
    auto reader = engine_->OpenReader("head");
    if (!reader.ok()) return reader.status();
    std::vector<uint8_t> values(static_cast<size_t>(10 * kHidden) * 4);
    return (*reader)->Read({}, {0, 10}, kernels::DType::kFloat32, absl::MakeSpan(values)).status();
  }

  Errors errors_;
};

TEST_F(DeviceErrorsTest, AHeadThatIsBeingLoadedIsNoLossOfTheDevice) {
  ASSERT_TRUE(engine_->BeginLoad("head", {.step = 3, .updates = 3}, std::nullopt).ok());
  EXPECT_EQ(engine_->GradNorm("head", std::nullopt).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 3}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Read().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(errors_.told, IsEmpty());
}

TEST_F(DeviceErrorsTest, ATensorThatIsBeingWrittenIsNoLossOfTheDevice) {
  auto writer = engine_->OpenWriter("head");
  ASSERT_TRUE(writer.ok()) << writer.status();
  (*writer)->SetRows({}, {0, 10});
  const std::vector<uint8_t> values(static_cast<size_t>(5 * kHidden) * 4);
  ASSERT_TRUE((*writer)->Write({0, 5}, kernels::DType::kFloat32, values).ok());
  EXPECT_EQ(engine_->ApplyStep("head", {.step = 0}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Read().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(errors_.told, IsEmpty());
}

TEST_F(DeviceErrorsTest, TheNormOfAStepNoticesALostDevice) {
  device_.fail_norm = absl::UnavailableError("fell off the bus");
  EXPECT_FALSE(engine_->GradNorm("head", std::nullopt).ok());
  EXPECT_THAT(errors_.told, ElementsAre("fell off the bus"));
  EXPECT_FALSE(engine_->ApplyStep("head", {.step = 0}).ok());
  EXPECT_THAT(errors_.told, ElementsAre("fell off the bus", "fell off the bus"));
}

}  // namespace
}  // namespace lossd::engine::device_errors_test
