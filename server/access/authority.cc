// SPDX-License-Identifier: Apache-2.0
#include "server/access/authority.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::access {
namespace {

constexpr size_t kMaxNameBytes = 200;  // the most bytes of a name in a message

template <typename T>
absl::StatusOr<std::unique_ptr<Reloaded<T>>> Watch(const char* what, const AccessFile& file,
                                                   Secrecy secrecy) {
  return Reloaded<T>::Create(what, {file.path},
                             [file, secrecy]() -> absl::StatusOr<std::shared_ptr<const T>> {
                               LOSSD_TRY(const std::string text, ReadAccessFile(file, secrecy));
                               return T::Parse(file, text);
                             });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Authority>> Authority::Create(const AccessFile& certificate_roles,
                                                             const AccessFile& tokens) {
  std::unique_ptr<Authority> authority(new Authority());
  if (!certificate_roles.path.empty()) {
    LOSSD_TRY(authority->roles_,
              Watch<CertificateRoles>("roles of certificates", certificate_roles, Secrecy::kPublic));
  }
  if (!tokens.path.empty()) {
    LOSSD_TRY(authority->tokens_, Watch<Tokens>("tokens", tokens, Secrecy::kSecret));
  }
  return authority;
}

absl::Status CertificateHasExpired() {
  return absl::UnauthenticatedError("the client certificate has expired (LOSSD_CERT, LOSSD_KEY)");
}

absl::StatusOr<Identity> Authority::Identify(const Presented& presented) const {
  if (!asks()) return Identity{.name = "", .role = Role::kAdmin};
  if (tokens_ != nullptr && presented.authorization.has_value())
    return IdentifyToken(*presented.authorization);
  if (roles_ != nullptr && presented.certificate) {
    // TLS checked the dates only once, when the connection began.
    if (clocks::WallNow() > presented.end) return CertificateHasExpired();
    CertificateRoles::Match match = roles_->Get()->Find(presented.names);
    return Identity{.name = std::move(match.name), .role = match.role, .until = presented.end};
  }
  return NothingPresented();
}

absl::StatusOr<Identity> Authority::IdentifyToken(absl::string_view authorization) const {
  constexpr absl::string_view kScheme = "bearer ";
  if (!absl::StartsWithIgnoreCase(authorization, kScheme))
    return absl::UnauthenticatedError("authorization must be Bearer and a token");
  const absl::string_view token = absl::StripAsciiWhitespace(authorization.substr(kScheme.size()));
  const std::shared_ptr<const Tokens> tokens = tokens_->Get();
  const Principal* const principal = tokens->Find(token);
  if (principal == nullptr) return absl::UnauthenticatedError("the server does not know this token");
  return Identity{.name = absl::StrCat("token:", principal->name), .role = principal->role};
}

absl::Status Authority::NothingPresented() const {
  if (roles_ == nullptr)
    return absl::UnauthenticatedError("the server wants a token, and none came (LOSSD_TOKEN)");
  if (tokens_ == nullptr)
    return absl::UnauthenticatedError(
        "the server wants a client certificate, and none came (LOSSD_CERT, LOSSD_KEY)");
  return absl::UnauthenticatedError(
      "the server wants a client certificate (LOSSD_CERT, LOSSD_KEY) or a token (LOSSD_TOKEN), and neither "
      "came");
}

absl::Status CheckRole(const Identity& identity, Role needed, absl::string_view method) {
  if (identity.role.has_value() && *identity.role >= needed) return absl::OkStatus();
  const std::string has =
      identity.role.has_value() ? absl::StrCat("has the role ", RoleName(*identity.role)) : "has no role";
  return absl::PermissionDeniedError(absl::StrCat(
      method, " needs the role ", RoleName(needed), "; ",
      errors::Shortened(errors::ValidUtf8(identity.name), kMaxNameBytes), " ", has, " on this server"));
}

}  // namespace lossd::access
