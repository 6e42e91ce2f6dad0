// SPDX-License-Identifier: Apache-2.0
#include "server/engine/range_allocator.h"

#include <algorithm>
#include <iterator>

namespace lossd::engine {

RangeAllocator::RangeAllocator(int64_t size, int64_t alignment, double share)
    : alignment_(alignment), size_(size / alignment * alignment), shares_(size_, share) {
  absl::MutexLock lock(&mutex_);
  if (size_ > 0) free_.emplace(0, size_);
}

// An empty block takes a place too, so that every block has an offset of its own.
int64_t RangeAllocator::RoundedUp(int64_t bytes) const {
  return std::max(alignment_, (bytes + alignment_ - 1) / alignment_ * alignment_);
}

std::shared_ptr<const RangeAllocator::Block> RangeAllocator::Allocate(int64_t bytes,
                                                                      absl::string_view holder) {
  if (bytes > size_) return nullptr;
  const int64_t rounded = RoundedUp(bytes);
  absl::MutexLock lock(&mutex_);
  if (shares_.Check(holder, rounded) != FairShare::Answer::kYes) return nullptr;
  const auto it =
      std::find_if(free_.begin(), free_.end(), [=](const auto& range) { return range.second >= rounded; });
  if (it == free_.end()) return nullptr;
  const auto [offset, length] = *it;
  free_.erase(it);
  if (length > rounded) free_.emplace(offset + rounded, length - rounded);
  shares_.Take(holder, rounded);
  return std::shared_ptr<const Block>(new Block(this, offset, rounded, std::string(holder)));
}

int64_t RangeAllocator::used() const {
  absl::MutexLock lock(&mutex_);
  return shares_.used();
}

int64_t RangeAllocator::held(absl::string_view holder) const {
  absl::MutexLock lock(&mutex_);
  return shares_.held(holder);
}

void RangeAllocator::Free(const Block& block) {
  const int64_t offset = block.offset_;
  int64_t bytes = block.bytes_;
  absl::MutexLock lock(&mutex_);
  shares_.Give(block.holder_, bytes);
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
