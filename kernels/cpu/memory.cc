// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/memory.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels {

absl::StatusOr<AlignedBytes> AllocateAligned(int64_t bytes) {
  const auto size = static_cast<size_t>(RoundUpToAlignment(std::max<int64_t>(bytes, 1)));
  AlignedBytes memory(static_cast<uint8_t*>(std::aligned_alloc(kMemoryAlignment, size)));
  if (memory == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the system has no ", errors::ExactBytes(bytes), " of memory left"));
  }
  return memory;
}

absl::StatusOr<Arena> Arena::Allocate(int64_t bytes) {
  absl::StatusOr<AlignedBytes> memory = AllocateAligned(bytes);
  if (!memory.ok()) return memory.status();
  std::memset(memory->get(), 0, static_cast<size_t>(bytes));
  Arena arena;
  arena.memory_ = *std::move(memory);
  return arena;
}

namespace {

using errors::ExactBytes;
using errors::HumanBytes;

// "weights 128 B, workspace 4.00 KiB".
std::string ByKind(const MemoryBytes& bytes) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < kMemoryKinds; ++i) {
    if (bytes.by_kind[i] == 0) continue;
    parts.push_back(absl::StrCat(Name(static_cast<MemoryKind>(i)), " ",
                                 HumanBytes(static_cast<double>(bytes.by_kind[i]))));
  }
  return absl::StrJoin(parts, ", ");
}

}  // namespace

MemoryAccounting::Reservation::Reservation(Reservation&& other) noexcept
    : accounting_(std::exchange(other.accounting_, nullptr)),
      bytes_(other.bytes_),
      pending_bytes_(other.pending_bytes_) {}

MemoryAccounting::Reservation& MemoryAccounting::Reservation::operator=(Reservation&& other) noexcept {
  std::swap(accounting_, other.accounting_);
  std::swap(bytes_, other.bytes_);
  std::swap(pending_bytes_, other.pending_bytes_);
  return *this;
}

MemoryAccounting::Reservation::~Reservation() {
  if (accounting_ != nullptr) accounting_->Release(bytes_, pending_bytes_);
}

void MemoryAccounting::Reservation::MarkResident() {
  accounting_->MarkResident(std::exchange(pending_bytes_, 0));
}

absl::StatusOr<MemoryAccounting::Reservation> MemoryAccounting::Reserve(absl::string_view what,
                                                                        const MemoryBytes& bytes,
                                                                        bool filled_at_once) {
  absl::MutexLock lock(&mutex_);
  if (absl::Status status = CheckLocked(what, bytes, 0); !status.ok()) return status;
  for (size_t i = 0; i < kMemoryKinds; ++i) {
    stats_.current.by_kind[i] += bytes.by_kind[i];
    stats_.peak.by_kind[i] = std::max(stats_.peak.by_kind[i], stats_.current.by_kind[i]);
  }
  stats_.peak_total = std::max(stats_.peak_total, stats_.current.Total());
  Reservation reservation(this, bytes);
  if (filled_at_once) reservation.pending_bytes_ = bytes.Total();
  pending_bytes_ += reservation.pending_bytes_;
  return reservation;
}

absl::Status MemoryAccounting::Check(absl::string_view what, const MemoryBytes& bytes,
                                     const MemoryBytes& beside) const {
  absl::MutexLock lock(&mutex_);
  return CheckLocked(what, bytes, beside.Total());
}

absl::Status MemoryAccounting::CheckLocked(absl::string_view what, const MemoryBytes& bytes,
                                           int64_t beside) const {
  const int64_t used = stats_.current.Total() + beside;
  if (stats_.limit > 0 && bytes.Total() > stats_.limit - used) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, " needs ", ExactBytes(bytes.Total()), ": ", ByKind(bytes), "; ", ExactBytes(used),
                     " of the limit of ", ExactBytes(stats_.limit), " are in use"));
  }
  return CheckHost(what, bytes, beside);
}

absl::Status MemoryAccounting::CheckHost(absl::string_view what, const MemoryBytes& bytes,
                                         int64_t beside) const {
  const std::optional<HostMemory::Bound> host = host_.Available();
  if (!host.has_value()) return absl::OkStatus();
  // What was promised before and is not written yet still looks available.
  const int64_t promised =
      std::max({pending_bytes_, stats_.current.Total() - host_.ResidentBytes(), int64_t{0}}) + beside;
  if (bytes.Total() <= host->bytes - promised - reserve_bytes_) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " needs ", ExactBytes(bytes.Total()), ": ", ByKind(bytes), "; ", host->what, ", ",
                   HumanBytes(static_cast<double>(promised)),
                   " are promised and not yet in use, and memory_reserve_bytes keeps ",
                   HumanBytes(static_cast<double>(reserve_bytes_)), " free"));
}

MemoryStats MemoryAccounting::stats() const {
  absl::MutexLock lock(&mutex_);
  return stats_;
}

void MemoryAccounting::MarkResident(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  pending_bytes_ -= bytes;
}

void MemoryAccounting::Release(const MemoryBytes& bytes, int64_t pending_bytes) {
  absl::MutexLock lock(&mutex_);
  pending_bytes_ -= pending_bytes;
  for (size_t i = 0; i < kMemoryKinds; ++i) stats_.current.by_kind[i] -= bytes.by_kind[i];
}

}  // namespace lossd::kernels
