// SPDX-License-Identifier: Apache-2.0
// How much a directory takes on the disk, against a limit. Stateless and thread-safe.
#ifndef LOSSD_SERVER_HEAD_DISK_LIMIT_H_
#define LOSSD_SERVER_HEAD_DISK_LIMIT_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lossd::head {

// The bytes of all regular files below `directory`, at any depth; links are not followed.
absl::StatusOr<int64_t> DirectoryBytes(const std::string& directory);

// RESOURCE_EXHAUSTED naming all figures unless `bytes` more stay within `limit_bytes`. Not atomic: of two
// servers that save into one directory at the same time, both may pass.
absl::Status CheckRoom(const std::string& directory, int64_t bytes, int64_t limit_bytes);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_DISK_LIMIT_H_
