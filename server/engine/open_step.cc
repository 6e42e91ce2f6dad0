#include "server/engine/open_step.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

// A repeat may be of a step that was applied before a restart, by another process.
absl::Status CheckIncarnation(const StepRequest& request, uint64_t own) {
  if (request.incarnation.value_or(own) == own) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, "incarnation",
                    absl::StrCat("must be that of the server process that has the step's rows, ",
                                 absl::Hex(own, absl::kZeroPad16)),
                    absl::StrCat(absl::Hex(*request.incarnation, absl::kZeroPad16)));
}

void Append(std::vector<std::string> more, std::vector<std::string>& lines) {
  lines.insert(lines.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

}  // namespace

OpenStep::OpenStep(uint64_t incarnation, uint64_t generation, int64_t max_rows, int64_t max_microbatches,
                   const RowMemory::Account& memory)
    : incarnation_(incarnation),
      generation_(generation),
      ledger_(max_rows, max_microbatches, memory),
      contributions_(max_rows, max_microbatches, memory) {}

// ---- Closing ----

absl::Status OpenStep::CheckRepeat(const StepRequest& request) const {
  const head::AppliedStep& last = *last_step_;
  if (auto meant = CheckIncarnation(request, last.incarnation); !meant.ok()) return meant;
  if (!(last.optimizer == request.optimizer)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "optimizer",
                      "differs from what this step was applied with", "other settings");
  }
  std::vector<std::string> lines;
  if (last_ids_.has_value()) {
    for (const uint64_t id : request.expected_microbatches) {
      if (!std::binary_search(last_ids_->begin(), last_ids_->end(), id))
        lines.push_back(absl::StrCat("microbatch ", id, ": was not whole in it"));
    }
  }
  if (request.expected_rows.has_value() && *request.expected_rows != last.rows) {
    lines.push_back(absl::StrCat("rows: ", last.rows, " were in it, ", *request.expected_rows, " expected"));
  }
  if (lines.empty()) return absl::OkStatus();
  absl::Status status = absl::FailedPreconditionError(
      absl::StrCat("step ", request.step, " has been applied as another one: ", lines.front()));
  return WithMissing(WithCurrentStep(std::move(status), number_), lines);
}

absl::Status OpenStep::CheckComplete(const StepRequest& request, absl::string_view waits_for) const {
  if (auto meant = CheckIncarnation(request, incarnation_); !meant.ok()) return meant;
  if (request.step != number_) return StepNotOpen("step", request.step, number_);
  if (const absl::Status& valid = CheckValid(); !valid.ok()) return valid;
  std::vector<std::string> lines = Missing(request.expected_microbatches);
  if (!request.expected_microbatches.empty()) Append(Incomplete(request.expected_microbatches), lines);
  const int64_t rows = ledger_.accumulated_rows();
  if (request.expected_rows.has_value() && *request.expected_rows != rows) {
    lines.push_back(absl::StrCat("rows: ", rows, " accumulated, ", *request.expected_rows, " expected"));
  }
  if (lines.empty()) return absl::OkStatus();
  if (!waits_for.empty()) lines.push_back(absl::StrCat("in order: slices wait for ", waits_for));
  absl::Status status = absl::FailedPreconditionError(
      absl::StrCat("step ", number_, " is not complete: ", lines.front(),
                   lines.size() > 1 ? absl::StrCat(" (and ", lines.size() - 1, " more)") : ""));
  return WithMissing(WithCurrentStep(std::move(status), number_), lines);
}

std::vector<std::string> OpenStep::Missing(absl::Span<const uint64_t> ids) const {
  std::vector<std::string> lines;
  std::vector<uint64_t> microbatches;
  for (uint64_t id : ids) {
    if (!contributions_.Contains(id)) {
      microbatches.push_back(id);
    } else if (!contributions_.Complete(id)) {
      lines.push_back(contributions_.DescribeMissing(id));
    }
  }
  Append(ledger_.Missing(microbatches), lines);
  return lines;
}

std::vector<std::string> OpenStep::Incomplete(absl::Span<const uint64_t> ids) const {
  std::vector<std::string> lines = ledger_.Incomplete(ids);
  Append(contributions_.Incomplete(ids), lines);
  return lines;
}

std::vector<uint64_t> OpenStep::CompleteIds() const {
  const std::vector<uint64_t> microbatches = ledger_.CompleteIds();
  const std::vector<uint64_t> contributions = contributions_.CompleteIds();
  std::vector<uint64_t> ids;
  std::merge(microbatches.begin(), microbatches.end(), contributions.begin(), contributions.end(),
             std::back_inserter(ids));
  return ids;
}

StepResult OpenStep::LastResult() const {
  return {.state = state(),
          .grad_norm = last_step_->grad_norm,
          .microbatches = last_step_->microbatches,
          .rows = last_step_->rows,
          .contributions = last_step_->contributions,
          .skipped = last_step_->skipped,
          .applied_incarnation = last_step_->incarnation};
}

// ---- Transitions ----

void OpenStep::Forget() {
  ledger_.Clear();
  contributions_.Clear();
}

void OpenStep::Enter(uint64_t number, uint64_t generation) {
  ledger_.Clear();
  contributions_.Clear();
  number_ = number;
  generation_ = generation;
  gradients_status_ = absl::OkStatus();
}

void OpenStep::Close(const kernels::OptimizerOptions& optimizer, double grad_norm, bool skipped,
                     uint64_t generation) {
  last_step_ = {.incarnation = incarnation_,
                .optimizer = optimizer,
                .grad_norm = grad_norm,
                .microbatches = ledger_.begun_microbatches(),
                .rows = ledger_.accumulated_rows(),
                .contributions = contributions_.begun_contributions(),
                .skipped = skipped};
  last_ids_ = CompleteIds();
  if (!skipped) ++updates_;
  Enter(number_ + 1, generation);
}

void OpenStep::Reset(const head::Progress& progress, const std::optional<head::AppliedStep>& last_step,
                     uint64_t generation) {
  Enter(progress.step, generation);
  updates_ = progress.updates;
  weights_status_ = absl::OkStatus();
  last_step_ = last_step;
  last_ids_.reset();
}

}  // namespace lossd::engine
