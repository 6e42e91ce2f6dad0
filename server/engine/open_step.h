// SPDX-License-Identifier: Apache-2.0
// The steps of one head. OpenStep is the step that is open: it decides what a call may begin or go on with
// and whether the step may be closed. LastStep is the step before it, so that a repeated ApplyStep gets the
// same answer. StepHistory knows who trains the head and where its values come from, and finds the words for
// a caller that names another step.
//
// Plain state without threads, device or lock; the engine's lock guards it. Checks change nothing.
#ifndef LOSSD_SERVER_ENGINE_OPEN_STEP_H_
#define LOSSD_SERVER_ENGINE_OPEN_STEP_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/engine/ledger.h"
#include "server/engine/stream.h"
#include "server/head/checkpoint.h"
#include "server/head/head.h"
#include "server/head/manifest.h"

namespace lossd::engine {

// How the step before the open one was closed, so that a repeat of the request that closed it is recognised
// and gets the same answer.
class LastStep {
 public:
  // The step `number` was closed by this engine with these microbatches and contributions complete,
  // ascending.
  void Set(uint64_t number, const head::AppliedStep& applied, std::vector<uint64_t> complete_ids);
  // The step `number` was closed by the engine that wrote a checkpoint, as far as the checkpoint tells.
  void SetLoaded(uint64_t number, const std::optional<head::AppliedStep>& applied);

  // Nothing if it is not known how the step was closed, or if there was none.
  const std::optional<head::AppliedStep>& applied() const { return applied_; }

  // True if the request is for this step, so that the answer is Result.
  bool IsRepeat(const StepRequest& request) const { return applied_.has_value() && request.step == number_; }

  // The members below are for a step of which `applied` is known.

  // FAILED_PRECONDITION unless the repeat means the step that was applied, ABORTED if that was with other
  // gradients than it names; GetMissing (errors.h) lists the differences.
  absl::Status CheckRepeat(const StepRequest& request) const;
  // The answer to the request that closed the step. `now`: the state of the head.
  StepResult Result(const HeadState& now) const;

 private:
  uint64_t number_ = 0;
  std::optional<head::AppliedStep> applied_;
  // The microbatches and contributions that were complete in it, ascending; nothing if another process
  // applied it.
  std::optional<std::vector<uint64_t>> complete_ids_;
};

// A step that a call names, and the run that makes the call ("": it names none).
struct NamedStep {
  uint64_t step = 0;
  absl::string_view run;
};

// What is known of who trains a head and where its values come from, and the words in which a caller is told
// that it named another step than the open one: another program trains the head, or the head went back.
class StepHistory {
 public:
  // `origin` names where the values come from: another number with each OnReplaced, none twice in an engine.
  explicit StepHistory(uint64_t origin) : origin_(origin) {}

  const head::History& history() const { return history_; }
  uint64_t origin() const { return origin_; }
  // The run that sent the first rows of the open step; "": the step has no rows, or the run gave no name.
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

// The open step of one head: its number, what has been accumulated in it, and whether the numbers on the
// device are valid. OpenStep alone knows the versions of a head (stream.h), and so what a call may begin, may
// go on with, or has to end for.
//
// A transition gives the numbers their new values. The rows of the step before stay in the ledgers until
// ForgetRows, so that the calls that end with them can be ended first.
class OpenStep {
 public:
  // Step 0 of a new head. `incarnation` of the engine; `counter` outlives this; the limits are those of the
  // two ledgers, and `memory` pays for them.
  OpenStep(uint64_t incarnation, VersionCounter* counter, int64_t max_rows, int64_t max_microbatches,
           const RowMemory::Account& memory = {});

  uint64_t number() const { return versions_.step(); }
  uint64_t updates() const { return updates_; }  // head::Progress
  HeadVersions& versions() { return versions_; }
  HeadState state() const {
    return {.incarnation = incarnation_,
            .step = number(),
            .generation = versions_.generation(),
            .weights_version = versions_.weights(),
            .creation = versions_.creation()};
  }
  const LastStep& last() const { return last_; }
  StepHistory& history() { return history_; }

  Ledger& ledger() { return ledgers_.microbatches; }
  const Ledger& ledger() const { return ledgers_.microbatches; }
  ContributionLedger& contributions() { return ledgers_.contributions; }
  const ContributionLedger& contributions() const { return ledgers_.contributions; }

  // ---- Validity ----
  // Not OK if the accumulators may be half-written, until the next generation.
  const absl::Status& gradients_status() const { return gradients_status_; }
  void MarkGradientsInvalid(absl::Status why);
  // The weights may be half-written, until a checkpoint has been loaded.
  void MarkWeightsInvalid(absl::Status why) { weights_status_ = std::move(why); }

  // ---- What a call may begin ----
  // To accumulate or to apply: the error of the weights, else of the gradients. UNAVAILABLE while the step is
  // being applied.
  absl::Status CheckValid() const;
  // To compute with the weights. UNAVAILABLE while a value is being written.
  absl::Status CheckWeights() const;
  // To use values and moments as they are, in a step, a save or a read. UNAVAILABLE while one is being
  // written.
  absl::Status CheckTensors() const;
  // To read the accumulated gradients.
  absl::Status CheckGradients() const { return weights_status_.ok() ? gradients_status_ : weights_status_; }
  // Checks the step that a call names. FAILED_PRECONDITION if another one is open, saying what is known of
  // why.
  absl::Status CheckNumber(absl::string_view field, const NamedStep& named, absl::Time now) const;
  // Checks the generation of gradients that a call names, if it names one. ABORTED if the head has another.
  absl::Status CheckGeneration(absl::string_view field, std::optional<uint64_t> named) const;

  // ---- What a call may go on with ----
  // ABORTED if something that the call is bound to has changed; the error of the weights.
  absl::Status CheckBound(const Binding& binding) const;

  // ---- Closing ----
  // FAILED_PRECONDITION unless the request is for the open step and all that it expects is there; GetMissing
  // lists what is not. ABORTED if the head has other gradients than it names, UNAVAILABLE while a tensor is
  // being written. `waits_for`: what slices of the head wait for, or empty.
  absl::Status CheckComplete(const StepRequest& request, absl::string_view waits_for, absl::Time now) const;

  // ---- Transitions ----
  // The step is going to be applied with what is in it now; nothing may join it until Close or CancelClose.
  void BeginClose();
  void CancelClose() { closing_.reset(); }
  // The step has been applied as the request says, or skipped, after BeginClose: the next one opens.
  void Close(const StepRequest& request, double grad_norm, bool skipped, absl::Time now);
  // Gradients of the open step were zeroed: it begins again. With `new_optimizer` the moments were zeroed,
  // too, and the next update is the first.
  void Restart(bool new_optimizer = false);
  // Other values take the place of all there is; they are there with EndLoad. `last_step`: how the step
  // before was applied, as far as that is known. `history`: of a checkpoint that is loaded; nothing: the head
  // is reset. `why` CheckWeights says until then.
  void BeginLoad(const head::Progress& progress, const std::optional<head::AppliedStep>& last_step,
                 const std::optional<head::History>& history, absl::Status why, absl::Time now);
  void EndLoad() { weights_status_ = absl::OkStatus(); }
  // After Close, Restart, a reset and BeginLoad, and when the head is gone: empties the ledgers, which give
  // their memory back.
  void ForgetRows() { ledgers_.Clear(); }

 private:
  // What a step was applied with.
  struct Contents {
    int64_t microbatches = 0;
    int64_t rows = 0;
    int64_t contributions = 0;
    std::vector<uint64_t> complete_ids;  // ascending
  };

  // The gradients begin at zero.
  void Enter(absl::string_view why);

  const uint64_t incarnation_;
  VersionCounter* const counter_;
  HeadVersions versions_;
  uint64_t updates_ = 0;
  StepLedgers ledgers_;
  absl::Status gradients_status_;
  absl::Status weights_status_;
  std::optional<Contents> closing_;  // while the step is being applied
  LastStep last_;
  StepHistory history_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_OPEN_STEP_H_
