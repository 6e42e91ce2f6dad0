// SPDX-License-Identifier: Apache-2.0
// The pool of a CPU backend for heads that live in host memory (CpuTeacherPool), and a head's place in it
// (CpuPooled). kernels/teacher_pool.h decides what lies where.
#ifndef LOSSD_KERNELS_CPU_CPU_TEACHER_POOL_H_
#define LOSSD_KERNELS_CPU_CPU_TEACHER_POOL_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/teacher_pool.h"

namespace lossd::kernels {

// The pool of a CPU backend for heads that live in host memory (teacher_pool.h), with its memory. On a CPU
// host memory is all that there is, so the pool saves nothing there: it does what a GPU's does, so that the
// same heads work on both. Driven by the backend's thread; stats() and Check are thread-safe.
class CpuTeacherPool {
 public:
  // `limit_bytes` as TeacherPool. The accounting outlives the pool.
  CpuTeacherPool(int64_t limit_bytes, MemoryAccounting* accounting)
      : accounting_(accounting), pool_(limit_bytes) {}

  // What the pool would take of the system beside what it has, with a further member. RESOURCE_EXHAUSTED as
  // TeacherPool::SizeWith.
  absl::StatusOr<MemoryBytes> GrowthWith(int64_t bytes) const;
  // A new member. RESOURCE_EXHAUSTED if it is too large for the pool, or the system has no room for the pool.
  absl::StatusOr<TeacherPool::Id> Add(int64_t bytes);
  void Remove(TeacherPool::Id id);
  // Where the member's values are in the pool, copied from `values` if they were not there.
  uint8_t* Use(TeacherPool::Id id, const uint8_t* values, int64_t bytes);
  void Invalidate(TeacherPool::Id id) { pool_.Invalidate(id); }
  PagingStats stats(TeacherPool::Id id) const { return pool_.stats(id); }

 private:
  MemoryAccounting* const accounting_;
  TeacherPool pool_;
  AlignedBytes memory_;
  MemoryAccounting::Reservation reservation_;
};

// A head's membership in the pool, which ends with it.
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
