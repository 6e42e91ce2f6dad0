// SPDX-License-Identifier: Apache-2.0
// The roles of client certificates, by subject alternative name, from a file with one a line:
//
//   admin dns:operator.example.com
//   trainer uri:spiffe://example.com/trainer
//   reader *                                   any certificate of the certificate authority
//
// Immutable and thread-safe.
#ifndef LOSSD_SERVER_ACCESS_CERTIFICATE_ROLES_H_
#define LOSSD_SERVER_ACCESS_CERTIFICATE_ROLES_H_

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/access/access_file.h"
#include "server/access/role.h"

namespace lossd::access {

class CertificateRoles {
 public:
  static constexpr size_t kMaxNames = 4096;

  // INVALID_ARGUMENT naming flag, path and line.
  static absl::StatusOr<std::shared_ptr<const CertificateRoles>> Parse(const AccessFile& file,
                                                                       absl::string_view text);

  struct Match {
    std::string name;          // the name that gives the role; without a role, the certificate's first
    std::optional<Role> role;  // the highest that a name of the certificate has
  };
  // `names`: of one certificate, "dns:...", "uri:...", "email:..." or "ip:...".
  Match Find(const std::vector<std::string>& names) const;

 private:
  std::map<std::string, Role, std::less<>> roles_;
  std::optional<Role> any_;
};

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_CERTIFICATE_ROLES_H_
