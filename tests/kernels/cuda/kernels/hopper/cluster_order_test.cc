// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/kernels/hopper/cluster_order.h"

#include <set>

#include "gtest/gtest.h"

namespace lossd::kernels::cuda::hopper::cluster_order_test {
namespace {

// On a machine without a GPU too: no groups are known there.
TEST(ClusterOrder, EveryPositionIsPreferredOnce) {
  const ClusterOrder order = FindClusterOrder();
  const std::set<int> positions(std::begin(order.preferred), std::end(order.preferred));
  EXPECT_EQ(positions.size(), kMostClusters);
  EXPECT_EQ(*positions.begin(), 0);
  EXPECT_EQ(*positions.rbegin(), kMostClusters - 1);
}

}  // namespace
}  // namespace lossd::kernels::cuda::hopper::cluster_order_test
