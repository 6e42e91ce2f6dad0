// SPDX-License-Identifier: Apache-2.0
// Names and paths that come from clients, confined to one directory. Errors repeat what the client said
// and nothing of the server's own paths. Thread-safe.
#ifndef LOSSD_SERVER_HEAD_PATHS_H_
#define LOSSD_SERVER_HEAD_PATHS_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/tensorfile/file.h"

namespace lossd::head {

// INVALID_ARGUMENT unless `name` is 1 to 64 characters out of A-Z a-z 0-9 . _ -, not starting with a dot.
// `what` names the field in the error.
absl::Status ValidateName(absl::string_view what, absl::string_view name);

// The real path of `relative` below `directory`, without symbolic links. INVALID_ARGUMENT if it is empty
// or absolute, holds "..", or leads outside through a symbolic link; NOT_FOUND if there is no such file.
// A symbolic link that is made after the check is followed by those who use the path; OpenBelow follows none.
absl::StatusOr<std::string> ResolveBelow(const std::string& directory, absl::string_view relative);

// Opens a regular file for reading. Errors as ResolveBelow, whatever is changed on the way meanwhile, and
// FAILED_PRECONDITION for anything but a regular file, which is not opened at all. The file is called
// `relative` in errors.
absl::StatusOr<std::unique_ptr<formats::InputFile>> OpenBelow(const std::string& directory,
                                                              absl::string_view relative);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_PATHS_H_
