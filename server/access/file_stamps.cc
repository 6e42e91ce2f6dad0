// SPDX-License-Identifier: Apache-2.0
#include "server/access/file_stamps.h"

#include <sys/stat.h>

namespace lossd::access {
namespace {

int64_t Nanoseconds(const timespec& time) {
  return int64_t{time.tv_sec} * 1'000'000'000 + int64_t{time.tv_nsec};
}

}  // namespace

FileStamps StampsOf(const std::vector<std::string>& paths) {
  FileStamps stamps;
  for (const std::string& path : paths) {
    struct stat info = {};
    FileStamp stamp;
    if (stat(path.c_str(), &info) == 0) {
      stamp = {.device = info.st_dev,
               .inode = info.st_ino,
               .size = int64_t{info.st_size},
               .modified = Nanoseconds(info.st_mtim),
               .changed = Nanoseconds(info.st_ctim)};
    }
    stamps.push_back(stamp);
  }
  return stamps;
}

}  // namespace lossd::access
