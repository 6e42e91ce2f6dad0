// SPDX-License-Identifier: Apache-2.0
// Host memory that slices are received into, computed in place, and sent from. It is one piece, allocated
// when the server starts (pinned, for a GPU), so the request path allocates no tensor memory and a full pool
// is what slows senders down.
//
// A buffer has the bytes that were asked for, rounded up to grain(), first fit. The grain is a 64th of the
// largest buffer, which bounds how many buffers there can be. No request starves: while one waits, no later
// one is served before it, so what is on loan comes back until the free bytes lie in one piece.
//
// Buffers have holders, each with its share of the pool (fair_share.h). A request beyond its holder's share
// waits until the holder has given enough back, and is passed by those of other holders meanwhile. So a
// holder that gives nothing back, because its client takes no answers, holds up itself.
//
// Thread-safe. The pool must outlive its buffers.
#ifndef LOSSD_SERVER_ENGINE_STAGING_POOL_H_
#define LOSSD_SERVER_ENGINE_STAGING_POOL_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "server/engine/fair_share.h"
#include "server/engine/range_allocator.h"

namespace lossd::engine {

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

#endif  // LOSSD_SERVER_ENGINE_STAGING_POOL_H_
