// SPDX-License-Identifier: Apache-2.0
#include "server/app/health.h"

#include <gtest/gtest.h>

namespace lossd::app::health_test {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(10);

TEST(HealthTest, AServerThatWorks) {
  EXPECT_EQ(Liveness({.device_silence = kTimeout}, kTimeout).status, 200);
  EXPECT_EQ(Liveness({}, kTimeout).body, "ok\n");
  EXPECT_EQ(Readiness({}).status, 200);
  EXPECT_EQ(Readiness({}).body, "ok\n");
}

TEST(HealthTest, AServerThatDrainsIsLiveAndNotReady) {
  EXPECT_EQ(Liveness({.draining = true}, kTimeout).status, 200);
  EXPECT_EQ(Readiness({.draining = true}).status, 503);
  EXPECT_EQ(Readiness({.draining = true}).body, "draining\n");
}

TEST(HealthTest, ALostDevice) {
  const Health health = {.draining = true, .device_lost = true};
  EXPECT_EQ(Liveness(health, kTimeout).status, 503);
  EXPECT_EQ(Liveness(health, kTimeout).body, "device lost\n");
  EXPECT_EQ(Readiness(health).status, 503);
  EXPECT_EQ(Readiness(health).body, "device lost\n");
}

TEST(HealthTest, ASilentDevice) {
  const Health health = {.device_silence = absl::Milliseconds(12'345)};
  EXPECT_EQ(Liveness(health, kTimeout).status, 503);
  EXPECT_EQ(Liveness(health, kTimeout).body, "no progress on the device for 12s\n");
  EXPECT_EQ(Readiness(health).status, 200);
}

TEST(HealthTest, AThreadThatDoesNotAnswer) {
  const Health health = {.threads = {{{"one", absl::Seconds(2)}, {"the other", absl::Milliseconds(31'500)}}}};
  EXPECT_EQ(Liveness(health, absl::Minutes(10)).status, 503);
  EXPECT_EQ(Liveness(health, absl::Minutes(10)).body, "no answer of the other for 31s\n");
  EXPECT_EQ(Liveness(health, absl::Seconds(1)).body, "no answer of one for 2s\n")
      << "a shorter timeout holds, too";
  EXPECT_EQ(Readiness(health).status, 200);
  EXPECT_EQ(Liveness({.threads = {{{"one", kThreadTimeout}}}}, absl::Minutes(10)).status, 200);
}

TEST(HealthTest, TroubleIsWhatAPersonHasToKnowFirst) {
  EXPECT_EQ(Trouble({}, kTimeout), "");
  EXPECT_EQ(Trouble({.draining = true}, kTimeout), "draining");
  EXPECT_EQ(Trouble({.draining = true, .device_lost = true}, kTimeout), "device lost");
  EXPECT_EQ(Trouble({.draining = true, .device_silence = absl::Seconds(12)}, kTimeout),
            "no progress on the device for 12s");
}

}  // namespace
}  // namespace lossd::app::health_test
