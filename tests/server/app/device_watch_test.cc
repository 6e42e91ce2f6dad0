// SPDX-License-Identifier: Apache-2.0
#include "server/app/device_watch.h"

#include <gtest/gtest.h>

namespace lossd::app::device_watch_test {
namespace {

TEST(DeviceWatchTest, AFailedOperationIsNotALostDevice) {
  int lost = 0;
  DeviceWatch watch([&](const absl::Status&) { ++lost; });
  watch.OnDeviceError(absl::InternalError("one chunk failed"));
  EXPECT_FALSE(watch.lost());
  EXPECT_EQ(lost, 0);
}

TEST(DeviceWatchTest, ReportsALostDeviceOnce) {
  int lost = 0;
  DeviceWatch watch([&](const absl::Status& status) {
    EXPECT_EQ(status.message(), "the device fell off the bus");
    ++lost;
  });
  for (int i = 0; i < 3; ++i) watch.OnDeviceError(absl::UnavailableError("the device fell off the bus"));
  EXPECT_TRUE(watch.lost());
  EXPECT_EQ(lost, 1);
}

}  // namespace
}  // namespace lossd::app::device_watch_test
