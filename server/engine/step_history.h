// SPDX-License-Identifier: Apache-2.0
// What is known of who trains a head and where its values come from, and the words in which a caller is told
// that it named another step than the open one: another program trains the head, or the head went back.
//
// Plain state without threads, clock or lock; the engine's lock guards it.
#ifndef LOSSD_SERVER_ENGINE_STEP_HISTORY_H_
#define LOSSD_SERVER_ENGINE_STEP_HISTORY_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/head/history.h"

namespace lossd::engine {

// A step that a call names, and the run that makes the call ("": it names none).
struct NamedStep {
  uint64_t step = 0;
  absl::string_view run;
};

class StepHistory {
 public:
  // `origin` names where the values come from: another number with each OnReplaced, none twice in an engine.
  explicit StepHistory(uint64_t origin) : origin_(origin) {}

  const head::History& history() const { return history_; }
  uint64_t origin() const { return origin_; }
  // Of the first rows of the open step; "": it has none, or the run named none.
  std::string open_run() const { return open_run_.value_or(""); }

  // ---- Events ----
  // Rows have been entered in a ledger.
  void OnRows(absl::string_view run) {
    if (!open_run_.has_value()) open_run_ = std::string(run);
  }
  void OnApplied(absl::string_view run, absl::Time now);
  // The open step has no rows any more.
  void OnDiscarded() { open_run_.reset(); }
  // A checkpoint took the place of the values; `loaded` says what it knows.
  void OnLoaded(uint64_t origin, const head::History& loaded);
  void OnReset(uint64_t origin, absl::Time now);
  // The values of `origin` with step `step` open were saved. Nothing if the head has others since.
  void OnSaved(uint64_t origin, absl::string_view checkpoint, uint64_t step, absl::Time saved_at);

  // What is known of why `named` is not `open`, for people, e.g. "another program trains this head: run a
  // applied step 1 3 seconds ago". Never empty.
  std::string WhyNotOpen(const NamedStep& named, uint64_t open, absl::Time now) const;

 private:
  void Replace(uint64_t origin, head::History history);

  uint64_t origin_;
  head::History history_;
  bool applied_here_ = false;            // a step since `origin`
  std::optional<absl::Time> reset_at_;   // the values of `origin` come from a reset
  std::optional<std::string> open_run_;  // nothing: the open step has no rows
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STEP_HISTORY_H_
