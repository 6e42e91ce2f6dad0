#include "kernels/cpu/accounting.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace lossd::kernels {
namespace {

// "weights 128, workspace 4096".
std::string ByKind(const MemoryBytes& bytes) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < kMemoryKinds; ++i) {
    if (bytes.by_kind[i] == 0) continue;
    parts.push_back(absl::StrCat(Name(static_cast<MemoryKind>(i)), " ", bytes.by_kind[i]));
  }
  return absl::StrJoin(parts, ", ");
}

}  // namespace

MemoryAccounting::Reservation::Reservation(Reservation&& other) noexcept
    : accounting_(std::exchange(other.accounting_, nullptr)), bytes_(other.bytes_) {}

MemoryAccounting::Reservation& MemoryAccounting::Reservation::operator=(Reservation&& other) noexcept {
  std::swap(accounting_, other.accounting_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MemoryAccounting::Reservation::~Reservation() {
  if (accounting_ != nullptr) accounting_->Release(bytes_);
}

absl::StatusOr<MemoryAccounting::Reservation> MemoryAccounting::Reserve(absl::string_view what,
                                                                        const MemoryBytes& bytes) {
  absl::MutexLock lock(&mutex_);
  const int64_t used = stats_.current.Total();
  if (stats_.limit > 0 && bytes.Total() > stats_.limit - used) {
    return absl::ResourceExhaustedError(absl::StrCat(what, " needs ", bytes.Total(), " bytes (",
                                                     ByKind(bytes), "); ", used, " of the limit of ",
                                                     stats_.limit, " bytes are in use"));
  }
  for (size_t i = 0; i < kMemoryKinds; ++i) {
    stats_.current.by_kind[i] += bytes.by_kind[i];
    stats_.peak.by_kind[i] = std::max(stats_.peak.by_kind[i], stats_.current.by_kind[i]);
  }
  stats_.peak_total = std::max(stats_.peak_total, stats_.current.Total());
  return Reservation(this, bytes);
}

MemoryStats MemoryAccounting::stats() const {
  absl::MutexLock lock(&mutex_);
  return stats_;
}

void MemoryAccounting::Release(const MemoryBytes& bytes) {
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < kMemoryKinds; ++i) stats_.current.by_kind[i] -= bytes.by_kind[i];
}

}  // namespace lossd::kernels
