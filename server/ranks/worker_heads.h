// SPDX-License-Identifier: Apache-2.0
// The heads of a worker's backend. WorkerHeads carries out what the leader asks of them; WorkerBuffers has
// the memory for the rows of chunks that bring them in messages.
//
// WorkerHeads is called by one thread, the backend's driving thread. What it sends may come from the
// backend's own threads.
#ifndef LOSSD_SERVER_RANKS_WORKER_HEADS_H_
#define LOSSD_SERVER_RANKS_WORKER_HEADS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "kernels/errors/status_macros.h"
#include "kernels/rank_link.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "server/ranks/rows.h"

namespace lossd::ranks {

// Staging memory for the chunks of a worker: one buffer for each chunk in flight, used again by later ones.
//
// Thread-safe.
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
      LOSSD_TRY(Buffer buffer, backend_->AllocateStaging(bytes));
      buffers.push_back(std::move(buffer));
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
  // Keeps a buffer for later. If there are more than chunks in flight, the smallest one goes.
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

// Carries out the leader's requests and chunks on the worker's heads. See the head of this file for threads.
class WorkerHeads {
 public:
  using Send = std::function<void(v1::FromWorker)>;  // thread-safe

  // All outlive the object, and chunks in flight do too: they end before it.
  WorkerHeads(kernels::Backend* backend, kernels::RankLink* link, Send send);
  // Maps what the leader shares. UNAVAILABLE, saying why, if all slices have to bring their rows. Before the
  // first chunk.
  absl::Status UseRowsOf(const v1::Prepare& prepare);

  v1::Answer Execute(const v1::Request& request);
  kernels::HeadKernels* Find(uint64_t head) const;  // null: there is none
  // A chunk with all its slices. INTERNAL if it is not one.
  absl::Status Submit(const v1::ChunkStart& start, std::vector<v1::ChunkSlice> slices);

 private:
  struct Head {
    std::unique_ptr<kernels::HeadKernels> kernels;
    std::unique_ptr<kernels::Replicas> replicas;  // ends first; null of a head that is split by vocabulary
  };

  absl::Status Do(const v1::Request& request, v1::Answer& answer);
  absl::Status DoWith(Head& head, const v1::Request& request, v1::Answer& answer);
  absl::Status Plan(const v1::HeadConfig& config, v1::Answer& answer);
  absl::Status Create(uint64_t id, const v1::HeadConfig& config, v1::Answer& answer);
  absl::Status Join(kernels::HeadKernels* head, std::unique_ptr<kernels::Replicas>& replicas);
  absl::Status Read(Head& head, const v1::TensorAccess& access, v1::Answer& answer);
  absl::Status Write(Head& head, const v1::TensorAccess& access, bool add);

  kernels::Backend* const backend_;
  kernels::RankLink* const link_;
  const Send send_;
  const std::shared_ptr<WorkerBuffers> buffers_;
  std::unique_ptr<MappedRows> rows_;  // null: all slices bring their rows
  std::map<uint64_t, Head> heads_;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_WORKER_HEADS_H_
