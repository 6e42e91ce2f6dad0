// SPDX-License-Identifier: Apache-2.0
#include "server/access/audit_log.h"

#include <optional>

#include "absl/strings/ascii.h"
#include "kernels/errors/text.h"
#include "server/log/log.h"

namespace lossd::access {
namespace {

std::string IdentityText(absl::string_view identity) {
  return identity.empty() ? "anybody" : AuditText(identity);
}

}  // namespace

std::string AuditText(absl::string_view text) {
  std::string result = errors::Shortened(text, AuditLog::kMaxTextBytes);
  for (char& c : result) {
    if (!absl::ascii_isprint(c)) c = '?';
  }
  return result;
}

void AuditLog::Ended(const AuditedCall& call, absl::string_view outcome) {
  log::Log(log::LogLevel::kInfo, "audit",
           {{"identity", IdentityText(call.identity)},
            {"address", AuditText(call.address)},
            {"method", call.method},
            {"head", AuditText(call.head)},
            {"outcome", outcome}});
}

void AuditLog::Refused(const AuditedCall& call, const absl::Status& why) {
  const std::optional<int64_t> left_out = refused_.Take();
  if (!left_out.has_value()) return;
  log::Log(log::LogLevel::kWarning, "audit",
           {{"identity", call.identity.empty() ? "unknown" : AuditText(call.identity)},
            {"address", AuditText(call.address)},
            {"method", call.method},
            {"head", AuditText(call.head)},
            {"outcome", absl::StatusCodeToString(why.code())},
            {"why", AuditText(why.message())},
            {"refusals_left_out", *left_out}});
}

}  // namespace lossd::access
