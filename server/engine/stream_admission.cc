// SPDX-License-Identifier: Apache-2.0
// StreamSet and StreamAdmission: how streams begin, fail and end (stream_admission.h).
#include "server/engine/stream_admission.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "server/engine/errors.h"
#include "server/engine/staging.h"
#include "server/engine/stream_state.h"

namespace lossd::engine {

// ---- StreamSet ----

void StreamSet::Fail(StreamState& stream, absl::Status why) {
  if (stream.failed() || stream.finished()) return;
  const bool gave_up = absl::IsDeadlineExceeded(why) || absl::IsCancelled(why);
  if (gave_up && order_ != nullptr && order_->IsWaiting(stream)) {
    why = errors::WithMessage(why, absl::StrCat(why.message(), " while it waited for ",
                                                schedule_->backlog().waits_for, " (deterministic mode)"));
  }
  stream.Fail(std::move(why));
  DropFailed();
}

void StreamSet::FailEach(absl::FunctionRef<absl::Status(const StreamState&)> why) {
  const auto streams = streams_;  // a copy, because FinishIfReady removes streams
  for (const auto& stream : streams) {
    absl::Status status = why(*stream);
    if (status.ok()) continue;
    Fail(*stream, std::move(status));
    FinishIfReady(stream);
  }
}

void StreamSet::FailIf(Predicate wanted, const absl::Status& why) {
  FailEach([&](const StreamState& stream) { return wanted(stream) ? why : absl::OkStatus(); });
}

int64_t StreamSet::accumulating() const {
  return std::count_if(streams_.begin(), streams_.end(), [](const auto& stream) {
    return stream->spec().accumulate_gradients && !stream->failed();
  });
}

absl::Status StreamSet::CheckRetaining(uint64_t id, const MicrobatchTerms& terms, RowRange rows) const {
  for (const auto& stream : streams_) {
    if (!stream->spec().retain || stream->failed() || stream->spec().microbatch_id != id) continue;
    absl::Status agrees =
        CheckRetained(id, {stream->terms(), stream->spec().rows}, {terms, rows}, "being retained");
    if (!agrees.ok()) return agrees;
  }
  return absl::OkStatus();
}

void StreamSet::EndAll(const absl::Status& why) {
  for (const auto& stream : streams_) stream->Start();  // else they would not finish
  FailIf([](const StreamState&) { return true; }, why);
}

void StreamSet::DropFailed() {
  DroppedSlices dropped = schedule_->TakeFailed();
  if (dropped.queued.empty() && dropped.waiting.empty()) return;
  for (const auto& slice : dropped.queued) slice->stream->AddOutstanding(-1);
  notifier_->Post([dropped = std::move(dropped)]() mutable { dropped = {}; });
}

void StreamSet::FinishIfReady(const std::shared_ptr<StreamState>& stream) {
  if (!stream->ReadyToFinish()) return;
  stream->MarkFinished();
  if (stream->status().ok() && stream->spec().retain) {
    deferred_->Add(stream->spec().microbatch_id, stream->terms(), stream->binding(), stream->TakePart(),
                   runtime_->Now());
  }
  std::erase(streams_, stream);
  on_end_(*stream);
  notifier_->Post([stream, values = stream->TakeValues()]() mutable {
    values = {};
    stream->observer().OnFinished(stream->status(), stream->summary());
  });
}

std::vector<RowRange> StreamSet::OwnRows(const StreamState& stream, bool* shared) const {
  const StreamSpec& spec = stream.spec();
  std::vector<RowRange> others;
  for (const auto& other : streams_) {
    const StreamSpec& theirs = other->spec();
    if (other.get() == &stream || !theirs.accumulate_gradients) continue;
    if (theirs.microbatch_id == spec.microbatch_id) others.push_back(theirs.rows);
  }
  *shared = !others.empty();
  std::sort(others.begin(), others.end(), [](RowRange a, RowRange b) { return a.begin < b.begin; });
  std::vector<RowRange> own;
  int64_t next = spec.rows.begin;
  for (const RowRange rows : others) {
    if (rows.begin >= spec.rows.end) break;
    if (rows.begin > next) own.push_back({next, rows.begin});
    next = std::max(next, rows.end);
  }
  if (next < spec.rows.end) own.push_back({next, spec.rows.end});
  return own;
}

// ---- StreamAdmission ----

absl::Status StreamAdmission::CheckPlaces(absl::string_view peer) const {
  const EngineContext& context = *parts_.context;
  context.mutex.AssertHeld();
  const FairShare::Answer answer = context.stream_places.Check(peer, 1);
  if (answer == FairShare::Answer::kYes) return absl::OkStatus();
  if (answer == FairShare::Answer::kFull) {
    return BecauseOf("max_streams", absl::ResourceExhaustedError(
                                        absl::StrCat("there are ", context.stream_places.used(),
                                                     " open streams, the most allowed (--max_streams)")));
  }
  return BecauseOf(
      "peer_share",
      absl::ResourceExhaustedError(absl::StrCat(
          "peer ", peer, " has ", context.stream_places.held(peer), " of ", context.stream_places.used(),
          " open streams, of ", context.stream_places.capacity(),
          " that are allowed; one more would be beyond its share (--max_streams, --peer_share)")));
}

absl::Status StreamAdmission::CheckStep(absl::string_view field, std::optional<uint64_t> named,
                                        absl::string_view run) const {
  if (!named.has_value()) return absl::OkStatus();
  return parts_.step->CheckNumber(field, {.step = *named, .run = run}, parts_.context->runtime->WallNow());
}

absl::Status StreamAdmission::CheckHiddenSize(absl::string_view field, uint64_t size) const {
  const auto own = static_cast<uint64_t>(parts_.config->hidden_size);
  if (size == 0 || size == own) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("must be the head's, ", own), absl::StrCat(size));
}

absl::StatusOr<std::shared_ptr<StreamState>> StreamAdmission::MakeStream(
    StreamSpec spec, std::shared_ptr<StreamObserver> observer, TeacherOf teacher) {
  const SliceLimits limits = parts_.schedule->For(spec.accumulate_gradients).limits();
  return StreamState::Create(std::move(spec), *parts_.config, parts_.step->state(), limits,
                             std::move(observer), std::move(teacher));
}

absl::StatusOr<std::shared_ptr<StreamState>> StreamAdmission::Open(StreamSpec spec,
                                                                   std::shared_ptr<StreamObserver> observer,
                                                                   TeacherOf teacher) {
  LOSSD_RETURN_IF_ERROR(CheckPlaces(spec.peer));
  LOSSD_RETURN_IF_ERROR(parts_.step->CheckGeneration("open.generation", spec.generation));
  LOSSD_RETURN_IF_ERROR(CheckHiddenSize("open.hidden_size", spec.hidden_size));
  auto stream = MakeStream(std::move(spec), std::move(observer), std::move(teacher));
  if (!stream.ok()) return stream.status();
  LOSSD_RETURN_IF_ERROR(CheckStep("open.step", (*stream)->spec().step, (*stream)->spec().run));
  LOSSD_RETURN_IF_ERROR(parts_.step->CheckWeights());
  if ((*stream)->spec().retain) {
    if (auto status = ReserveRetained(**stream); !status.ok()) return status;
  }
  return Admit(*std::move(stream));
}

absl::StatusOr<std::shared_ptr<StreamState>> StreamAdmission::OpenBackward(
    BackwardSpec spec, std::shared_ptr<StreamObserver> observer) {
  LOSSD_RETURN_IF_ERROR(CheckPlaces(spec.peer));
  LOSSD_RETURN_IF_ERROR(parts_.step->CheckGeneration("backward.generation", spec.generation));
  LOSSD_RETURN_IF_ERROR(CheckHiddenSize("backward.hidden_size", spec.hidden_size));
  LOSSD_RETURN_IF_ERROR(CheckStep("backward.step", spec.step, spec.run));
  LOSSD_RETURN_IF_ERROR(parts_.step->CheckWeights());
  if (spec.accumulate_gradients && !parts_.config->trainable) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "backward.accumulate_gradients",
                      "needs a head that is not frozen", "true");
  }
  auto kept = parts_.deferred->Find(spec.microbatch_id, spec.rows, parts_.context->runtime->Now());
  if (!kept.ok()) return kept.status();
  BackwardRows rows = RowsOf(spec, **kept);
  if (spec.hidden_dtype.value_or(rows.stream.hidden_dtype) != rows.stream.hidden_dtype) {
    return InvalidField(
        "backward.hidden_dtype",
        absl::StrCat("must be ", kernels::Name(rows.stream.hidden_dtype), ", as the rows were retained"),
        kernels::Name(*spec.hidden_dtype));
  }
  auto stream = MakeStream(std::move(rows.stream), std::move(observer));
  if (!stream.ok()) return stream.status();
  (*stream)->SetRetained(std::move(rows.retained), {.loss = std::move(spec.grad_loss),
                                                    .lse = std::move(spec.grad_lse),
                                                    .entropy = std::move(spec.grad_entropy)});
  return Admit(*std::move(stream));
}

absl::Status StreamAdmission::ReserveRetained(StreamState& stream) {
  const StreamSpec& spec = stream.spec();
  if (auto status = parts_.deferred->CheckAdd(spec.microbatch_id, stream.terms(), spec.rows, spec.identity);
      !status.ok())
    return status;
  if (auto status = parts_.streams->CheckRetaining(spec.microbatch_id, stream.terms(), spec.rows);
      !status.ok())
    return status;
  const int64_t bytes = stream.RetainedBytes();
  RangeAllocator& ranges = parts_.context->retained_ranges;
  auto block = ranges.Allocate(bytes, spec.peer);
  if (block == nullptr && ranges.used() + bytes <= ranges.size() && ranges.held(spec.peer) > 0) {
    return BecauseOf(
        "peer_share",
        FieldError(
            absl::StatusCode::kResourceExhausted, "open.retain",
            absl::StrCat(
                "needs ", errors::ExactBytes(bytes), "; peer ", spec.peer, " has ",
                errors::ExactBytes(ranges.held(spec.peer)), " of ", errors::ExactBytes(ranges.size()),
                ", and more would be beyond its share, or does not fit between what is in use (release "
                "microbatches; --retained_bytes, --peer_share)"),
            "true"));
  }
  if (block == nullptr) {
    return BecauseOf(
        "retained_bytes",
        FieldError(
            absl::StatusCode::kResourceExhausted, "open.retain",
            absl::StrCat("needs ", errors::ExactBytes(bytes), "; ", errors::ExactBytes(ranges.used()), " of ",
                         errors::ExactBytes(ranges.size()),
                         " are in use (release microbatches, or start the server with more retained_bytes)"),
            "true"));
  }
  stream.SetRetained({{spec.rows, std::move(block)}}, {});
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<StreamState>> StreamAdmission::Admit(std::shared_ptr<StreamState> stream) {
  parts_.context->mutex.AssertHeld();
  const StreamSpec& spec = stream->spec();
  const int64_t host_bytes = stream->HostBytes();
  LOSSD_RETURN_IF_ERROR(AccountOf(*stream).Take(host_bytes));
  if (spec.accumulate_gradients) {
    if (auto declared = Declare(*stream); !declared.ok()) {
      AccountOf(*stream).Give(host_bytes);
      return declared;
    }
    if (parts_.order != nullptr) parts_.order->OnDeclared(spec.microbatch_id);
    parts_.context->loop.Wake();
  }
  stream->SetAdmitted(host_bytes);
  parts_.context->stream_places.Take(spec.peer, 1);  // a place is free: CheckPlaces
  parts_.streams->Add(stream);
  return stream;
}

RowMemory::Account StreamAdmission::AccountOf(const StreamState& stream) {
  parts_.context->mutex.AssertHeld();
  const std::string& peer = stream.spec().peer;
  return RowMemory::Account(&parts_.context->row_memory, peer.empty() ? "" : absl::StrCat("peer ", peer));
}

absl::Status StreamAdmission::Declare(const StreamState& stream) {
  LOSSD_RETURN_IF_ERROR(parts_.step->CheckValid());
  const StreamSpec& spec = stream.spec();
  if (parts_.step->contributions().Contains(spec.microbatch_id)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.microbatch_id",
                      "names a contribution of this step", absl::StrCat(spec.microbatch_id));
  }
  absl::Status declared =
      parts_.step->ledger().Declare(spec.microbatch_id, stream.terms(), spec.rows, stream.contents());
  if (declared.ok()) parts_.step->history().OnRows(spec.run);
  return declared;
}

void StreamAdmission::OnEnd(StreamState& stream) {
  parts_.context->mutex.AssertHeld();
  AccountOf(stream).Give(stream.host_bytes());
  parts_.context->stream_places.Give(stream.spec().peer, 1);
  const StreamSpec& spec = stream.spec();
  // With another generation, the ledger has forgotten the stream's rows already, or is about to.
  if (!spec.accumulate_gradients || stream.head_state().generation != parts_.step->versions().generation())
    return;
  if (stream.status().ok()) return parts_.step->ledger().Keep(spec.microbatch_id, spec.rows);
  // The stream has failed. Rows that another open stream also has stay in the ledger.
  bool shared = false;
  const std::vector<RowRange> own = parts_.streams->OwnRows(stream, &shared);
  for (const RowRange rows : own) {
    const auto withdrawable = parts_.order == nullptr ? std::vector<RowRange>{rows}
                                                      : parts_.order->Withdrawable(spec.microbatch_id, rows);
    for (const RowRange leaving : withdrawable) {
      parts_.step->ledger().Withdraw(spec.microbatch_id, leaving, !shared);
    }
  }
  const bool is_empty =
      parts_.step->ledger().microbatches() == 0 && parts_.step->contributions().contributions() == 0;
  if (is_empty) parts_.step->history().OnDiscarded();
  if (parts_.order != nullptr) parts_.order->OnDeclared(spec.microbatch_id);
  parts_.context->loop.Wake();
}

}  // namespace lossd::engine
