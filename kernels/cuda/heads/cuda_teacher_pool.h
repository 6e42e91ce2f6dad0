// SPDX-License-Identifier: Apache-2.0
// CudaTeacherPool: the memory of a GPU for heads that live in host memory. It has room for values of these
// heads, and one workspace with slots in which all these heads compute. The chunks use the workspace one
// after the other, each with its head and its teacher. TeacherPool (kernels/teacher_pool.h) decides which
// heads have their values on the device.
//
// Copies to the pool have a stream of their own. On that stream, a copy waits for the chunks that still read
// the old values in the same place. On the compute stream, the chunk that needs the copy waits for the copy.
// No thread of the host waits.
//
// When another head uses the workspace, the compute stream first waits for the transfers of earlier chunks
// and zeroes the workspace, because heads rely on zeros in their padding. The upload stream waits until the
// workspace is zeroed. This takes about a millisecond. Mostly the head's values must be copied at that time,
// too.
//
// Used by the backend's driving thread; const members are thread-safe.
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

// The device memory in which a head in host memory computes.
struct HostedPlaces {
  uint8_t* values = nullptr;     // laid out as ValueBuffer
  uint8_t* workspace = nullptr;  // laid out as Workspace
  uint8_t* slots = nullptr;      // the slots of Workspace
};

class CudaTeacherPool {
 public:
  using Id = TeacherPool::Id;
  // Called, while the device is idle, when the memory of the pool has been replaced.
  using OnMoved = absl::AnyInvocable<absl::Status(const HostedPlaces&)>;

  // A copy of a head's values to the pool. Its duration is known when a chunk that waited for it is done.
  struct Copied {
    Id id = 0;
    Event begin, end;
  };

  // `limit_bytes`: as in TeacherPool, for values. `device` outlives the pool.
  CudaTeacherPool(Device* device, int64_t limit_bytes) : device_(device), pool_(limit_bytes) {}
  ~CudaTeacherPool();

  // The memory that Add would allocate before it frees the memory that it replaces. RESOURCE_EXHAUSTED as
  // TeacherPool::SizeWith.
  absl::StatusOr<MemoryBytes> GrowthWith(const HostedBytes& bytes) const;
  // Adds a member. Calls `moved` at once, and again each time the memory of the pool is replaced. After an
  // error nothing has changed, except if a head could not be moved.
  absl::StatusOr<Id> Add(const HostedBytes& bytes, OnMoved moved);
  void Remove(Id id);  // waits for copies

  // Call before a chunk that has the member as its head or teacher is enqueued. Work that is enqueued
  // afterwards on compute() and upload() finds the values and the workspace in the returned places. If the
  // values were not on the device, Use enqueues a copy of them from `home`, the pinned host memory of the
  // values, and sets `copied`.
  absl::StatusOr<HostedPlaces> Use(Id id, const uint8_t* home, std::unique_ptr<Copied>& copied);
  // Call when the chunk has been enqueued.
  absl::Status EndUse(Id id);
  // Call when no chunk of the member is in flight, before its values in host memory change.
  void Invalidate(Id id) { pool_.Invalidate(id); }
  // Adds the duration of a copy to stats(). Call after the chunk is done, from any thread.
  void Count(const Copied& copied);
  PagingStats stats(Id id) const { return pool_.stats(id); }

 private:
  struct Member {
    HostedBytes bytes;
    OnMoved moved;
    Event last_use;  // on the compute stream, after the last use of its values
  };
  // The buffers of the pool; empty while it has no members.
  struct Memory {
    DeviceBuffer values, workspace, slots;
  };

  absl::Status Start();
  absl::Status Grow(const HostedBytes& bytes);
  HostedPlaces PlacesAt(int64_t offset) const {
    return {memory_.values.data() + offset, memory_.workspace.data(), memory_.slots.data()};
  }
  // Enqueues the copy.
  absl::StatusOr<std::unique_ptr<Copied>> CopyValues(Id id, const TeacherPool::Place& place,
                                                     const uint8_t* home);
  // Gives the workspace to this member.
  absl::Status TakeWorkspace(Id id);

  Device* const device_;
  TeacherPool pool_;
  std::map<Id, Member> members_;
  Memory memory_;
  cudaStream_t stream_ = nullptr;  // for the copies
  Event copied_;
  Event downloads_end_, uploads_end_, workspace_free_;
  Id workspace_of_ = 0;  // the member that used the workspace last; 0: none since it was allocated
};

// A base class of heads that may live in host memory. It removes the head from the pool when it is destroyed.
class PooledKernels : public HeadKernels {
 public:
  std::optional<PagingStats> paging() const override {
    if (!id_.has_value()) return std::nullopt;
    return pool_->stats(*id_);
  }

 protected:
  // `pool` outlives the object.
  explicit PooledKernels(CudaTeacherPool* pool) : pool_(pool) {}
  ~PooledKernels() override { LeavePool(); }
  void LeavePool() {
    if (id_.has_value()) pool_->Remove(*id_);
    id_.reset();
  }

  // JoinPool and UsePool call Add and Use of CudaTeacherPool. UsePool may be called only after JoinPool.
  absl::Status JoinPool(const HostedBytes& bytes, CudaTeacherPool::OnMoved moved);
  bool is_pooled() const { return id_.has_value(); }
  absl::StatusOr<HostedPlaces> UsePool(const uint8_t* home,
                                       std::unique_ptr<CudaTeacherPool::Copied>& copied) {
    return pool_->Use(*id_, home, copied);
  }
  // The next functions do nothing if the head has not joined the pool.
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
