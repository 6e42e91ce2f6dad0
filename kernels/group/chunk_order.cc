// SPDX-License-Identifier: Apache-2.0
#include "kernels/group/chunk_order.h"

#include <algorithm>
#include <utility>

namespace lossd::kernels {

void ChunkOrder::Add(std::shared_ptr<GroupChunk> chunk) {
  const bool refused = chunk->parts() == 0;
  {
    absl::MutexLock lock(&mutex_);
    entries_.push_back({.chunk = std::move(chunk), .has_results = refused, .is_done = refused});
  }
  if (refused) Advance();
}

void ChunkOrder::OnResults(const GroupChunk& chunk) {
  {
    absl::MutexLock lock(&mutex_);
    EntryOf(chunk).has_results = true;
  }
  Advance();
}

void ChunkOrder::OnDone(const GroupChunk& chunk) {
  {
    absl::MutexLock lock(&mutex_);
    EntryOf(chunk).is_done = true;
  }
  Advance();
}

void ChunkOrder::WaitUntilIdle() {
  absl::MutexLock lock(&mutex_);
  const auto is_idle = [this] {
    mutex_.AssertHeld();
    return entries_.empty() && !calling_;
  };
  mutex_.Await(absl::Condition(&is_idle));
}

ChunkOrder::Entry& ChunkOrder::EntryOf(const GroupChunk& chunk) {
  return *std::find_if(entries_.begin(), entries_.end(),
                       [&chunk](const Entry& entry) { return entry.chunk.get() == &chunk; });
}

void ChunkOrder::Advance() {
  absl::MutexLock lock(&mutex_);
  if (calling_) return;
  calling_ = true;
  while (CallNext()) {
  }
  calling_ = false;
}

bool ChunkOrder::CallNext() {
  std::shared_ptr<GroupChunk> chunk;
  const bool results = told_ < entries_.size() && entries_[told_].has_results;
  if (results) {
    chunk = entries_[told_++].chunk;
  } else if (told_ > 0 && entries_.front().is_done) {
    chunk = std::move(entries_.front().chunk);
    entries_.pop_front();
    --told_;
  } else {
    return false;
  }
  mutex_.Unlock();
  if (results) {
    chunk->CallResults();
  } else {
    chunk->CallDone();
  }
  chunk.reset();
  mutex_.Lock();
  return true;
}

}  // namespace lossd::kernels
