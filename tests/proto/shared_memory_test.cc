// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace lossd::wire::shared_memory_test {
namespace {

constexpr int64_t kMebibyte = int64_t{1} << 20;

TEST(SharedMemoryTest, NobodyCanChangeItsSize) {
  const auto memory = SharedMemory::Create(3 * kMebibyte + 1);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const size_t size = (*memory)->bytes().size();
  EXPECT_GE(size, static_cast<size_t>(3 * kMebibyte + 1));
  EXPECT_EQ(size % static_cast<size_t>(sysconf(_SC_PAGESIZE)), 0u);
  const int descriptor = (*memory)->descriptor();
  EXPECT_NE(ftruncate(descriptor, 0), 0);
  EXPECT_NE(ftruncate(descriptor, static_cast<off_t>(2 * size)), 0);
  EXPECT_NE(fcntl(descriptor, F_ADD_SEALS, F_SEAL_WRITE), 0);
  // Holes read as zeros.
  (*memory)->bytes().front() = 7;
  EXPECT_EQ(fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
  EXPECT_EQ((*memory)->bytes().front(), 0);
}

// Whoever keeps a mapping keeps no memory of the server's.
TEST(SharedMemoryTest, TakesItsPagesWithIt) {
  auto memory = SharedMemory::Create(kMebibyte);
  ASSERT_TRUE(memory.ok());
  const int copy = dup((*memory)->descriptor());
  auto* const mapped = static_cast<uint8_t*>(mmap(nullptr, kMebibyte, PROT_READ, MAP_SHARED, copy, 0));
  (*memory)->bytes()[100] = 42;
  EXPECT_EQ(mapped[100], 42);
  memory->reset();
  struct stat status = {};
  ASSERT_EQ(fstat(copy, &status), 0);
  EXPECT_EQ(status.st_blocks, 0);
  EXPECT_EQ(mapped[100], 0);
  munmap(mapped, kMebibyte);
  close(copy);
}

int64_t PagesOf(int descriptor) {
  struct stat status = {};
  EXPECT_EQ(fstat(descriptor, &status), 0);
  return status.st_blocks;
}

TEST(SharedMemoryTest, TakesNoPagesUntilItIsFilled) {
  const auto memory = SharedMemory::Reserve(kMebibyte);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(PagesOf((*memory)->descriptor()), 0);
  EXPECT_NE(ftruncate((*memory)->descriptor(), 0), 0);
  ASSERT_TRUE((*memory)->Fill().ok());
  EXPECT_EQ(PagesOf((*memory)->descriptor()) * 512, kMebibyte);
  EXPECT_EQ((*memory)->bytes().back(), 0);
}

TEST(SharedMemoryTest, MoreThanThereIsIsRefused) {
  const auto memory = SharedMemory::Create(int64_t{1} << 61);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted) << memory.status();
}

}  // namespace
}  // namespace lossd::wire::shared_memory_test
