// SPDX-License-Identifier: Apache-2.0
// WorkQueue, and ArrivalSchedule with the chunks that it makes (schedule.h).
//
// WorkQueue::items_ has slices and operations in the order in which they are to go. The next chunk is made in
// two steps: Lead finds the slice that leads it, and ForEachOfNext goes over all slices that can join it.
// Next counts these slices; TakeChunk takes them.
#include "server/engine/schedule.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "kernels/decision.h"
#include "xxhash.h"

namespace lossd::engine {

uint64_t SampleSeed(absl::string_view head, uint64_t step, uint64_t microbatch_id) {
  // Not absl::Hash or std::hash, which differ between processes and platforms.
  uint64_t seed = XXH64(head.data(), head.size(), /*seed=*/0);
  seed = kernels::MixBits(seed + step);
  return kernels::MixBits(seed + microbatch_id);
}

// ---- The queue ----

namespace {

// True if rows of both streams may be computed in one chunk.
bool Compatible(const StreamSpec& a, const StreamSpec& b) {
  return a.options == b.options && a.hidden_dtype == b.hidden_dtype &&
         a.accumulate_gradients == b.accumulate_gradients;
}

// Reserves the slice's rows in the ledger, if it accumulates. False if another chunk is computing some of
// them.
bool TryReserve(SliceWork& slice, Ledger& ledger) {
  const StreamSpec& spec = slice.stream->spec();
  if (!spec.accumulate_gradients) return true;
  if (ledger.AnyReserved(spec.microbatch_id, slice.rows)) return false;
  slice.accumulate.resize(static_cast<size_t>(slice.rows.size()));
  slice.has_repeats = ledger.Reserve(spec.microbatch_id, slice.rows, absl::MakeSpan(slice.accumulate)) > 0;
  return true;
}

}  // namespace

void WorkQueue::Push(std::unique_ptr<SliceWork> slice) {
  ++slices_;
  rows_ += slice->rows.size();
  slice->round = RoundOf(*slice);
  const auto is_later = [&slice](const Item& item) {
    const auto* other = std::get_if<std::unique_ptr<SliceWork>>(&item);
    return other != nullptr && (*other)->round > slice->round;
  };
  auto at = items_.end();
  while (at != items_.begin() && is_later(*std::prev(at))) --at;
  items_.insert(at, std::move(slice));
}

int64_t WorkQueue::RoundOf(const SliceWork& slice) {
  int64_t& charged = charged_rows_[slice.stream->spec().peer];
  charged = std::max(charged, round_ * round_rows_);  // a peer without rows here begins in the present round
  const int64_t round = charged / round_rows_;
  charged += slice.rows.size();
  return round;
}

void WorkQueue::ForgetPeers() {
  if (slices_ == 0) round_ = 0;
  std::erase_if(charged_rows_,
                [this](const auto& peer) { return slices_ == 0 || peer.second <= round_ * round_rows_; });
}

void WorkQueue::Push(Operation* operation) { items_.emplace_back(operation); }

std::vector<std::unique_ptr<SliceWork>> WorkQueue::TakeFailed() {
  std::vector<std::unique_ptr<SliceWork>> taken;
  std::deque<Item> kept;
  for (Item& item : items_) {
    auto* slice = std::get_if<std::unique_ptr<SliceWork>>(&item);
    if (slice != nullptr && (*slice)->stream->failed()) {
      --slices_;
      rows_ -= (*slice)->rows.size();
      if (const auto peer = charged_rows_.find((*slice)->stream->spec().peer); peer != charged_rows_.end())
        peer->second -= (*slice)->rows.size();
      taken.push_back(std::move(*slice));
    } else {
      kept.push_back(std::move(item));
    }
  }
  items_ = std::move(kept);
  ForgetPeers();
  return taken;
}

std::vector<Operation*> WorkQueue::TakeOperations() {
  std::vector<Operation*> taken;
  std::deque<Item> kept;
  for (Item& item : items_) {
    if (auto* operation = std::get_if<Operation*>(&item)) {
      taken.push_back(*operation);
    } else {
      kept.push_back(std::move(item));
    }
  }
  items_ = std::move(kept);
  return taken;
}

Operation* WorkQueue::FrontOperation() const {
  if (items_.empty()) return nullptr;
  auto* const front = std::get_if<Operation*>(&items_.front());
  return front == nullptr ? nullptr : *front;
}

Operation* WorkQueue::TakeOperation() {
  Operation* const operation = FrontOperation();
  if (operation != nullptr) items_.pop_front();
  return operation;
}

const SliceWork* WorkQueue::SliceAt(size_t position) const {
  if (position >= items_.size()) return nullptr;
  const auto* slice = std::get_if<std::unique_ptr<SliceWork>>(&items_[position]);
  return slice == nullptr ? nullptr : slice->get();
}

ValuesAre WorkQueue::ValuesAt(size_t position) const {
  return values_ == nullptr ? ValuesAre::kHome : values_(*SliceAt(position));
}

// A slice that was passed over kMostPassedOver times leads the next chunk, wherever its values are.
size_t WorkQueue::Lead() const {
  for (size_t i = 0; SliceAt(i) != nullptr; ++i) {
    if (ValuesAt(i) != ValuesAre::kAway || SliceAt(i)->passed_over >= kMostPassedOver) return i;
  }
  return SliceAt(0) == nullptr ? items_.size() : 0;
}

ValuesAre WorkQueue::Values() const {
  const size_t lead = Lead();
  return lead == items_.size() ? ValuesAre::kHome : ValuesAt(lead);
}

template <typename Fn>
bool WorkQueue::ForEachOfNext(int64_t chunk_rows, Fn fn) const {
  const size_t lead = Lead();
  if (lead == items_.size()) return !items_.empty();
  const StreamSpec& first = SliceAt(lead)->stream->spec();
  int64_t rows = 0;
  for (size_t i = 0; i < items_.size() && rows < chunk_rows; ++i) {
    const SliceWork* const slice = SliceAt(i);
    if (slice == nullptr) return true;  // an operation, which no slice passes
    if (!Compatible(first, slice->stream->spec())) continue;
    const int64_t more = slice->rows.size();
    if (rows + more > chunk_rows || !fn(i)) return true;
    rows += more;
  }
  return rows >= chunk_rows;
}

NextChunk WorkQueue::Next(int64_t chunk_rows) const {
  NextChunk next;
  next.closed = ForEachOfNext(chunk_rows, [&](size_t i) {
    const SliceWork& slice = *std::get<std::unique_ptr<SliceWork>>(items_[i]);
    next.rows += slice.rows.size();
    next.accumulates = slice.stream->spec().accumulate_gradients;
    return true;
  });
  return next;
}

std::vector<std::unique_ptr<SliceWork>> WorkQueue::TakeChunk(int64_t chunk_rows, Ledger& ledger) {
  std::vector<std::unique_ptr<SliceWork>> chunk;
  const size_t lead = Lead();
  if (lead == items_.size()) return chunk;
  const int64_t round = SliceAt(0)->round;  // the round of the front slice, which may be passed over
  ForEachOfNext(chunk_rows, [&](size_t i) {
    auto& slice = std::get<std::unique_ptr<SliceWork>>(items_[i]);
    if (!TryReserve(*slice, ledger)) return false;
    --slices_;
    rows_ -= slice->rows.size();
    chunk.push_back(std::move(slice));
    return true;
  });
  if (chunk.empty()) return chunk;
  round_ = std::max(round_, round);
  for (size_t i = 0; i < lead; ++i) {
    if (auto& slice = std::get<std::unique_ptr<SliceWork>>(items_[i]); slice != nullptr) ++slice->passed_over;
  }
  // The slices of the chunk have been moved away, which left null pointers.
  std::erase_if(items_, [](const Item& item) {
    const auto* slice = std::get_if<std::unique_ptr<SliceWork>>(&item);
    return slice != nullptr && *slice == nullptr;
  });
  ForgetPeers();
  return chunk;
}

// ---- Schedules ----

namespace {

// A chunk of an ArrivalSchedule. It has one segment for each slice.
struct ArrivalChunk final : ChunkWork {
  explicit ArrivalChunk(std::vector<std::unique_ptr<SliceWork>> works) {
    slices = std::move(works);
    const StreamSpec& first = slices.front()->stream->spec();
    options = first.options;
    hidden_dtype = first.hidden_dtype;
    // All slices have the same options, so the same teacher.
    teacher = slices.front()->stream->teacher().session;
    accumulates = settles_with_results = first.accumulate_gradients;
    for (const auto& work : slices) {
      const StreamState& stream = *work->stream;
      // The weight gradient reads retained rows, which may be released when the call has ended. So the call
      // ends after it.
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
  // The slice moves into the waiter first, because the pool may call the waiter, on another thread, as soon
  // as Acquire has queued it. If there is memory at once, the slice comes back from there.
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
