// SPDX-License-Identifier: Apache-2.0
// AuditLog writes the audit lines of the log: one line for each administrative call that has ended, and one
// line for each call that was refused for who the caller is.
//
//   ... INFO audit identity=dns:operator address=10.0.0.5:40112 method=DeleteHead head=lm outcome=OK
//
// A save that removed older checkpoints says how many, and their names up to the bound of a text:
//
//   ... method=SaveCheckpoint head=lm outcome=OK removed=2 removed_names="lm/step-0000000001 lm/step-..."
//
// A line is bounded: each text is cut to kMaxTextBytes, and bytes that are not visible ASCII are shown as
// "?". The lines of calls that were refused, or failed and changed nothing, are bounded too: kLines at once
// and one a second from then on for each holder, and kLinesOfAll at once and one a second for all holders
// together; the next line of a holder says how many were left out. A holder is an identity, from wherever it
// calls, and of callers that show none a peer (rpc::AccessControl::HolderOf). An identity that has been quiet
// is not left out because of others. Callers that show no identity where the server asks for one have budgets
// of their own, so that strangers leave no line about a known caller out.
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
  std::string identity;              // empty: the server does not ask, or the caller is not known
  log::LineHolder holder;            // of the budget that the call's line is taken from
  std::string address;               // of the peer
  absl::string_view method;          // "CreateHead"
  std::string head;                  // may be empty
  std::vector<std::string> removed;  // checkpoints that a save has pruned
  bool leaves_nothing = false;       // also with the outcome OK: rpc::MethodAccess
};

class AuditLog {
 public:
  static constexpr size_t kMaxTextBytes = 200;
  static constexpr int64_t kLines = 20;        // of one holder
  static constexpr int64_t kLinesOfAll = 200;  // of all holders

  explicit AuditLog(std::function<absl::Time()> now = &clocks::SteadyNow)
      : refused_(kLines, kLinesOfAll, now),
        unknown_(kLines, kLinesOfAll, now),
        failed_(kLines, kLinesOfAll, now),
        changed_nothing_(kLines, kLinesOfAll, now),
        left_nothing_(kLines, kLinesOfAll, now) {}

  // A holder has a budget of lines for calls with an outcome other than "OK", and one for the calls with the
  // outcome "OK" of each method that leaves nothing behind.
  void Ended(const AuditedCall& call, absl::string_view outcome);
  void Refused(const AuditedCall& call, const absl::Status& why);
  // Writes "call failed" for a call that was not refused because of its caller. `peer`: the peer that made
  // it, as the line names it.
  void Failed(const log::LineHolder& holder, absl::string_view peer, absl::string_view method,
              absl::string_view code, absl::string_view error);

 private:
  log::LineBudgets refused_;          // calls of known callers
  log::LineBudgets unknown_;          // and of others
  log::LineBudgets failed_;           // "call failed"
  log::LineBudgets changed_nothing_;  // audit lines of calls with another outcome than OK
  log::LineBudgets left_nothing_;     // and with OK, by holder and method
};

// `text` as audit lines show it.
std::string AuditText(absl::string_view text);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_AUDIT_LOG_H_
