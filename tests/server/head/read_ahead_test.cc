// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <set>
#include <thread>

#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "server/head/shard_files.h"

namespace lossd::head::read_ahead_test {
namespace {

constexpr absl::Duration kShort = absl::Milliseconds(20);

ReadAhead::Block Filled(ReadAhead& ahead, uint8_t value, size_t bytes) {
  std::optional<ReadAhead::Block> block = ahead.Take(absl::InfiniteFuture());
  EXPECT_TRUE(block.has_value());
  block->bytes = bytes;
  std::fill(block->span().begin(), block->span().end(), value);
  return *std::move(block);
}

TEST(ReadAheadTest, BlocksComeInOrderAndBuffersAreUsedAgain) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  constexpr int kBlocks = 2000;
  constexpr size_t kBytes = 64;
  ReadAhead ahead(kBytes, 3);
  std::atomic<int> outstanding{0};
  std::thread consumer([&] {
    std::mt19937 random(seed);
    for (int i = 0; i < kBlocks; ++i) {
      std::optional<ReadAhead::Block> block = ahead.Next();
      ASSERT_TRUE(block.has_value());
      EXPECT_EQ(block->part.row_begin, i);
      EXPECT_EQ(block->bytes, 1 + static_cast<size_t>(i) % kBytes);
      for (const uint8_t byte : block->span()) EXPECT_EQ(byte, static_cast<uint8_t>(i));
      if (random() % 100 == 0) absl::SleepFor(absl::Microseconds(random() % 300));
      EXPECT_LE(outstanding--, 3);
      ahead.GiveBack(*std::move(block));
    }
    EXPECT_FALSE(ahead.Next().has_value());
    ahead.End(ahead.closed_with());
  });
  std::set<uint8_t*> buffers;
  for (int i = 0; i < kBlocks; ++i) {
    ReadAhead::Block block = Filled(ahead, static_cast<uint8_t>(i), 1 + static_cast<size_t>(i) % kBytes);
    block.part.row_begin = i;
    buffers.insert(block.buffer.get());
    ++outstanding;
    ahead.Put(std::move(block));
  }
  ahead.Close(absl::OkStatus());
  EXPECT_TRUE(ahead.WaitUntilEnded(absl::InfiniteFuture()));
  EXPECT_TRUE(ahead.result().ok());
  consumer.join();
  EXPECT_LE(buffers.size(), 3u);
}

TEST(ReadAheadTest, TheProducerIsHeldBack) {
  ReadAhead ahead(1, 2);
  ahead.Put(Filled(ahead, 1, 1));
  ahead.Put(Filled(ahead, 2, 1));
  EXPECT_FALSE(ahead.Take(clocks::SteadyNow() + kShort).has_value());
  ahead.GiveBack(*ahead.Next());
  EXPECT_TRUE(ahead.Take(clocks::SteadyNow() + kShort).has_value());
  EXPECT_FALSE(ahead.WaitUntilEnded(clocks::SteadyNow() + kShort));
}

TEST(ReadAheadTest, AFailedConsumerEndsTheProducer) {
  ReadAhead ahead(1, 2);
  ahead.Put(Filled(ahead, 1, 1));
  ahead.End(absl::DataLossError("disk"));
  EXPECT_FALSE(ahead.Take(absl::InfiniteFuture()).has_value());
  EXPECT_EQ(ahead.result(), absl::DataLossError("disk"));
}

TEST(ReadAheadTest, AFailedProducerDropsWhatIsThere) {
  ReadAhead ahead(1, 2);
  ahead.Put(Filled(ahead, 1, 1));
  ahead.Close(absl::UnavailableError("device"));
  EXPECT_FALSE(ahead.Next().has_value());
  EXPECT_EQ(ahead.closed_with(), absl::UnavailableError("device"));
}

}  // namespace
}  // namespace lossd::head::read_ahead_test
