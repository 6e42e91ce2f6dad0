// SPDX-License-Identifier: Apache-2.0
// Hands out ranges of one fixed piece of memory, first fit, by offset; it never touches the memory. For some
// thousand blocks: the free ranges are searched one after the other.
//
// Thread-safe. Must outlive its blocks.
#ifndef LOSSD_SERVER_ENGINE_RANGE_ALLOCATOR_H_
#define LOSSD_SERVER_ENGINE_RANGE_ALLOCATOR_H_

#include <cstdint>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace lossd::engine {

class RangeAllocator {
 public:
  // A range on loan; goes back when destroyed.
  class Block {
   public:
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block() { allocator_->Free(offset_, bytes_); }

    int64_t offset() const { return offset_; }  // a multiple of the alignment
    int64_t bytes() const { return bytes_; }    // rounded up to the alignment

   private:
    friend class RangeAllocator;
    Block(RangeAllocator* allocator, int64_t offset, int64_t bytes)
        : allocator_(allocator), offset_(offset), bytes_(bytes) {}

    RangeAllocator* const allocator_;
    const int64_t offset_;
    const int64_t bytes_;
  };

  static constexpr int64_t kAlignment = 256;

  // `size` in bytes, >= 0; what does not fill a multiple of `alignment` is never used.
  explicit RangeAllocator(int64_t size, int64_t alignment = kAlignment);

  // A block of at least `bytes` >= 0, or null if no free range is long enough.
  std::shared_ptr<const Block> Allocate(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t size() const { return size_; }
  int64_t used() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Free(int64_t offset, int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  const int64_t alignment_;
  const int64_t size_;
  mutable absl::Mutex mutex_;
  std::map<int64_t, int64_t> free_ ABSL_GUARDED_BY(mutex_);  // offset to bytes; never adjacent
  int64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_RANGE_ALLOCATOR_H_
