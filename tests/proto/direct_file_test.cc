// SPDX-License-Identifier: Apache-2.0
// Whatever pieces are appended, and wherever they lie in memory, the file has their bytes, on file systems
// with direct writes and without.
#include "proto/tensorfile/direct_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <filesystem>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/temp_folder.h"

namespace lossd::formats::direct_file_test {
namespace {

using testing::HasSubstr;

class DirectFileTest : public testing::Test {
 protected:
  int64_t Below(int64_t limit) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(limit)); }

  // A piece that lies at any place, or at one that can be written directly.
  absl::Span<const uint8_t> Piece(const AlignedBuffer& memory, int64_t memory_bytes) {
    const int64_t offset = Below(2) == 0 ? 0 : Below(5000);
    int64_t bytes = Below(3) == 0 ? Below(100) : Below(memory_bytes - offset);
    if (Below(2) == 0) bytes = bytes / kDirectAlignment * kDirectAlignment;
    return {&memory[static_cast<size_t>(offset)], static_cast<size_t>(bytes)};
  }

  test::TempFolder folder_;
  const uint32_t seed_ = std::random_device{}();
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
  std::mt19937_64 random_{seed_};
};

TEST_F(DirectFileTest, HasWhatWasAppended) {
  constexpr int64_t kBytes = int64_t{3} << 20;
  const AlignedBuffer memory = AllocateAligned(kBytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % kDirectAlignment, 0u);
  for (int64_t i = 0; i < kBytes; ++i) memory[static_cast<size_t>(i)] = static_cast<uint8_t>(random_());
  const std::string shared_memory = absl::StrCat("/dev/shm/lossd-direct-", seed_);  // without direct writes
  for (const std::string& path : {folder_.File("x"), shared_memory}) {
    for (int round = 0; round < 6; ++round) {
      auto file = CreateDirectFile(path);
      ASSERT_TRUE(file.ok()) << file.status();
      EXPECT_EQ(CreateDirectFile(path).status().code(), absl::StatusCode::kAlreadyExists);
      std::string expected;
      for (int64_t piece = Below(12); piece > 0; --piece) {
        const absl::Span<const uint8_t> bytes = Piece(memory, kBytes);
        ASSERT_TRUE((*file)->Append(bytes).ok());
        expected.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
        if (Below(10) == 0) {
          ASSERT_TRUE((*file)->Sync().ok());
          EXPECT_EQ(test::ReadWholeFile(path), expected);
        }
      }
      if (Below(2) == 0) {
        ASSERT_TRUE((*file)->Sync().ok());
      }
      ASSERT_TRUE((*file)->Close().ok());
      EXPECT_TRUE(test::ReadWholeFile(path) == expected) << expected.size() << " bytes on " << path;
      std::filesystem::remove(path);
    }
  }
}

// The operating system refuses in the middle of a write, directly or not, at a place that is aligned or not.
TEST_F(DirectFileTest, RefusedWrites) {
  const int64_t bytes = int64_t{1} << 20;
  const AlignedBuffer memory = AllocateAligned(bytes);
  std::fill_n(memory.get(), bytes, uint8_t{7});
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  for (const rlim_t room : {rlim_t{0}, rlim_t{8192}, rlim_t{10'000}}) {
    const std::string path = folder_.File(absl::StrCat(room));
    const rlimit small{.rlim_cur = room, .rlim_max = before.rlim_max};
    auto file = CreateDirectFile(path);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    absl::Status status = (*file)->Append({memory.get(), static_cast<size_t>(bytes)});
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr("File too large"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  }
  signal(SIGXFSZ, handler);
}

TEST_F(DirectFileTest, NoSuchFolder) {
  EXPECT_EQ(CreateDirectFile(folder_.File("missing/x")).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace lossd::formats::direct_file_test
