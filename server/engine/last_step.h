// SPDX-License-Identifier: Apache-2.0
// How the step before the open one was closed, so that a repeat of the request that closed it is recognised
// and gets the same answer.
//
// Plain state without threads or lock; the engine's lock guards it. Checks change nothing.
#ifndef LOSSD_SERVER_ENGINE_LAST_STEP_H_
#define LOSSD_SERVER_ENGINE_LAST_STEP_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/step_request.h"
#include "server/engine/stream.h"
#include "server/head/applied_step.h"

namespace lossd::engine {

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

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_LAST_STEP_H_
