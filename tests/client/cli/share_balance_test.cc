// SPDX-License-Identifier: Apache-2.0
#include "client/cli/share_balance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace lossd::cli::share_balance_test {
namespace {

using ::testing::ElementsAre;

TEST(ShareBalanceTest, EqualDevicesGetTheSame) {
  EXPECT_THAT(BalancedShares({{100, 1.0, 0}, {100, 1.0, 0}}), ElementsAre(500, 500));
  // However the classes lie now.
  EXPECT_THAT(BalancedShares({{300, 3.0, 0}, {100, 1.0, 0}, {0, 0, 0}}), ElementsAre(333, 333, 333));
}

TEST(ShareBalanceTest, ASlowerDeviceGetsLess) {
  EXPECT_THAT(BalancedShares({{100, 1.0, 0}, {100, 3.0, 0}}), ElementsAre(750, 250));
}

// As lossd.torch.balance() fills stages.
TEST(ShareBalanceTest, TheHeadFillsWhatStagesLeave) {
  EXPECT_THAT(BalancedShares({{100, 2.0, 10}, {100, 2.0, 1}, {0, 0, 1}}), ElementsAre(0, 500, 500));
  EXPECT_THAT(BalancedShares({{100, 2.0, 3}, {100, 2.0, 1}}), ElementsAre(250, 750));
}

TEST(ShareBalanceTest, DevicesThatHaveClassesEndTogether) {
  const std::vector<DeviceLoad> loads = {{1000, 2.0, 5.0}, {3000, 9.0, 4.0}, {500, 0.5, 6.0}, {0, 0, 20.0}};
  const std::vector<uint32_t> shares = BalancedShares(loads);
  const uint32_t whole = std::accumulate(shares.begin(), shares.end(), 0u);
  EXPECT_NEAR(whole, 1000, 2);
  EXPECT_EQ(shares[3], 0);
  const double first = SecondsWith(loads[0], loads, shares[0], whole);
  for (size_t i = 1; i < 3; ++i) EXPECT_NEAR(SecondsWith(loads[i], loads, shares[i], whole), first, 0.02 * first);
  EXPECT_LT(first, 20.0);
}

}  // namespace
}  // namespace lossd::cli::share_balance_test
