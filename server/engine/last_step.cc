// SPDX-License-Identifier: Apache-2.0
#include "server/engine/last_step.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {

void LastStep::Set(uint64_t number, const head::AppliedStep& applied, std::vector<uint64_t> complete_ids) {
  number_ = number;
  applied_ = applied;
  complete_ids_ = std::move(complete_ids);
}

void LastStep::SetLoaded(uint64_t number, const std::optional<head::AppliedStep>& applied) {
  number_ = number;
  applied_ = applied;
  complete_ids_.reset();
}

absl::Status LastStep::CheckRepeat(const StepRequest& request) const {
  const head::AppliedStep& last = *applied_;
  if (auto meant = CheckIncarnation(request.incarnation, last.incarnation); !meant.ok()) return meant;
  if (last.generation != 0 && request.generation.value_or(last.generation) != last.generation)
    return WithCurrentStep(OtherGeneration("generation", *request.generation, last.generation), number_ + 1);
  if (!(last.optimizer == request.optimizer)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "optimizer",
                      "differs from what this step was applied with", "other settings");
  }
  if (last.begin_optimizer != request.begin_optimizer) {
    return FieldError(
        absl::StatusCode::kFailedPrecondition, "begin_optimizer",
        absl::StrCat("must be ", last.begin_optimizer ? "true" : "false", ", as this step was applied with"),
        request.begin_optimizer ? "true" : "false");
  }
  std::vector<std::string> lines;
  if (complete_ids_.has_value()) {
    for (const uint64_t id : request.expected_microbatches) {
      if (!std::binary_search(complete_ids_->begin(), complete_ids_->end(), id))
        lines.push_back(absl::StrCat("microbatch ", id, ": was not whole in it"));
    }
  }
  if (request.expected_rows.has_value() && *request.expected_rows != last.rows) {
    lines.push_back(absl::StrCat("rows: ", last.rows, " were in it, ", *request.expected_rows, " expected"));
  }
  if (lines.empty()) return absl::OkStatus();
  absl::Status status = absl::FailedPreconditionError(
      absl::StrCat("step ", request.step, " has been applied as another one: ", lines.front()));
  return WithMissing(WithCurrentStep(std::move(status), number_ + 1), lines);
}

StepResult LastStep::Result(const HeadState& now) const {
  return {.state = now,
          .grad_norm = applied_->grad_norm,
          .microbatches = applied_->microbatches,
          .rows = applied_->rows,
          .contributions = applied_->contributions,
          .skipped = applied_->skipped,
          .applied_incarnation = applied_->incarnation};
}

}  // namespace lossd::engine
