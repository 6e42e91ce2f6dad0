// SPDX-License-Identifier: Apache-2.0
// Roles, and the files that assign them: CertificateRoles for client certificates, and Tokens for bearer
// tokens. ReadAccessFile reads such files, and refuses a secret file that other users can read.
//
// All classes are immutable; all functions are stateless. Both are thread-safe.
#ifndef LOSSD_SERVER_ACCESS_ROLES_H_
#define LOSSD_SERVER_ACCESS_ROLES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::access {

// What a caller may do. Each role includes the rights of the role before it.
enum class Role : uint8_t {
  kReader,   // describes server and heads, reads metrics; no tensors
  kTrainer,  // computes losses, accumulates and applies gradients, reads tensors, saves checkpoints
  kAdmin,    // creates, overwrites, loads and deletes heads
};

// "reader", "trainer" or "admin".
absl::string_view RoleName(Role role);
// nullopt for any other text.
std::optional<Role> ParseRole(absl::string_view name);

// A file that controls access: certificates, keys, tokens or roles. A flag names the file, and every error
// names flag and path. An unreadable or empty file is an error, never an empty value.
struct AccessFile {
  std::string flag;  // "tls_key"
  std::string path;
};

enum class Secrecy {
  kPublic,
  // Only the owner may be able to read the file. If the file belongs to root, its group may read it too,
  // because service managers hand out secrets in this way. PostgreSQL has the same rule.
  kSecret,
};

inline constexpr size_t kMaxAccessFileBytes = size_t{1} << 20;

// Reads a file. INVALID_ARGUMENT unless it is a regular, readable file of 1 byte to kMaxAccessFileBytes that
// satisfies `secrecy`.
absl::StatusOr<std::string> ReadAccessFile(const AccessFile& file, Secrecy secrecy);

// The error "tls_key must <rule>, got <path>".
absl::Status AccessFileError(const AccessFile& file, absl::string_view rule);
// The error "token_file must <rule>, got <path> line 3".
absl::Status AccessLineError(const AccessFile& file, size_t line, absl::string_view rule);

// A line of a file of tokens or roles.
struct AccessLine {
  size_t number = 0;       // counts from 1
  absl::string_view text;  // without spaces at its ends; a part of the given text
};

// The lines of a file, without comments (#) and empty lines.
std::vector<AccessLine> AccessLines(absl::string_view text);

// The roles of client certificates by subject alternative name, from a file with one role on each line:
//
//   admin dns:operator.example.com
//   trainer uri:spiffe://example.com/trainer
//   reader *                                   any certificate of the certificate authority
class CertificateRoles {
 public:
  static constexpr size_t kMaxNames = 4096;

  // INVALID_ARGUMENT naming flag, path and line.
  static absl::StatusOr<std::shared_ptr<const CertificateRoles>> Parse(const AccessFile& file,
                                                                       absl::string_view text);

  struct Match {
    // The name that has the role; if no name has one, the first name of the certificate.
    std::string name;
    std::optional<Role> role;  // the highest role of the certificate's names
  };
  // `names`: the names of one certificate, "dns:...", "uri:...", "email:..." or "ip:...".
  Match Find(const std::vector<std::string>& names) const;

 private:
  std::map<std::string, Role, std::less<>> roles_;
  std::optional<Role> any_;
};

// The owner of a token.
struct Principal {
  std::string name;
  Role role = Role::kReader;
};

// Bearer tokens, from a file with one token on each line:
//
//   # role:name:token
//   trainer:pipeline-1:vJ2mWqk0u5m0V8m1zq3x
//   reader:prometheus:sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
//
// A name may have several lines, and so several tokens. Then one token can be replaced while another is in
// use.
class Tokens {
 public:
  static constexpr size_t kMinTokenBytes = 16;
  static constexpr size_t kMaxTokenBytes = 1024;
  static constexpr size_t kMaxTokens = 1024;
  static constexpr size_t kMaxNameBytes = 64;

  // INVALID_ARGUMENT naming flag, path and line, but never a token.
  static absl::StatusOr<std::shared_ptr<const Tokens>> Parse(const AccessFile& file, absl::string_view text);

  // The owner of the token; null if the token is unknown. The time does not depend on the token: the hashes
  // of all tokens are compared, each of them completely.
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

#endif  // LOSSD_SERVER_ACCESS_ROLES_H_
