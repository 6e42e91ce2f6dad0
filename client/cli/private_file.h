// SPDX-License-Identifier: Apache-2.0
// Small files that belong to one user: read with a look at who else may, and replaced as a whole.
//
// Stateless but for the lock; thread-safe.
#ifndef LOSSD_CLIENT_CLI_PRIVATE_FILE_H_
#define LOSSD_CLIENT_CLI_PRIVATE_FILE_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lossd::cli {

enum class Privacy {
  kOthersMustNotWrite,
  // Not a group either, unless the file belongs to root, as systemd and Kubernetes hand secrets out.
  kOthersMustNotRead,
};

// NOT_FOUND if there is none; PERMISSION_DENIED if it may not be read, belongs to another user than this one
// or root, or is less private than that, with what mends it; INVALID_ARGUMENT if it is no file or longer than
// `most_bytes`.
absl::StatusOr<std::string> ReadPrivateFile(const std::string& path, Privacy privacy, size_t most_bytes);

// Replaces the file, or makes it, with mode 0600; readers see the old or the new content. A link is followed.
absl::Status WritePrivateFile(const std::string& path, const std::string& content);

// While one lives, other programs that ask for the same one wait. Makes the folder, with mode 0700, if it is
// not there. Move-only.
class FolderLock {
 public:
  // Of the folder that `path` is in. UNAVAILABLE if another program has it for five seconds.
  static absl::StatusOr<FolderLock> Of(const std::string& path);
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;
  ~FolderLock();

 private:
  explicit FolderLock(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
};

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_PRIVATE_FILE_H_
