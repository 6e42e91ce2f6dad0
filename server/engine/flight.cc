// SPDX-License-Identifier: Apache-2.0
// The life of a chunk on the device: submission, results, settlement (flight.h).
//
// Launch submits the chunk. When the results come (OnResults), they go to the streams. When the chunk leaves
// the device (OnDone), its weight gradient has been added. Settle, which commits the rows in the ledger and
// finishes the slices, runs once: with the results if ChunkWork::settles_with_results, else at the end.
// ReportChunk runs before Settle.
#include "server/engine/flight.h"

#include <algorithm>
#include <utility>

#include "server/engine/engine_context.h"
#include "server/engine/errors.h"
#include "server/engine/head_session.h"
#include "server/engine/open_step.h"
#include "server/engine/stream_admission.h"

namespace lossd::engine {
namespace {

// Where the backend writes the results of the rows from `index` on; null if they are not wanted.
template <typename T>
T* PlaceIf(bool wanted, std::vector<T>& values, size_t index) {
  return wanted ? values.data() + index : nullptr;
}

// Copies the results of rows [index, index + rows) if they are wanted.
template <typename T>
void CopyIf(bool wanted, const std::vector<T>& from, size_t index, size_t rows, std::vector<T>& to) {
  if (!wanted) return;  // not wanted: `from` may be empty
  const auto first = from.begin() + static_cast<std::ptrdiff_t>(index);
  to.assign(first, first + static_cast<std::ptrdiff_t>(rows));
}

// `from` has `each` results a row. Copies the first `wanted` results of each row.
template <typename T>
void CopyFirst(const std::vector<T>& from, int32_t each, size_t index, size_t rows, int32_t wanted,
               std::vector<T>& to) {
  for (size_t row = 0; wanted > 0 && row < rows; ++row) {
    const auto first = from.begin() + static_cast<std::ptrdiff_t>((index + row) * static_cast<size_t>(each));
    to.insert(to.end(), first, first + wanted);
  }
}

}  // namespace

Flight::Flight(std::shared_ptr<Owner> owner, std::unique_ptr<ChunkWork> work)
    : owner_(std::move(owner)),
      head_(owner_->flight_parts()),
      work_(std::move(work)),
      formed_(head_.context->runtime->Now()) {
  for (const auto& slice : work_->slices)
    slice->queue_seconds = absl::ToDoubleSeconds(formed_ - slice->queued);
}

// ---- To the device ----

void Flight::Launch() {
  work_->Prepare();
  MakeChunk();
  const auto self = shared_from_this();
  head_.kernels->Submit(&chunk_, {.on_results = [self](absl::Status status) { self->OnResults(status); },
                                  .on_done = [self](absl::Status status) { self->OnDone(status); }});
}

void Flight::MakeChunk() {
  RowWants& wants = results_.wants;
  for (const Segment& segment : work_->segments) wants.Add(segment.wants);
  if (wants.loss) results_.loss.resize(work_->rows);
  if (wants.lse) results_.lse.resize(work_->rows);
  if (wants.entropy) results_.entropy.resize(work_->rows);
  if (wants.logprob) results_.logprob.resize(work_->rows);
  if (wants.argmax) results_.argmax.resize(work_->rows);
  const auto class_count = static_cast<size_t>(wants.class_count), top_k = static_cast<size_t>(wants.top_k);
  results_.class_logprobs.resize(work_->rows * class_count);
  results_.top_logprobs.resize(work_->rows * top_k);
  results_.top_classes.resize(work_->rows * top_k);
  for (const Segment& segment : work_->segments) {
    kernels::Slice slice = segment.input;
    slice.out = {.loss = PlaceIf(segment.wants.loss, results_.loss, segment.index),
                 .lse = PlaceIf(segment.wants.lse, results_.lse, segment.index),
                 .entropy = PlaceIf(segment.wants.entropy, results_.entropy, segment.index),
                 .target_logprob = PlaceIf(segment.wants.logprob, results_.logprob, segment.index),
                 .argmax = PlaceIf(segment.wants.argmax, results_.argmax, segment.index)};
    // Rows that want top classes get as many as the slice that wants most; TakeResults cuts them.
    const bool wants_top = segment.wants.top_k > 0;
    slice.top_k = wants_top ? wants.top_k : 0;
    slice.out.top_logprobs = PlaceIf(wants_top, results_.top_logprobs, segment.index * top_k);
    slice.out.top_classes = PlaceIf(wants_top, results_.top_classes, segment.index * top_k);
    slice.out.class_logprobs =
        PlaceIf(slice.class_count > 0, results_.class_logprobs, segment.index * class_count);
    slices_.push_back(slice);
  }
  const EngineContext& context = *head_.context;
  chunk_ = {.options = work_->options,
            .hidden_dtype = work_->hidden_dtype,
            .accumulate_gradients = work_->accumulates,
            .independent = context.options.deterministic,
            .turn = work_->turn,
            .retained = context.retained.get(),
            .teacher = work_->teacher == nullptr ? nullptr : &work_->teacher->head().kernels(),
            .slices = absl::MakeSpan(slices_)};
}

// ---- Results ----

void Flight::OnResults(const absl::Status& status) {
  compute_seconds_ = absl::ToDoubleSeconds(head_.context->runtime->Now() - formed_);
  results_ok_ = status.ok();
  EngineContext& context = *head_.context;
  if (!status.ok()) context.observers.Tell(&EngineObserver::OnDeviceError, status);
  TakeResults();
  settled_ = results_ok_ && work_->settles_with_results;
  if (settled_) ReportChunk();
  bool delivers = false;
  {
    absl::MutexLock lock(&context.mutex);
    SettleResults(status);
    // While other chunks are on the device, this thread leaves the observers to the notifier's thread, and
    // waits for the other chunks' results.
    delivers = context.loop.load().chunks <= 1 && !context.loop.IsThisThread();
  }
  if (delivers) context.notifier.RunQueued();
}

void Flight::SettleResults(const absl::Status& status) {
  EngineContext& context = *head_.context;
  std::vector<StagingBuffer> unused;
  context.loop.OnResults(work_->accumulates);
  bool all_good = true;
  for (const auto& slice : work_->slices) {
    if (!slice->is_good()) {
      all_good = false;
      head_.streams->Fail(*slice->stream, status.ok()
                                              ? RowNotFinite(slice->bad_row, slice->accumulated_all_the_same)
                                              : DeviceFailed(status));
    } else if (!slice->stream->failed()) {
      Deliver(*slice);
    }
    if (slice->buffer) unused.push_back(std::move(slice->buffer));
  }
  if (!unused.empty()) context.notifier.Post([unused = std::move(unused)]() mutable { unused.clear(); });
  if (status.ok()) work_->OnComputed(chunk_);
  work_->OnResults(all_good);
  if (!settled_) return;
  Settle(/*accumulated=*/true);
  for (const auto& slice : work_->slices) head_.streams->FinishIfReady(slice->stream);
}

void Flight::TakeResults() {
  for (size_t i = 0; i < work_->segments.size(); ++i) {
    const Segment& segment = work_->segments[i];
    for (SliceWork* slice : segment.slices) {
      slice->sums += slices_[i].sums;
      if (IsGood(i) && work_->accumulates) slice->accumulated_all_the_same = true;
      if (IsGood(i) || !slice->is_good()) continue;
      slice->bad_row = segment.rows.begin + std::max<int64_t>(0, slices_[i].first_nonfinite_row);
    }
  }
  for (const auto& slice : work_->slices) {
    const RowWants& wants = slice->stream->spec().want_rows;
    const auto rows = static_cast<size_t>(slice->rows.size());
    SliceOutput& output = slice->output;
    CopyIf(wants.loss, results_.loss, slice->index, rows, output.loss);
    CopyIf(wants.lse, results_.lse, slice->index, rows, output.lse);
    CopyIf(wants.entropy, results_.entropy, slice->index, rows, output.entropy);
    CopyIf(wants.logprob, results_.logprob, slice->index, rows, output.logprob);
    CopyIf(wants.argmax, results_.argmax, slice->index, rows, output.argmax);
    const auto class_count = static_cast<size_t>(wants.class_count);
    CopyIf(class_count > 0, results_.class_logprobs,
           slice->index * static_cast<size_t>(results_.wants.class_count), rows * class_count,
           output.class_logprobs);
    CopyFirst(results_.top_logprobs, results_.wants.top_k, slice->index, rows, wants.top_k,
              output.top_logprobs);
    CopyFirst(results_.top_classes, results_.wants.top_k, slice->index, rows, wants.top_k,
              output.top_classes);
    slice->stream->NumberClasses(output.argmax);
    slice->stream->NumberClasses(output.top_classes);
  }
}

void Flight::Deliver(SliceWork& slice) {
  SliceOutput& output = slice.output;
  output.rows = slice.rows;
  output.staging_bytes = slice.buffer.bytes();
  output.queue_seconds = slice.queue_seconds;
  output.compute_seconds = compute_seconds_;
  if (slice.stream->spec().want_grad_hidden) {
    output.grad_bytes = slice.stream->RowBytes(slice.rows.size());
    output.grad_hidden = std::move(slice.buffer);
  }
  head_.context->notifier.Post([stream = slice.stream, output = std::move(output)]() mutable {
    stream->observer().OnSlice(std::move(output));
  });
}

// ---- The end ----

void Flight::OnDone(const absl::Status& status) {
  EngineContext& context = *head_.context;
  if (!settled_) ReportChunk();
  context.observers.Tell(&EngineObserver::OnChunkLeft, Report());
  // Broken: the head's accumulators may be half-written (kernels::ChunkCallbacks::on_done).
  const bool broken = !status.ok() && (results_ok_ || absl::IsDataLoss(status));
  if (broken) context.observers.Tell(&EngineObserver::OnDeviceError, status);
  absl::MutexLock lock(&context.mutex);
  if (broken) owner_->OnAccumulationFailed(status);
  if (!settled_) Settle(/*accumulated=*/!broken);
  work_->OnLeft();
  if (broken) {
    const absl::Status why = head_.step->gradients_status();
    for (const auto& slice : work_->slices) head_.streams->Fail(*slice->stream, why);
    head_.streams->FailIf([this](const StreamState& stream) { return work_->Affects(stream); }, why);
  }
  owner_->OnChunkLeft(std::move(work_->slices));
}

void Flight::ReportChunk() {
  const ChunkReport report = Report();
  head_.context->observers.Tell(&EngineObserver::OnChunk, report);
  if (!chunk_.options.is_embedding()) owner_->NoteChunk(report, chunk_.choices);
}

void Flight::Settle(bool accumulated) {
  Ledger& ledger = head_.step->ledger();
  for (size_t i = 0; work_->accumulates && i < work_->segments.size(); ++i) {
    const Segment& segment = work_->segments[i];
    if (!IsGood(i) || !accumulated) {
      ledger.Release(segment.microbatch_id, segment.rows);
      continue;
    }
    int64_t committed = ledger.Commit(segment.microbatch_id, segment.rows);
    for (SliceWork* slice : segment.slices) {
      if (!slice->is_good()) continue;  // a failed slice reports no rows
      slice->accumulated_rows += committed;
      slice->repeated_rows += slices_[i].sums.valid_rows - committed;
      committed = 0;
    }
  }
  for (const auto& slice : work_->slices) {
    if (slice->is_good()) owner_->FinishSlice(*slice, compute_seconds_);
    slice->stream->AddOutstanding(-1);
  }
}

ChunkReport Flight::Report() const {
  ChunkReport report{.head = head_.head,
                     .gradients = chunk_.gradients,
                     .embedding = chunk_.options.embedding,
                     .compute_seconds = compute_seconds_,
                     .device_seconds = absl::ToDoubleSeconds(head_.context->runtime->Now() - formed_)};
  for (size_t i = 0; i < work_->segments.size(); ++i) {
    if (work_->segments[i].slices.empty()) continue;  // a segment of zeros, for rows not sent again
    report.rows += work_->segments[i].rows.size();
    report.sums += slices_[i].sums;
    if (work_->accumulates && IsGood(i)) report.accumulating += slices_[i].sums;
  }
  for (const auto& slice : work_->slices) report.queue_seconds.push_back(slice->queue_seconds);
  for (const auto& slice : work_->slices) {
    report.slices.push_back({.microbatch_id = slice->stream->spec().microbatch_id,
                             .first_row = slice->rows.begin,
                             .rows = slice->rows.size()});
  }
  return report;
}

}  // namespace lossd::engine
