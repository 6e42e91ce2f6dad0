// A fixed number of equal host buffers that slices are received into, computed in place, and sent from.
// All of it is allocated when the server starts (pinned, for a GPU), so the request path allocates no
// tensor memory and a full pool is what slows senders down.
//
// Thread-safe. The pool must outlive its buffers.
#ifndef LOSSD_SERVER_ENGINE_STAGING_POOL_H_
#define LOSSD_SERVER_ENGINE_STAGING_POOL_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::engine {

// Host memory on loan; goes back to its owner when destroyed. Move-only, thread-compatible.
class StagingBuffer {
 public:
  using GiveBack = absl::AnyInvocable<void()>;

  StagingBuffer() = default;
  // `give_back` runs once, on whatever thread lets go of the buffer; it must not block.
  StagingBuffer(uint8_t* data, GiveBack give_back) : data_(data), give_back_(std::move(give_back)) {}
  StagingBuffer(StagingBuffer&& other) noexcept;
  StagingBuffer& operator=(StagingBuffer&& other) noexcept;
  ~StagingBuffer() { Release(); }

  uint8_t* data() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }
  void Release();

 private:
  uint8_t* data_ = nullptr;
  GiveBack give_back_;
};

class StagingPool {
 public:
  // Called once with a buffer, on the thread that gave it back; must not block.
  using Waiter = absl::AnyInvocable<void(StagingBuffer)>;

  // `buffer_bytes` is rounded up to 64. INVALID_ARGUMENT if either number is not positive, or the
  // backend's error.
  static absl::StatusOr<std::unique_ptr<StagingPool>> Create(kernels::Backend* backend, int64_t buffer_bytes,
                                                             int64_t buffers);
  ~StagingPool();

  // Hands a buffer to `waiter`: at once, on this thread, if one is free and nobody waits; otherwise
  // later, first come first served. Returns a ticket for Forget (0 if served at once).
  uint64_t Acquire(Waiter waiter) ABSL_LOCKS_EXCLUDED(mutex_);
  // Drops a waiter that was not served yet; false if it was (or is being) served.
  bool Forget(uint64_t ticket) ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t buffer_bytes() const { return buffer_bytes_; }
  int64_t buffers() const { return buffers_; }
  int64_t free_buffers() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Waiting {
    uint64_t ticket;
    Waiter waiter;
  };

  StagingPool(std::unique_ptr<kernels::StagingMemory> memory, int64_t buffer_bytes, int64_t buffers);
  StagingBuffer Lend(uint8_t* data);
  void GiveBack(uint8_t* data) ABSL_LOCKS_EXCLUDED(mutex_);

  const std::unique_ptr<kernels::StagingMemory> memory_;
  const int64_t buffer_bytes_;
  const int64_t buffers_;

  mutable absl::Mutex mutex_;
  std::vector<uint8_t*> free_ ABSL_GUARDED_BY(mutex_);
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  uint64_t last_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STAGING_POOL_H_
