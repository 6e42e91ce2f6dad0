// The open step of one head: its number, what has been accumulated in it, and whether the numbers on the
// device are valid. The one place that knows the versions of a head:
//   - number(), of the optimizer step that is open: it names the version of the weights;
//   - generation(), of the gradients: another number whenever they begin at zero again.
// It also decides whether a step may be closed, and recognises the repeat of a request that closed the last
// one.
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
#include "absl/types/span.h"
#include "server/engine/contribution_ledger.h"
#include "server/engine/ledger.h"
#include "server/engine/step_request.h"
#include "server/head/applied_step.h"
#include "server/head/progress.h"

namespace lossd::engine {

class OpenStep {
 public:
  // Step 0 of a new head. `incarnation` of the engine; the limits are those of the two ledgers, and `memory`
  // pays for them.
  OpenStep(uint64_t incarnation, uint64_t generation, int64_t max_rows, int64_t max_microbatches,
           const RowMemory::Account& memory = {});

  uint64_t number() const { return number_; }
  uint64_t updates() const { return updates_; }  // head::Progress
  uint64_t generation() const { return generation_; }
  HeadState state() const { return {.incarnation = incarnation_, .step = number_}; }
  const std::optional<head::AppliedStep>& last_step() const { return last_step_; }

  Ledger& ledger() { return ledger_; }
  const Ledger& ledger() const { return ledger_; }
  ContributionLedger& contributions() { return contributions_; }
  const ContributionLedger& contributions() const { return contributions_; }

  // ---- Validity ----
  // Not OK if the accumulators may be half-written, until Enter.
  const absl::Status& gradients_status() const { return gradients_status_; }
  // Not OK if the weights may be half-written, until Reset.
  const absl::Status& weights_status() const { return weights_status_; }
  // Why nothing may be accumulated or applied: the error of the weights, else of the gradients.
  const absl::Status& CheckValid() const {
    return weights_status_.ok() ? gradients_status_ : weights_status_;
  }
  void MarkGradientsInvalid(absl::Status why) { gradients_status_ = std::move(why); }
  void MarkWeightsInvalid(absl::Status why) { weights_status_ = std::move(why); }

  // ---- Closing ----
  // True if the request is for the step that was closed last, so that the answer is LastResult.
  bool IsRepeat(const StepRequest& request) const {
    return last_step_.has_value() && request.step + 1 == number_;
  }
  // FAILED_PRECONDITION unless the repeat means the step that was applied; GetMissing (errors.h) lists the
  // differences.
  absl::Status CheckRepeat(const StepRequest& request) const;
  // FAILED_PRECONDITION unless the request is for the open step and all that it expects is there; GetMissing
  // lists what is not. `waits_for`: what slices of the head wait for, or empty.
  absl::Status CheckComplete(const StepRequest& request, absl::string_view waits_for) const;
  // The last step's answer. Only if there is a last step.
  StepResult LastResult() const;

  // ---- Transitions ----
  // The head is gone: its ledgers give their memory back.
  void Forget();
  // The open step has been applied, or skipped: the next one opens.
  void Close(const kernels::OptimizerOptions& optimizer, double grad_norm, bool skipped, uint64_t generation);
  // Gradients of the open step were zeroed: it begins again.
  void Restart(uint64_t generation) { Enter(number_, generation); }
  // Weights were loaded. `last_step`: how the step before was applied, as far as that is known.
  void Reset(const head::Progress& progress, const std::optional<head::AppliedStep>& last_step,
             uint64_t generation);

 private:
  void Enter(uint64_t number, uint64_t generation);
  // A line for each of the ids that is not complete.
  std::vector<std::string> Missing(absl::Span<const uint64_t> ids) const;
  // A line for each microbatch or contribution outside `ids` that was begun and is not complete.
  std::vector<std::string> Incomplete(absl::Span<const uint64_t> ids) const;
  // Of microbatches and contributions, ascending.
  std::vector<uint64_t> CompleteIds() const;

  const uint64_t incarnation_;
  uint64_t number_ = 0;
  uint64_t updates_ = 0;
  uint64_t generation_;
  Ledger ledger_;
  ContributionLedger contributions_;
  absl::Status gradients_status_;
  absl::Status weights_status_;
  std::optional<head::AppliedStep> last_step_;  // number_ - 1
  // The microbatches and contributions that were complete in it, ascending; nothing if another process
  // applied it.
  std::optional<std::vector<uint64_t>> last_ids_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_OPEN_STEP_H_
