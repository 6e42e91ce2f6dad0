// SPDX-License-Identifier: Apache-2.0
#include "client/cli/private_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/bytes.h"

namespace lossd::cli {
namespace {

absl::Status SystemError(const std::string& path, absl::string_view what, int error) {
  return absl::Status(absl::ErrnoToStatusCode(error),
                      absl::StrCat(path, " cannot be ", what, ": ", std::strerror(error)));
}

absl::Status CheckPrivacy(const std::string& path, const struct stat& file, Privacy privacy) {
  if (!S_ISREG(file.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, " is not a file"));
  if (file.st_uid != geteuid() && file.st_uid != 0) {
    return absl::PermissionDeniedError(absl::StrCat(path, " belongs to another user (", file.st_uid, ")"));
  }
  mode_t forbidden = S_IWGRP | S_IWOTH;
  if (privacy == Privacy::kOthersMustNotRead) {
    forbidden = S_IRWXO | (file.st_uid == 0 ? S_IWGRP | S_IXGRP : S_IRWXG);
  }
  if ((file.st_mode & forbidden) == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrFormat(
      "%s has the mode %04o, so others can %s it; `chmod 600 %s` mends that", path, file.st_mode & 07777,
      privacy == Privacy::kOthersMustNotRead ? "read" : "change", path));
}

std::string FolderOf(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path();
  return folder.empty() ? "." : folder;
}

}  // namespace

absl::StatusOr<std::string> ReadPrivateFile(const std::string& path, Privacy privacy, size_t most_bytes) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe is not waited for
  if (descriptor < 0) return SystemError(path, "read", errno);
  const absl::Cleanup closes = [descriptor] { close(descriptor); };
  struct stat file = {};
  if (fstat(descriptor, &file) != 0) return SystemError(path, "read", errno);
  if (absl::Status status = CheckPrivacy(path, file, privacy); !status.ok()) return status;
  std::string content(most_bytes + 1, '\0');
  size_t size = 0;
  while (size < content.size()) {
    const ssize_t got = read(descriptor, content.data() + size, content.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError(path, "read", errno);
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  if (size > most_bytes)
    return absl::InvalidArgumentError(absl::StrCat(path, " has more than ", errors::ExactBytes(most_bytes)));
  content.resize(size);
  return content;
}

absl::Status WritePrivateFile(const std::string& path, const std::string& content) {
  std::error_code none;
  const std::filesystem::path target = std::filesystem::weakly_canonical(path, none);
  const std::string real = none ? path : target.string();
  std::string temporary = absl::StrCat(real, ".XXXXXX");
  const int descriptor = mkostemp(temporary.data(), O_CLOEXEC);  // mode 0600
  if (descriptor < 0) return SystemError(temporary, "made", errno);
  int error = 0;
  for (size_t at = 0; at < content.size() && error == 0;) {
    const ssize_t written = write(descriptor, content.data() + at, content.size() - at);
    if (written >= 0) {
      at += static_cast<size_t>(written);
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (error == 0 && fsync(descriptor) != 0) error = errno;
  if (close(descriptor) != 0 && error == 0) error = errno;
  if (error == 0 && std::rename(temporary.c_str(), real.c_str()) != 0) error = errno;
  if (error == 0) return absl::OkStatus();
  unlink(temporary.c_str());
  return SystemError(path, "written", error);
}

absl::StatusOr<FolderLock> FolderLock::Of(const std::string& path) {
  const std::string folder = FolderOf(path);
  std::error_code error;
  if (!std::filesystem::exists(folder, error)) {
    const std::string above = FolderOf(folder);
    std::filesystem::create_directories(above, error);
    if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return SystemError(folder, "made", errno);
  }
  const int descriptor = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return SystemError(folder, "opened", errno);
  FolderLock lock(descriptor);
  const absl::Time end = clocks::SteadyNow() + absl::Seconds(5);
  while (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return SystemError(folder, "locked", errno);
    if (clocks::SteadyNow() > end) {
      return absl::UnavailableError(absl::StrCat(folder, " is locked by another program that changes it"));
    }
    absl::SleepFor(absl::Milliseconds(20));
  }
  return lock;
}

FolderLock::FolderLock(FolderLock&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}

FolderLock::~FolderLock() {
  if (descriptor_ >= 0) close(descriptor_);
}

}  // namespace lossd::cli
