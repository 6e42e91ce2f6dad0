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
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/fair_share.h"

namespace lossd::engine {

class RangeAllocator {
 public:
  // A range on loan; goes back when destroyed.
  class Block {
   public:
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block() { allocator_->Free(*this); }

    int64_t offset() const { return offset_; }  // a multiple of the alignment
    int64_t bytes() const { return bytes_; }    // rounded up to the alignment

   private:
    friend class RangeAllocator;
    Block(RangeAllocator* allocator, int64_t offset, int64_t bytes, std::string holder)
        : allocator_(allocator), offset_(offset), bytes_(bytes), holder_(std::move(holder)) {}

    RangeAllocator* const allocator_;
    const int64_t offset_;
    const int64_t bytes_;
    const std::string holder_;
  };

  static constexpr int64_t kAlignment = 256;

  // `size` in bytes, >= 0; what does not fill a multiple of `alignment` is never used.
  // `share`: of a holder, as FairShare has it.
  explicit RangeAllocator(int64_t size, int64_t alignment = kAlignment, double share = 1.0);

  // A block of at least `bytes` >= 0, or null if no free range is long enough, or `holder` has its share.
  std::shared_ptr<const Block> Allocate(int64_t bytes, absl::string_view holder = "")
      ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t size() const { return size_; }
  int64_t used() const ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t held(absl::string_view holder) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  int64_t RoundedUp(int64_t bytes) const;
  void Free(const Block& block) ABSL_LOCKS_EXCLUDED(mutex_);

  const int64_t alignment_;
  const int64_t size_;
  mutable absl::Mutex mutex_;
  std::map<int64_t, int64_t> free_ ABSL_GUARDED_BY(mutex_);  // offset to bytes; never adjacent
  FairShare shares_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_RANGE_ALLOCATOR_H_
