// SPDX-License-Identifier: Apache-2.0
// The least-recently-used pool for heads in host memory (teacher_pool.h).
#include "kernels/teacher_pool.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::kernels {
namespace {

int64_t PlaceBytes(int64_t bytes) {
  constexpr int64_t kUnit = TeacherPool::kAlignment;
  return std::max(kUnit, (bytes + kUnit - 1) / kUnit * kUnit);
}

}  // namespace

PagingStats& PagingStats::operator+=(const PagingStats& other) {
  on_device = on_device && other.on_device;
  value_bytes += other.value_bytes;
  hits += other.hits;
  copies += other.copies;
  evictions += other.evictions;
  copied_bytes += other.copied_bytes;
  copying += other.copying;
  return *this;
}

absl::StatusOr<int64_t> TeacherPool::SizeWith(int64_t bytes) const {
  absl::MutexLock lock(&mutex_);
  const int64_t place = PlaceBytes(bytes);
  if (limit_bytes_ == 0) return std::max(size_, place);
  if (place <= limit_bytes_) return limit_bytes_;
  return absl::ResourceExhaustedError(
      absl::StrCat("the values of the head take ", errors::ExactBytes(place),
                   ", and the pool of the device for heads in host memory has ",
                   errors::ExactBytes(limit_bytes_), " (--teacher_pool_bytes)"));
}

TeacherPool::Id TeacherPool::Add(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const int64_t place = PlaceBytes(bytes);
  const int64_t size = limit_bytes_ > 0 ? limit_bytes_ : std::max(size_, place);
  if (size != size_) {
    while (!by_use_.empty()) Leave(by_use_.front());
    size_ = size;
  }
  members_[++last_id_] = {.bytes = place, .offset = std::nullopt, .stats = {.value_bytes = bytes}};
  return last_id_;
}

void TeacherPool::Remove(Id id) {
  absl::MutexLock lock(&mutex_);
  Leave(id);
  members_.erase(id);
  if (members_.empty()) size_ = 0;
}

TeacherPool::Place TeacherPool::Use(Id id) {
  absl::MutexLock lock(&mutex_);
  Member& member = members_.at(id);
  Place place;
  if (member.offset.has_value()) {
    by_use_.splice(by_use_.end(), by_use_, std::find(by_use_.begin(), by_use_.end(), id));
    ++member.stats.hits;
    place.offset = *member.offset;
    return place;
  }
  std::optional<int64_t> gap = GapOf(member.bytes);
  while (!gap.has_value()) {  // ends, because an empty pool has room for every member
    const Id oldest = by_use_.front();
    ++members_.at(oldest).stats.evictions;
    Leave(oldest);
    place.evicted.push_back(oldest);
    gap = GapOf(member.bytes);
  }
  place.offset = *gap;
  place.copy = true;
  member.offset = gap;
  by_use_.push_back(id);
  by_offset_[*gap] = id;
  ++member.stats.copies;
  member.stats.copied_bytes += member.stats.value_bytes;
  return place;
}

void TeacherPool::Invalidate(Id id) {
  absl::MutexLock lock(&mutex_);
  Leave(id);
}

void TeacherPool::AddCopying(Id id, absl::Duration time) {
  absl::MutexLock lock(&mutex_);
  if (const auto member = members_.find(id); member != members_.end()) member->second.stats.copying += time;
}

int64_t TeacherPool::size() const {
  absl::MutexLock lock(&mutex_);
  return size_;
}

PagingStats TeacherPool::stats(Id id) const {
  absl::MutexLock lock(&mutex_);
  const Member& member = members_.at(id);
  PagingStats stats = member.stats;
  stats.on_device = member.offset.has_value();
  return stats;
}

bool TeacherPool::on_device(Id id) const {
  absl::MutexLock lock(&mutex_);
  return members_.at(id).offset.has_value();
}

std::optional<int64_t> TeacherPool::GapOf(int64_t bytes) const {
  int64_t begin = 0;
  for (const auto& [offset, id] : by_offset_) {
    if (offset - begin >= bytes) return begin;
    begin = offset + members_.at(id).bytes;
  }
  if (size_ - begin >= bytes) return begin;
  return std::nullopt;
}

void TeacherPool::Leave(Id id) {
  Member& member = members_.at(id);
  if (!member.offset.has_value()) return;
  by_offset_.erase(*member.offset);
  by_use_.remove(id);
  member.offset.reset();
}

}  // namespace lossd::kernels
