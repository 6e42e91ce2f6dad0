#include "server/engine/head_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/arrival_schedule.h"
#include "server/engine/backward.h"
#include "server/engine/deterministic_schedule.h"
#include "server/engine/errors.h"
#include "server/engine/flight.h"

namespace lossd::engine {

absl::StatusOr<std::shared_ptr<HeadSession>> HeadSession::Create(
    EngineContext* context, std::string name, std::unique_ptr<kernels::HeadKernels> kernels) {
  std::shared_ptr<HeadSession> session;
  {
    absl::MutexLock lock(&context->mutex);
    // Not make_shared: the constructor is private.
    session.reset(new HeadSession(context, std::move(name), std::move(kernels), &context->versions));
  }
  absl::StatusOr<std::shared_ptr<Schedule>> schedule = session->MakeSchedule();
  if (!schedule.ok()) return schedule.status();
  session->schedule_ = *std::move(schedule);
  session->streams_ = std::make_unique<StreamSet>(session->schedule_.get(), &session->deferred_,
                                                  &context->notifier, context->runtime);
  session->streams_->set_on_end([raw = session.get()](StreamState& stream) { raw->OnStreamEnd(stream); });
  return session;
}

HeadSession::HeadSession(EngineContext* context, std::string name,
                         std::unique_ptr<kernels::HeadKernels> kernels, VersionCounter* counter)
    : context_(context),
      name_(std::move(name)),
      head_(std::make_unique<head::Head>(name_, std::move(kernels))),
      config_(head_->config()),
      compute_dtype_(head_->kernels().compute_dtype()),
      chunk_rows_(head_->kernels().chunk_rows()),
      memory_(head_->kernels().memory()),
      choices_(head_->kernels().Describe()),
      step_(std::make_shared<OpenStep>(
          context->incarnation, counter, context->options.max_ledger_rows,
          context->options.max_step_microbatches,
          RowMemory::Account(&context->row_memory, absl::StrCat("head ", name_)))) {}

absl::StatusOr<std::shared_ptr<Schedule>> HeadSession::MakeSchedule() {
  const EngineOptions& options = context_->options;
  const SliceLimits limits{.max_rows = chunk_rows_, .max_bytes = options.slice_bytes};
  MemoryReady memory_ready = [weak = weak_from_this()](std::unique_ptr<SliceWork> slice) {
    if (const auto session = weak.lock()) session->OfferMemory(std::move(slice));
  };
  if (!options.deterministic || !config_.trainable) {
    return std::make_shared<ArrivalSchedule>(limits, context_->staging.get(), &step_->ledger(),
                                             std::move(memory_ready));
  }
  absl::StatusOr<GroupAreas> areas =
      GroupAreas::Allocate(context_->backend, config_.hidden_size, chunk_rows_, options.staging_bytes);
  if (!areas.ok()) return areas.status();
  return std::make_shared<DeterministicSchedule>(context_, *std::move(areas), limits, step_,
                                                 std::move(memory_ready));
}

// ---- Streams ----

absl::StatusOr<std::shared_ptr<StreamState>> HeadSession::MakeStream(
    StreamSpec spec, std::shared_ptr<StreamObserver> observer) {
  const SliceLimits limits = schedule_->For(spec.accumulate_gradients).limits();
  return StreamState::Create(std::move(spec), config_, step_->state(), limits, std::move(observer));
}

absl::StatusOr<std::shared_ptr<StreamState>> HeadSession::Open(StreamSpec spec,
                                                               std::shared_ptr<StreamObserver> observer) {
  if (auto meant = step_->CheckGeneration("open.generation", spec.generation); !meant.ok()) return meant;
  auto stream = MakeStream(std::move(spec), std::move(observer));
  if (!stream.ok()) return stream.status();
  if (auto usable = step_->CheckWeights(); !usable.ok()) return usable;
  if ((*stream)->spec().retain) {
    if (auto status = ReserveRetained(**stream); !status.ok()) return status;
  }
  return Admit(*std::move(stream));
}

absl::StatusOr<std::shared_ptr<StreamState>> HeadSession::OpenBackward(
    BackwardSpec spec, std::shared_ptr<StreamObserver> observer) {
  if (auto meant = step_->CheckGeneration("backward.generation", spec.generation); !meant.ok()) return meant;
  if (spec.step.has_value() && *spec.step != step_->number())
    return StepNotOpen("backward.step", *spec.step, step_->number());
  if (auto usable = step_->CheckWeights(); !usable.ok()) return usable;
  if (spec.accumulate_gradients && !config_.trainable) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "backward.accumulate_gradients",
                      "needs a head that is not frozen", "true");
  }
  auto kept = deferred_.Find(spec.microbatch_id, spec.rows, context_->runtime->Now());
  if (!kept.ok()) return kept.status();
  BackwardRows rows = RowsOf(spec, **kept);
  auto stream = MakeStream(std::move(rows.stream), std::move(observer));
  if (!stream.ok()) return stream.status();
  (*stream)->SetRetained(std::move(rows.retained), {.loss = std::move(spec.grad_loss),
                                                    .lse = std::move(spec.grad_lse),
                                                    .entropy = std::move(spec.grad_entropy)});
  return Admit(*std::move(stream));
}

absl::Status HeadSession::ReserveRetained(StreamState& stream) {
  const StreamSpec& spec = stream.spec();
  if (auto status = deferred_.CheckAdd(spec.microbatch_id, stream.terms(), spec.rows); !status.ok())
    return status;
  if (auto status = streams_->CheckRetaining(spec.microbatch_id, stream.terms(), spec.rows); !status.ok())
    return status;
  const int64_t bytes = stream.RowBytes(spec.rows.size());
  RangeAllocator& ranges = context_->retained_ranges;
  auto block = ranges.Allocate(bytes);
  if (block == nullptr) {
    return FieldError(
        absl::StatusCode::kResourceExhausted, "open.retain",
        absl::StrCat("needs ", bytes, " bytes; ", ranges.used(), " of ", ranges.size(),
                     " are in use (release microbatches, or start the server with more retained_bytes)"),
        "true");
  }
  stream.SetRetained({{spec.rows, std::move(block)}}, {});
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<StreamState>> HeadSession::Admit(std::shared_ptr<StreamState> stream) {
  context_->mutex.AssertHeld();
  const StreamSpec& spec = stream->spec();
  const int64_t host_bytes = stream->HostBytes();
  if (auto taken = AccountOf(*stream).Take(host_bytes); !taken.ok()) return taken;
  if (spec.accumulate_gradients) {
    if (auto declared = Declare(*stream); !declared.ok()) {
      AccountOf(*stream).Give(host_bytes);
      return declared;
    }
    schedule_->OnDeclared(spec.microbatch_id);
    context_->loop.Wake();
  }
  stream->SetAdmitted(host_bytes);
  context_->stream_places.Take(spec.peer, 1);  // there is one: CheckStreams
  streams_->Add(stream);
  return stream;
}

RowMemory::Account HeadSession::AccountOf(const StreamState& stream) {
  context_->mutex.AssertHeld();
  const std::string& peer = stream.spec().peer;
  return RowMemory::Account(&context_->row_memory, peer.empty() ? "" : absl::StrCat("peer ", peer));
}

absl::Status HeadSession::Declare(const StreamState& stream) {
  if (auto valid = step_->CheckValid(); !valid.ok()) return valid;
  const StreamSpec& spec = stream.spec();
  if (step_->contributions().Contains(spec.microbatch_id)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.microbatch_id",
                      "names a contribution of this step", absl::StrCat(spec.microbatch_id));
  }
  return step_->ledger().Declare(spec.microbatch_id, stream.terms(), spec.rows, stream.contents());
}

void HeadSession::OnStreamEnd(StreamState& stream) {
  context_->mutex.AssertHeld();
  AccountOf(stream).Give(stream.host_bytes());
  context_->stream_places.Give(stream.spec().peer, 1);
  const StreamSpec& spec = stream.spec();
  if (!spec.accumulate_gradients || stream.head_state().generation != step_->versions().generation()) return;
  if (stream.status().ok()) return step_->ledger().Keep(spec.microbatch_id, spec.rows);
  bool shared = false;
  const std::vector<RowRange> own = streams_->OwnRows(stream, &shared);
  for (const RowRange rows : own) {
    for (const RowRange leaving : schedule_->Withdrawable(spec.microbatch_id, rows)) {
      step_->ledger().Withdraw(spec.microbatch_id, leaving, !shared);
    }
  }
  schedule_->OnDeclared(spec.microbatch_id);
  context_->loop.Wake();
}

// ---- Slices ----

bool HeadSession::Receive(std::unique_ptr<SliceWork>& slice) {
  const std::shared_ptr<StreamState> stream = slice->stream;
  if (stream->failed() || stream->finished()) return false;
  if (absl::Status status = stream->AddSlice(slice->rows, slice->bytes); !status.ok()) {
    streams_->Fail(*stream, std::move(status));
    streams_->FinishIfReady(stream);
    return false;
  }
  return schedule_->For(stream->spec().accumulate_gradients).FindMemory(slice);
}

void HeadSession::OfferMemory(std::unique_ptr<SliceWork> slice) {
  StreamObserver& observer = slice->stream->observer();
  observer.OnMemory([session = shared_from_this(), slice = std::move(slice)]() mutable {
    session->CopyAndQueue(std::move(slice));
  });
}

void HeadSession::CopyAndQueue(std::unique_ptr<SliceWork> slice) {
  StreamState& stream = *slice->stream;
  IncomingSlice caller = std::move(slice->caller);
  if (caller.copy) caller.copy(slice->buffer.data());
  const int64_t staging_bytes = slice->buffer.bytes();
  {
    absl::MutexLock lock(&context_->mutex);
    if (!stream.failed()) {
      stream.OnQueued();
      slice->queued = context_->runtime->Now();
      schedule_->For(stream.spec().accumulate_gradients).Queue(std::move(slice));
      context_->loop.Wake();
    }
  }
  if (slice == nullptr) caller.on_queued(staging_bytes);
}

// ---- Versions ----

void HeadSession::EnterStep(absl::FunctionRef<void(OpenStep&)> enter) {
  enter(*step_);
  EndStale();
  step_->ForgetRows();
  schedule_->OnRestart();
}

void HeadSession::EndStale() {
  streams_->FailEach([this](const StreamState& stream) { return step_->CheckBound(stream.binding()); });
  deferred_.ReleaseIf([this](const Binding& binding) { return !step_->CheckBound(binding).ok(); });
}

void HeadSession::MarkWeightsInvalid(absl::Status why) {
  step_->MarkWeightsInvalid(std::move(why));
  EndStale();
}

void HeadSession::DeleteHead() {
  head_.reset();
  absl::MutexLock lock(&context_->mutex);
  deferred_.ReleaseIf([](const Binding&) { return true; });
}

void HeadSession::OnAccumulationFailed(const absl::Status& status) {
  step_->MarkGradientsInvalid(absl::InternalError(absl::StrCat(
      "the device failed while accumulating; the gradients of head ", name_, " at step ", step_->number(),
      " are not to be trusted (zero the gradients and repeat the step): ", status.message())));
}

// ---- The device ----

absl::Status HeadSession::Run(absl::FunctionRef<absl::Status()> operation) {
  const auto run = [&](head::Head&) { return operation(); };
  Operation queued{.run = run};
  {
    absl::MutexLock lock(&context_->mutex);
    if (context_->loop.stopping()) return ShuttingDown();
    if (deleting_) return UnknownHead(name_);
    if (schedule_->operations() >= context_->options.max_queued_operations) {
      return absl::ResourceExhaustedError(absl::StrCat("head ", name_, " has ", schedule_->operations(),
                                                       " operations waiting, the most allowed"));
    }
    schedule_->Push(&queued);
    context_->loop.Wake();
  }
  context_->runtime->Wait(queued.done);
  return queued.result;
}

DeviceLoop::Work HeadSession::TakeWork(const DeviceLoad& load) {
  ScheduledWork next = schedule_->TakeNext(load, chunks_in_flight_ == 0);
  if (Operation** operation = std::get_if<Operation*>(&next)) {
    return [session = shared_from_this(), operation = *operation] {
      operation->result = operation->run(*session->head_);
      operation->done.Notify();
    };
  }
  auto* const chunk = std::get_if<std::unique_ptr<ChunkWork>>(&next);
  if (chunk == nullptr) return nullptr;
  auto flight = std::make_shared<Flight>(shared_from_this(), std::move(*chunk));
  if (flight->accumulates()) step_->versions().NewAccumulation();
  ++chunks_in_flight_;
  context_->loop.OnLaunched(flight->accumulates());
  return [flight = std::move(flight)] { flight->Launch(); };
}

void HeadSession::FinishSlice(const SliceWork& slice, double compute_seconds) {
  slice.stream->FinishSlice(slice.sums, slice.accumulated_rows, slice.repeated_rows, slice.queue_seconds,
                            compute_seconds);
  total_rows_ += slice.rows.size();
}

void HeadSession::OnChunkLeft(std::vector<std::unique_ptr<SliceWork>> slices) {
  for (const auto& slice : slices) streams_->FinishIfReady(slice->stream);
  --chunks_in_flight_;
  context_->loop.OnLeft();
  context_->notifier.Post([slices = std::move(slices)]() mutable { slices.clear(); });
}

void HeadSession::NoteChoices(const std::vector<kernels::Choice>& choices) {
  if (choices.empty()) return;  // it was refused
  {
    absl::MutexLock lock(&context_->mutex);
    if (last_chunk_choices_ == choices) return;
    last_chunk_choices_ = choices;
  }
  context_->observers.Tell(&EngineObserver::OnChoices, {.head = name_, .choices = choices});
}

// ---- What is told about it ----

HeadSnapshot HeadSession::Snapshot() {
  const Backlog backlog = schedule_->backlog();
  return {.name = name_,
          .config = config_,
          .compute_dtype = compute_dtype_,
          .state = step_->state(),
          .limits = schedule_->For(config_.trainable).limits(),
          .chunk_rows = chunk_rows_,
          .memory = memory_,
          .choices = choices_,
          .last_chunk_choices = last_chunk_choices_,
          .open_streams = streams_->size(),
          .queued_slices = backlog.queued_slices,
          .updates = step_->updates(),
          .step_microbatches = step_->ledger().microbatches(),
          .step_contributions = step_->contributions().contributions(),
          .retained_microbatches = deferred_.size(),
          .waiting_slices = backlog.waiting_slices,
          .waits_for = backlog.waits_for,
          .step_rows = step_->ledger().accumulated_rows(),
          .total_rows = total_rows_,
          .tensors_status = step_->CheckTensors(),
          .last_step = step_->last_step()};
}

void HeadSession::AddTo(EngineStats& stats) {
  const Backlog backlog = schedule_->backlog();
  stats.open_streams += streams_->size();
  stats.queued_slices += backlog.queued_slices;
  stats.queued_rows += backlog.queued_rows;
  stats.waiting_slices += backlog.waiting_slices;
  stats.ledger_rows += step_->ledger().declared_rows() + step_->contributions().rows();
  stats.ledger_bytes += step_->ledger().bytes() + step_->contributions().bytes();
  stats.retained_microbatches += deferred_.size();
}

}  // namespace lossd::engine
