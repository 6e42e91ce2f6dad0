// SPDX-License-Identifier: Apache-2.0
// The host memory of an engine, and how peers and heads share it. StagingPool lends StagingBuffers, in which
// slices are received, computed and sent. RowMemory counts the memory of what the server remembers of rows.
// RangeAllocator hands out ranges of one piece of memory, for the pool and for retained rows. FairShare is
// the rule by which holders share each of these memories (docs/fairness.md).
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

// Returns the error with a note that the limit of this flag (without "--") caused it, for the metrics.
absl::Status BecauseOf(absl::string_view flag, absl::Status error);
// The flag that BecauseOf noted; empty if there is none.
std::string LimitOf(const absl::Status& status);

// FairShare is the rule by which holders, for example peers or heads, share a resource. It counts and decides
// only. The rule:
//
//   A holder that has a part may take more only if it then has at most `share` of the capacity, and at most
//   as much as is left free. A holder that has nothing may take all that is free.
//
// So even holders that never give back leave something for each later holder: with a share of a half, the
// first holder gets a half, the next one a quarter, and so on. (These are the dynamic thresholds of shared
// buffers in network switches.)
//
// Memory: an entry for each holder that has a part. Thread-compatible.
class FairShare {
 public:
  // `share` in (0, 1]; 1: a holder may take the whole capacity.
  FairShare(int64_t capacity, double share) : capacity_(capacity), share_(share) {}

  enum class Answer : uint8_t {
    kYes,
    kFull,       // less than the amount is free
    kOverShare,  // the amount is free, but beyond this holder's share
  };
  // Whether `holder` may take `amount` >= 0 more. The holder "" is not limited by a share: it may take all
  // that is free.
  Answer Check(absl::string_view holder, int64_t amount) const;
  // As Check; if the answer is kYes, the holder has taken the amount.
  Answer Take(absl::string_view holder, int64_t amount);
  // Gives back a part of what the holder has taken.
  void Give(absl::string_view holder, int64_t amount);

  int64_t capacity() const { return capacity_; }
  int64_t used() const { return used_; }
  int64_t held(absl::string_view holder) const;
  // The number of holders that have a part; for tests. Holders without a part have no entry, so peers that
  // come and go leave nothing behind.
  int64_t holders() const { return static_cast<int64_t>(held_.size()); }

 private:
  const int64_t capacity_;
  const double share_;
  int64_t used_ = 0;
  std::map<std::string, int64_t, std::less<>> held_;  // by holder; never 0
};

// RangeAllocator hands out ranges of one fixed piece of memory, first fit, as offsets. It never touches the
// memory. It suits some thousand blocks, because it searches the free ranges one by one.
//
// Thread-safe. Must outlive its blocks.
class RangeAllocator {
 public:
  // A range on loan. Its destruction gives the range back.
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

  // `size` >= 0 in bytes, rounded down to a multiple of `alignment`. `share`: the share of a holder, as in
  // FairShare.
  explicit RangeAllocator(int64_t size, int64_t alignment = kAlignment, double share = 1.0);

  // A block of at least `bytes` >= 0. Null if no free range is long enough, or if the block would be beyond
  // the share of `holder`.
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
  std::map<int64_t, int64_t> free_ ABSL_GUARDED_BY(mutex_);  // offset to bytes; no two ranges touch
  FairShare shares_ ABSL_GUARDED_BY(mutex_);
};

// RowMemory is the budget for what the server remembers of rows in host memory: the targets and weights of
// open streams, and the ledgers of open steps. It only counts; its users allocate the memory.
//
// A peer pays for its streams and a head for its ledgers, and each has its share (FairShare). A user takes
// and gives through an Account.
//
// Thread-compatible: guarded by the engine's lock.
class RowMemory {
 public:
  // `share`: as in FairShare.
  RowMemory(int64_t bytes, double share) : shares_(bytes, share) {}

  class Account {
   public:
    // An account that has no limit and counts nothing.
    Account() = default;
    // `holder` pays, e.g. "head lm_head"; "" is not limited by a share. `memory` outlives the account.
    Account(RowMemory* memory, std::string holder) : memory_(memory), holder_(std::move(holder)) {}

    // RESOURCE_EXHAUSTED names the limit and its flag; then nothing is taken.
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

// Host memory on loan. Its destruction gives the memory back to its owner. Move-only, thread-compatible.
class StagingBuffer {
 public:
  using GiveBack = absl::AnyInvocable<void()>;

  StagingBuffer() = default;
  // `give_back` runs once, on the thread that releases the buffer. It must not block.
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

// StagingPool is the host memory in which slices are received, computed in place, and from which they are
// sent. It is one piece, allocated when the server starts (pinned, for a GPU), so requests allocate no tensor
// memory. When the pool is full, new slices wait, which slows their senders down.
//
// A buffer has the bytes that were asked for, rounded up to grain(). The grain is a 64th of the largest
// buffer, which bounds the number of buffers. Buffers are placed first fit. No request starves: while a
// request waits, no later one is served before it, so buffers come back until enough free bytes are in one
// piece.
//
// Each buffer has a holder, and each holder a share of the pool (FairShare). A request beyond its holder's
// share waits until the holder has given enough back; requests of other holders pass it meanwhile. So a
// holder that gives nothing back, because its client reads no answers, holds up only itself.
//
// Thread-safe. The pool must outlive its buffers.
class StagingPool {
 public:
  // Called once with a buffer, on the thread that gave the memory back. Must not block.
  using Waiter = absl::AnyInvocable<void(StagingBuffer)>;

  // Creates a pool of `bytes` for buffers of up to `max_buffer_bytes`. INVALID_ARGUMENT unless 0 <
  // max_buffer_bytes <= bytes, or the backend's error.
  static absl::StatusOr<std::unique_ptr<StagingPool>> Create(kernels::Backend* backend, int64_t bytes,
                                                             int64_t max_buffer_bytes,
                                                             double holder_share = 1.0);
  ~StagingPool();

  // The result of Acquire: a buffer, or a ticket if the buffer comes later.
  struct Acquired {
    StagingBuffer buffer;
    uint64_t ticket = 0;  // for Forget; 0: `buffer` is set
  };
  // Lends `holder` a buffer of at least `bytes`, in [0, max_buffer_bytes], if there is memory and no request
  // that is within its holder's share waits. Otherwise `waiter` gets the buffer later: first come first
  // served among the requests within their shares. Acquire itself never calls `waiter`. The holder "" is not
  // limited by a share.
  Acquired Acquire(absl::string_view holder, int64_t bytes, Waiter waiter) ABSL_LOCKS_EXCLUDED(mutex_);
  Acquired Acquire(int64_t bytes, Waiter waiter) { return Acquire("", bytes, std::move(waiter)); }
  // Drops a waiter that was not served yet. False if it was served, or is being served.
  bool Forget(uint64_t ticket) ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t bytes() const { return ranges_.size(); }
  int64_t grain() const { return grain_; }
  int64_t used_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t peak_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);  // the most that was ever used at once
  // The number of requests that wait because their holders have their share.
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
  // Empty if no free range is long enough.
  StagingBuffer TryLend(absl::string_view holder, int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(const std::string& holder, Block block) ABSL_LOCKS_EXCLUDED(mutex_);
  // Removes the waiting requests that can be served now, in order, and lends them their buffers.
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
