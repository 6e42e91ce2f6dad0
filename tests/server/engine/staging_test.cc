// SPDX-License-Identifier: Apache-2.0
// Tests of staging.h: fair shares, ranges of memory, the staging pool, and how several takers share it.
#include "server/engine/staging.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "tests/server/engine/fake_backend.h"

// ---- Fair share ----

namespace lossd::engine::fair_share_test {
namespace {

using Answer = FairShare::Answer;

int64_t TakeAll(FairShare& shares, const std::string& holder) {
  int64_t taken = 0;
  while (shares.Take(holder, 1) == Answer::kYes) ++taken;
  return taken;
}

TEST(FairShareTest, EachGreedyHolderLeavesSomethingForTheNext) {
  FairShare shares(256, 0.5);
  EXPECT_EQ(TakeAll(shares, "a"), 128);
  EXPECT_EQ(TakeAll(shares, "b"), 64);
  EXPECT_EQ(TakeAll(shares, "c"), 32);
  EXPECT_EQ(shares.Check("a", 1), Answer::kOverShare);
  EXPECT_EQ(shares.used(), 224);
}

TEST(FairShareTest, WhoTakesNothingIsNoHolder) {
  FairShare shares(10, 0.5);
  EXPECT_EQ(shares.Take("a", 0), Answer::kYes);
  EXPECT_EQ(shares.holders(), 0);
}

TEST(FairShareTest, WhoHasNothingMayTakeAnyFreeAmount) {
  FairShare shares(10, 0.5);
  EXPECT_EQ(shares.Take("a", 9), Answer::kYes);
  EXPECT_EQ(shares.Check("a", 1), Answer::kOverShare);
  EXPECT_EQ(shares.Check("b", 2), Answer::kFull);
  EXPECT_EQ(shares.Take("b", 1), Answer::kYes);
  EXPECT_EQ(shares.Check("c", 1), Answer::kFull);
}

TEST(FairShareTest, WhatIsGivenBackCanBeTakenAgain) {
  FairShare shares(8, 0.5);
  EXPECT_EQ(TakeAll(shares, "a"), 4);
  shares.Give("a", 4);
  EXPECT_EQ(shares.used(), 0);
  EXPECT_EQ(shares.holders(), 0);
  EXPECT_EQ(TakeAll(shares, "b"), 4);
}

TEST(FairShareTest, WithoutARuleOneMayTakeAll) {
  FairShare shares(8, 1.0);
  EXPECT_EQ(TakeAll(shares, "a"), 8);
  FairShare anonymous(8, 0.5);
  EXPECT_EQ(TakeAll(anonymous, ""), 8);
}

TEST(FairShareTest, RemembersOnlyHoldersThatHaveSomething) {
  FairShare shares(1000, 0.5);
  for (int i = 0; i < 1000; ++i) {
    const std::string name = absl::StrCat("peer ", i);
    ASSERT_EQ(shares.Take(name, 3), Answer::kYes);
    ASSERT_EQ(shares.Take(name, 0), Answer::kYes);
    shares.Give(name, 3);
  }
  EXPECT_EQ(shares.holders(), 0);
}

}  // namespace
}  // namespace lossd::engine::fair_share_test

// ---- Range allocator ----

namespace lossd::engine::range_allocator_test {
namespace {

constexpr int64_t kUnit = RangeAllocator::kAlignment;

TEST(RangeAllocatorTest, GivesAndTakesBack) {
  RangeAllocator allocator(4 * kUnit + 17);
  EXPECT_EQ(allocator.size(), 4 * kUnit);
  auto a = allocator.Allocate(1);
  auto b = allocator.Allocate(3 * kUnit);
  ASSERT_TRUE(a != nullptr && b != nullptr);
  EXPECT_NE(a->offset(), b->offset());
  EXPECT_EQ(allocator.Allocate(1), nullptr);
  EXPECT_EQ(allocator.used(), 4 * kUnit);
  a.reset();
  b.reset();
  EXPECT_EQ(allocator.used(), 0);
  EXPECT_NE(allocator.Allocate(4 * kUnit), nullptr);  // joined again
}

TEST(RangeAllocatorTest, RefusesWhatCannotFit) {
  RangeAllocator empty(0);
  EXPECT_EQ(empty.Allocate(0), nullptr);
  RangeAllocator allocator(kUnit);
  EXPECT_EQ(allocator.Allocate(kUnit + 1), nullptr);
  EXPECT_EQ(allocator.Allocate(INT64_MAX), nullptr);
}

// Random allocations never overlap or leave the memory, and all of it can be had again at the end.
TEST(RangeAllocatorTest, BlocksNeverOverlap) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  constexpr int64_t kUnits = 64;
  RangeAllocator allocator(kUnits * kUnit);
  std::vector<std::shared_ptr<const RangeAllocator::Block>> blocks;
  for (int i = 0; i < 5000; ++i) {
    if (!blocks.empty() && rng() % 2 == 0) {
      const size_t victim = rng() % blocks.size();
      blocks[victim] = blocks.back();
      blocks.pop_back();
    } else if (auto block = allocator.Allocate(static_cast<int64_t>(rng() % (9 * kUnit)))) {
      blocks.push_back(block);
    }
    std::vector<bool> taken(kUnits, false);
    int64_t used = 0;
    for (const auto& block : blocks) {
      ASSERT_EQ(block->offset() % kUnit, 0);
      for (int64_t unit = block->offset() / kUnit; unit < (block->offset() + block->bytes()) / kUnit;
           ++unit) {
        ASSERT_LT(unit, kUnits);
        ASSERT_FALSE(taken[static_cast<size_t>(unit)]);
        taken[static_cast<size_t>(unit)] = true;
      }
      used += block->bytes();
    }
    ASSERT_EQ(allocator.used(), used);
  }
  blocks.clear();
  EXPECT_NE(allocator.Allocate(kUnits * kUnit), nullptr);
}

}  // namespace
}  // namespace lossd::engine::range_allocator_test

// ---- Staging pool ----

namespace lossd::engine::staging_pool_test {
namespace {

constexpr int64_t kGrain = RangeAllocator::kAlignment;
constexpr int64_t kLargest = 64 * kGrain;

// Hands a buffer to `waiter`, now or later; returns the ticket, 0 if it was now.
uint64_t Acquire(StagingPool& pool, int64_t bytes, const std::function<void(StagingBuffer)>& waiter) {
  StagingPool::Acquired acquired = pool.Acquire(bytes, waiter);
  EXPECT_NE(static_cast<bool>(acquired.buffer), acquired.ticket != 0);
  if (acquired.ticket == 0) waiter(std::move(acquired.buffer));
  return acquired.ticket;
}

class StagingPoolTest : public ::testing::Test {
 protected:
  std::unique_ptr<StagingPool> Pool(int64_t bytes, int64_t max_buffer_bytes = kLargest) {
    auto pool = StagingPool::Create(&backend_, bytes, max_buffer_bytes);
    EXPECT_TRUE(pool.ok()) << pool.status();
    return *std::move(pool);
  }

  // A buffer that is there at once, or an empty one.
  static StagingBuffer Take(StagingPool& pool, int64_t bytes) {
    StagingBuffer taken;
    const uint64_t ticket = Acquire(pool, bytes, [&](StagingBuffer buffer) { taken = std::move(buffer); });
    if (ticket != 0) pool.Forget(ticket);
    return taken;
  }

  static StagingBuffer WaitFor(StagingPool& pool, int64_t bytes) {
    StagingBuffer taken;
    absl::Notification served;
    Acquire(pool, bytes, [&](StagingBuffer buffer) {
      taken = std::move(buffer);
      served.Notify();
    });
    served.WaitForNotification();
    return taken;
  }

  FakeDevice device_;
  FakeBackend backend_{&device_};
};

TEST_F(StagingPoolTest, RefusesNothing) {
  EXPECT_FALSE(StagingPool::Create(&backend_, 64, 0).ok());
  EXPECT_FALSE(StagingPool::Create(&backend_, 0, 0).ok());
  EXPECT_FALSE(StagingPool::Create(&backend_, 63, 64).ok());
}

TEST_F(StagingPoolTest, BuffersTakeWhatTheyNeed) {
  auto pool = Pool(2 * kLargest);
  EXPECT_EQ(pool->grain(), kGrain);
  EXPECT_EQ(pool->bytes(), 2 * kLargest);
  StagingBuffer large = Take(*pool, kLargest);
  StagingBuffer small = Take(*pool, kGrain + 1);
  StagingBuffer none = Take(*pool, 0);
  ASSERT_TRUE(large && small && none);
  EXPECT_EQ(large.bytes(), kLargest);
  EXPECT_EQ(small.bytes(), 2 * kGrain);
  EXPECT_EQ(none.bytes(), kGrain);
  EXPECT_EQ(pool->used_bytes(), kLargest + 3 * kGrain);
  EXPECT_FALSE(Take(*pool, kLargest));
  large.Release();
  large.Release();  // harmless
  EXPECT_EQ(large.bytes(), 0);
  small = StagingBuffer();
  none = StagingBuffer();
  EXPECT_EQ(pool->used_bytes(), 0);
  EXPECT_EQ(pool->peak_bytes(), kLargest + 3 * kGrain);
}

TEST_F(StagingPoolTest, GrainAndPoolAreRoundedUp) {
  auto pool = Pool(2 * kLargest + 1, kLargest + 1);
  EXPECT_EQ(pool->grain(), 2 * kGrain);
  EXPECT_EQ(pool->bytes(), 2 * kLargest + 2 * kGrain);
  EXPECT_TRUE(Take(*pool, kLargest + 1));
}

TEST_F(StagingPoolTest, WaitersAreServedInOrder) {
  auto pool = Pool(kLargest);
  StagingBuffer held = Take(*pool, kLargest);
  std::vector<int> order;
  std::vector<StagingBuffer> got;
  for (int i = 0; i < 3; ++i) {
    EXPECT_NE(Acquire(*pool, kLargest,
                      [&, i](StagingBuffer buffer) {
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

TEST_F(StagingPoolTest, OneReturnServesSeveral) {
  auto pool = Pool(kLargest);
  StagingBuffer held = Take(*pool, kLargest);
  std::vector<StagingBuffer> got;
  for (int i = 0; i < 3; ++i) {
    Acquire(*pool, kLargest / 2, [&](StagingBuffer buffer) { got.push_back(std::move(buffer)); });
  }
  held.Release();
  EXPECT_EQ(got.size(), 2u);
  got.front().Release();
  EXPECT_EQ(got.size(), 3u);
}

// Small requests that come later fit and could go on for ever; they wait behind the large one.
TEST_F(StagingPoolTest, LargeRequestsDoNotStarve) {
  auto pool = Pool(kLargest);
  std::vector<StagingBuffer> small;
  for (int i = 0; i < 64; ++i) small.push_back(Take(*pool, kGrain));
  StagingBuffer large;
  EXPECT_NE(Acquire(*pool, kLargest, [&](StagingBuffer buffer) { large = std::move(buffer); }), 0u);
  std::vector<StagingBuffer> late;
  for (size_t i = 0; i < small.size(); i += 2) {
    small[i].Release();
    EXPECT_NE(Acquire(*pool, kGrain, [&](StagingBuffer buffer) { late.push_back(std::move(buffer)); }), 0u);
  }
  EXPECT_TRUE(late.empty());
  small.clear();
  EXPECT_TRUE(large);
  EXPECT_TRUE(late.empty());
  large.Release();
  EXPECT_EQ(late.size(), 32u);
}

TEST_F(StagingPoolTest, ForgottenWaitersAreNotServed) {
  auto pool = Pool(kLargest);
  StagingBuffer held = Take(*pool, kLargest);
  const uint64_t ticket = Acquire(*pool, kGrain, [](StagingBuffer) { FAIL() << "was forgotten"; });
  EXPECT_TRUE(pool->Forget(ticket));
  EXPECT_FALSE(pool->Forget(ticket));
  held.Release();
  EXPECT_EQ(pool->used_bytes(), 0);
}

TEST_F(StagingPoolTest, WhoIsForgottenLetsOthersPass) {
  auto pool = Pool(kLargest);
  StagingBuffer held = Take(*pool, kGrain);
  const uint64_t large = Acquire(*pool, kLargest, [](StagingBuffer) { FAIL() << "was forgotten"; });
  StagingBuffer small;
  EXPECT_NE(Acquire(*pool, kGrain, [&](StagingBuffer buffer) { small = std::move(buffer); }), 0u);
  EXPECT_FALSE(small);
  EXPECT_TRUE(pool->Forget(large));
  EXPECT_TRUE(small);
}

// Slices of one size, which is what a client sends, leave no holes: whatever came back in whatever order, one
// more is had while there are bytes for it.
TEST_F(StagingPoolTest, EqualBuffersDoNotFragment) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  for (int round = 0; round < 20; ++round) {
    auto pool = Pool(static_cast<int64_t>(2 * kLargest + rng() % (8 * kLargest)));
    const auto bytes = static_cast<int64_t>(1 + rng() % kLargest);
    const int64_t taken = Take(*pool, bytes).bytes();
    std::vector<StagingBuffer> held;
    for (int i = 0; i < 500; ++i) {
      if (!held.empty() && rng() % 2 == 0) {
        std::swap(held[rng() % held.size()], held.back());
        held.pop_back();
        continue;
      }
      const bool fits = pool->used_bytes() + taken <= pool->bytes();
      StagingBuffer buffer = Take(*pool, bytes);
      ASSERT_EQ(static_cast<bool>(buffer), fits);
      if (buffer) held.push_back(std::move(buffer));
    }
  }
}

// A pool under random requests, returns and changes of mind, and what has to hold after each.
class History {
 public:
  History(StagingPool* pool, uint64_t seed) : pool_(pool), rng_(seed) {}
  ~History() {
    while (!held_.empty() || !waiting_.empty()) Return();
  }

  void Request() {
    const int64_t most = rng_() % 4 == 0 ? kLargest : kLargest / 8;
    const auto bytes = static_cast<int64_t>(rng_() % static_cast<uint64_t>(most + 1));
    const int64_t name = ++requests_;
    waiting_.push_back({name, bytes, 0});
    const uint64_t ticket =
        Acquire(*pool_, bytes, [this, name](StagingBuffer buffer) { Serve(name, std::move(buffer)); });
    if (ticket != 0) waiting_.back().ticket = ticket;
  }

  void Return() {
    if (held_.empty()) return;
    const auto it = std::next(held_.begin(), static_cast<int64_t>(rng_() % held_.size()));
    StagingBuffer buffer = std::move(it->second);
    held_.erase(it);  // before others are served
    buffer.Release();
  }

  void Forget() {
    if (waiting_.empty()) return;
    const size_t index = rng_() % waiting_.size();
    const uint64_t ticket = waiting_[index].ticket;
    waiting_.erase(waiting_.begin() + static_cast<int64_t>(index));
    EXPECT_TRUE(pool_->Forget(ticket));
  }

  void Check() const {
    int64_t used = 0;
    int64_t longest = 0;  // free range
    const uint8_t* end = begin_;
    for (const auto& [data, buffer] : held_) {
      ASSERT_GE(data, end) << "buffers overlap";
      ASSERT_EQ((data - begin_) % kGrain, 0);
      longest = std::max<int64_t>(longest, data - end);
      end = data + buffer.bytes();
      used += buffer.bytes();
    }
    ASSERT_LE(end - begin_, pool_->bytes());
    longest = std::max<int64_t>(longest, pool_->bytes() - (end - begin_));
    ASSERT_EQ(pool_->used_bytes(), used);
    ASSERT_GE(pool_->peak_bytes(), used);
    if (!waiting_.empty()) {
      ASSERT_LT(longest, waiting_.front().bytes) << "somebody waits for what is free";
    }
  }

 private:
  struct Waiting {
    int64_t name;
    int64_t bytes;
    uint64_t ticket;
  };

  void Serve(int64_t name, StagingBuffer buffer) {
    ASSERT_FALSE(waiting_.empty());
    ASSERT_EQ(waiting_.front().name, name) << "served out of turn";
    ASSERT_GE(buffer.bytes(), waiting_.front().bytes);
    waiting_.pop_front();
    uint8_t* const data = buffer.data();
    ASSERT_TRUE(held_.emplace(data, std::move(buffer)).second);
  }

  // The pool's first byte: where its first buffer is.
  static const uint8_t* FirstByte(StagingPool& pool) {
    const uint8_t* first = nullptr;
    Acquire(pool, 0, [&](StagingBuffer buffer) { first = buffer.data(); });
    return first;
  }

  StagingPool* const pool_;
  const uint8_t* const begin_ = FirstByte(*pool_);
  std::mt19937_64 rng_;
  int64_t requests_ = 0;
  std::map<const uint8_t*, StagingBuffer> held_;
  std::deque<Waiting> waiting_;
};

TEST_F(StagingPoolTest, RandomHistories) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  for (int round = 0; round < 10; ++round) {
    auto pool = Pool(static_cast<int64_t>(kLargest + rng() % (4 * kLargest)));
    {
      History history(pool.get(), rng());
      for (int i = 0; i < 2000; ++i) {
        const uint64_t what = rng() % 16;
        if (what == 0) {
          history.Forget();
        } else if (what < 8) {
          history.Return();
        } else {
          history.Request();
        }
        ASSERT_NO_FATAL_FAILURE(history.Check());
      }
    }
    EXPECT_EQ(pool->used_bytes(), 0);
    EXPECT_TRUE(Take(*pool, kLargest));
  }
}

// Many small buffers beside few large ones: no user sees another's bytes, and every user finishes.
TEST_F(StagingPoolTest, ManyThreadsShareOnePool) {
  auto pool = Pool(kLargest + kLargest / 2);
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 6; ++t) {
    threads.emplace_back([&pool, t, seed] {
      std::mt19937_64 rng(seed + t);
      const int64_t most = t == 0 ? kLargest : kLargest / 4;
      for (int i = 0; i < 500; ++i) {
        const auto bytes = t == 0 ? most : static_cast<int64_t>(1 + rng() % static_cast<uint64_t>(most));
        StagingBuffer mine = WaitFor(*pool, bytes);
        std::memset(mine.data(), static_cast<int>(t), static_cast<size_t>(bytes));
        std::this_thread::yield();
        ASSERT_TRUE(std::all_of(mine.data(), mine.data() + bytes, [t](uint8_t byte) { return byte == t; }));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->used_bytes(), 0);
  EXPECT_LE(pool->peak_bytes(), pool->bytes());
}

// While slices come and go on other threads, requests are dropped: each is served or forgotten, not both.
TEST_F(StagingPoolTest, ForgetWhileOthersReturn) {
  auto pool = Pool(kLargest);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      for (int i = 0; i < 500; ++i) {
        StagingBuffer mine;
        absl::Notification served;
        const uint64_t ticket = Acquire(*pool, (i % 3 + 1) * kLargest / 3, [&](StagingBuffer buffer) {
          mine = std::move(buffer);
          served.Notify();
        });
        const bool forgotten = t % 2 == 0 && ticket != 0 && pool->Forget(ticket);
        if (!forgotten) served.WaitForNotification();
        EXPECT_EQ(static_cast<bool>(mine), !forgotten);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->used_bytes(), 0);
}

}  // namespace
}  // namespace lossd::engine::staging_pool_test

// ---- Shares of the staging pool ----

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
