// SPDX-License-Identifier: Apache-2.0
// Files of a few bytes, as a whole. Stateless and thread-safe.
#ifndef LOSSD_SERVER_HEAD_SMALL_FILES_H_
#define LOSSD_SERVER_HEAD_SMALL_FILES_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/head/disk.h"

namespace lossd::head {

// Makes a file, and brings it to the disk.
absl::Status WriteSmallFile(Disk* disk, const std::string& path, const std::string& text);

// A file of exactly `bytes` bytes; DATA_LOSS if it has another size, else errors as OpenBelow.
absl::StatusOr<std::string> ReadSmallFile(const std::string& folder, const std::string& name, size_t bytes);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_SMALL_FILES_H_
