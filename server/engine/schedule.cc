// SPDX-License-Identifier: Apache-2.0
#include "server/engine/schedule.h"

#include <utility>

#include "server/engine/work_queue.h"

namespace lossd::engine {
namespace {

// One segment a slice.
struct ArrivalChunk final : ChunkWork {
  explicit ArrivalChunk(std::vector<std::unique_ptr<SliceWork>> works) {
    slices = std::move(works);
    const StreamSpec& first = slices.front()->stream->spec();
    options = first.options;
    hidden_dtype = first.hidden_dtype;
    teacher = slices.front()->stream->teacher().session;  // the options of all slices name the same
    accumulates = settles_with_results = first.accumulate_gradients;
    for (const auto& work : slices) {
      const StreamState& stream = *work->stream;
      // The weight gradient reads retained rows, which are free when the call has ended.
      if (stream.is_backward()) settles_with_results = false;
      work->index = rows;
      Segment segment{.microbatch_id = stream.spec().microbatch_id,
                      .rows = work->rows,
                      .index = rows,
                      .slices = {work.get()},
                      .wants = stream.spec().want_rows,
                      .input = InputOf(stream, work->rows, work->buffer.data())};
      if (work->has_repeats) segment.input.accumulate = work->accumulate.data();
      segments.push_back(std::move(segment));
      rows += static_cast<size_t>(work->rows.size());
    }
  }

  void Prepare() override {}
  void OnResults(bool all_good) override {}
  void OnLeft() override {}
  bool Affects(const StreamState& stream) const override { return false; }
};

}  // namespace

ArrivalSchedule::ArrivalSchedule(SliceLimits limits, int64_t chunk_rows, StagingPool* staging, Ledger* ledger,
                                 MemoryReady memory_ready, WorkQueue::ValuesOf values)
    : limits_(limits),
      chunk_rows_(chunk_rows),
      staging_(staging),
      ledger_(ledger),
      memory_ready_(std::move(memory_ready)),
      queue_(chunk_rows, std::move(values)) {}

bool ArrivalSchedule::FindMemory(std::unique_ptr<SliceWork>& slice) {
  if (slice->caller.in_place) {
    slice->buffer = std::move(slice->caller.in_place);
    return true;
  }
  StreamState& stream = *slice->stream;
  const int64_t bytes = slice->bytes;
  const auto waiting = std::make_shared<std::unique_ptr<SliceWork>>(std::move(slice));
  StagingPool::Acquired acquired =
      staging_->Acquire(stream.spec().peer, bytes, [ready = memory_ready_, waiting](StagingBuffer buffer) {
        (*waiting)->buffer = std::move(buffer);
        ready(std::move(*waiting));
      });
  if (!acquired.buffer) {
    stream.SetMemoryTicket(acquired.ticket);
    return false;
  }
  slice = std::move(*waiting);
  slice->buffer = std::move(acquired.buffer);
  return true;
}

ScheduledWork ArrivalSchedule::TakeNext(const DeviceLoad& load, bool head_is_idle) {
  if (queue_.FrontOperation() != nullptr) {
    if (!head_is_idle) return {};
    return queue_.TakeOperation();
  }
  if (!load.accepts_chunk()) return {};
  if (WaitsForRows(queue_.Next(chunk_rows_), load.without_results)) return {};
  auto slices = queue_.TakeChunk(chunk_rows_, *ledger_);
  if (slices.empty()) return {};
  return std::make_unique<ArrivalChunk>(std::move(slices));
}

}  // namespace lossd::engine
