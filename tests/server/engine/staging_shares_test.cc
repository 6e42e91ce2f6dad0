// SPDX-License-Identifier: Apache-2.0
// Shares of the staging pool.
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"
#include "server/engine/staging_pool.h"
#include "tests/server/engine/fake_backend.h"

namespace lossd::engine::staging_shares_test {
namespace {

// Takes all that `holder` gets without waiting.
std::vector<StagingBuffer> Hoard(StagingPool& pool, absl::string_view holder, int64_t bytes) {
  std::vector<StagingBuffer> hoard;
  while (true) {
    StagingPool::Acquired acquired = pool.Acquire(holder, bytes, [](StagingBuffer) {});
    if (!acquired.buffer) {
      pool.Forget(acquired.ticket);
      return hoard;
    }
    hoard.push_back(std::move(acquired.buffer));
  }
}

TEST(StagingSharesTest, AHolderThatGivesNothingBackHoldsUpItselfOnly) {
  FakeDevice device;
  FakeBackend backend(&device);
  auto pool = StagingPool::Create(&backend, 64 * 4096, 4096, 0.5);
  ASSERT_TRUE(pool.ok());
  std::vector<StagingBuffer> stopped = Hoard(**pool, "stopped", 4096);
  EXPECT_EQ(stopped.size(), 32u);
  bool served = false;
  const uint64_t ticket = (*pool)->Acquire("stopped", 4096, [&](StagingBuffer) { served = true; }).ticket;
  EXPECT_NE(ticket, 0u);
  EXPECT_EQ((*pool)->over_share(), 1);
  for (int i = 0; i < 100; ++i) {
    StagingPool::Acquired other = (*pool)->Acquire("other", 4096, [](StagingBuffer) {});
    ASSERT_TRUE(other.buffer) << i;
  }
  EXPECT_FALSE(served);
  stopped.pop_back();
  EXPECT_TRUE(served);
}

TEST(StagingSharesTest, ManyGreedyHoldersLeaveSomethingForTheNext) {
  FakeDevice device;
  FakeBackend backend(&device);
  auto pool = StagingPool::Create(&backend, 64 * 4096, 4096, 0.5);
  ASSERT_TRUE(pool.ok());
  const std::vector<StagingBuffer> a = Hoard(**pool, "a", 4096);
  const std::vector<StagingBuffer> b = Hoard(**pool, "b", 4096);
  const std::vector<StagingBuffer> c = Hoard(**pool, "c", 4096);
  EXPECT_EQ(a.size(), 32u);
  EXPECT_EQ(b.size(), 16u);
  EXPECT_EQ(c.size(), 8u);
  EXPECT_EQ((*pool)->used_bytes(), 56 * 4096);
}

}  // namespace
}  // namespace lossd::engine::staging_shares_test
