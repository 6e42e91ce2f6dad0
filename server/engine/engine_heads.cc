// EngineImpl: heads and their steps.
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

// ---- Heads ----

absl::StatusOr<EngineImpl::EntryPtr> EngineImpl::Find(absl::string_view name) const {
  const auto it = entries_.find(name);
  if (it == entries_.end() || it->second->deleting) {
    absl::Status status = absl::NotFoundError(absl::StrCat("no head named '", name, "'"));
    status.SetPayload(kFieldPayload, absl::Cord("head"));
    status.SetPayload(kValuePayload, absl::Cord(name));
    return status;
  }
  return it->second;
}

absl::Status EngineImpl::CreateHead(absl::string_view name, const kernels::HeadConfig& config) {
  if (auto status = kernels::Validate(config); !status.ok()) return status;
  if (config.hidden_size > options_.slice_bytes / 4) {
    return InvalidField(
        "hidden_size",
        absl::StrCat("must let one fp32 row fit into a slice of ", options_.slice_bytes, " bytes"),
        absl::StrCat(config.hidden_size));
  }
  EntryPtr entry = std::make_shared<Entry>(std::string(name), config, options_);
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return absl::UnavailableError("the server is shutting down");
    if (static_cast<int64_t>(entries_.size()) >= options_.max_heads && !entries_.contains(name)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("there are ", entries_.size(), " heads, the most allowed"));
    }
    if (!entries_.emplace(entry->name, entry).second) {
      return FieldError(absl::StatusCode::kAlreadyExists, "spec.name", "is taken by another head", name);
    }
  }
  absl::Status status;
  absl::Status ran = RunDeviceTask([&] {
    auto kernels = backend_->CreateHead(config);
    const int64_t group_rows = kernels.ok() ? GroupRows(config, (*kernels)->chunk_rows()) : 0;
    absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> areas = nullptr;
    if (group_rows > 0) {
      areas = backend_->AllocateStaging(static_cast<int64_t>(Sequencer::kAreas) * group_rows *
                                        AreaRowBytes(config));
    }
    absl::MutexLock lock(&mutex_);
    if (!kernels.ok() || !areas.ok()) {
      status = kernels.ok() ? areas.status() : kernels.status();
      entries_.erase(entry->name);
      return;
    }
    if (group_rows > 0) {
      entry->areas = *std::move(areas);
      entry->sequencer = std::make_unique<Sequencer>(group_rows, &entry->ledger, &entry->contributions);
    }
    entry->compute_dtype = (*kernels)->compute_dtype();
    entry->chunk_rows = (*kernels)->chunk_rows();
    entry->memory = (*kernels)->memory();
    entry->choices = (*kernels)->Describe();
    entry->generation = ++last_generation_;
    entry->head = std::make_unique<head::Head>(entry->name, *std::move(kernels));
  });
  return ran.ok() ? status : ran;
}

absl::Status EngineImpl::PublishHead(absl::string_view name) {
  absl::MutexLock lock(&mutex_);
  auto entry = Find(name);
  if (!entry.ok()) return entry.status();
  (*entry)->published = true;
  return absl::OkStatus();
}

absl::Status EngineImpl::DeleteHead(absl::string_view name) {
  {
    absl::MutexLock lock(&mutex_);
    auto entry = Find(name);
    if (!entry.ok()) return entry.status();
    if (!(*entry)->streams.empty()) {
      return absl::FailedPreconditionError(
          absl::StrCat("head ", name, " has ", (*entry)->streams.size(), " open ComputeLoss calls"));
    }
    (*entry)->deleting = true;
    CallTurns(**entry);
  }
  return RunDeviceTask([&] {
    std::unique_ptr<head::Head> head;  // freed outside the lock
    absl::MutexLock lock(&mutex_);
    const auto it = entries_.find(name);
    if (it == entries_.end()) return;
    for (Operation* operation : it->second->queue.TakeOperations()) {
      operation->result = absl::NotFoundError(absl::StrCat("head ", name, " was deleted"));
      operation->done.Notify();
    }
    head = std::move(it->second->head);
    entries_.erase(it);
  });
}

HeadSnapshot EngineImpl::Snapshot(const Entry& entry) const {
  const bool in_order = entry.sequencer != nullptr;
  return {.name = entry.name,
          .config = entry.config,
          .compute_dtype = entry.compute_dtype,
          .state = {.incarnation = incarnation_, .step = entry.step},
          .limits = LimitsFor(entry, entry.config.trainable),
          .chunk_rows = entry.chunk_rows,
          .memory = entry.memory,
          .choices = entry.choices,
          .last_chunk_choices = entry.last_chunk_choices,
          .open_streams = static_cast<int64_t>(entry.streams.size()),
          .queued_slices = entry.queue.slices() + (in_order ? entry.sequencer->attached_slices() : 0),
          .updates = entry.updates,
          .step_microbatches = entry.ledger.microbatches(),
          .step_contributions = entry.contributions.contributions(),
          .retained_microbatches = entry.deferred.size(),
          .waiting_slices = in_order ? entry.sequencer->waiting_slices() : 0,
          .waits_for = in_order ? entry.sequencer->WaitsFor() : "",
          .step_rows = entry.ledger.accumulated_rows(),
          .total_rows = entry.total_rows,
          .weights_distrust = entry.weights_distrust,
          .last_step = entry.last_step};
}

absl::StatusOr<HeadSnapshot> EngineImpl::Describe(absl::string_view name) const {
  absl::MutexLock lock(&mutex_);
  auto entry = Find(name);
  if (!entry.ok()) return entry.status();
  return Snapshot(**entry);
}

std::vector<HeadSnapshot> EngineImpl::List() const {
  absl::MutexLock lock(&mutex_);
  std::vector<HeadSnapshot> heads;
  for (const auto& [name, entry] : entries_) {
    if (entry->published && !entry->deleting) heads.push_back(Snapshot(*entry));
  }
  return heads;
}

EngineStats EngineImpl::stats() const {
  EngineStats stats;
  stats.staging_buffers = staging_->buffers();
  stats.staging_buffers_free = staging_->free_buffers();
  stats.retained_bytes_used = retained_allocator_.used();
  absl::MutexLock lock(&mutex_);
  stats.open_streams = open_streams_;
  stats.rooms_lent = rooms_lent_;
  for (const auto& [name, entry] : entries_) {
    stats.queued_slices += entry->queue.slices();
    stats.queued_rows += entry->queue.rows();
    if (entry->sequencer != nullptr) {
      stats.queued_slices += entry->sequencer->attached_slices();
      stats.waiting_slices += entry->sequencer->waiting_slices();
    }
    stats.heads += entry->published ? 1 : 0;
    stats.ledger_rows += entry->ledger.declared_rows() + entry->contributions.rows();
    stats.ledger_bytes += entry->ledger.bytes() + entry->contributions.bytes();
    stats.retained_microbatches += entry->deferred.size();
  }
  return stats;
}

absl::Status EngineImpl::OnDevice(absl::string_view name,
                                  absl::FunctionRef<absl::Status(head::Head&)> operation) {
  Operation queued{.run = operation};
  {
    absl::MutexLock lock(&mutex_);
    auto entry = Find(name);
    if (!entry.ok()) return entry.status();
    if (stopping_) return absl::UnavailableError("the server is shutting down");
    if ((*entry)->head == nullptr)
      return absl::UnavailableError(absl::StrCat("head ", name, " is being created"));
    if ((*entry)->queue.operations() >= options_.max_queued_operations) {
      return absl::ResourceExhaustedError(absl::StrCat("head ", name, " has ", (*entry)->queue.operations(),
                                                       " operations waiting, the most allowed"));
    }
    queued.arrival = ++(*entry)->arrivals;
    (*entry)->queue.Push(&queued);
    work_.Signal();
  }
  queued.done.WaitForNotification();
  return queued.result;
}

absl::Status EngineImpl::RunOnHead(absl::string_view name,
                                   absl::FunctionRef<absl::Status(Entry&, head::Head&)> operation) {
  return OnDevice(name, [&](head::Head& head) -> absl::Status {
    EntryPtr entry;
    {
      absl::MutexLock lock(&mutex_);
      entry = entries_.find(name)->second;  // operations run before the entry goes
    }
    return operation(*entry, head);
  });
}

// ---- Steps ----

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
