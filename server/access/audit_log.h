// SPDX-License-Identifier: Apache-2.0
// The audit lines of the log: one for each administrative call that has ended, and one for each call that was
// refused for who the caller is.
//
//   ... INFO audit identity=dns:operator address=10.0.0.5:40112 method=DeleteHead head=lm outcome=OK
//
// A line is bounded: each text is cut to kMaxTextBytes, and bytes that are not visible ASCII are shown as
// "?". Callers without rights can cause at most kRefusedLines lines at once and one a second from then on;
// the next line says how many were left out.
//
// Thread-safe.
#ifndef LOSSD_SERVER_ACCESS_AUDIT_LOG_H_
#define LOSSD_SERVER_ACCESS_AUDIT_LOG_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/log/line_budget.h"

namespace lossd::access {

struct AuditedCall {
  std::string identity;      // empty: the server does not ask
  std::string address;       // of the peer
  absl::string_view method;  // "CreateHead"
  std::string head;          // may be empty
};

class AuditLog {
 public:
  static constexpr size_t kMaxTextBytes = 200;
  static constexpr int64_t kRefusedLines = 20;

  explicit AuditLog(std::function<absl::Time()> now = &absl::Now) : refused_(kRefusedLines, std::move(now)) {}

  void Ended(const AuditedCall& call, absl::string_view outcome);
  void Refused(const AuditedCall& call, const absl::Status& why);

 private:
  log::LineBudget refused_;
};

// `text` as audit lines show it.
std::string AuditText(absl::string_view text);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_AUDIT_LOG_H_
