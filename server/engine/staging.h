// SPDX-License-Identifier: Apache-2.0
// The host memory of an engine, and how peers and heads share it. StagingPool lends StagingBuffers, the
// memory that slices are received into, computed in and sent from. RowMemory counts what the server remembers
// of rows. RangeAllocator hands out ranges of one piece of memory, for the pool and for retained rows.
// FairShare is the rule by which holders share each of them (docs/fairness.md).
#ifndef LOSSD_SERVER_ENGINE_STAGING_H_
#define LOSSD_SERVER_ENGINE_STAGING_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"

namespace lossd::engine {

// The error with the note that the limit of this flag (without "--") caused it, for those who count.
absl::Status BecauseOf(absl::string_view flag, absl::Status error);
// The flag that BecauseOf noted; empty if none.
std::string LimitOf(const absl::Status& status);

// How a resource is shared between those that hold parts of it, for example peers or heads. The rule:
//
//   A holder that has something may take more only as long as it then has at most `share` of the capacity,
//   and at most as much as is left to all others. A holder that has nothing may take whatever is free.
//
// So holders that only take, never give back, leave something for each one that comes later: with a share of
// a half, the first one gets a half, the next a quarter, and so on. (Dynamic thresholds, as in the shared
// buffers of switches.)
//
// Memory: an entry for each holder that has something. Thread-compatible.
class FairShare {
 public:
  // `share` in (0, 1]; 1: a holder may take all there is.
  FairShare(int64_t capacity, double share) : capacity_(capacity), share_(share) {}

  enum class Answer : uint8_t {
    kYes,
    kFull,       // there is not so much left for any holder
    kOverShare,  // this holder has its share
  };
  // Whether `holder` may take `amount` >= 0 more. The holder "" has no share: it may take what is free.
  Answer Check(absl::string_view holder, int64_t amount) const;
  // The same; kYes: it has taken them.
  Answer Take(absl::string_view holder, int64_t amount);
  // Gives back some of what was taken.
  void Give(absl::string_view holder, int64_t amount);

  int64_t capacity() const { return capacity_; }
  int64_t used() const { return used_; }
  int64_t held(absl::string_view holder) const;
  // Only those that have something, so that strangers who come and go leave nothing behind; for tests.
  int64_t holders() const { return static_cast<int64_t>(held_.size()); }

 private:
  const int64_t capacity_;
  const double share_;
  int64_t used_ = 0;
  std::map<std::string, int64_t, std::less<>> held_;  // not 0
};

// Hands out ranges of one fixed piece of memory, first fit, by offset; it never touches the memory. For some
// thousand blocks: the free ranges are searched one after the other.
//
// Thread-safe. Must outlive its blocks.
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

// Host memory for what the server remembers of rows: the targets and weights of open streams, and the ledgers
// of open steps. A budget that is counted, not an allocation: its users allocate row by row.
//
// A peer pays for its streams, a head for its ledgers, and each has its share (FairShare). A user of the
// memory has an Account with it.
//
// Thread-compatible: guarded by the engine's lock.
class RowMemory {
 public:
  // As FairShare.
  RowMemory(int64_t bytes, double share) : shares_(bytes, share) {}

  class Account {
   public:
    // One that has no limit and counts nothing.
    Account() = default;
    // `holder` is who pays, e.g. "head lm_head"; "" has no share. `memory` outlives the account.
    Account(RowMemory* memory, std::string holder) : memory_(memory), holder_(std::move(holder)) {}

    // RESOURCE_EXHAUSTED naming the limit and its flag; then nothing is taken.
    absl::Status Take(int64_t bytes);
    void Give(int64_t bytes);

   private:
    RowMemory* memory_ = nullptr;
    std::string holder_;
  };

  int64_t used() const { return shares_.used(); }
  int64_t capacity() const { return shares_.capacity(); }

 private:
  FairShare shares_;
};

// Host memory on loan; goes back to its owner when destroyed. Move-only, thread-compatible.
class StagingBuffer {
 public:
  using GiveBack = absl::AnyInvocable<void()>;

  StagingBuffer() = default;
  // `give_back` runs once, on whatever thread lets go of the buffer; it must not block.
  StagingBuffer(uint8_t* data, int64_t bytes, GiveBack give_back)
      : data_(data), bytes_(bytes), give_back_(std::move(give_back)) {}
  StagingBuffer(StagingBuffer&& other) noexcept;
  StagingBuffer& operator=(StagingBuffer&& other) noexcept;
  ~StagingBuffer() { Release(); }

  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  explicit operator bool() const { return data_ != nullptr; }
  void Release();

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
  GiveBack give_back_;
};

// Host memory that slices are received into, computed in place, and sent from. It is one piece, allocated
// when the server starts (pinned, for a GPU), so the request path allocates no tensor memory and a full pool
// is what slows senders down.
//
// A buffer has the bytes that were asked for, rounded up to grain(), first fit. The grain is a 64th of the
// largest buffer, which bounds how many buffers there can be. No request starves: while one waits, no later
// one is served before it, so what is on loan comes back until the free bytes lie in one piece.
//
// Buffers have holders, each with its share of the pool (FairShare). A request beyond its holder's share
// waits until the holder has given enough back; requests of other holders pass it meanwhile. So a holder that
// gives nothing back, because its client takes no answers, holds up only itself.
//
// Thread-safe. The pool must outlive its buffers.
class StagingPool {
 public:
  // Called once with a buffer, on the thread that gave its memory back; must not block.
  using Waiter = absl::AnyInvocable<void(StagingBuffer)>;

  // A pool of `bytes` for buffers of up to `max_buffer_bytes`. INVALID_ARGUMENT unless
  // 0 < max_buffer_bytes <= bytes, or the backend's error.
  static absl::StatusOr<std::unique_ptr<StagingPool>> Create(kernels::Backend* backend, int64_t bytes,
                                                             int64_t max_buffer_bytes,
                                                             double holder_share = 1.0);
  ~StagingPool();

  // A buffer, or the promise of one.
  struct Acquired {
    StagingBuffer buffer;
    uint64_t ticket = 0;  // for Forget; 0: the buffer is here
  };
  // A buffer of at least `bytes`, in [0, max_buffer_bytes], for `holder`, if there is memory for it and no
  // other request waits that is within its holder's share. Otherwise `waiter`, which is not called in here,
  // gets it later, first come first served among those within their shares. The holder "" has no share.
  Acquired Acquire(absl::string_view holder, int64_t bytes, Waiter waiter) ABSL_LOCKS_EXCLUDED(mutex_);
  Acquired Acquire(int64_t bytes, Waiter waiter) { return Acquire("", bytes, std::move(waiter)); }
  // Drops a waiter that was not served yet; false if it was (or is being) served.
  bool Forget(uint64_t ticket) ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t bytes() const { return ranges_.size(); }
  int64_t grain() const { return grain_; }
  int64_t used_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t peak_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);  // most that was used at once
  // Requests that wait although there is memory, because their holders have their share.
  int64_t over_share() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  using Block = std::shared_ptr<const RangeAllocator::Block>;
  struct Waiting {
    uint64_t ticket;
    std::string holder;
    int64_t bytes;
    Waiter waiter;
  };
  struct Served {
    Waiter waiter;
    StagingBuffer buffer;
  };

  StagingPool(std::unique_ptr<kernels::StagingMemory> memory, int64_t grain, double holder_share);
  bool WithinShare(absl::string_view holder, int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Empty if there is no free range that is long enough.
  StagingBuffer TryLend(absl::string_view holder, int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(const std::string& holder, Block block) ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes the first of the waiting requests within their shares, as many as there is memory for.
  std::vector<Served> ServeWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Call(std::vector<Served> served);

  const std::unique_ptr<kernels::StagingMemory> memory_;
  const int64_t grain_;
  RangeAllocator ranges_;

  mutable absl::Mutex mutex_;
  FairShare shares_ ABSL_GUARDED_BY(mutex_);
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t peak_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STAGING_H_
