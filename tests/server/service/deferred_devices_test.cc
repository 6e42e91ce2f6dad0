// SPDX-License-Identifier: Apache-2.0
// Losses first and gradients later, on a server whose heads lie on several devices: it trains as one device
// does, and a deterministic one gives the bits of gradients that come directly.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/server/service/deferred_training.h"
#include "tests/server/service/test_server.h"

namespace lossd::app::testing::deferred_devices_test {
namespace {

ServerOptions WithDevices(int devices, const std::string& split) {
  ServerOptions options = SmallServer();
  options.split = split;
  options.backend = "cpu";
  options.cpu_devices = devices;
  options.retained_bytes = 4 << 20;
  return options;
}

const std::vector<std::pair<int, std::string>> kLayouts = {
    {2, "rows"}, {3, "rows"}, {4, "rows"}, {2, "vocabulary"}, {3, "vocabulary"}};

using Defers = std::function<bool(size_t)>;
bool All(size_t) { return true; }
bool None(size_t) { return false; }
bool EverySecond(size_t i) { return i % 2 == 0; }

Trained TrainOn(const ServerOptions& options, const std::vector<SmallRows>& data, const Defers& defers,
                bool ones, uint64_t seed) {
  TestServer server(options);
  std::mt19937_64 rng(seed);
  const auto client = Connect(server.target(), 1 + static_cast<int>(rng() % 3));
  EXPECT_TRUE(client->CreateHead(SmallHead()).ok());
  const Trained trained = DeferredTraining(*client, data, ones).Run(3, defers, rng);
  const auto head = client->DescribeHead("head");
  EXPECT_TRUE(head.ok()) << head.status();
  EXPECT_EQ(head->retained_microbatches(), 0u) << "they end with their step";
  return trained;
}

TEST(DeferredDevicesTest, SeveralDevicesTrainAsOneDoes) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  const Trained one = TrainOn(WithDevices(1, "any"), data, EverySecond, /*ones=*/false, seed);
  for (const auto& [devices, split] : kLayouts) {
    SCOPED_TRACE(::testing::Message() << devices << " by " << split);
    const Trained got = TrainOn(WithDevices(devices, split), data, EverySecond, /*ones=*/false, seed + 1);
    for (size_t i = 0; i < data.size(); ++i) ExpectNear(got.grads[i], one.grads[i], 1e-4);
    ASSERT_EQ(got.losses.size(), one.losses.size());
    for (size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(got.losses[i], one.losses[i], 1e-4 * (1.0 + std::fabs(one.losses[i])));
    }
    for (size_t i = 0; i < one.norms.size(); ++i)
      EXPECT_NEAR(got.norms[i], one.norms[i], 1e-4 * one.norms[i]);
    for (size_t i = 0; i < one.tensors.size(); ++i) ExpectNear(got.tensors[i], one.tensors[i], 1e-3);
  }
}

TEST(DeferredDevicesTest, DeterministicDevicesGiveTheBitsOfGradientsThatComeDirectly) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  std::vector<std::pair<int, std::string>> layouts = kLayouts;
  layouts.emplace_back(1, "any");
  for (const auto& [devices, split] : layouts) {
    SCOPED_TRACE(::testing::Message() << devices << " by " << split);
    ServerOptions options = WithDevices(devices, split);
    options.deterministic = true;
    const Trained direct = TrainOn(options, data, None, /*ones=*/true, seed);
    for (const Defers& defers : {Defers(All), Defers(EverySecond)}) {
      const Trained other = TrainOn(options, data, defers, /*ones=*/true, rng());
      EXPECT_EQ(other.tensors, direct.tensors);
      EXPECT_EQ(other.grads, direct.grads);
      EXPECT_EQ(other.norms, direct.norms);
    }
  }
}

}  // namespace
}  // namespace lossd::app::testing::deferred_devices_test
