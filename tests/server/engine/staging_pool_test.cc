#include "server/engine/staging_pool.h"

#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "tests/server/engine/fake_backend.h"

namespace lossd::engine {
namespace {

class StagingPoolTest : public ::testing::Test {
 protected:
  std::unique_ptr<StagingPool> Pool(int64_t bytes, int64_t buffers) {
    auto pool = StagingPool::Create(&backend_, bytes, buffers);
    EXPECT_TRUE(pool.ok()) << pool.status();
    return *std::move(pool);
  }

  FakeDevice device_;
  FakeBackend backend_{&device_};
};

TEST_F(StagingPoolTest, RefusesNothing) {
  EXPECT_FALSE(StagingPool::Create(&backend_, 0, 1).ok());
  EXPECT_FALSE(StagingPool::Create(&backend_, 1, 0).ok());
}

TEST_F(StagingPoolTest, BuffersAreDistinctAndComeBack) {
  auto pool = Pool(100, 2);
  EXPECT_EQ(pool->buffer_bytes(), 128);
  StagingBuffer a, b;
  EXPECT_EQ(pool->Acquire([&](StagingBuffer buffer) { a = std::move(buffer); }), 0u);
  EXPECT_EQ(pool->Acquire([&](StagingBuffer buffer) { b = std::move(buffer); }), 0u);
  ASSERT_TRUE(a && b);
  EXPECT_GE(std::abs(a.data() - b.data()), 128);
  EXPECT_EQ(pool->free_buffers(), 0);
  a.Release();
  a.Release();  // harmless
  b = StagingBuffer();
  EXPECT_EQ(pool->free_buffers(), 2);
}

TEST_F(StagingPoolTest, WaitersAreServedInOrder) {
  auto pool = Pool(64, 1);
  StagingBuffer held;
  pool->Acquire([&](StagingBuffer buffer) { held = std::move(buffer); });
  std::vector<int> order;
  std::vector<StagingBuffer> got;
  for (int i = 0; i < 3; ++i) {
    EXPECT_NE(pool->Acquire([&, i](StagingBuffer buffer) {
      order.push_back(i);
      got.push_back(std::move(buffer));
    }),
              0u);
  }
  held.Release();
  EXPECT_EQ(order, (std::vector<int>{0}));
  got.back().Release();
  EXPECT_EQ(order, (std::vector<int>{0, 1}));
  got.back().Release();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
}

TEST_F(StagingPoolTest, ForgottenWaitersAreNotServed) {
  auto pool = Pool(64, 1);
  StagingBuffer held;
  pool->Acquire([&](StagingBuffer buffer) { held = std::move(buffer); });
  const uint64_t ticket = pool->Acquire([](StagingBuffer) { FAIL() << "was forgotten"; });
  EXPECT_TRUE(pool->Forget(ticket));
  EXPECT_FALSE(pool->Forget(ticket));
  held.Release();
  EXPECT_EQ(pool->free_buffers(), 1);
}

TEST_F(StagingPoolTest, ManyThreadsShareFewBuffers) {
  auto pool = Pool(64, 3);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool] {
      for (int i = 0; i < 500; ++i) {
        StagingBuffer mine;
        absl::Notification served;
        pool->Acquire([&](StagingBuffer buffer) {
          mine = std::move(buffer);
          served.Notify();
        });
        served.WaitForNotification();
        mine.data()[0] = static_cast<uint8_t>(i);
        mine.Release();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->free_buffers(), 3);
}

}  // namespace
}  // namespace lossd::engine
