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

OpenStep::OpenStep(uint64_t incarnation, VersionCounter* counter, int64_t max_rows, int64_t max_microbatches,
                   const RowMemory::Account& memory)
    : incarnation_(incarnation),
      versions_(counter),
      ledger_(max_rows, max_microbatches, memory),
      contributions_(max_rows, max_microbatches, memory) {}

// ---- Validity ----

void OpenStep::MarkGradientsInvalid(absl::Status why) {
  gradients_status_ = std::move(why);
  versions_.NewAccumulation();
}

absl::Status OpenStep::CheckValid() const {
  if (!weights_status_.ok()) return weights_status_;
  if (!gradients_status_.ok()) return gradients_status_;
  if (!closing_.has_value()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("step ", number(), " is being applied"));
}

absl::Status OpenStep::CheckWeights() const {
  if (!weights_status_.ok()) return weights_status_;
  if (!versions_.values_being_written()) return absl::OkStatus();
  return absl::UnavailableError("the weights are being written (WriteTensor)");
}

absl::Status OpenStep::CheckTensors() const {
  if (absl::Status weights = CheckWeights(); !weights.ok()) return weights;
  if (!versions_.being_written()) return absl::OkStatus();
  return absl::UnavailableError("the optimizer's state is being written (WriteTensor)");
}

absl::Status OpenStep::CheckGeneration(absl::string_view field, std::optional<uint64_t> named) const {
  if (named.value_or(versions_.generation()) == versions_.generation()) return absl::OkStatus();
  return WithCurrentStep(OtherGeneration(field, *named, versions_.generation()), number());
}

absl::Status OpenStep::CheckBound(const Binding& binding) const {
  absl::Status changed = versions_.Check(binding);
  return changed.ok() ? weights_status_ : WithCurrentStep(std::move(changed), number());
}

// ---- Closing ----

absl::Status OpenStep::CheckRepeat(const StepRequest& request) const {
  const head::AppliedStep& last = *last_step_;
  if (auto meant = CheckIncarnation(request, last.incarnation); !meant.ok()) return meant;
  if (last.generation != 0 && request.generation.value_or(last.generation) != last.generation)
    return WithCurrentStep(OtherGeneration("generation", *request.generation, last.generation), number());
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
  return WithMissing(WithCurrentStep(std::move(status), number()), lines);
}

absl::Status OpenStep::CheckComplete(const StepRequest& request, absl::string_view waits_for) const {
  if (auto meant = CheckIncarnation(request, incarnation_); !meant.ok()) return meant;
  if (auto meant = CheckGeneration("generation", request.generation); !meant.ok()) return meant;
  if (request.step != number()) return StepNotOpen("step", request.step, number());
  if (absl::Status valid = CheckValid(); !valid.ok()) return valid;
  if (absl::Status valid = CheckTensors(); !valid.ok()) return valid;
  std::vector<std::string> lines = Missing(request.expected_microbatches);
  if (!request.expected_microbatches.empty()) Append(Incomplete(request.expected_microbatches), lines);
  const int64_t rows = ledger_.accumulated_rows();
  if (request.expected_rows.has_value() && *request.expected_rows != rows) {
    lines.push_back(absl::StrCat("rows: ", rows, " accumulated, ", *request.expected_rows, " expected"));
  }
  if (lines.empty()) return absl::OkStatus();
  if (!waits_for.empty()) lines.push_back(absl::StrCat("in order: slices wait for ", waits_for));
  absl::Status status = absl::FailedPreconditionError(
      absl::StrCat("step ", number(), " is not complete: ", lines.front(),
                   lines.size() > 1 ? absl::StrCat(" (and ", lines.size() - 1, " more)") : ""));
  return WithMissing(WithCurrentStep(std::move(status), number()), lines);
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

void OpenStep::BeginClose() {
  closing_ = Contents{.microbatches = ledger_.begun_microbatches(),
                      .rows = ledger_.accumulated_rows(),
                      .contributions = contributions_.begun_contributions(),
                      .complete_ids = CompleteIds()};
}

void OpenStep::Close(const kernels::OptimizerOptions& optimizer, double grad_norm, bool skipped) {
  Contents contents = *std::move(closing_);
  last_step_ = {.incarnation = incarnation_,
                .generation = versions_.generation(),
                .optimizer = optimizer,
                .grad_norm = grad_norm,
                .microbatches = contents.microbatches,
                .rows = contents.rows,
                .contributions = contents.contributions,
                .skipped = skipped};
  last_ids_ = std::move(contents.complete_ids);
  const std::string why = absl::StrCat("step ", number(), " was ", skipped ? "skipped" : "applied");
  if (!skipped) {
    ++updates_;
    versions_.NewWeights(why);
  }
  versions_.SetStep(number() + 1, why);
  Enter(why);
}

void OpenStep::BeginLoad(const head::Progress& progress, const std::optional<head::AppliedStep>& last_step,
                         absl::Status why) {
  constexpr absl::string_view kLoaded = "a checkpoint was loaded";
  versions_.EndWrites();
  versions_.NewWeights(kLoaded);
  versions_.SetStep(progress.step, kLoaded);
  Enter(kLoaded);
  updates_ = progress.updates;
  weights_status_ = std::move(why);
  last_step_ = last_step;
  last_ids_.reset();
}

void OpenStep::Enter(absl::string_view why) {
  versions_.NewGeneration(why);
  gradients_status_ = absl::OkStatus();
  closing_.reset();
}

void OpenStep::ForgetRows() {
  ledger_.Clear();
  contributions_.Clear();
}

}  // namespace lossd::engine
