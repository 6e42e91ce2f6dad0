// EngineImpl: the open step of a head, how it is applied, and when its numbers are not trusted.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/validation.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

absl::Status NormNotFinite(double norm) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "skip_non_finite",
                    "must be set to close a step whose gradient norm is not finite (nothing changed)",
                    absl::StrCat("a norm of ", norm));
}

// A repeat may be of a step that was applied before a restart, by another process.
absl::Status CheckIncarnation(const StepRequest& request, uint64_t own) {
  if (request.incarnation.value_or(own) == own) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, "incarnation",
                    absl::StrCat("must be that of the server process that has the step's rows, ",
                                 absl::Hex(own, absl::kZeroPad16)),
                    absl::StrCat(absl::Hex(*request.incarnation, absl::kZeroPad16)));
}

}  // namespace

absl::StatusOr<double> EngineImpl::GradNorm(absl::string_view name, std::optional<uint64_t> step) {
  double norm = 0.0;
  absl::Status status = RunOnHead(name, [&](Entry& entry, head::Head& head) -> absl::Status {
    {
      absl::MutexLock lock(&mutex_);
      if (step.has_value() && *step != entry.step) return StepNotOpen("step", *step, entry.step);
      if (auto trusted = CheckTrusted(entry); !trusted.ok()) return trusted;
    }
    auto result = head.kernels().GradNorm();
    if (result.ok()) norm = *result;
    return result.status();
  });
  if (!status.ok()) return status;
  return norm;
}

// Of microbatches and contributions that are not complete, a line each.
std::vector<std::string> EngineImpl::MissingOf(const Entry& entry, absl::Span<const uint64_t> ids) const {
  std::vector<std::string> lines;
  std::vector<uint64_t> microbatches;
  for (uint64_t id : ids) {
    if (!entry.contributions.Contains(id)) {
      microbatches.push_back(id);
    } else if (!entry.contributions.Complete(id)) {
      lines.push_back(entry.contributions.DescribeMissing(id));
    }
  }
  std::vector<std::string> others = entry.ledger.Missing(microbatches);
  lines.insert(lines.end(), std::make_move_iterator(others.begin()), std::make_move_iterator(others.end()));
  return lines;
}

// Of those begun and not complete although nobody expects them, a line each.
std::vector<std::string> EngineImpl::HalvesOf(const Entry& entry, absl::Span<const uint64_t> ids) const {
  std::vector<std::string> lines = entry.ledger.Halves(ids);
  for (std::string& line : entry.contributions.Halves(ids)) lines.push_back(std::move(line));
  return lines;
}

absl::Status EngineImpl::CheckTrusted(const Entry& entry) {
  return entry.weights_distrust.ok() ? entry.distrust : entry.weights_distrust;
}

// A repeat for a step that has been applied must mean the step that was applied.
absl::Status EngineImpl::CheckRepeat(const Entry& entry, const StepRequest& request,
                                     std::vector<std::string>* missing) {
  const head::AppliedStep& last = *entry.last_step;
  if (auto meant = CheckIncarnation(request, last.incarnation); !meant.ok()) return meant;
  if (!(last.optimizer == request.optimizer)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "optimizer",
                      "differs from what this step was applied with", "other settings");
  }
  std::vector<std::string> lines;
  if (entry.last_ids.has_value()) {
    for (const uint64_t id : request.expected_microbatches) {
      if (!std::binary_search(entry.last_ids->begin(), entry.last_ids->end(), id))
        lines.push_back(absl::StrCat("microbatch ", id, ": was not whole in it"));
    }
  }
  if (request.expected_rows.has_value() && *request.expected_rows != last.rows) {
    lines.push_back(absl::StrCat("rows: ", last.rows, " were in it, ", *request.expected_rows, " expected"));
  }
  if (lines.empty()) return absl::OkStatus();
  absl::Status status = absl::FailedPreconditionError(
      absl::StrCat("step ", request.step, " has been applied as another one: ", lines.front()));
  status.SetPayload(kCurrentStepPayload, absl::Cord(absl::StrCat(entry.step)));
  if (missing != nullptr) *missing = std::move(lines);
  return status;
}

absl::Status EngineImpl::CheckStepComplete(const Entry& entry, const StepRequest& request,
                                           std::vector<std::string>* missing) {
  if (auto meant = CheckIncarnation(request, incarnation_); !meant.ok()) return meant;
  if (request.step != entry.step) return StepNotOpen("step", request.step, entry.step);
  if (auto trusted = CheckTrusted(entry); !trusted.ok()) return trusted;
  std::vector<std::string> lines = MissingOf(entry, request.expected_microbatches);
  if (!request.expected_microbatches.empty()) {
    for (std::string& half : HalvesOf(entry, request.expected_microbatches)) lines.push_back(std::move(half));
  }
  const int64_t rows = entry.ledger.accumulated_rows();
  if (request.expected_rows.has_value() && *request.expected_rows != rows) {
    lines.push_back(absl::StrCat("rows: ", rows, " accumulated, ", *request.expected_rows, " expected"));
  }
  if (lines.empty()) return absl::OkStatus();
  if (const std::string waits = entry.sequencer == nullptr ? "" : entry.sequencer->WaitsFor();
      !waits.empty()) {
    lines.push_back(absl::StrCat("in order: slices wait for ", waits));
  }
  absl::Status status = absl::FailedPreconditionError(
      absl::StrCat("step ", entry.step, " is not complete: ", lines.front(),
                   lines.size() > 1 ? absl::StrCat(" (and ", lines.size() - 1, " more)") : ""));
  status.SetPayload(kCurrentStepPayload, absl::Cord(absl::StrCat(entry.step)));
  if (missing != nullptr) *missing = std::move(lines);
  return status;
}

// Opens a step: forgets the ledger and ends the streams that accumulate for the old one.
void EngineImpl::EnterStep(Entry& entry, uint64_t step, const absl::Status& why) {
  FailStreams(
      entry, [](const StreamState& stream) { return stream.belongs_to_step(); }, why);
  DropFailed(entry);
  entry.ledger.Clear();
  entry.contributions.Clear();
  entry.generation = ++last_generation_;
  if (entry.sequencer != nullptr) entry.sequencer->Clear();
  CallTurns(entry);
  entry.deferred.Clear();  // their logits were those of the old weights
  entry.step = step;
  entry.distrust = absl::OkStatus();
}

// A device that fails half-way through an update leaves weights nobody can vouch for.
absl::Status EngineImpl::StepFailed(Entry& entry, const absl::Status& status) {
  if (absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status)) return status;
  observer_->OnDeviceError(status);
  absl::MutexLock lock(&mutex_);
  entry.weights_distrust = absl::InternalError(
      absl::StrCat("the device failed while applying step ", entry.step, " to head ", entry.name,
                   "; its weights are not to be trusted (load a checkpoint): ", status.message()));
  return entry.weights_distrust;
}

// If it fails, some gradients are gone although the ledger knows them.
absl::Status EngineImpl::ClearGradients(Entry& entry, head::Head& head) {
  absl::Status status = head.kernels().ZeroGradients();
  if (status.ok()) return status;
  observer_->OnDeviceError(status);
  absl::MutexLock lock(&mutex_);
  entry.distrust = absl::InternalError(
      absl::StrCat("the device failed while zeroing the gradients of head ", entry.name, " at step ",
                   entry.step, "; they are not to be trusted (zero them again): ", status.message()));
  return entry.distrust;
}

// Of microbatches and contributions, ascending.
std::vector<uint64_t> EngineImpl::CompleteIdsOf(const Entry& entry) {
  const std::vector<uint64_t> microbatches = entry.ledger.CompleteIds();
  const std::vector<uint64_t> contributions = entry.contributions.CompleteIds();
  std::vector<uint64_t> ids;
  std::merge(microbatches.begin(), microbatches.end(), contributions.begin(), contributions.end(),
             std::back_inserter(ids));
  return ids;
}

// What the last step answers.
StepResult EngineImpl::ResultOf(const Entry& entry) const {
  return {.state = {.incarnation = incarnation_, .step = entry.step},
          .grad_norm = entry.last_step->grad_norm,
          .microbatches = entry.last_step->microbatches,
          .rows = entry.last_step->rows,
          .contributions = entry.last_step->contributions,
          .skipped = entry.last_step->skipped,
          .applied_incarnation = entry.last_step->incarnation};
}

absl::StatusOr<StepResult> EngineImpl::ApplyStep(absl::string_view name, const StepRequest& request,
                                                 std::vector<std::string>* missing) {
  if (auto status = kernels::Validate(request.optimizer); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("optimizer.", status.message()));
  }
  StepResult result;
  absl::Status status = RunOnHead(name, [&](Entry& entry, head::Head& head) -> absl::Status {
    uint64_t updates = 0;
    {
      absl::MutexLock lock(&mutex_);
      if (entry.last_step.has_value() && request.step + 1 == entry.step) {
        if (auto same = CheckRepeat(entry, request, missing); !same.ok()) return same;
        result = ResultOf(entry);
        result.repeated = true;
        return absl::OkStatus();
      }
      if (auto complete = CheckStepComplete(entry, request, missing); !complete.ok()) return complete;
      updates = entry.updates;
    }
    const auto update = static_cast<int64_t>(updates) + 1;
    auto valid = kernels::ValidateStep(entry.config, request.optimizer, update);
    if (!valid.ok()) return valid;
    auto norm = head.kernels().GradNorm();
    if (!norm.ok()) return norm.status();
    const bool skipped = !std::isfinite(*norm);
    if (skipped && !request.skip_non_finite) return NormNotFinite(*norm);
    if (skipped) {
      if (auto cleared = ClearGradients(entry, head); !cleared.ok()) return cleared;
    } else {
      auto applied = head.kernels().ApplyStep(request.optimizer, update);
      if (!applied.ok()) return StepFailed(entry, applied);
    }
    absl::MutexLock lock(&mutex_);
    const head::AppliedStep applied_step = {.incarnation = incarnation_,
                                            .optimizer = request.optimizer,
                                            .grad_norm = *norm,
                                            .microbatches = entry.ledger.begun_microbatches(),
                                            .rows = entry.ledger.accumulated_rows(),
                                            .contributions = entry.contributions.begun_contributions(),
                                            .skipped = skipped};
    std::vector<uint64_t> ids = CompleteIdsOf(entry);
    EnterStep(entry, request.step + 1, StepNotOpen("open.step", request.step, request.step + 1));
    if (!skipped) ++entry.updates;
    entry.last_step = applied_step;
    entry.last_ids = std::move(ids);
    result = ResultOf(entry);
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  if (!result.repeated) observer_->OnStep(name, result.skipped);
  return result;
}

absl::Status EngineImpl::ZeroGradients(absl::string_view name, uint64_t step) {
  return RunOnHead(name, [&](Entry& entry, head::Head& head) -> absl::Status {
    {
      absl::MutexLock lock(&mutex_);
      if (step != entry.step) return StepNotOpen("step", step, entry.step);
    }
    if (auto status = ClearGradients(entry, head); !status.ok()) return status;
    absl::MutexLock lock(&mutex_);
    EnterStep(entry, entry.step, absl::AbortedError("the step's gradients were zeroed"));
    return absl::OkStatus();
  });
}

absl::Status EngineImpl::DistrustWeights(absl::string_view name, const absl::Status& why) {
  return RunOnHead(name, [&](Entry& entry, head::Head&) -> absl::Status {
    absl::MutexLock lock(&mutex_);
    entry.weights_distrust = why;
    return absl::OkStatus();
  });
}

absl::Status EngineImpl::ResetStep(absl::string_view name, const head::Progress& progress,
                                   const std::optional<head::AppliedStep>& last_step) {
  return RunOnHead(name, [&](Entry& entry, head::Head& head) -> absl::Status {
    if (entry.config.trainable) {
      if (auto status = ClearGradients(entry, head); !status.ok()) return status;
    }
    absl::MutexLock lock(&mutex_);
    EnterStep(entry, progress.step, absl::AbortedError("a checkpoint was loaded"));
    entry.updates = progress.updates;
    entry.weights_distrust = absl::OkStatus();
    entry.last_step = last_step;
    entry.last_ids.reset();
    return absl::OkStatus();
  });
}

}  // namespace lossd::engine
