// SPDX-License-Identifier: Apache-2.0
#include "kernels/heartbeat.h"

#include <gtest/gtest.h>

#include "absl/time/clock.h"

namespace lossd::kernels::heartbeat_test {
namespace {

TEST(HeartbeatTest, SilenceIsTheTimeSinceTheLastBeat) {
  Heartbeat beating;
  Heartbeat silent;
  absl::SleepFor(absl::Milliseconds(50));
  beating.Beat();
  const absl::Duration since_the_beat = beating.Silence();
  EXPECT_GE(since_the_beat, absl::ZeroDuration());
  EXPECT_GE(silent.Silence(), since_the_beat + absl::Milliseconds(50));
}

}  // namespace
}  // namespace lossd::kernels::heartbeat_test
