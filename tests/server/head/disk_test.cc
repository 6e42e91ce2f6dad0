// SPDX-License-Identifier: Apache-2.0
#include "server/head/disk.h"

#include <string>

#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"

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
