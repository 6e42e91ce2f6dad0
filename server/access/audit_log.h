// SPDX-License-Identifier: Apache-2.0
// AuditLog writes the audit lines of the log: one line for each administrative call that has ended, and one
// line for each call that was refused because of its caller.
//
//   ... INFO audit identity=dns:operator address=10.0.0.5:40112 method=DeleteHead head=lm outcome=OK
//
// The line of a save that removed older checkpoints has their number, and their names up to kMaxTextBytes:
//
//   ... method=SaveCheckpoint head=lm outcome=OK removed=2 removed_names="lm/step-0000000001 lm/step-..."
//
// The size of a line is bounded: each text is cut to kMaxTextBytes, and bytes that are not visible ASCII are
// shown as "?".
//
// The number of lines is bounded too, for calls that were refused or that changed nothing. Each holder may
// cause kLines lines at once and then one a second. All holders together may cause kLinesOfAll at once and
// then one a second. The next line of a holder tells how many of its lines were left out. A holder is an
// identity, from any address, or the peer if the caller shows no identity (rpc::AccessControl::HolderOf). The
// first line of an identity that has been quiet is written even if others have used up the budget of all. If
// the server requires an identity, callers without one have separate budgets, so that strangers cannot
// displace lines about known callers.
//
// Thread-safe.
#ifndef LOSSD_SERVER_ACCESS_AUDIT_LOG_H_
#define LOSSD_SERVER_ACCESS_AUDIT_LOG_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "server/log/log.h"

namespace lossd::access {

struct AuditedCall {
  // Empty: the server requires no identity, or the caller is not known.
  std::string identity;
  log::LineHolder holder;            // the holder of the line's budget
  std::string address;               // the peer's address
  absl::string_view method;          // "CreateHead"
  std::string head;                  // may be empty
  std::vector<std::string> removed;  // the checkpoints that a save has pruned
  // The call changes nothing even with the outcome OK (rpc::MethodAccess).
  bool leaves_nothing = false;
};

class AuditLog {
 public:
  static constexpr size_t kMaxTextBytes = 200;
  static constexpr int64_t kLines = 20;        // for one holder
  static constexpr int64_t kLinesOfAll = 200;  // for all holders

  explicit AuditLog(std::function<absl::Time()> now = &clocks::SteadyNow)
      : refused_(kLines, kLinesOfAll, now),
        unknown_(kLines, kLinesOfAll, now),
        failed_(kLines, kLinesOfAll, now),
        changed_nothing_(kLines, kLinesOfAll, now),
        left_nothing_(kLines, kLinesOfAll, now) {}

  // Writes the line of a call that has ended. A holder has one budget for calls with an outcome other than
  // "OK", and one budget for each method that leaves nothing behind, for its calls with the outcome "OK".
  void Ended(const AuditedCall& call, absl::string_view outcome);
  void Refused(const AuditedCall& call, const absl::Status& why);
  // Writes the line "call failed" for a call that failed, but not because of its caller. `peer`: the caller's
  // name in the line.
  void Failed(const log::LineHolder& holder, absl::string_view peer, absl::string_view method,
              absl::string_view code, absl::string_view error);

 private:
  log::LineBudgets refused_;          // refused calls of known callers
  log::LineBudgets unknown_;          // refused calls of unknown callers
  log::LineBudgets failed_;           // "call failed"
  log::LineBudgets changed_nothing_;  // calls with an outcome other than OK
  // Calls with the outcome OK that leave nothing behind, by holder and method.
  log::LineBudgets left_nothing_;
};

// `text` in the form of audit lines: cut and in visible ASCII.
std::string AuditText(absl::string_view text);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_AUDIT_LOG_H_
