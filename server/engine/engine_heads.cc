// EngineImpl: heads, and what is run on them.
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/validation.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"

namespace lossd::engine {

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
  stats.staging_bytes = staging_->bytes();
  stats.staging_used_bytes = staging_->used_bytes();
  stats.staging_peak_bytes = staging_->peak_bytes();
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

}  // namespace lossd::engine
