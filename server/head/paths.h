// SPDX-License-Identifier: Apache-2.0
// Names and paths that come from clients, confined to one directory: they are checked, resolved and opened
// here. Errors repeat what the client said and nothing of the server's own paths. RunInThreads, which divides
// work among threads, is here as well.
//
// Thread-safe.
#ifndef LOSSD_SERVER_HEAD_PATHS_H_
#define LOSSD_SERVER_HEAD_PATHS_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/tensorfile/file.h"

namespace lossd::head {

// INVALID_ARGUMENT unless `name` is 1 to 64 characters out of A-Z a-z 0-9 . _ -, not starting with a dot.
// `what` names the field in the error.
absl::Status ValidateName(absl::string_view what, absl::string_view name);

// The real path of `relative` below `directory`, without symbolic links. INVALID_ARGUMENT if it is empty
// or absolute, holds "..", or leads outside or in circles through a symbolic link, which the error names;
// NOT_FOUND if there is no such file, or a link on the way leads to none.
// A symbolic link that is made after the check is followed by those who use the path; OpenBelow follows none.
absl::StatusOr<std::string> ResolveBelow(const std::string& directory, absl::string_view relative);

// Opens a regular file for reading. Errors as ResolveBelow, whatever is changed on the way meanwhile, and
// FAILED_PRECONDITION for anything but a regular file, which is not opened at all. The file is called
// `relative` in errors.
absl::StatusOr<std::unique_ptr<formats::InputFile>> OpenBelow(const std::string& directory,
                                                              absl::string_view relative);

// A folder below a directory, held open: whatever is renamed or replaced meanwhile, path() leads to it.
class FolderBelow {
 public:
  // `names`: of the folders on the way, from the directory on. No symbolic link is followed, but on the way
  // to the directory itself. INVALID_ARGUMENT for a name that could lead elsewhere; NOT_FOUND or INTERNAL if
  // one is no folder. Errors repeat the names alone.
  static absl::StatusOr<FolderBelow> Open(const std::string& directory, absl::Span<const std::string> names);
  FolderBelow(FolderBelow&& other) noexcept;
  FolderBelow& operator=(FolderBelow&&) = delete;
  ~FolderBelow();

  std::string path() const;                          // of this process, while it is open
  const std::string& name() const { return name_; }  // for people, from the directory on

 private:
  FolderBelow(int descriptor, std::string name) : descriptor_(descriptor), name_(std::move(name)) {}

  int descriptor_;
  std::string name_;
};

// Calls `task` once with each number below `tasks`, in order, on this thread and on up to `threads` - 1
// others; the threads end before this returns. After an error no further task begins. Of several errors that
// of the lowest number is returned, so that it does not depend on the threads' speed.
absl::Status RunInThreads(int threads, size_t tasks, absl::FunctionRef<absl::Status(size_t)> task);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_PATHS_H_
