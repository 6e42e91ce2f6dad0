// SPDX-License-Identifier: Apache-2.0
// Bearer tokens, from a file with one a line:
//
//   # role:name:token
//   trainer:pipeline-1:vJ2mWqk0u5m0V8m1zq3x
//   reader:prometheus:sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
//
// A name that has several lines has several tokens, so that one can be replaced while the other is in use.
//
// Immutable and thread-safe.
#ifndef LOSSD_SERVER_ACCESS_TOKENS_H_
#define LOSSD_SERVER_ACCESS_TOKENS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/access/access_file.h"
#include "server/access/role.h"

namespace lossd::access {

// Who a token or a certificate belongs to.
struct Principal {
  std::string name;
  Role role = Role::kReader;
};

class Tokens {
 public:
  static constexpr size_t kMinTokenBytes = 16;
  static constexpr size_t kMaxTokenBytes = 1024;
  static constexpr size_t kMaxTokens = 1024;
  static constexpr size_t kMaxNameBytes = 64;

  // INVALID_ARGUMENT naming flag, path and line, never a token.
  static absl::StatusOr<std::shared_ptr<const Tokens>> Parse(const AccessFile& file, absl::string_view text);

  // Whose token it is; null if it is unknown. The time does not depend on which token it is, or nearly is:
  // hashes are compared, all of them, and each as a whole.
  const Principal* Find(absl::string_view token) const;

  size_t size() const { return entries_.size(); }

 private:
  using Hash = std::array<uint8_t, 32>;
  struct Entry {
    Principal principal;
    Hash hash;  // SHA-256
  };
  static Hash HashOf(absl::string_view token);
  static absl::StatusOr<Entry> ParseLine(const AccessFile& file, size_t number, absl::string_view line);

  std::vector<Entry> entries_;
};

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_TOKENS_H_
