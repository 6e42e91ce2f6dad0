// SPDX-License-Identifier: Apache-2.0
#include "server/access/audit_log.h"

#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/errors/field_error.h"

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
  std::optional<int64_t> left_out = 0;
  if (outcome != "OK") {
    left_out = changed_nothing_.Take(call.holder);
  } else if (call.leaves_nothing) {
    left_out = left_nothing_.Take(
        {.name = absl::StrCat(call.method, " ", call.holder.name), .is_known = call.holder.is_known});
  }
  if (!left_out.has_value()) return;
  const std::string identity = IdentityText(call.identity);
  const std::string address = AuditText(call.address);
  const std::string head = AuditText(call.head);
  if (!call.removed.empty()) {
    log::Log(log::LogLevel::kInfo, "audit",
             {{"identity", identity},
              {"address", address},
              {"method", call.method},
              {"head", head},
              {"outcome", outcome},
              {"removed", call.removed.size()},
              {"removed_names", AuditText(absl::StrJoin(call.removed, " "))}});
  } else if (*left_out > 0) {
    log::Log(log::LogLevel::kInfo, "audit",
             {{"identity", identity},
              {"address", address},
              {"method", call.method},
              {"head", head},
              {"outcome", outcome},
              {outcome == "OK" ? "calls_left_out" : "failures_left_out", *left_out}});
  } else {
    log::Log(log::LogLevel::kInfo, "audit",
             {{"identity", identity},
              {"address", address},
              {"method", call.method},
              {"head", head},
              {"outcome", outcome}});
  }
}

void AuditLog::Failed(const log::LineHolder& holder, absl::string_view peer, absl::string_view method,
                      absl::string_view code, absl::string_view error) {
  const std::optional<int64_t> left_out = failed_.Take(holder);
  if (!left_out.has_value()) return;
  const std::string who = AuditText(peer);
  if (*left_out > 0) {
    log::Log(log::LogLevel::kInfo, "call failed",
             {{"method", method},
              {"code", code},
              {"error", error},
              {"peer", who},
              {"failures_left_out", *left_out}});
  } else {
    log::Log(log::LogLevel::kInfo, "call failed",
             {{"method", method}, {"code", code}, {"error", error}, {"peer", who}});
  }
}

void AuditLog::Refused(const AuditedCall& call, const absl::Status& why) {
  const std::optional<int64_t> left_out = (call.identity.empty() ? unknown_ : refused_).Take(call.holder);
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
