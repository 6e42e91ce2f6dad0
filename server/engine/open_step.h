// SPDX-License-Identifier: Apache-2.0
// The steps of one head. OpenStep is the step that is open: it decides what a call may begin or continue, and
// whether the step may be closed. LastStep is the step before it, kept so that a repeated ApplyStep gets the
// same answer. StepHistory knows which program trains the head and where its values come from; it explains to
// a caller why the step that the caller names is not open.
//
// Plain state without threads or device; the engine's lock guards it. Checks change nothing.
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

// LastStep records how the step before the open one was closed, so that a repeat of the request that closed
// it is recognized and gets the same answer.
class LastStep {
 public:
  // This engine closed step `number`. `complete_ids`, ascending: the microbatches and contributions that were
  // complete in it.
  void Set(uint64_t number, const head::AppliedStep& applied, std::vector<uint64_t> complete_ids);
  // The engine that wrote the loaded checkpoint closed step `number`. `applied` is what the checkpoint says
  // of it.
  void SetLoaded(uint64_t number, const std::optional<head::AppliedStep>& applied);

  // How the step was closed; nothing if that is not known, or if there was no such step.
  const std::optional<head::AppliedStep>& applied() const { return applied_; }

  // True if the request is for this step: it is then checked by CheckRepeat and answered with Result.
  bool IsRepeat(const StepRequest& request) const { return applied_.has_value() && request.step == number_; }

  // The members below require that applied() has a value.

  // Checks that a repeat asks for the step as it was applied. FAILED_PRECONDITION if it differs; GetMissing
  // (errors.h) then lists what differs. ABORTED if it names another generation of gradients.
  absl::Status CheckRepeat(const StepRequest& request) const;
  // The answer to the request that closed the step. `now`: the present state of the head.
  StepResult Result(const HeadState& now) const;

 private:
  uint64_t number_ = 0;
  std::optional<head::AppliedStep> applied_;
  // The microbatches and contributions that were complete in the step, ascending; nothing if another process
  // applied it.
  std::optional<std::vector<uint64_t>> complete_ids_;
};

// A step that a call names, and the run that makes the call; "": the call names no run.
struct NamedStep {
  uint64_t step = 0;
  absl::string_view run;
};

// StepHistory records which program trains a head and where the head's values come from. From that it
// explains why a caller named a step that is not open: another program trains the head, or the head went back
// to an earlier step.
class StepHistory {
 public:
  // `origin` identifies where the values come from. OnLoaded and OnReset give a new number, and no number is
  // used twice in an engine.
  explicit StepHistory(uint64_t origin) : origin_(origin) {}

  const head::History& history() const { return history_; }
  uint64_t origin() const { return origin_; }
  // The run that sent the first rows of the open step; "": the step has no rows, or the call named no run.
  std::string open_run() const { return open_run_.value_or(""); }

  // ---- Events ----
  // `run` entered rows in a ledger.
  void OnRows(absl::string_view run) {
    if (!open_run_.has_value()) open_run_ = std::string(run);
  }
  // `run` closed the open step.
  void OnApplied(absl::string_view run, absl::Time now);
  // The open step has no rows anymore.
  void OnDiscarded() { open_run_.reset(); }
  // A checkpoint replaced the values; `loaded` is the history in the checkpoint.
  void OnLoaded(uint64_t origin, const head::History& loaded);
  // The head was reset.
  void OnReset(uint64_t origin, absl::Time now);
  // The values of `origin`, with step `step` open, were saved to a checkpoint. Does nothing if the head has
  // values of another origin now.
  void OnSaved(uint64_t origin, absl::string_view checkpoint, uint64_t step, absl::Time saved_at);

  // Explains to people why the step that a call named is not the open one, e.g. "another program trains this
  // head: run a applied step 1 3 seconds ago". Never empty.
  std::string WhyNotOpen(const NamedStep& named, uint64_t open, absl::Time now) const;

 private:
  void Replace(uint64_t origin, head::History history);

  uint64_t origin_;
  head::History history_;
  bool applied_here_ = false;            // a step was applied since the values of `origin` came
  std::optional<absl::Time> reset_at_;   // set if the values of `origin` come from a reset
  std::optional<std::string> open_run_;  // absent: the open step has no rows
};

// The open step of one head: its number, the ledgers of what has been accumulated in it, and whether weights
// and gradients on the device are valid. It owns the versions of the head (HeadVersions in stream.h), so it
// decides what a call may begin or continue, and when a call has to end.
//
// A transition sets the new step and versions. The rows of the former step stay in the ledgers until
// ForgetRows, so that the calls that have to end can be ended first.
class OpenStep {
 public:
  // Opens step 0 of a new head. `incarnation`: the engine's. `counter` outlives this object. The limits are
  // those of each of the two ledgers, and `memory` pays for the ledgers.
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
  // Not OK if the accumulators may be half-written; OK again with the next generation.
  const absl::Status& gradients_status() const { return gradients_status_; }
  void MarkGradientsInvalid(absl::Status why);
  // The weights may be half-written, until a checkpoint has been loaded or the head was reset.
  void MarkWeightsInvalid(absl::Status why) { weights_status_ = std::move(why); }

  // ---- What a call may begin ----
  // Whether a call may accumulate or apply. Returns the error of the weights, else of the gradients.
  // UNAVAILABLE while the step is being applied.
  absl::Status CheckValid() const;
  // Whether a call may compute with the weights. UNAVAILABLE while a value is being written.
  absl::Status CheckWeights() const;
  // Whether a step, a save or a read may use values and moments. UNAVAILABLE while one of them is being
  // written.
  absl::Status CheckTensors() const;
  // Whether a call may read the accumulated gradients.
  absl::Status CheckGradients() const { return weights_status_.ok() ? gradients_status_ : weights_status_; }
  // Checks the step that a call names. FAILED_PRECONDITION if another step is open; the message explains why
  // (StepHistory::WhyNotOpen).
  absl::Status CheckNumber(absl::string_view field, const NamedStep& named, absl::Time now) const;
  // Checks the generation of gradients that a call names, if it names one. ABORTED if the head has another.
  absl::Status CheckGeneration(absl::string_view field, std::optional<uint64_t> named) const;

  // ---- What a call may continue ----
  // ABORTED if a version that the call is bound to has changed; else the error of the weights.
  absl::Status CheckBound(const Binding& binding) const;

  // ---- Closing ----
  // Checks that the request is for the open step and that everything that it expects has been accumulated.
  // FAILED_PRECONDITION if not; GetMissing then lists what is missing. ABORTED if the request names another
  // generation of gradients. UNAVAILABLE while a tensor is being written. `waits_for`: what slices of the
  // head wait for, or empty.
  absl::Status CheckComplete(const StepRequest& request, absl::string_view waits_for, absl::Time now) const;

  // ---- Transitions ----
  // The step will be applied with what it has now. No rows may join it until Close or CancelClose.
  void BeginClose();
  void CancelClose() { closing_.reset(); }
  // After BeginClose: the step has been applied as the request says, or skipped. The next step opens.
  void Close(const StepRequest& request, double grad_norm, bool skipped, absl::Time now);
  // The gradients of the open step were zeroed: the step begins again. `new_optimizer`: the moments were
  // zeroed, too, and the next update is the first.
  void Restart(bool new_optimizer = false);
  // All tensors are being replaced; EndLoad says when that is done. Until then CheckWeights returns `why`.
  // `last_step`: how the step before `progress.step` was applied, if that is known. `history`: of the
  // checkpoint that is loaded; absent if the head is reset.
  void BeginLoad(const head::Progress& progress, const std::optional<head::AppliedStep>& last_step,
                 const std::optional<head::History>& history, absl::Status why, absl::Time now);
  void EndLoad() { weights_status_ = absl::OkStatus(); }
  // Empties the ledgers, which give their memory back. Called after Close, Restart and BeginLoad, and when
  // the head is gone.
  void ForgetRows() { ledgers_.Clear(); }

 private:
  // What was in a step when it was applied.
  struct Contents {
    int64_t microbatches = 0;
    int64_t rows = 0;
    int64_t contributions = 0;
    std::vector<uint64_t> complete_ids;  // ascending
  };

  // Starts a new generation, whose gradients begin at zero.
  void Enter(absl::string_view why);

  const uint64_t incarnation_;
  VersionCounter* const counter_;
  HeadVersions versions_;
  uint64_t updates_ = 0;
  StepLedgers ledgers_;
  absl::Status gradients_status_;
  absl::Status weights_status_;
  std::optional<Contents> closing_;  // set while the step is being applied
  LastStep last_;
  StepHistory history_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_OPEN_STEP_H_
