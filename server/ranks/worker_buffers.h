// Staging memory for the chunks of a worker, one buffer a chunk in flight, used again by later ones.
//
// Thread-safe.
#ifndef LOSSD_SERVER_RANKS_WORKER_BUFFERS_H_
#define LOSSD_SERVER_RANKS_WORKER_BUFFERS_H_

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

  explicit WorkerBuffers(kernels::Backend* backend) : backend_(backend) {}

  // One of at least so many bytes. RESOURCE_EXHAUSTED if there is no memory.
  absl::StatusOr<Buffer> Take(int64_t bytes) {
    Buffer buffer;
    {
      absl::MutexLock lock(&mutex_);
      if (!free_.empty()) {
        buffer = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (buffer != nullptr && static_cast<int64_t>(buffer->bytes().size()) >= bytes) return buffer;
    buffer.reset();  // too small: of a smaller head
    return backend_->AllocateStaging(bytes);
  }
  // From now on one chunk of so many bytes finds its memory. RESOURCE_EXHAUSTED, which changes nothing.
  absl::Status Reserve(int64_t bytes) {
    absl::StatusOr<Buffer> buffer = backend_->AllocateStaging(bytes);
    if (!buffer.ok()) return buffer.status();
    absl::MutexLock lock(&mutex_);
    if (free_.empty()) free_.push_back(nullptr);
    Buffer& last = free_.back();
    if (last == nullptr || static_cast<int64_t>(last->bytes().size()) < bytes) last = *std::move(buffer);
    return absl::OkStatus();
  }
  void Return(Buffer buffer) {
    absl::MutexLock lock(&mutex_);
    free_.push_back(std::move(buffer));
  }

 private:
  kernels::Backend* const backend_;
  absl::Mutex mutex_;
  std::vector<Buffer> free_ ABSL_GUARDED_BY(mutex_);  // at most as many as chunks have been in flight
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_WORKER_BUFFERS_H_
