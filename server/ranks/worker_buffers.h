// SPDX-License-Identifier: Apache-2.0
// Staging memory for the chunks of a worker, one buffer a chunk in flight, used again by later ones.
//
// Thread-safe.
#ifndef LOSSD_SERVER_RANKS_WORKER_BUFFERS_H_
#define LOSSD_SERVER_RANKS_WORKER_BUFFERS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"

namespace lossd::ranks {

class WorkerBuffers {
 public:
  using Buffer = std::unique_ptr<kernels::StagingMemory>;

  explicit WorkerBuffers(kernels::Backend* backend)
      : backend_(backend), most_(static_cast<size_t>(backend->max_chunks_in_flight())) {}

  // One of at least so many bytes. RESOURCE_EXHAUSTED if there is no memory.
  absl::StatusOr<Buffer> Take(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      for (Buffer& buffer : free_) {
        if (SizeOf(buffer) < bytes) continue;
        std::swap(buffer, free_.back());
        Buffer taken = std::move(free_.back());
        free_.pop_back();
        return taken;
      }
    }
    return backend_->AllocateStaging(bytes);
  }
  // From now on chunks of so many bytes find their memory, as many as are in flight at a time.
  // RESOURCE_EXHAUSTED, which changes nothing.
  absl::Status Reserve(int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_) {
    {
      absl::MutexLock lock(&mutex_);
      if (bytes <= reserved_) return absl::OkStatus();
    }
    std::vector<Buffer> buffers;
    while (buffers.size() < most_) {
      absl::StatusOr<Buffer> buffer = backend_->AllocateStaging(bytes);
      if (!buffer.ok()) return buffer.status();
      buffers.push_back(*std::move(buffer));
    }
    absl::MutexLock lock(&mutex_);
    reserved_ = bytes;
    for (Buffer& buffer : buffers) Keep(std::move(buffer));
    return absl::OkStatus();
  }
  void Return(Buffer buffer) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    Keep(std::move(buffer));
  }

 private:
  static int64_t SizeOf(const Buffer& buffer) { return static_cast<int64_t>(buffer->bytes().size()); }
  // Of more than can be in flight, the smallest goes.
  void Keep(Buffer buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    free_.push_back(std::move(buffer));
    if (free_.size() <= most_) return;
    free_.erase(std::min_element(free_.begin(), free_.end(),
                                 [](const Buffer& a, const Buffer& b) { return SizeOf(a) < SizeOf(b); }));
  }

  kernels::Backend* const backend_;
  const size_t most_;  // chunks in flight
  absl::Mutex mutex_;
  std::vector<Buffer> free_ ABSL_GUARDED_BY(mutex_);  // at most so many
  int64_t reserved_ ABSL_GUARDED_BY(mutex_) = 0;      // so many buffers, free or in use, have these bytes
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_WORKER_BUFFERS_H_
