// EngineImpl: streams, from Open to their end.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

absl::Status CheckBackward(const BackwardSpec& spec) {
  if (spec.rows.begin < 0 || spec.rows.begin >= spec.rows.end) {
    return InvalidField("backward.rows", "must be a non-empty range", Text(spec.rows));
  }
  if (spec.accumulate_gradients && !spec.step.has_value()) {
    return InvalidField("backward.step", "is required with accumulate_gradients", "nothing");
  }
  const int64_t rows = spec.rows.size();
  absl::Status status = CheckRowValues("backward.grad_loss", spec.grad_loss, rows, /*optional=*/false);
  status.Update(CheckRowValues("backward.grad_lse", spec.grad_lse, rows, /*optional=*/true));
  status.Update(CheckRowValues("backward.grad_entropy", spec.grad_entropy, rows, /*optional=*/true));
  return status;
}

// The stream that computes retained rows, and where they are.
StreamSpec BackwardStream(const BackwardSpec& spec, const DeferredMicrobatches::Microbatch& kept,
                          std::vector<RetainedRows>& retained) {
  StreamSpec stream;
  stream.head = spec.head;
  stream.step = spec.step;
  stream.microbatch_id = spec.microbatch_id;
  stream.microbatch_rows = kept.terms.microbatch_rows;
  stream.rows = spec.rows;
  stream.hidden_dtype = kept.terms.hidden_dtype;
  stream.options = kept.terms.options;
  stream.ignore_index = kernels::kIgnoredTarget;
  stream.want_grad_hidden = spec.want_grad_hidden;
  stream.accumulate_gradients = spec.accumulate_gradients;
  for (const auto& [first, part] : kept.parts) {
    const int64_t begin = std::max(first, spec.rows.begin);
    const int64_t end = std::min(part.retained.rows.end, spec.rows.end);
    if (begin >= end) continue;
    retained.push_back(part.retained);
    const auto targets = part.targets.begin() + (begin - first);
    stream.targets.insert(stream.targets.end(), targets, targets + (end - begin));
    // Parts with and without weights may stand side by side: no weight is 1.
    if (!part.row_weights.empty())
      stream.row_weights.resize(static_cast<size_t>(begin - spec.rows.begin), 1.0f);
    if (part.row_weights.empty() && stream.row_weights.empty()) continue;
    for (int64_t row = begin; row < end; ++row) {
      stream.row_weights.push_back(
          part.row_weights.empty() ? 1.0f : part.row_weights[static_cast<size_t>(row - first)]);
    }
  }
  return stream;
}

}  // namespace

// The caller's end of a stream.
class StreamHandle final : public Stream {
 public:
  StreamHandle(EngineImpl* engine, EngineImpl::EntryPtr entry, std::shared_ptr<StreamState> state)
      : engine_(engine), entry_(std::move(entry)), state_(std::move(state)) {}
  ~StreamHandle() override {
    if (ticket_ != 0) engine_->staging_->Forget(ticket_);
    Cancel(absl::CancelledError("the stream was dropped"));
  }

  HeadState state() const override { return state_->head_state(); }
  SliceLimits limits() const override { return state_->limits(); }
  int64_t hidden_size() const override { return state_->hidden_size(); }

  void Start() override {
    absl::MutexLock lock(&engine_->mutex_);
    state_->Start();
    engine_->FinishIfReady(*entry_, state_);
  }

  std::vector<RowRange> RetainedSlices() const override { return state_->RetainedSlices(); }

  void SubmitRetained(RowRange rows, StagingBuffer buffer) override {
    Submit(rows, std::move(buffer), state_->RowBytes(rows.size()));
  }

  void RequestRoom(RowRange rows, int64_t bytes, RoomWaiter waiter) override {
    if (state_->is_backward()) bytes = state_->RowBytes(rows.size());
    if (state_->in_order()) {
      engine_->RequestRoom(entry_, state_, rows, bytes, std::move(waiter));
    } else {
      ticket_ = engine_->staging_->Acquire(bytes, std::move(waiter));
    }
  }

  void Submit(RowRange rows, StagingBuffer buffer, int64_t bytes) override {
    auto work = std::make_unique<SliceWork>();  // outlives the lock if it is refused
    work->stream = state_;
    work->rows = rows;
    work->output.room_bytes = buffer.bytes();
    work->buffer = std::move(buffer);
    work->submitted = absl::Now();
    absl::MutexLock lock(&engine_->mutex_);
    if (state_->failed() || state_->finished()) return;
    if (absl::Status status = state_->AddSlice(rows, bytes); !status.ok()) {
      engine_->FailStream(*entry_, *state_, std::move(status));
      engine_->FinishIfReady(*entry_, state_);
      return;
    }
    if (state_->in_order()) {
      engine_->SubmitInOrder(*entry_, work);
    } else {
      entry_->queue.Push(std::move(work));
    }
    engine_->work_.Signal();
  }

  void HalfClose() override {
    absl::MutexLock lock(&engine_->mutex_);
    if (state_->failed() || state_->finished()) return;
    if (absl::Status status = state_->HalfClose(); !status.ok()) {
      engine_->FailStream(*entry_, *state_, std::move(status));
    }
    engine_->FinishIfReady(*entry_, state_);
  }

  void Cancel(absl::Status why) override {
    absl::MutexLock lock(&engine_->mutex_);
    state_->Start();  // so that OnFinished comes even if the caller gave up before starting
    if (!state_->finished()) engine_->FailStream(*entry_, *state_, std::move(why));
    engine_->FinishIfReady(*entry_, state_);
  }

 private:
  EngineImpl* const engine_;
  const EngineImpl::EntryPtr entry_;
  const std::shared_ptr<StreamState> state_;
  uint64_t ticket_ = 0;  // of the last request to the staging pool
};

// ---- Streams ----

absl::StatusOr<EngineImpl::EntryPtr> EngineImpl::FindForStream(absl::string_view name) const {
  if (stopping_) return absl::UnavailableError("the server is shutting down");
  auto found = Find(name);
  if (!found.ok()) return found.status();
  if (!(*found)->published) return absl::UnavailableError(absl::StrCat("head ", name, " is being created"));
  if (open_streams_ >= options_.max_streams) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", open_streams_, " open streams, the most allowed"));
  }
  return found;
}

// Enters a checked stream into the ledger and the head.
absl::StatusOr<std::unique_ptr<Stream>> EngineImpl::Admit(const EntryPtr& entry,
                                                          std::shared_ptr<StreamState> state) {
  const StreamSpec& spec = state->spec();
  if (!entry->weights_distrust.ok()) return entry->weights_distrust;
  if (spec.accumulate_gradients) {
    if (auto status = CheckTrusted(*entry); !status.ok()) return status;
    if (entry->contributions.Contains(spec.microbatch_id)) {
      return FieldError(absl::StatusCode::kFailedPrecondition, "open.microbatch_id",
                        "names a contribution of this step", absl::StrCat(spec.microbatch_id));
    }
    absl::Status declared =
        entry->ledger.Declare(spec.microbatch_id, state->terms(), spec.rows, state->contents());
    if (!declared.ok()) return declared;
    if (entry->sequencer != nullptr) {
      entry->sequencer->OnDeclared(spec.microbatch_id);
      GrantRooms(*entry);
      work_.Signal();
    }
  }
  entry->streams.push_back(state);
  ++open_streams_;
  return std::make_unique<StreamHandle>(this, entry, std::move(state));
}

absl::StatusOr<std::unique_ptr<Stream>> EngineImpl::Open(StreamSpec spec,
                                                         std::shared_ptr<StreamObserver> observer) {
  absl::MutexLock lock(&mutex_);
  auto entry = FindForStream(spec.head);
  if (!entry.ok()) return entry.status();
  const SliceLimits limits = LimitsFor(**entry, spec.accumulate_gradients);
  auto state =
      StreamState::Create(std::move(spec), (*entry)->config,
                          {.incarnation = incarnation_, .step = (*entry)->step}, limits, std::move(observer));
  if (!state.ok()) return state.status();
  if ((*state)->spec().retain) {
    if (auto status = ReserveRetained(**entry, **state); !status.ok()) return status;
  }
  return Admit(*entry, *std::move(state));
}

// ---- Deferred microbatches ----

// Finds a place for the hidden states of a stream that retains them.
absl::Status EngineImpl::ReserveRetained(Entry& entry, StreamState& state) {
  const StreamSpec& spec = state.spec();
  if (auto status = entry.deferred.CheckAdd(spec.microbatch_id, state.terms(), spec.rows); !status.ok())
    return status;
  const int64_t bytes = state.RowBytes(spec.rows.size());
  auto block = retained_allocator_.Allocate(bytes);
  if (block == nullptr) {
    return FieldError(
        absl::StatusCode::kResourceExhausted, "open.retain",
        absl::StrCat("needs ", bytes, " bytes; ", retained_allocator_.used(), " of ",
                     retained_allocator_.size(),
                     " are in use (release microbatches, or start the server with more retained_bytes)"),
        "true");
  }
  state.SetRetained({{spec.rows, std::move(block)}}, {});
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Stream>> EngineImpl::OpenBackward(BackwardSpec spec,
                                                                 std::shared_ptr<StreamObserver> observer) {
  if (auto status = CheckBackward(spec); !status.ok()) return status;
  absl::MutexLock lock(&mutex_);
  auto entry = FindForStream(spec.head);
  if (!entry.ok()) return entry.status();
  if (spec.step.has_value() && *spec.step != (*entry)->step)
    return StepNotOpen("backward.step", *spec.step, (*entry)->step);
  auto kept = (*entry)->deferred.Find(spec.microbatch_id, spec.rows, absl::Now());
  if (!kept.ok()) return kept.status();
  std::vector<RetainedRows> retained;
  StreamSpec stream = BackwardStream(spec, **kept, retained);
  const SliceLimits limits = LimitsFor(**entry, spec.accumulate_gradients);
  auto state =
      StreamState::Create(std::move(stream), (*entry)->config,
                          {.incarnation = incarnation_, .step = (*entry)->step}, limits, std::move(observer));
  if (!state.ok()) return state.status();
  (*state)->SetRetained(std::move(retained), {.loss = std::move(spec.grad_loss),
                                              .lse = std::move(spec.grad_lse),
                                              .entropy = std::move(spec.grad_entropy)});
  return Admit(*entry, *std::move(state));
}

absl::StatusOr<bool> EngineImpl::Release(absl::string_view name, uint64_t microbatch_id) {
  absl::MutexLock lock(&mutex_);
  auto entry = Find(name);
  if (!entry.ok()) return entry.status();
  return (*entry)->deferred.Release(microbatch_id);
}

int64_t EngineImpl::ExpireRetained(absl::Time limit) {
  absl::MutexLock lock(&mutex_);
  int64_t expired = 0;
  for (auto& [name, entry] : entries_) expired += entry->deferred.Expire(limit);
  return expired;
}

// ---- Ends of streams ----

// Fails a stream and drops its queued slices.
void EngineImpl::FailStream(Entry& entry, StreamState& stream, absl::Status why) {
  if (stream.failed() || stream.finished()) return;
  const bool gave_up = absl::IsDeadlineExceeded(why) || absl::IsCancelled(why);
  if (gave_up && entry.sequencer != nullptr && entry.sequencer->IsWaiting(stream)) {
    why = absl::Status(why.code(), absl::StrCat(why.message(), " while it waited for ",
                                                entry.sequencer->WaitsFor(), " (deterministic mode)"));
  }
  stream.Fail(std::move(why));
  DropFailed(entry);
}

void EngineImpl::FailStreams(Entry& entry, absl::FunctionRef<bool(const StreamState&)> wanted,
                             const absl::Status& why) {
  const auto streams = entry.streams;
  for (const auto& stream : streams) {
    if (!wanted(*stream)) continue;
    FailStream(entry, *stream, why);
    FinishIfReady(entry, stream);
  }
}

void EngineImpl::DropFailed(Entry& entry) {
  Sequencer::Dropped dropped;
  if (entry.sequencer != nullptr) dropped = entry.sequencer->TakeFailed();
  for (auto& slice : entry.queue.TakeFailed()) dropped.slices.push_back(std::move(slice));
  if (dropped.slices.empty() && dropped.waiters.empty()) return;
  for (const auto& work : dropped.slices) work->stream->AddOutstanding(-1);
  notifier_.Post([dropped = std::move(dropped)]() mutable { dropped = {}; });
  if (entry.sequencer != nullptr) GrantRooms(entry);  // an area may have come free
}

void EngineImpl::FinishIfReady(Entry& entry, const std::shared_ptr<StreamState>& stream) {
  if (!stream->ReadyToFinish()) return;
  stream->MarkFinished();
  if (stream->status().ok() && stream->spec().retain) {
    entry.deferred.Add(stream->spec().microbatch_id, stream->terms(), stream->TakePart(), absl::Now());
  }
  std::erase(entry.streams, stream);
  --open_streams_;
  notifier_.Post([stream] { stream->observer().OnFinished(stream->status(), stream->summary()); });
}

}  // namespace lossd::engine
