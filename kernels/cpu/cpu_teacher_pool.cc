// SPDX-License-Identifier: Apache-2.0
// CpuTeacherPool (cpu_teacher_pool.h): the pool's memory, and the copies of values to it.
#include "kernels/cpu/cpu_teacher_pool.h"

#include <cstring>
#include <utility>

#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"

namespace lossd::kernels {

absl::StatusOr<MemoryBytes> CpuTeacherPool::GrowthWith(int64_t bytes) const {
  LOSSD_TRY(const int64_t size, pool_.SizeWith(bytes));
  MemoryBytes growth;
  growth[MemoryKind::kTeacherPool] = size == pool_.size() ? 0 : size;
  return growth;
}

// Frees the pool's old memory only after the new memory is allocated.
absl::StatusOr<TeacherPool::Id> CpuTeacherPool::Add(int64_t bytes) {
  LOSSD_TRY(const MemoryBytes growth, GrowthWith(bytes));
  if (const int64_t size = growth[MemoryKind::kTeacherPool]; size > 0) {
    LOSSD_TRY(MemoryAccounting::Reservation reservation, accounting_->Reserve("the teacher pool", growth));
    LOSSD_TRY(AlignedBytes memory, AllocateAligned(size));
    memory_ = std::move(memory);
    reservation_ = std::move(reservation);
  }
  return pool_.Add(bytes);
}

void CpuTeacherPool::Remove(TeacherPool::Id id) {
  pool_.Remove(id);
  if (pool_.size() > 0) return;
  memory_.reset();
  reservation_ = MemoryAccounting::Reservation();
}

uint8_t* CpuTeacherPool::Use(TeacherPool::Id id, const uint8_t* values, int64_t bytes) {
  const TeacherPool::Place place = pool_.Use(id);
  uint8_t* const here = memory_.get() + place.offset;
  if (!place.copy) return here;
  const absl::Time begin = clocks::SteadyNow();
  std::memcpy(here, values, static_cast<size_t>(bytes));
  pool_.AddCopying(id, clocks::SteadyNow() - begin);
  return here;
}

}  // namespace lossd::kernels
