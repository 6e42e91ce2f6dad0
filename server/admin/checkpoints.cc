// SPDX-License-Identifier: Apache-2.0
#include "server/admin/checkpoints.h"

#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "kernels/host_memory.h"
#include "proto/tensorfile/file.h"
#include "server/head/checkpoint_store.h"
#include "server/head/disk.h"
#include "server/messages/convert.h"

namespace lossd::admin {

// ---- Deletions ----

namespace {

constexpr char kDeletionIdField[] = "deletion_id";

}  // namespace

absl::StatusOr<v1::DeleteCheckpointResponse> CheckpointDeletions::Delete(
    const v1::DeleteCheckpointRequest& request) {
  LOSSD_RETURN_IF_ERROR(messages::CheckCallId(kDeletionIdField, request.deletion_id()));
  const NamedLocks::Guard guard = under_way_.Lock(request.deletion_id());
  LOSSD_TRY(const std::optional<int64_t> before, Find(request));
  v1::DeleteCheckpointResponse response;
  if (before.has_value()) {
    response.set_bytes(static_cast<uint64_t>(*before));
    response.set_repeated_call(true);
    return response;
  }
  LOSSD_TRY(const head::RemovedCheckpoint removed,
            head::RemoveCheckpoint(directory_, request.checkpoint(), disk_));
  Remember(request, removed.bytes, removed.unremoved);
  metrics_->saves().OnRemoved(metrics::SaveMetrics::Cause::kDeleted, 1);
  const std::string head = request.checkpoint().substr(0, request.checkpoint().find('/'));
  metrics_->events().Add(metrics::EventLevel::kInfo, "checkpoint_deleted", head,
                         absl::StrCat("deleted ", request.checkpoint()));
  log::Log(log::LogLevel::kInfo, "checkpoint deleted",
           {{"checkpoint", request.checkpoint()},
            {"bytes", removed.bytes},
            {"in_use", !removed.unremoved.empty()}});
  response.set_bytes(static_cast<uint64_t>(removed.bytes));
  return response;
}

absl::StatusOr<std::optional<int64_t>> CheckpointDeletions::Find(
    const v1::DeleteCheckpointRequest& request) const {
  absl::MutexLock lock(&mutex_);
  const auto found = by_id_.find(request.deletion_id());
  if (found == by_id_.end()) return std::nullopt;
  if (found->second.checkpoint == request.checkpoint()) return found->second.bytes;
  return errors::FieldProblem(
      kDeletionIdField,
      absl::StrCat("has deleted ", found->second.checkpoint, " before and not ", request.checkpoint()),
      request.deletion_id(), absl::StatusCode::kFailedPrecondition);
}

void CheckpointDeletions::Remember(const v1::DeleteCheckpointRequest& request, int64_t bytes,
                                   const std::string& unremoved) {
  absl::MutexLock lock(&mutex_);
  by_id_[request.deletion_id()] = {request.checkpoint(), bytes};
  ids_.push_back(request.deletion_id());
  if (ids_.size() > kMostRemembered) {
    by_id_.erase(ids_.front());
    ids_.pop_front();
  }
  if (unremoved.empty()) return;
  unremoved_.push_back(unremoved);
  if (unremoved_.size() > kMostUnremoved) unremoved_.pop_front();
}

void CheckpointDeletions::RemoveUnused() {
  std::deque<std::string> paths;
  {
    absl::MutexLock lock(&mutex_);
    paths.swap(unremoved_);
  }
  std::erase_if(paths, [this](const std::string& path) { return head::RemoveIfUnused(disk_, path); });
  absl::MutexLock lock(&mutex_);
  unremoved_.insert(unremoved_.begin(), paths.begin(), paths.end());
}

// ---- Checkpoints ----

namespace {

using log::LogLevel;

constexpr size_t kMostListed = 1000;

v1::SaveProgress ProgressMessage(const head::SaveProgress& progress, v1::SavePhase phase) {
  v1::SaveProgress message;
  message.set_phase(phase);
  message.set_total_bytes(static_cast<uint64_t>(progress.total_bytes));
  message.set_read_bytes(static_cast<uint64_t>(progress.read_bytes));
  message.set_written_bytes(static_cast<uint64_t>(progress.written_bytes));
  return message;
}

// The buffer memory that a save or a load may use now.
int64_t BufferBytes(const CheckpointOptions& options) {
  const auto host = kernels::HostMemory().Available();
  if (!host.has_value()) return options.buffer_bytes;
  const int64_t writing = options.shards.threads * formats::kDirectBufferBytes;
  return std::clamp<int64_t>(host->bytes - options.memory_reserve_bytes - writing, 0, options.buffer_bytes);
}

// Replaces the codes NOT_FOUND and PERMISSION_DENIED of an error of the disk. A client would understand them
// as errors about the head, and about the caller's role.
absl::Status OfTheDisk(absl::Status status) {
  if (!absl::IsNotFound(status) && !absl::IsPermissionDenied(status)) return status;
  return absl::FailedPreconditionError(
      absl::StrCat("the checkpoint directory cannot be used: ", status.message()));
}

v1::CheckpointInfo CheckpointMessage(const head::CheckpointInfo& info) {
  v1::CheckpointInfo message;
  message.set_checkpoint(info.name);
  if (!info.status.ok()) {
    message.set_error(errors::ValidUtf8(info.status.message()));  // it may have bytes of a broken file
    return message;
  }
  *message.mutable_spec() = messages::ToProto(info.subject.head, info.subject.config);
  message.set_step(info.subject.step);
  message.set_incarnation(info.subject.incarnation);
  message.set_bytes(static_cast<uint64_t>(info.bytes));
  message.set_saved_unix_seconds(absl::ToUnixSeconds(info.saved_at));
  message.set_automatic(info.automatic);
  message.set_run(info.subject.run);
  message.set_save_number(info.save_number);
  return message;
}

}  // namespace

Checkpoints::Checkpoints(const CheckpointOptions& options, engine::Engine* engine, metrics::Metrics* metrics,
                         NamedLocks* head_locks)
    : options_(options),
      engine_(engine),
      metrics_(metrics),
      head_locks_(head_locks),
      deletions_(options_.directory, options_.disk, metrics) {}

void Checkpoints::RemoveLeftovers() {
  std::error_code error;
  if (!std::filesystem::is_directory(options_.directory, error)) return;
  if (absl::Status status = PrepareDirectory(); !status.ok()) {
    log::Log(LogLevel::kWarning, "cannot clean the checkpoint directory", {{"error", status.message()}});
  }
  const auto lock = head::FolderLock::Try(options_.directory, head::FolderLock::Kind::kShared);
  if (absl::IsUnimplemented(lock.status())) {
    log::Log(LogLevel::kWarning, "checkpoints cannot be saved", {{"error", lock.status().message()}});
  }
}

absl::Status Checkpoints::PrepareDirectory() {
  absl::MutexLock lock(&directory_mutex_);
  std::error_code error;
  const bool is_there = std::filesystem::is_directory(options_.directory, error);
  if (directory_ready_ && is_there) return absl::OkStatus();
  absl::Status status = head::PrepareCheckpointDirectory(options_.directory, options_.disk);
  if (absl::IsAlreadyExists(status))
    status = absl::NotFoundError(status.message());  // there is a file that is no folder
  status = OfTheDisk(std::move(status));
  if (directory_ready_ && status.ok()) {
    metrics_->events().Add(metrics::EventLevel::kWarning, "checkpoint_directory_made", "",
                           absl::StrCat("the checkpoint directory ", options_.directory,
                                        " had vanished and was made again; what was in it is gone"));
    log::Log(LogLevel::kWarning, "the checkpoint directory had vanished and was made again",
             {{"directory", options_.directory}});
  }
  directory_ready_ = status.ok();
  return status;
}

absl::Status Checkpoints::CheckKeep(const v1::SaveCheckpointRequest& request) const {
  const bool keeps_all = request.keep() == 0;
  if (!request.name().empty() || !request.has_keep() || keeps_all || request.keep() >= options_.keep) {
    return absl::OkStatus();
  }
  return errors::FieldError("keep",
                            absl::StrCat("be 0 or at least ", options_.keep,
                                         " (--keep_checkpoints of the server), unless an admin asks"),
                            request.keep(), absl::StatusCode::kPermissionDenied);
}

absl::Status Checkpoints::CheckDelete(const v1::DeleteCheckpointRequest& request) const {
  const std::pair<absl::string_view, absl::string_view> names =
      absl::StrSplit(request.checkpoint(), absl::MaxSplits('/', 1));
  // The deletion itself reports a malformed name.
  const bool is_name =
      head::ValidateName("head", names.first).ok() && head::ValidateName("name", names.second).ok();
  if (options_.keep == 0 || !is_name) return absl::OkStatus();
  const head::CheckpointInfo info = head::InfoOf(options_.directory, request.checkpoint());
  if (!info.status.ok() || !info.automatic) return absl::OkStatus();
  return errors::FieldError(
      "checkpoint",
      absl::StrCat("have a name that a client gave it, unless an admin asks: the server "
                   "keeps those that it names (--keep_checkpoints=",
                   options_.keep, ")"),
      request.checkpoint(), absl::StatusCode::kPermissionDenied);
}

absl::StatusOr<v1::SaveCheckpointResponse> Checkpoints::Save(const v1::SaveCheckpointRequest& request,
                                                             const SaveCallbacks& callbacks) {
  if (!request.name().empty()) LOSSD_RETURN_IF_ERROR(messages::CheckName("name", request.name()));
  if (absl::Status status = PrepareDirectory(); !status.ok()) {
    OnFailed(request, status);
    return status;
  }
  absl::MutexLock turn(&save_mutex_);
  absl::StatusOr<v1::SaveCheckpointResponse> saved = SaveInTurn(request, callbacks);
  metrics_->saves().SetBuffered(0);
  deletions_.RemoveUnused();
  if (absl::IsNotFound(saved.status())) return saved;  // there is no such head
  if (!saved.ok()) {
    OnFailed(request, saved.status());
    return saved;
  }
  metrics_->saves().OnSaved(request.head(), {.checkpoint = saved->checkpoint(),
                                             .step = saved->state().step(),
                                             .bytes = static_cast<int64_t>(saved->bytes()),
                                             .seconds = saved->seconds()});
  metrics_->events().Add(metrics::EventLevel::kInfo, "checkpoint_saved", request.head(),
                         absl::StrCat("saved ", saved->checkpoint()));
  if (saved->not_finite() > 0) {
    metrics_->events().Add(
        metrics::EventLevel::kWarning, "checkpoint_not_finite", request.head(),
        absl::StrCat(saved->checkpoint(), " has ", saved->not_finite(), " values that are infinite or NaN"));
    log::Log(LogLevel::kWarning, "a checkpoint has values that are infinite or NaN",
             {{"checkpoint", saved->checkpoint()}, {"values", saved->not_finite()}});
  }
  // If the head was deleted while the disk was written, removes its series again. A deletion from now on does
  // so itself.
  if (absl::IsNotFound(engine_->Describe(request.head()).status())) metrics_->ForgetHead(request.head());
  log::Log(LogLevel::kInfo, "checkpoint saved",
           {{"checkpoint", saved->checkpoint()},
            {"bytes", saved->bytes()},
            {"seconds", saved->seconds()},
            {"read_seconds", saved->read_seconds()}});
  if (request.name().empty()) Prune(request, &*saved);
  return saved;
}

void Checkpoints::OnFailed(const v1::SaveCheckpointRequest& request, const absl::Status& status) {
  metrics_->saves().OnFailed(status);
  const bool intended = absl::IsCancelled(status) || absl::IsAlreadyExists(status);
  metrics_->events().Count(intended ? metrics::EventLevel::kWarning : metrics::EventLevel::kError,
                           "checkpoint_failed", request.head(),
                           absl::IsAlreadyExists(status)  // its message has a name that the client chose
                               ? "checkpoint not saved: its name is taken, or the same is saved already"
                               : absl::StrCat("checkpoint not saved: ", status.message()));
  const bool exists = engine_->Describe(request.head()).ok();
  const std::optional<int64_t> left_out = failed_lines_.Take(
      {.name = absl::StrCat(intended ? "client " : "server ", exists ? request.head() : ""),
       .is_known = true});
  if (!left_out.has_value()) return;
  log::Log(LogLevel::kError, "checkpoint not saved",
           {{"head", request.head()}, {"error", status.message()}, {"failures_left_out", *left_out}});
}

absl::StatusOr<v1::SaveCheckpointResponse> Checkpoints::SaveInTurn(const v1::SaveCheckpointRequest& request,
                                                                   const SaveCallbacks& callbacks) {
  // Held while the tensors are read.
  NamedLocks::Guard guard = head_locks_->Lock(request.head());
  const absl::StatusOr<engine::HeadSnapshot> head = engine_->Describe(request.head());
  if (!head.ok()) return head.status();
  if (!head->tensors_status.ok()) return head->tensors_status;
  LOSSD_TRY(const auto reader, engine_->OpenReader(request.head()));
  const absl::Time begin = clocks::SteadyNow();
  absl::Time read_end = begin;
  v1::SavePhase phase = v1::SAVE_PHASE_READING;
  head::SaveOptions save{.slice_bytes = options_.transfer_bytes,
                         .buffer_bytes = BufferBytes(options_),
                         .shards = options_.shards,
                         .limit_bytes = options_.limit_bytes,
                         .disk = options_.disk};
  save.on_read = [&] {
    guard.Unlock();
    read_end = clocks::SteadyNow();
    phase = v1::SAVE_PHASE_WRITING;
  };
  save.on_progress = [&](const head::SaveProgress& progress) {
    metrics_->saves().SetBuffered(progress.read_bytes - progress.written_bytes);
    callbacks.on_progress(ProgressMessage(progress, phase));
  };
  save.cancelled = [&] { return saves_cancelled_ || callbacks.cancelled(); };
  absl::Status read_error;  // error of reading the head; errors of the disk are separate
  const absl::StatusOr<head::SavedCheckpoint> saved = head::SaveCheckpoint(
      options_.directory, request.name(),
      {.head = head->name,
       .config = head->config,
       .step = head->state.step,
       .updates = head->updates,
       .incarnation = head->state.incarnation,
       .last_step = head->last_step,
       .run = head->history.run,
       .applied_unix_seconds = head->history.applied_unix_seconds},
      [&](kernels::TensorId id, int64_t row_begin, int64_t rows, absl::Span<uint8_t> out) {
        absl::Status read =
            reader->Read(id, {row_begin, row_begin + rows}, kernels::DType::kFloat32, out).status();
        if (!read.ok()) read_error = read;
        return read;
      },
      save,
      options_.sites == nullptr ? std::vector<std::unique_ptr<head::SaveSite>>()
                                : options_.sites->ForSave(RemotePartsOf(head->name)));
  if (!read_error.ok()) return read_error;
  if (!saved.ok()) return OfTheDisk(saved.status());
  v1::SaveCheckpointResponse response;
  *response.mutable_state() = messages::ToProto(head->state);
  response.set_checkpoint(absl::StrCat(head->name, "/", saved->name));
  reader->NoteSaved(*head, response.checkpoint(), saved->saved_at);
  response.set_bytes(static_cast<uint64_t>(saved->bytes));
  response.set_not_finite(static_cast<uint64_t>(saved->not_finite));
  response.set_seconds(absl::ToDoubleSeconds(clocks::SteadyNow() - begin));
  response.set_read_seconds(absl::ToDoubleSeconds(read_end - begin));
  return response;
}

// The parts of a head in other processes. Empty if the head was deleted meanwhile; the next operation then
// fails.
std::vector<kernels::RemotePart> Checkpoints::RemotePartsOf(const std::string& head) const {
  std::vector<kernels::RemotePart> parts;
  engine_
      ->OnDevice(head,
                 [&](head::Head& on_device) {
                   parts = on_device.kernels().remote_parts();
                   return absl::OkStatus();
                 })
      .IgnoreError();
  return parts;
}

std::vector<std::unique_ptr<head::LoadSite>> Checkpoints::LoadSites(const std::string& head) const {
  if (options_.sites == nullptr) return {};
  return options_.sites->ForLoad(RemotePartsOf(head));
}

void Checkpoints::Prune(const v1::SaveCheckpointRequest& request, v1::SaveCheckpointResponse* response) {
  const int64_t keep = request.has_keep() ? request.keep() : options_.keep;
  if (keep == 0) return;
  const absl::StatusOr<std::vector<std::string>> pruned =
      head::PruneCheckpoints(options_.directory, response->checkpoint(), keep, options_.disk);
  if (!pruned.ok()) {
    metrics_->events().Add(metrics::EventLevel::kWarning, "checkpoint_not_removed", request.head(),
                           absl::StrCat("old checkpoints not removed: ", pruned.status().message()));
    log::Log(LogLevel::kWarning, "old checkpoints not removed",
             {{"head", request.head()}, {"error", pruned.status().message()}});
    return;
  }
  metrics_->saves().OnRemoved(metrics::SaveMetrics::Cause::kPruned, pruned->size());
  for (const std::string& checkpoint : *pruned) {
    response->add_pruned(checkpoint);
    log::Log(LogLevel::kInfo, "checkpoint removed", {{"checkpoint", checkpoint}, {"keep", keep}});
  }
}

head::LoadOptions Checkpoints::LoadOptions(bool verify_first) const {
  head::LoadOptions options;
  return {.slice_bytes = std::min(options.slice_bytes, options_.transfer_bytes),
          .buffer_bytes = BufferBytes(options_),
          .threads = options_.shards.threads,
          .verify_first = verify_first};
}

absl::StatusOr<v1::ListCheckpointsResponse> Checkpoints::List(
    const v1::ListCheckpointsRequest& request) const {
  if (!request.head().empty()) LOSSD_RETURN_IF_ERROR(messages::CheckName("head", request.head()));
  LOSSD_TRY(const std::vector<head::CheckpointInfo> list,
            head::ListCheckpoints(options_.directory, request.head()));
  v1::ListCheckpointsResponse response;
  const size_t listed = std::min(list.size(), kMostListed);
  for (size_t i = 0; i < listed; ++i) *response.add_checkpoints() = CheckpointMessage(list[i]);
  response.set_left_out(list.size() - listed);
  return response;
}

}  // namespace lossd::admin
