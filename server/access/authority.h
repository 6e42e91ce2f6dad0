// SPDX-License-Identifier: Apache-2.0
// Authority identifies callers by what they present: a client certificate that TLS has verified, or a bearer
// token. CheckRole checks that a caller's role is high enough.
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

// The credentials that came with a call. The view must stay valid during Identify.
struct Presented {
  bool certificate = false;                 // TLS has verified a certificate
  absl::Time end = absl::InfiniteFuture();  // end of the certificate, wall clock
  // The names of the certificate: "dns:...", "uri:...", "email:...", "ip:...".
  std::vector<std::string> names;
  std::optional<absl::string_view> authorization;  // "Bearer <token>"
};

struct Identity {
  // "dns:trainer-1" or "token:pipeline-1"; empty if the server requires no identity.
  std::string name;
  std::optional<Role> role;                   // nullopt: the caller is known, but has no role
  absl::Time until = absl::InfiniteFuture();  // the credentials are valid until then
};

class Authority {
 public:
  // An empty path means that there is no such file. Without both files the server requires no identity, and
  // every client is an admin.
  static absl::StatusOr<std::unique_ptr<Authority>> Create(const AccessFile& certificate_roles,
                                                           const AccessFile& tokens);

  bool asks() const { return roles_ != nullptr || tokens_ != nullptr; }

  // Identifies a caller. If the server has tokens, a token takes precedence over a certificate.
  // UNAUTHENTICATED if the token is unknown, the certificate has expired, or nothing is presented. The
  // message contains no part of the credentials.
  absl::StatusOr<Identity> Identify(const Presented& presented) const;

 private:
  Authority() = default;
  absl::StatusOr<Identity> IdentifyToken(absl::string_view authorization) const;
  absl::Status NothingPresented() const;

  std::unique_ptr<Reloaded<CertificateRoles>> roles_;  // null: certificates are ignored
  std::unique_ptr<Reloaded<Tokens>> tokens_;           // null: tokens are ignored
};

absl::Status CertificateHasExpired();

// OK if `identity` has the role `needed` or a higher one. Otherwise PERMISSION_DENIED naming `method`, role
// and identity.
absl::Status CheckRole(const Identity& identity, Role needed, absl::string_view method);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_AUTHORITY_H_
