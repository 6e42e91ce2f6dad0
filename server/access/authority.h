// SPDX-License-Identifier: Apache-2.0
// Authority says who a caller is, by what the caller presents: a client certificate that TLS has verified, or
// a bearer token. CheckRole says whether that caller's role is high enough.
//
// Thread-safe. The files of roles and tokens are read again when they change.
#ifndef LOSSD_SERVER_ACCESS_AUTHORITY_H_
#define LOSSD_SERVER_ACCESS_AUTHORITY_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/access/certificates.h"
#include "server/access/roles.h"

namespace lossd::access {

// What came with a call. The view outlives the call of Identify.
struct Presented {
  bool certificate = false;                 // TLS has verified one
  absl::Time end = absl::InfiniteFuture();  // of the certificate, by the wall clock
  std::vector<std::string> names;           // of the certificate: "dns:...", "uri:...", "email:...", "ip:..."
  std::optional<absl::string_view> authorization;  // "Bearer <token>"
};

struct Identity {
  std::string name;          // "dns:trainer-1", "token:pipeline-1"; empty if the server does not ask
  std::optional<Role> role;  // null: known, but without a role
  absl::Time until = absl::InfiniteFuture();  // what was presented holds so long
};

class Authority {
 public:
  // An empty path: no such file. Without either the server does not ask who a client is, and every
  // client is an admin.
  static absl::StatusOr<std::unique_ptr<Authority>> Create(const AccessFile& certificate_roles,
                                                           const AccessFile& tokens);

  bool asks() const { return roles_ != nullptr || tokens_ != nullptr; }

  // A token counts before a certificate, if the server knows any tokens. UNAUTHENTICATED if a token is
  // unknown, the certificate has expired or nothing is presented; the message holds no part of what was
  // presented.
  absl::StatusOr<Identity> Identify(const Presented& presented) const;

 private:
  Authority() = default;
  absl::StatusOr<Identity> IdentifyToken(absl::string_view authorization) const;
  absl::Status NothingPresented() const;

  std::unique_ptr<Reloaded<CertificateRoles>> roles_;  // null: certificates count for nothing
  std::unique_ptr<Reloaded<Tokens>> tokens_;           // null: tokens count for nothing
};

absl::Status CertificateHasExpired();

// OK if `identity` has `needed` or a higher role; else PERMISSION_DENIED naming `method`, role and identity.
absl::Status CheckRole(const Identity& identity, Role needed, absl::string_view method);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_AUTHORITY_H_
