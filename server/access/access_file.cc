// SPDX-License-Identifier: Apache-2.0
#include "server/access/access_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/bytes.h"
#include "kernels/errors/field_error.h"

namespace lossd::access {
namespace {

absl::Status CheckSecrecy(const AccessFile& file, const struct stat& info) {
  const bool for_others = (info.st_mode & S_IRWXO) != 0;
  const bool for_group = (info.st_mode & S_IRWXG) != 0;
  const bool of_root = info.st_uid == 0 && (info.st_mode & (S_IWGRP | S_IXGRP)) == 0;
  if (!for_others && (!for_group || of_root)) return absl::OkStatus();
  return AccessFileError(file, "be a file that its owner alone can read (chmod 600)");
}

absl::StatusOr<std::string> ReadAll(const AccessFile& file, int descriptor, size_t size) {
  std::string content(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t count = read(descriptor, content.data() + done, size - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0)
      return AccessFileError(file, absl::StrCat("be a readable file (", std::strerror(errno), ")"));
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  content.resize(done);
  if (content.empty()) return AccessFileError(file, "not be an empty file");
  return content;
}

}  // namespace

absl::Status AccessFileError(const AccessFile& file, absl::string_view rule) {
  return errors::FieldError(file.flag, rule, file.path);
}

absl::Status AccessLineError(const AccessFile& file, size_t line, absl::string_view rule) {
  return errors::FieldError(file.flag, rule, absl::StrCat(file.path, " line ", line));
}

absl::StatusOr<std::string> ReadAccessFile(const AccessFile& file, Secrecy secrecy) {
  // Without waiting for a writer, if it is a pipe.
  const int descriptor = open(file.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0)
    return AccessFileError(file, absl::StrCat("be a readable file (", std::strerror(errno), ")"));
  const absl::Cleanup closer = [descriptor] { close(descriptor); };
  struct stat info = {};
  if (fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode))
    return AccessFileError(file, "be a regular file");
  if (secrecy == Secrecy::kSecret) {
    if (absl::Status status = CheckSecrecy(file, info); !status.ok()) return status;
  }
  const auto size = static_cast<size_t>(info.st_size);
  if (size > kMaxAccessFileBytes)
    return AccessFileError(file, absl::StrCat("have at most ", errors::ExactBytes(kMaxAccessFileBytes)));
  return ReadAll(file, descriptor, size);
}

}  // namespace lossd::access
