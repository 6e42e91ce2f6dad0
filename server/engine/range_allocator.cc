// SPDX-License-Identifier: Apache-2.0
#include "server/engine/range_allocator.h"

#include <algorithm>
#include <iterator>

namespace lossd::engine {

RangeAllocator::RangeAllocator(int64_t size, int64_t alignment)
    : alignment_(alignment), size_(size / alignment * alignment) {
  absl::MutexLock lock(&mutex_);
  if (size_ > 0) free_.emplace(0, size_);
}

std::shared_ptr<const RangeAllocator::Block> RangeAllocator::Allocate(int64_t bytes) {
  if (bytes > size_) return nullptr;
  // An empty block takes a place too, so that every block has an offset of its own.
  const int64_t rounded = std::max(alignment_, (bytes + alignment_ - 1) / alignment_ * alignment_);
  absl::MutexLock lock(&mutex_);
  const auto it =
      std::find_if(free_.begin(), free_.end(), [=](const auto& range) { return range.second >= rounded; });
  if (it == free_.end()) return nullptr;
  const auto [offset, length] = *it;
  free_.erase(it);
  if (length > rounded) free_.emplace(offset + rounded, length - rounded);
  used_ += rounded;
  return std::shared_ptr<const Block>(new Block(this, offset, rounded));
}

int64_t RangeAllocator::used() const {
  absl::MutexLock lock(&mutex_);
  return used_;
}

void RangeAllocator::Free(int64_t offset, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  used_ -= bytes;
  const auto next = free_.upper_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    free_.erase(next);
  }
  const auto after = free_.upper_bound(offset);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

}  // namespace lossd::engine
