// SPDX-License-Identifier: Apache-2.0
// The memory of a GPU for heads that live in host memory (kernels/teacher_pool.h has the decisions): room for
// their values, and one workspace with slots that all of them compute in, which only the head of a chunk and
// its teacher do at a time.
//
// Copies to the pool have a stream of their own. A copy waits there for the chunks that still read what lies
// in its place, and the chunk that needs it waits for it on the compute stream. No thread of the host waits.
//
// Where the workspace goes from one head to another, the compute stream waits for the transfers of the chunks
// before, zeroes the workspace (heads rely on zeros in their padding), and the upload stream waits for that.
// That is about a millisecond, beside the copy of a head's values that mostly goes with it.
//
// Driven by the backend's thread; what is const is thread-safe.
#ifndef LOSSD_KERNELS_CUDA_HEADS_CUDA_TEACHER_POOL_H_
#define LOSSD_KERNELS_CUDA_HEADS_CUDA_TEACHER_POOL_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/heads/head_memory.h"
#include "kernels/teacher_pool.h"

namespace lossd::kernels::cuda {

// Where a head in host memory computes.
struct HostedPlaces {
  uint8_t* values = nullptr;     // ValueBuffer
  uint8_t* workspace = nullptr;  // Workspace
  uint8_t* slots = nullptr;      // likewise
};

class CudaTeacherPool {
 public:
  using Id = TeacherPool::Id;
  // Called when the memory of the pool has become another one, with the device idle.
  using OnMoved = absl::AnyInvocable<absl::Status(const HostedPlaces&)>;

  // A copy of a head's values, whose duration is known when a chunk that waited for it is done.
  struct Copied {
    Id id = 0;
    Event begin, end;
  };

  // `limit_bytes` of values, as TeacherPool; `device` outlives the pool.
  CudaTeacherPool(Device* device, int64_t limit_bytes) : device_(device), pool_(limit_bytes) {}
  ~CudaTeacherPool();

  // The memory that Add would allocate before it frees what it replaces. RESOURCE_EXHAUSTED as
  // TeacherPool::SizeWith.
  absl::StatusOr<MemoryBytes> GrowthWith(const HostedBytes& bytes) const;
  // A new member. `moved` is called at once, and whenever the memory moves. After an error nothing has
  // changed, unless a head could not be moved.
  absl::StatusOr<Id> Add(const HostedBytes& bytes, OnMoved moved);
  void Remove(Id id);  // waits for copies

  // Before a chunk of the member, or with it as the teacher, is enqueued: what is enqueued on compute() and
  // upload() from now on finds the values, `bytes` copied from pinned `home` if they were not there, and the
  // workspace, in the places returned. `copied` is set if they were copied.
  absl::StatusOr<HostedPlaces> Use(Id id, const uint8_t* home, std::unique_ptr<Copied>& copied);
  // The chunk has been enqueued.
  absl::Status EndUse(Id id);
  // No chunk of the member is in flight; its values in host memory are about to change.
  void Invalidate(Id id) { pool_.Invalidate(id); }
  // After the chunk is done; from any thread.
  void Count(const Copied& copied);
  PagingStats stats(Id id) const { return pool_.stats(id); }

 private:
  struct Member {
    HostedBytes bytes;
    OnMoved moved;
    Event last_use;  // of its values, on the compute stream
  };
  // Buffers of a pool with some members.
  struct Memory {
    DeviceBuffer values, workspace, slots;
  };

  int64_t MostOf(int64_t HostedBytes::*part, int64_t more) const;
  absl::Status Start();
  absl::Status Grow(const HostedBytes& bytes);
  HostedPlaces PlacesAt(int64_t offset) const {
    return {memory_.values.data() + offset, memory_.workspace.data(), memory_.slots.data()};
  }
  // Enqueues the copy.
  absl::StatusOr<std::unique_ptr<Copied>> CopyValues(Id id, const TeacherPool::Place& place,
                                                     const uint8_t* home);
  // The workspace is this member's from now on.
  absl::Status TakeWorkspace(Id id);

  Device* const device_;
  TeacherPool pool_;
  std::map<Id, Member> members_;
  Memory memory_;
  cudaStream_t stream_ = nullptr;  // of the copies
  Event copied_;
  Event downloads_end_, uploads_end_, workspace_free_;
  Id workspace_of_ = 0;  // the member that used it last; 0: none since it was allocated
};

// A head that may live in host memory: its membership in the pool, which ends with it.
class PooledKernels : public HeadKernels {
 public:
  std::optional<PagingStats> paging() const override {
    if (!id_.has_value()) return std::nullopt;
    return pool_->stats(*id_);
  }

 protected:
  // `pool` outlives it.
  explicit PooledKernels(CudaTeacherPool* pool) : pool_(pool) {}
  ~PooledKernels() override { LeavePool(); }
  void LeavePool() {
    if (id_.has_value()) pool_->Remove(*id_);
    id_.reset();
  }

  // As the members of CudaTeacherPool; of a head that has joined, except for the first.
  absl::Status JoinPool(const HostedBytes& bytes, CudaTeacherPool::OnMoved moved);
  bool is_pooled() const { return id_.has_value(); }
  absl::StatusOr<HostedPlaces> UsePool(const uint8_t* home,
                                       std::unique_ptr<CudaTeacherPool::Copied>& copied) {
    return pool_->Use(*id_, home, copied);
  }
  // These do nothing for a head that has not joined.
  absl::Status EndUse() const { return id_.has_value() ? pool_->EndUse(*id_) : absl::OkStatus(); }
  void Invalidate() const {
    if (id_.has_value()) pool_->Invalidate(*id_);
  }

  CudaTeacherPool* const pool_;

 private:
  std::optional<CudaTeacherPool::Id> id_;
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_CUDA_TEACHER_POOL_H_
