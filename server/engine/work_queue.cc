#include "server/engine/work_queue.h"

#include <utility>

namespace lossd::engine {
namespace {

// Rows of both may be computed in one chunk.
bool Compatible(const StreamSpec& a, const StreamSpec& b) {
  return a.options == b.options && a.hidden_dtype == b.hidden_dtype &&
         a.accumulate_gradients == b.accumulate_gradients;
}

// Reserves the slice's rows; false if some are being computed by another chunk.
bool TryReserve(SliceWork& slice, Ledger& ledger) {
  const StreamSpec& spec = slice.stream->spec();
  if (!spec.accumulate_gradients) return true;
  if (ledger.AnyReserved(spec.microbatch_id, slice.rows)) return false;
  slice.accumulate.resize(static_cast<size_t>(slice.rows.size()));
  slice.repeated_rows = ledger.Reserve(spec.microbatch_id, slice.rows, absl::MakeSpan(slice.accumulate));
  slice.reserved = true;
  return true;
}

}  // namespace

void WorkQueue::Push(std::unique_ptr<SliceWork> slice) {
  ++slices_;
  rows_ += slice->rows.size();
  items_.emplace_back(std::move(slice));
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
      taken.push_back(std::move(*slice));
    } else {
      kept.push_back(std::move(item));
    }
  }
  items_ = std::move(kept);
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

std::vector<std::unique_ptr<SliceWork>> WorkQueue::TakeChunk(int64_t chunk_rows, Ledger& ledger) {
  std::vector<std::unique_ptr<SliceWork>> chunk;
  int64_t rows = 0;
  std::deque<Item> skipped;
  while (!items_.empty()) {
    auto* front = std::get_if<std::unique_ptr<SliceWork>>(&items_.front());
    if (front == nullptr) break;
    SliceWork& slice = **front;
    if (!chunk.empty() && !Compatible(chunk.front()->stream->spec(), slice.stream->spec())) {
      skipped.push_back(std::move(items_.front()));
      items_.pop_front();
      continue;
    }
    if (rows + slice.rows.size() > chunk_rows || !TryReserve(slice, ledger)) break;
    rows += slice.rows.size();
    chunk.push_back(std::move(*front));
    items_.pop_front();
  }
  while (!skipped.empty()) {
    items_.push_front(std::move(skipped.back()));
    skipped.pop_back();
  }
  slices_ -= static_cast<int64_t>(chunk.size());
  rows_ -= rows;
  return chunk;
}

}  // namespace lossd::engine
