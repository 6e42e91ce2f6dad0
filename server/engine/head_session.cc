// SPDX-License-Identifier: Apache-2.0
// HeadSession, Stream and HeadDirectory: how a head is set up, and the way of slices and chunks through it
// (head_session.h).
//
// A slice comes by Stream::Receive. HeadSession::Receive checks it and asks the schedule for memory.
// CopyAndQueue copies it there and queues it, at once or, if it had to wait, when StreamObserver::OnMemory
// runs. Then TakeWork, on the device thread, takes the next chunk from the schedule and makes a Flight of it.
// The flight calls FinishSlice for each slice, and OnChunkLeft at its end.
#include "server/engine/head_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/errors/status_macros.h"
#include "kernels/group/group_backend.h"
#include "kernels/validation.h"
#include "server/engine/deterministic_schedule.h"
#include "server/engine/errors.h"
#include "server/engine/schedule.h"

namespace lossd::engine {
namespace {

// Bytes of `rows` rows of hidden states in the widest dtype.
int64_t MostBytes(int64_t rows, const kernels::HeadConfig& config) {
  return rows * config.hidden_size * static_cast<int64_t>(sizeof(float));
}

SliceLimits LimitsByArrival(const EngineOptions& options, const kernels::HeadConfig& config,
                            int64_t slice_rows) {
  return {.max_rows = slice_rows,
          .max_bytes = options.slice_bytes,
          .max_bytes_in_place = MostBytes(slice_rows, config)};
}

struct MadeSchedule {
  std::shared_ptr<Schedule> schedule;
  DeterministicSchedule* order = nullptr;  // `schedule`, if it is deterministic; else null
};

absl::StatusOr<MadeSchedule> MakeSchedule(EngineContext* context, const kernels::HeadKernels& kernels,
                                          const std::shared_ptr<OpenStep>& step, MemoryReady memory_ready,
                                          WorkQueue::ValuesOf values) {
  const EngineOptions& options = context->options;
  const kernels::HeadConfig& config = kernels.config();
  const SliceLimits limits = LimitsByArrival(options, config, kernels.slice_rows());
  if (!options.deterministic || !config.trainable) {
    return MadeSchedule{std::make_shared<ArrivalSchedule>(limits, kernels.chunk_rows(),
                                                          context->staging.get(), &step->ledger(),
                                                          std::move(memory_ready), std::move(values))};
  }
  absl::StatusOr<GroupAreas> areas =
      GroupAreas::Allocate(context->backend, config.hidden_size, kernels.slice_rows(), options.staging_bytes);
  if (!areas.ok()) return areas.status();
  const auto order =
      std::make_shared<DeterministicSchedule>(context, *std::move(areas), limits, kernels.chunk_rows(), step,
                                              std::move(memory_ready), std::move(values));
  return MadeSchedule{order, order.get()};
}

}  // namespace

absl::StatusOr<std::shared_ptr<HeadSession>> HeadSession::Create(
    EngineContext* context, std::string name, std::unique_ptr<kernels::HeadKernels> kernels,
    kernels::ClassList class_list) {
  std::shared_ptr<HeadSession> session;
  {
    absl::MutexLock lock(&context->mutex);
    // Not make_shared: the constructor is private.
    session.reset(new HeadSession(context, std::move(name), std::move(kernels), &context->versions));
    session->config_.class_list = std::move(class_list);
  }
  absl::StatusOr<MadeSchedule> made = MakeSchedule(
      context, session->head_->kernels(), session->step_,
      [weak = std::weak_ptr(session)](std::unique_ptr<SliceWork> slice) {
        const auto alive = weak.lock();
        if (alive == nullptr) return;  // the session is gone: the slice is destroyed
        StreamObserver& observer = slice->stream->observer();
        observer.OnMemory(
            [alive, slice = std::move(slice)]() mutable { alive->CopyAndQueue(std::move(slice)); });
      },
      // Tells the session's schedule where the values are that a slice needs from host memory (ValuesAre;
      // kHome: it needs none). At most one of a head and its teacher lives in host memory (ValidateTeacher),
      // so this is the answer of the head, or the teacher's if the head's answer is kHome.
      [head = session.get()](const SliceWork& slice) {
        const std::shared_ptr<HeadSession>& teacher = slice.stream->teacher().session;
        const ValuesAre own = head->teaching.values();
        return teacher == nullptr || own != ValuesAre::kHome ? own : teacher->teaching.values();
      });
  if (!made.ok()) return made.status();
  session->schedule_ = std::move(made->schedule);
  session->order_ = made->order;
  session->streams_ = std::make_unique<StreamSet>(session->schedule_.get(), session->order_,
                                                  &session->deferred_, &context->notifier, context->runtime);
  session->admission_ =
      std::make_unique<StreamAdmission>(StreamAdmission::Parts{.context = context,
                                                               .config = &session->config_,
                                                               .step = session->step_.get(),
                                                               .deferred = &session->deferred_,
                                                               .schedule = session->schedule_.get(),
                                                               .order = session->order_,
                                                               .streams = session->streams_.get()});
  // A raw pointer is enough, because the session owns the set of streams.
  session->streams_->set_on_end([student = session.get()](StreamState& stream) {
    student->admission_->OnEnd(stream);
    if (stream.teacher()) stream.teacher().session->teaching.End(student);
  });
  return session;
}

HeadSession::HeadSession(EngineContext* context, std::string name,
                         std::unique_ptr<kernels::HeadKernels> kernels, VersionCounter* counter)
    : teaching(kernels.get()),
      context_(context),
      name_(std::move(name)),
      head_(std::make_unique<head::Head>(name_, std::move(kernels))),
      config_(head_->config()),
      compute_dtype_(head_->kernels().compute_dtype()),
      chunk_rows_(head_->kernels().chunk_rows()),
      slice_rows_(head_->kernels().slice_rows()),
      memory_(head_->kernels().memory()),
      choices_(head_->kernels().Describe()),
      divided_(head_->kernels().divides_classes()),
      step_(std::make_shared<OpenStep>(
          context->incarnation, counter, context->options.max_ledger_rows,
          context->options.max_step_microbatches,
          RowMemory::Account(&context->row_memory, absl::StrCat("head ", name_)))) {}

SliceLimits PlannedLimits(const EngineOptions& options, const kernels::HeadConfig& config,
                          int64_t slice_rows) {
  SliceLimits limits{.max_rows = slice_rows, .max_bytes = options.slice_bytes};
  if (options.deterministic && config.trainable && slice_rows > 0) {
    limits.max_rows = GroupAreas::GroupRows(config.hidden_size, slice_rows, options.staging_bytes);
    limits.row_grid = limits.max_rows;
  }
  limits.max_bytes_in_place = MostBytes(limits.max_rows, config);
  return limits;
}

// ---- HeadSession: slices ----

bool HeadSession::Receive(std::unique_ptr<SliceWork>& slice) {
  const std::shared_ptr<StreamState> stream = slice->stream;
  if (stream->failed() || stream->finished()) return false;
  const bool in_place{slice->caller.in_place};
  if (absl::Status status = stream->AddSlice(slice->rows, slice->bytes, in_place); !status.ok()) {
    streams_->Fail(*stream, std::move(status));
    streams_->FinishIfReady(stream);
    return false;
  }
  return schedule_->For(stream->spec().accumulate_gradients).FindMemory(slice);
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
  // Null: the slice was queued. Otherwise its stream has failed, and the slice is destroyed here, without the
  // lock.
  if (slice == nullptr) caller.on_queued(staging_bytes);
}

// ---- HeadSession: shares ----

absl::Status HeadSession::SetShares(const std::vector<int32_t>& shares) {
  kernels::HeadKernels& kernels = head_->kernels();
  const auto set_limits = [&](int64_t slice_rows, int64_t chunk_rows) {
    return schedule_->SetLimits(LimitsByArrival(context_->options, config_, slice_rows), chunk_rows);
  };
  const auto accept = [&](const kernels::HeadKernels& divided) {
    absl::MutexLock lock(&context_->mutex);
    // Only tests whether the schedule accepts the new limits, and then restores the present ones.
    absl::Status status = set_limits(divided.slice_rows(), divided.chunk_rows());
    if (status.ok()) set_limits(slice_rows_, chunk_rows_).IgnoreError();
    return status;
  };
  LOSSD_RETURN_IF_ERROR(kernels.SetShares(shares, accept));
  absl::MutexLock lock(&context_->mutex);
  config_.shares = kernels.config().shares;
  chunk_rows_ = kernels.chunk_rows();
  slice_rows_ = kernels.slice_rows();
  memory_ = kernels.memory();
  choices_ = kernels.Describe();
  set_limits(slice_rows_, chunk_rows_).IgnoreError();  // the schedule accepted these limits above
  return absl::OkStatus();
}

// ---- HeadSession: versions ----

void HeadSession::EnterStep(absl::FunctionRef<void(OpenStep&)> enter) {
  enter(*step_);
  EndStale();
  step_->ForgetRows();
  if (order_ != nullptr) order_->OnRestart();
}

void HeadSession::EndStale() {
  streams_->FailEach([this](const StreamState& stream) { return step_->CheckBound(stream.binding()); });
  for (HeadSession* student : teaching.students()) {
    student->streams().FailEach([](const StreamState& stream) { return stream.teacher().CheckBound(); });
  }
  deferred_.ReleaseIf([this](const Binding& binding) { return !step_->CheckBound(binding).ok(); });
}

void HeadSession::MarkWeightsInvalid(absl::Status why) {
  step_->MarkWeightsInvalid(std::move(why));
  EndStale();
}

void HeadSession::DeleteHead() {
  {
    absl::MutexLock lock(&context_->mutex);
    teaching.OnHeadGone();
  }
  head_.reset();
  absl::MutexLock lock(&context_->mutex);
  deferred_.ReleaseIf([](const Binding&) { return true; });
}

void HeadSession::OnAccumulationFailed(const absl::Status& status) {
  step_->MarkGradientsInvalid(absl::InternalError(absl::StrCat(
      "the device failed while accumulating; the gradients of head ", name_, " at step ", step_->number(),
      " are not to be trusted (zero the gradients and repeat the step): ", status.message())));
}

// ---- HeadSession: the device ----

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
      operation->done.Notify();  // the waiting thread owns the operation, and may destroy it from here on
    };
  }
  auto* const chunk = std::get_if<std::unique_ptr<ChunkWork>>(&next);
  if (chunk == nullptr) return nullptr;
  // Operations on the teacher wait until this chunk has left the device.
  if ((*chunk)->teacher != nullptr) ++(*chunk)->teacher->chunks_in_flight_;
  auto flight = std::make_shared<Flight>(shared_from_this(), std::move(*chunk));
  if (flight->accumulates()) step_->versions().NewAccumulation();
  ++chunks_in_flight_;
  context_->loop.OnLaunched(flight->accumulates());
  return [flight = std::move(flight)] { flight->Launch(); };
}

// ---- HeadSession: its flights ----

Flight::Parts HeadSession::flight_parts() {
  return {.head = name_,
          .context = context_,
          .kernels = &head_->kernels(),
          .step = step_.get(),
          .streams = streams_.get()};
}

void HeadSession::FinishSlice(const SliceWork& slice, double compute_seconds) {
  slice.stream->FinishSlice(slice.rows, slice.sums, slice.accumulated_rows, slice.repeated_rows,
                            slice.queue_seconds, compute_seconds);
  total_rows_ += slice.rows.size();
}

void HeadSession::OnChunkLeft(std::vector<std::unique_ptr<SliceWork>> slices) {
  for (const auto& slice : slices) streams_->FinishIfReady(slice->stream);
  --chunks_in_flight_;
  const auto teacher = slices.empty() ? nullptr : slices.front()->stream->teacher().session;
  if (teacher != nullptr) --teacher->chunks_in_flight_;
  context_->loop.OnLeft();
  // The notifier destroys the slices, because the lock is held here.
  context_->notifier.Post([slices = std::move(slices)]() mutable { slices.clear(); });
}

void HeadSession::NoteChunk(const ChunkReport& report, const std::vector<kernels::Choice>& choices) {
  if (choices.empty()) return;  // the backend refused the chunk
  {
    absl::MutexLock lock(&context_->mutex);
    if (report.gradients == kernels::Gradients::kSampled) gradient_error_ = report.sums.gradient_error();
    if (last_chunk_choices_ == choices) return;
    last_chunk_choices_ = choices;
  }
  context_->observers.Tell(&EngineObserver::OnChoices, {.head = name_, .choices = choices});
}

// ---- HeadSession: its snapshot ----

namespace {

std::vector<HeadDevice> DevicesOf(const kernels::Backend* backend, const kernels::HeadConfig& config) {
  const std::vector<kernels::MemberState> members = backend->MemberStates();
  const auto count = static_cast<int>(members.size());
  kernels::HeadConfig split = config;
  split.split = kernels::Split::kVocabulary;
  std::vector<HeadDevice> devices;
  for (int i = 0; i < count; ++i) {
    const kernels::MemberState& member = members[static_cast<size_t>(i)];
    absl::Duration exchanging;
    for (const absl::Duration time : member.exchanges) exchanging += time;
    devices.push_back({.device = member.device,
                       .share = config.shares.empty() ? 1 : config.shares[static_cast<size_t>(i)],
                       .classes = kernels::ClassesOf(split, {i, count}).rows,
                       .rows = member.work.rows,
                       .busy = member.work.busy,
                       .exchanging = exchanging});
  }
  return devices;
}

}  // namespace

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
          .gradient_error = gradient_error_,
          .devices = divided_ ? DevicesOf(context_->backend, config_) : std::vector<HeadDevice>(),
          .paging = teaching.paging(),
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
          .last_step = step_->last().applied(),
          .history = step_->history().history(),
          .open_run = step_->history().open_run(),
          .origin = step_->history().origin()};
}

void AddTo(HeadSession& session, EngineStats& stats) {
  const Backlog backlog = session.schedule().backlog();
  OpenStep& step = session.step();
  stats.open_streams += session.streams().size();
  stats.queued_slices += backlog.queued_slices;
  stats.queued_rows += backlog.queued_rows;
  stats.waiting_slices += backlog.waiting_slices;
  stats.ledger_rows += step.ledger().declared_rows() + step.contributions().rows();
  stats.ledger_bytes += step.ledger().bytes() + step.contributions().bytes();
  stats.retained_microbatches += session.deferred().size();
}

Stream::~Stream() {
  Cancel(absl::CancelledError("the stream was dropped"));
  EngineContext& context = session_->context();
  uint64_t ticket = 0;
  {
    absl::MutexLock lock(&context.mutex);
    ticket = state_->memory_ticket();
  }
  if (ticket != 0) context.staging->Forget(ticket);  // a slice of this stream may still wait for memory
}

void Stream::Start() {
  absl::MutexLock lock(&session_->context().mutex);
  state_->Start();
  session_->streams().FinishIfReady(state_);
}

void Stream::Receive(IncomingSlice incoming) {
  auto slice = std::make_unique<SliceWork>();  // outlives the lock if it is refused
  slice->stream = state_;
  slice->rows = incoming.rows;
  slice->bytes = incoming.bytes;
  // A slice without values needs memory for its results. `bytes` is set already if the caller has a place for
  // the results. Rows outside the stream's range get no memory: HeadSession::Receive refuses them.
  const bool own = incoming.rows.begin < incoming.rows.end && incoming.rows.IsWithin(state_->spec().rows);
  if (own && !BringsRows(*state_) && incoming.bytes == 0)
    slice->bytes = state_->RowBytes(incoming.rows.size());
  slice->caller = std::move(incoming);
  bool has_memory = false;
  {
    absl::MutexLock lock(&session_->context().mutex);
    has_memory = session_->Receive(slice);
  }
  if (has_memory) session_->CopyAndQueue(std::move(slice));
}

void Stream::HalfClose() {
  absl::MutexLock lock(&session_->context().mutex);
  if (state_->failed() || state_->finished()) return;
  if (absl::Status status = state_->HalfClose(); !status.ok()) {
    session_->streams().Fail(*state_, std::move(status));
  }
  session_->streams().FinishIfReady(state_);
}

void Stream::Cancel(absl::Status why) {
  absl::MutexLock lock(&session_->context().mutex);
  state_->Start();  // so that OnFinished comes even if the caller never called Start
  if (!state_->finished()) session_->streams().Fail(*state_, std::move(why));
  session_->streams().FinishIfReady(state_);
}

// ---- HeadDirectory ----

namespace {

absl::Status BeingCreated(absl::string_view name) {
  return absl::UnavailableError(absl::StrCat("head ", name, " is being created"));
}

}  // namespace

// ---- HeadDirectory: creation ----

absl::Status HeadDirectory::CheckFree(absl::string_view name) const {
  if (slots_.contains(name)) {
    return FieldError(absl::StatusCode::kAlreadyExists, "name", "is taken by another head", name);
  }
  if (static_cast<int64_t>(slots_.size()) >= max_heads_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", slots_.size(), " heads, the most allowed"));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> HeadDirectory::Reserve(absl::string_view name) {
  LOSSD_RETURN_IF_ERROR(CheckFree(name));
  slots_.try_emplace(std::string(name), Slot{.number = ++last_number_});
  return last_number_;
}

bool HeadDirectory::Fill(absl::string_view name, uint64_t number, SessionPtr session) {
  const auto slot = SlotOf(name, number);
  if (slot == slots_.end()) return false;
  slot->second.session = std::move(session);
  return true;
}

absl::Status HeadDirectory::Publish(absl::string_view name) {
  if (auto found = Find(name); !found.ok()) return found.status();
  slots_.find(name)->second.published = true;
  return absl::OkStatus();
}

// ---- HeadDirectory: deletion ----

absl::StatusOr<uint64_t> HeadDirectory::BeginDelete(absl::string_view name) {
  if (auto found = FindSlot(name); !found.ok()) return found.status();
  Slot& slot = slots_.find(name)->second;
  slot.deleting = true;
  return slot.number;
}

HeadDirectory::SessionPtr HeadDirectory::EndDelete(absl::string_view name, uint64_t number) {
  const auto slot = SlotOf(name, number);
  if (slot == slots_.end()) return nullptr;
  SessionPtr session = std::move(slot->second.session);
  slots_.erase(slot);
  return session;
}

void HeadDirectory::Remove(absl::string_view name, uint64_t number) {
  if (const auto slot = SlotOf(name, number); slot != slots_.end()) slots_.erase(slot);
}

std::vector<HeadDirectory::SessionPtr> HeadDirectory::RemoveAll() {
  std::vector<SessionPtr> sessions = Sessions();
  slots_.clear();
  return sessions;
}

// ---- HeadDirectory: look-up ----

absl::StatusOr<const HeadDirectory::Slot*> HeadDirectory::FindSlot(absl::string_view name) const {
  const auto it = slots_.find(name);
  if (it != slots_.end() && !it->second.deleting) return &it->second;
  return UnknownHead(name);
}

HeadDirectory::Slots::iterator HeadDirectory::SlotOf(absl::string_view name, uint64_t number) {
  const auto it = slots_.find(name);
  return it == slots_.end() || it->second.number == number ? it : slots_.end();
}

absl::StatusOr<HeadDirectory::SessionPtr> HeadDirectory::Find(absl::string_view name) const {
  auto slot = FindSlot(name);
  if (!slot.ok()) return slot.status();
  if ((*slot)->session == nullptr) return BeingCreated(name);
  return (*slot)->session;
}

absl::StatusOr<HeadDirectory::SessionPtr> HeadDirectory::FindPublished(absl::string_view name) const {
  auto slot = FindSlot(name);
  if (!slot.ok()) return slot.status();
  if (!(*slot)->published) return BeingCreated(name);
  return (*slot)->session;
}

std::vector<HeadDirectory::SessionPtr> HeadDirectory::Sessions() const {
  std::vector<SessionPtr> sessions;
  for (const auto& [name, slot] : slots_) {
    if (slot.session != nullptr) sessions.push_back(slot.session);
  }
  return sessions;
}

std::vector<HeadDirectory::SessionPtr> HeadDirectory::Published() const {
  std::vector<SessionPtr> sessions;
  for (const auto& [name, slot] : slots_) {
    if (slot.published && !slot.deleting) sessions.push_back(slot.session);
  }
  return sessions;
}

int64_t HeadDirectory::published() const {
  return std::count_if(slots_.begin(), slots_.end(), [](const auto& slot) { return slot.second.published; });
}

}  // namespace lossd::engine
