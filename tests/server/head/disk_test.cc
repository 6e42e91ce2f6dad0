// SPDX-License-Identifier: Apache-2.0
// Tests of disk.h: the removal of folders, and the lock of a folder.
#include "server/head/disk.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"

// ---- Disk ----

namespace lossd::head::disk_test {
namespace {

TEST(DiskTest, SaysWhetherAFolderWasRemoved) {
  const test::TempFolder folder;
  Disk disk;
  const std::string path = folder.File("x");
  EXPECT_TRUE(disk.CreateFolder(path).ok());
  EXPECT_FALSE(disk.CreateFolder(path).ok());
  EXPECT_TRUE(disk.RemoveFolder(path).ok());
  EXPECT_EQ(disk.RemoveFolder(path).code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace lossd::head::disk_test

// ---- Folder lock ----

namespace lossd::head::folder_lock_test {
namespace {

using Kind = FolderLock::Kind;

TEST(FolderLockTest, ReadersShareWritersDoNot) {
  const test::TempFolder folder;
  {
    const auto reader = FolderLock::Try(folder.path(), Kind::kShared);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_TRUE(FolderLock::Try(folder.path(), Kind::kShared).ok());
    EXPECT_EQ(FolderLock::Try(folder.path(), Kind::kExclusive).status().code(),
              absl::StatusCode::kFailedPrecondition);
  }
  const auto writer = FolderLock::Try(folder.path(), Kind::kExclusive);
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_EQ(FolderLock::Try(folder.path(), Kind::kShared).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(FolderLockTest, NoFolder) {
  const test::TempFolder folder;
  EXPECT_EQ(FolderLock::Try(folder.File("none"), Kind::kShared).status().code(), absl::StatusCode::kNotFound);
  test::WriteWholeFile(folder.File("file"), "");
  EXPECT_FALSE(FolderLock::Try(folder.File("file"), Kind::kShared).ok());
  std::filesystem::create_directory_symlink(folder.path(), folder.File("link"));
  EXPECT_FALSE(FolderLock::Try(folder.File("link"), Kind::kShared).ok());
}

// Whoever waited for a folder that was taken away meanwhile is told so.
TEST(FolderLockTest, RenamedWhileWaiting) {
  const test::TempFolder folder;
  std::filesystem::create_directory(folder.File("a"));
  auto writer = FolderLock::Try(folder.File("a"), Kind::kExclusive);
  ASSERT_TRUE(writer.ok());
  absl::Status status;
  std::thread waiter([&] { status = FolderLock::Wait(folder.File("a"), Kind::kShared).status(); });
  absl::SleepFor(absl::Milliseconds(50));
  std::filesystem::rename(folder.File("a"), folder.File("b"));
  { const FolderLock released = *std::move(writer); }
  waiter.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_TRUE(FolderLock::Wait(folder.File("b"), Kind::kShared).ok());
}

}  // namespace
}  // namespace lossd::head::folder_lock_test
