// SPDX-License-Identifier: Apache-2.0
// Files that decide who may do what: certificates, keys, tokens, roles. Each is named by a flag, and every
// error names flag and path. An unreadable or empty file is an error and never an empty value.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_ACCESS_ACCESS_FILE_H_
#define LOSSD_SERVER_ACCESS_ACCESS_FILE_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::access {

struct AccessFile {
  std::string flag;  // "tls_key"
  std::string path;
};

enum class Secrecy {
  kPublic,
  // Others than the owner must not be able to read the file. The group may read it if it belongs to root, as
  // PostgreSQL has it: a service manager hands out secrets in this way.
  kSecret,
};

inline constexpr size_t kMaxAccessFileBytes = size_t{1} << 20;

// INVALID_ARGUMENT unless the path names a regular, readable file of 1 byte to kMaxAccessFileBytes that is as
// secret as it has to be.
absl::StatusOr<std::string> ReadAccessFile(const AccessFile& file, Secrecy secrecy);

// "tls_key must <rule>, got <path>".
absl::Status AccessFileError(const AccessFile& file, absl::string_view rule);
// "token_file must <rule>, got <path> line 3".
absl::Status AccessLineError(const AccessFile& file, size_t line, absl::string_view rule);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_ACCESS_FILE_H_
