// SPDX-License-Identifier: Apache-2.0
// The members of Engine: each finds the session of a head by name and passes the request on (engine.h).
#include "server/engine/engine.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "server/engine/errors.h"
#include "server/engine/head_session.h"
#include "server/engine/operations.h"
#include "server/engine/stream_state.h"

namespace lossd::engine {
namespace {

// Checks what the engine requires of a head's config; the backend checks the rest.
absl::Status CheckConfig(const EngineOptions& options, const kernels::HeadConfig& config) {
  LOSSD_RETURN_IF_ERROR(kernels::Validate(config));
  const int64_t slice_bytes = options.slice_bytes;
  if (config.hidden_size <= slice_bytes / 4) return absl::OkStatus();
  return InvalidField(
      "hidden_size",
      absl::StrCat("must let one fp32 row fit into a slice of ", errors::ExactBytes(slice_bytes)),
      absl::StrCat(config.hidden_size));
}

// Blocks until no chunk of `session`, which is being deleted, is under way. Called without the lock.
void AwaitIdle(HeadSession& session, EngineContext* context) {
  const auto nothing = [](head::Head&) { return absl::OkStatus(); };
  Operation last{.run = nothing};
  {
    absl::MutexLock lock(&context->mutex);
    if (context->loop.stopping()) return;
    session.schedule().Push(&last);
    context->loop.Wake();
  }
  context->runtime->Wait(last.done);
}

// The error for a teacher that a request names and that was not found for the reason `why`.
absl::Status UnknownTeacher(const absl::Status& why, absl::string_view name) {
  if (!absl::IsNotFound(why)) return why;
  return FieldError(absl::StatusCode::kNotFound, "open.options.distillation.teacher", "is not a head", name);
}

// Finds the head of a new stream, contribution or tensor call.
absl::StatusOr<HeadDirectory::SessionPtr> FindOpen(const EngineContext& context, const HeadDirectory& heads,
                                                   absl::string_view name) {
  if (context.loop.stopping()) return ShuttingDown();
  return heads.FindPublished(name);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options,
                                                       kernels::Backend* backend, uint64_t incarnation,
                                                       std::vector<EngineObserver*> observers,
                                                       Runtime* runtime) {
  auto context = EngineContext::Create(options, backend, incarnation, std::move(observers), runtime);
  if (!context.ok()) return context.status();
  return absl::WrapUnique(new Engine(*std::move(context)));
}

Engine::Engine(std::unique_ptr<EngineContext> context)
    : context_(std::move(context)), heads_(context_->options.max_heads) {
  context_->loop.Start();
}

Engine::~Engine() {
  {
    absl::MutexLock lock(&context_->mutex);
    for (const SessionPtr& session : heads_.Sessions()) {
      session->streams().EndAll(ShuttingDown());
      if (session->order() != nullptr) session->order()->EndTurns();
    }
    // Heads are destroyed on the device thread, even if something still holds their sessions.
    context_->loop.Stop([this] {
      std::vector<SessionPtr> sessions;
      {
        absl::MutexLock ending(&context_->mutex);
        sessions = heads_.RemoveAll();
      }
      for (const SessionPtr& session : sessions) session->DeleteHead();
    });
  }
  context_->loop.Join();
}

EngineStats Engine::stats() const {
  EngineStats stats;
  stats.staging_bytes = context_->staging->bytes();
  stats.staging_used_bytes = context_->staging->used_bytes();
  stats.staging_peak_bytes = context_->staging->peak_bytes();
  stats.retained_bytes_used = context_->retained_ranges.used();
  absl::MutexLock lock(&context_->mutex);
  stats.row_bytes = context_->row_memory.capacity();
  stats.row_bytes_used = context_->row_memory.used();
  stats.area_buffers_lent = context_->area_buffers_lent;
  stats.heads = heads_.published();
  stats.device_busy = context_->loop.BusyTime();
  for (const SessionPtr& session : heads_.Sessions()) AddTo(*session, stats);
  return stats;
}

// ---- Heads ----

namespace {

// A backend numbers classes from 0 and does not know the class list.
kernels::HeadConfig ForBackend(kernels::HeadConfig config) {
  config.class_list = {};
  return config;
}

}  // namespace

absl::StatusOr<HeadSnapshot> Engine::PlanHead(absl::string_view name,
                                              const kernels::HeadConfig& config) const {
  LOSSD_RETURN_IF_ERROR(CheckConfig(context_->options, config));
  {
    absl::MutexLock lock(&context_->mutex);
    if (context_->loop.stopping()) return ShuttingDown();
    if (auto status = heads_.CheckFree(name); !status.ok()) return status;
  }
  const absl::StatusOr<kernels::PlannedHead> planned =
      context_->backend->PlanWholeHead(ForBackend(config), {});
  if (!planned.ok()) return planned.status();
  HeadSnapshot head;
  head.name = std::string(name);
  head.config = config;
  head.compute_dtype = planned->compute_dtype;
  head.state.incarnation = context_->incarnation;
  head.limits = PlannedLimits(context_->options, config, planned->slice_rows);
  head.chunk_rows = planned->chunk_rows;
  head.memory = planned->memory;
  head.choices = planned->choices;
  return head;
}

absl::Status Engine::CreateHead(absl::string_view name, const kernels::HeadConfig& config) {
  LOSSD_RETURN_IF_ERROR(CheckConfig(context_->options, config));
  uint64_t number = 0;
  {
    absl::MutexLock lock(&context_->mutex);
    if (context_->loop.stopping()) return ShuttingDown();
    LOSSD_TRY(number, heads_.Reserve(name));
  }
  absl::Status created;
  absl::Status ran = context_->loop.Run([&] {
    absl::StatusOr<SessionPtr> session = nullptr;
    auto kernels = context_->backend->CreateHead(ForBackend(config));
    created = context_->NoteIfLost(kernels.status());
    if (created.ok()) {
      session =
          HeadSession::Create(context_.get(), std::string(name), *std::move(kernels), config.class_list);
      created = session.status();
    }
    {
      absl::MutexLock lock(&context_->mutex);
      if (!created.ok()) return heads_.Remove(name, number);
      if (heads_.Fill(name, number, *session)) return context_->loop.Add(std::string(name), *session);
    }
    // A deletion that came after Reserve has run before this task.
    created = absl::NotFoundError(absl::StrCat("head ", name, " was deleted"));
    (*session)->DeleteHead();
  });
  return ran.ok() ? created : ran;
}

absl::Status Engine::PublishHead(absl::string_view name) {
  absl::MutexLock lock(&context_->mutex);
  return heads_.Publish(name);
}

absl::Status Engine::DeleteHead(absl::string_view name) {
  uint64_t number = 0;
  SessionPtr busy;  // the head, if a chunk of it is under way
  {
    absl::MutexLock lock(&context_->mutex);
    // A head whose creation is under way has no session yet.
    if (const auto session = heads_.Find(name); session.ok()) {
      if (const int64_t streams = (*session)->streams().size(); streams > 0) {
        return absl::FailedPreconditionError(
            absl::StrCat("head ", name, " has ", streams, " open ComputeLoss calls"));
      }
      if (const int64_t streams = (*session)->teaching.streams(); streams > 0) {
        return absl::FailedPreconditionError(
            absl::StrCat("head ", name, " is the teacher of ", streams, " open ComputeLoss calls"));
      }
      if (!(*session)->BeginDelete()) busy = *session;
      if ((*session)->order() != nullptr) (*session)->order()->EndTurns();
    }
    const absl::StatusOr<uint64_t> begun = heads_.BeginDelete(name);
    if (!begun.ok()) return begun.status();
    number = *begun;
  }
  if (busy != nullptr) AwaitIdle(*busy, context_.get());
  return context_->loop.Run([&] {
    SessionPtr session;
    {
      absl::MutexLock lock(&context_->mutex);
      session = heads_.EndDelete(name, number);
      if (session == nullptr) return;  // the creation of this head failed meanwhile
      context_->loop.Remove(name);
      session->step().ForgetRows();
      for (Operation* operation : session->schedule().TakeOperations()) {
        operation->result = absl::NotFoundError(absl::StrCat("head ", name, " was deleted"));
        operation->done.Notify();
      }
    }
    session->DeleteHead();
  });
}

absl::StatusOr<HeadSnapshot> Engine::Describe(absl::string_view name) const {
  absl::MutexLock lock(&context_->mutex);
  const auto session = heads_.FindPublished(name);
  if (!session.ok()) return session.status();
  return (*session)->Snapshot();
}

std::vector<HeadSnapshot> Engine::List() const {
  absl::MutexLock lock(&context_->mutex);
  std::vector<HeadSnapshot> heads;
  for (const SessionPtr& session : heads_.Published()) heads.push_back(session->Snapshot());
  return heads;
}

absl::Status Engine::RunOnHead(absl::string_view name,
                               absl::FunctionRef<absl::Status(HeadSession&)> operation) {
  SessionPtr session;
  {
    absl::MutexLock lock(&context_->mutex);
    auto found = heads_.Find(name);
    if (!found.ok()) return found.status();
    session = *std::move(found);
  }
  return session->Run([&] { return operation(*session); });
}

absl::Status Engine::OnDevice(absl::string_view name,
                              absl::FunctionRef<absl::Status(head::Head&)> operation) {
  return RunOnHead(name,
                   [&](HeadSession& session) { return context_->NoteIfLost(operation(session.head())); });
}

// ---- Tensors ----

absl::StatusOr<std::unique_ptr<TensorReader>> Engine::OpenReader(absl::string_view name) {
  absl::MutexLock lock(&context_->mutex);
  auto session = FindOpen(*context_, heads_, name);
  if (!session.ok()) return session.status();
  return std::make_unique<TensorReader>(*std::move(session));
}

absl::StatusOr<std::unique_ptr<TensorWriter>> Engine::OpenWriter(absl::string_view name) {
  absl::MutexLock lock(&context_->mutex);
  auto session = FindOpen(*context_, heads_, name);
  if (!session.ok()) return session.status();
  return std::make_unique<TensorWriter>(*std::move(session));
}

// ---- Steps ----

absl::StatusOr<GradNormResult> Engine::GradNorm(absl::string_view name, std::optional<uint64_t> step,
                                                absl::string_view run) {
  absl::StatusOr<GradNormResult> norm;
  absl::Status status = RunOnHead(name, [&](HeadSession& session) {
    norm = engine::GradNorm(session, step, run);
    return norm.status();
  });
  if (!status.ok()) return status;
  return norm;
}

absl::StatusOr<StepResult> Engine::ApplyStep(absl::string_view name, const StepRequest& request) {
  assert(kernels::Validate(request.optimizer).ok());
  StepRequest ordered = request;
  LOSSD_RETURN_IF_ERROR(OrderExpected(context_->options, ordered));
  absl::StatusOr<StepResult> result;
  absl::Status status = RunOnHead(name, [&](HeadSession& session) {
    result = engine::ApplyStep(session, ordered);
    return result.status();
  });
  if (!status.ok()) return status;
  if (!result->repeated) {
    context_->observers.Tell(&EngineObserver::OnStep, {.head = name,
                                                       .skipped = result->skipped,
                                                       .step = request.step,
                                                       .rows = result->rows,
                                                       .grad_norm = result->grad_norm,
                                                       .learning_rate = request.optimizer.learning_rate});
  }
  return result;
}

absl::StatusOr<HeadState> Engine::ZeroGradients(absl::string_view name, uint64_t step,
                                                absl::string_view run) {
  absl::StatusOr<HeadState> state;
  absl::Status status = RunOnHead(name, [&](HeadSession& session) {
    state = engine::ZeroGradients(session, step, run);
    return state.status();
  });
  if (!status.ok()) return status;
  return state;
}

absl::StatusOr<HeadState> Engine::Reset(absl::string_view name, ResetScope scope) {
  absl::StatusOr<HeadState> state;
  absl::Status status = RunOnHead(name, [&](HeadSession& session) {
    state = engine::Reset(session, scope);
    return state.status();
  });
  if (!status.ok()) return status;
  return state;
}

absl::Status Engine::SetShares(absl::string_view name, const std::vector<int32_t>& shares) {
  return RunOnHead(
      name, [&](HeadSession& session) { return context_->NoteIfLost(engine::SetShares(session, shares)); });
}

absl::Status Engine::BeginLoad(absl::string_view name, const head::Progress& progress,
                               const std::optional<head::AppliedStep>& last_step,
                               const head::History& history) {
  return RunOnHead(
      name, [&](HeadSession& session) { return engine::BeginLoad(session, progress, last_step, history); });
}

absl::Status Engine::EndLoad(absl::string_view name) {
  return RunOnHead(name, [](HeadSession& session) { return engine::EndLoad(session); });
}

// ---- Contributions ----

absl::StatusOr<Contribution> Engine::OpenContribution(const ContributionSpec& spec) {
  absl::MutexLock lock(&context_->mutex);
  const auto session = FindOpen(*context_, heads_, spec.head);
  if (!session.ok()) return errors::Within("open.", session.status());
  return engine::OpenContribution(**session, spec);
}

uint64_t Engine::AwaitTurn(const Contribution& contribution, absl::AnyInvocable<void()> ready) {
  absl::MutexLock lock(&context_->mutex);
  HeadSession& session = *contribution.session;
  if (session.order() == nullptr || context_->loop.stopping() || session.deleting()) return 0;
  if (!session.step().CheckBound(contribution.binding).ok()) return 0;
  const uint64_t ticket = ++context_->last_turn_ticket;
  return session.order()->AwaitTurn(contribution.id, ticket, std::move(ready)) ? ticket : 0;
}

absl::StatusOr<AddedRows> Engine::AddRows(const Contribution& contribution, RowRange rows,
                                          absl::Span<const uint8_t> values) {
  LOSSD_RETURN_IF_ERROR(CheckRows(contribution, rows, values));
  const std::vector<uint64_t> checksums = RowChecksums(values, contribution.row_bytes());
  absl::StatusOr<AddedRows> added;
  HeadSession& session = *contribution.session;
  const absl::Status status = session.Run([&] {
    added = engine::AddRows(session, contribution, {.rows = rows, .values = values, .checksums = checksums});
    return added.status();
  });
  if (!status.ok()) return status;
  context_->observers.Tell(&EngineObserver::OnContribution,
                           {.head = session.name(), .added_rows = added->rows});
  return added;
}

// ---- Streams ----

absl::StatusOr<std::unique_ptr<Stream>> Engine::Open(StreamSpec spec,
                                                     std::shared_ptr<StreamObserver> observer) {
  absl::MutexLock lock(&context_->mutex);
  const auto session = FindOpen(*context_, heads_, spec.head);
  if (!session.ok()) return errors::Within("open.", session.status());
  TeacherOf teacher;
  if (spec.options.distillation.used()) {
    const auto found = heads_.FindPublished(spec.teacher);
    if (!found.ok()) return UnknownTeacher(found.status(), spec.teacher);
    LOSSD_TRY(teacher, CheckDistillation(**session, *found, &spec));
  }
  const SessionPtr teaching = teacher.session;
  auto stream = (*session)->admission().Open(std::move(spec), std::move(observer), std::move(teacher));
  if (!stream.ok()) return stream.status();
  if (teaching != nullptr) teaching->teaching.Begin(session->get());
  return std::make_unique<Stream>(*session, *std::move(stream));
}

absl::StatusOr<std::unique_ptr<Stream>> Engine::OpenBackward(BackwardSpec spec,
                                                             std::shared_ptr<StreamObserver> observer) {
  LOSSD_RETURN_IF_ERROR(CheckBackward(spec));
  absl::MutexLock lock(&context_->mutex);
  const auto session = FindOpen(*context_, heads_, spec.head);
  if (!session.ok()) return errors::Within("backward.", session.status());
  auto stream = (*session)->admission().OpenBackward(std::move(spec), std::move(observer));
  if (!stream.ok()) return stream.status();
  return std::make_unique<Stream>(*session, *std::move(stream));
}

absl::StatusOr<ReleaseResult> Engine::Release(absl::string_view name, uint64_t microbatch_id,
                                              const Asker& asker) {
  absl::MutexLock lock(&context_->mutex);
  const auto session = heads_.FindPublished(name);
  if (!session.ok()) return session.status();
  const absl::StatusOr<bool> released = (*session)->deferred().Release(microbatch_id, asker);
  if (!released.ok()) return released.status();
  return ReleaseResult{.state = (*session)->step().state(), .released = *released};
}

int64_t Engine::ExpireRetained(absl::Time limit) {
  absl::MutexLock lock(&context_->mutex);
  int64_t expired = 0;
  for (const SessionPtr& session : heads_.Sessions()) expired += session->deferred().Expire(limit);
  return expired;
}

}  // namespace lossd::engine
