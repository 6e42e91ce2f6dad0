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
// "?". Callers without rights can cause at most kRefusedLines lines at once and one a second from then on;
// the next line says how many were left out. Calls that failed and changed nothing have such a budget for
// each peer, and one for all peers together.
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
  std::string identity;              // empty: the server does not ask
  std::string address;               // of the peer
  absl::string_view method;          // "CreateHead"
  std::string head;                  // may be empty
  std::vector<std::string> removed;  // checkpoints that a save has pruned
};

class AuditLog {
 public:
  static constexpr size_t kMaxTextBytes = 200;
  static constexpr int64_t kRefusedLines = 20;
  static constexpr int64_t kFailedLines = 20;        // of one peer
  static constexpr int64_t kFailedLinesOfAll = 200;  // of all peers

  explicit AuditLog(std::function<absl::Time()> now = &clocks::SteadyNow)
      : refused_(kRefusedLines, now),
        failed_(kFailedLines, kFailedLinesOfAll, now),
        changed_nothing_(kFailedLines, kFailedLinesOfAll, now) {}

  // An identity has a budget of lines for calls with an outcome other than "OK".
  void Ended(const AuditedCall& call, absl::string_view outcome);
  void Refused(const AuditedCall& call, const absl::Status& why);
  // Writes "call failed" for a call that was not refused because of its caller. `peer`: the peer that made
  // it.
  void Failed(absl::string_view peer, absl::string_view method, absl::string_view code,
              absl::string_view error);

 private:
  log::LineBudget refused_;
  log::LineBudgets failed_;           // by peer
  log::LineBudgets changed_nothing_;  // audit lines, by identity
};

// `text` as audit lines show it.
std::string AuditText(absl::string_view text);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_AUDIT_LOG_H_
