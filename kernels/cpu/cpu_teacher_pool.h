// SPDX-License-Identifier: Apache-2.0
// CpuTeacherPool is the teacher pool of a CPU backend, for heads that live in host memory. CpuPooled is the
// membership of a head in the pool. TeacherPool (kernels/teacher_pool.h) decides which heads are in the pool,
// and where.
#ifndef LOSSD_KERNELS_CPU_CPU_TEACHER_POOL_H_
#define LOSSD_KERNELS_CPU_CPU_TEACHER_POOL_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/threads_and_memory.h"
#include "kernels/teacher_pool.h"

namespace lossd::kernels {

// The teacher pool with its memory. On a CPU the pool saves no memory, because its memory is host memory too.
// It exists so that the same heads work on CPUs and GPUs. Driven by the backend's thread; stats() is
// thread-safe.
class CpuTeacherPool {
 public:
  // `limit_bytes` as in TeacherPool. The accounting outlives the pool.
  CpuTeacherPool(int64_t limit_bytes, MemoryAccounting* accounting)
      : accounting_(accounting), pool_(limit_bytes) {}

  // The memory that the pool would allocate, in addition to its present memory, for a further member.
  // RESOURCE_EXHAUSTED as TeacherPool::SizeWith.
  absl::StatusOr<MemoryBytes> GrowthWith(int64_t bytes) const;
  // Adds a member. RESOURCE_EXHAUSTED if it is too large for the pool, or if the system has no memory for the
  // pool.
  absl::StatusOr<TeacherPool::Id> Add(int64_t bytes);
  void Remove(TeacherPool::Id id);
  // Returns the member's values in the pool. Copies them from `values` if they were not there.
  uint8_t* Use(TeacherPool::Id id, const uint8_t* values, int64_t bytes);
  void Invalidate(TeacherPool::Id id) { pool_.Invalidate(id); }
  PagingStats stats(TeacherPool::Id id) const { return pool_.stats(id); }

 private:
  MemoryAccounting* const accounting_;
  TeacherPool pool_;
  AlignedBytes memory_;
  MemoryAccounting::Reservation reservation_;
};

// A head's membership in the pool. It ends with the object.
class CpuPooled {
 public:
  CpuPooled(CpuTeacherPool* pool, TeacherPool::Id id, int64_t bytes) : pool_(pool), id_(id), bytes_(bytes) {}
  ~CpuPooled() { pool_->Remove(id_); }
  CpuPooled(const CpuPooled&) = delete;
  CpuPooled& operator=(const CpuPooled&) = delete;

  uint8_t* Use(const uint8_t* values) const { return pool_->Use(id_, values, bytes_); }
  void Invalidate() const { pool_->Invalidate(id_); }
  PagingStats stats() const { return pool_->stats(id_); }

 private:
  CpuTeacherPool* const pool_;
  const TeacherPool::Id id_;
  const int64_t bytes_;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_CPU_TEACHER_POOL_H_
