// SPDX-License-Identifier: Apache-2.0
// TeacherPool manages the pool, a device's memory for heads that live in host memory (Residency::kHost). It
// decides which of these heads have their values on the device, and at which offset in the pool. A backend
// has one TeacherPool for each device. TeacherPool only decides; the backend owns the memory and copies the
// values.
//
// The members of a pool are the heads that live in host memory. When a member is used, it gets a place of its
// size. If there is no room, the least recently used members leave their places until there is room. Host
// memory keeps all values, so nothing is copied back.
//
// After an error the pool has not changed.
#ifndef LOSSD_KERNELS_TEACHER_POOL_H_
#define LOSSD_KERNELS_TEACHER_POOL_H_

#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::kernels {

// How often a head in host memory was copied to the device since the head was created. Plain data. For
// several devices the counts are sums.
struct PagingStats {
  bool on_device = false;    // the head is on the device now; with several devices: on all of them
  int64_t value_bytes = 0;   // size of one copy
  int64_t hits = 0;          // chunks that found the values on the device
  int64_t copies = 0;        // chunks for which the values were copied
  int64_t evictions = 0;     // how often the head left its place for another head
  int64_t copied_bytes = 0;  // total of all copies
  absl::Duration copying;    // total duration of the copies that have ended, measured on their stream

  PagingStats& operator+=(const PagingStats& other);
};

// Thread-safe. Only the backend's driving thread changes the pool; other threads read it.
class TeacherPool {
 public:
  // Identifies a member. A pool never uses an id twice.
  using Id = uint64_t;
  // The offset and the size of a place are multiples of this.
  static constexpr int64_t kAlignment = 256;

  // `limit_bytes`: the size of the pool; 0: as large as its largest member.
  explicit TeacherPool(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // The size that the pool would have with one more member of `bytes` >= 0 bytes. RESOURCE_EXHAUSTED, with
  // both sizes, if the member alone is larger than the limit.
  absl::StatusOr<int64_t> SizeWith(int64_t bytes) const;
  // Adds a member, which is not on the device yet. SizeWith(bytes) must be OK and becomes the size of the
  // pool. If the pool becomes larger, the caller must allocate new memory, and no member is on the device.
  Id Add(int64_t bytes);
  // Removes a member. A pool without members has size 0.
  void Remove(Id id);

  // Where a member is, and what the caller has to do.
  struct Place {
    int64_t offset = 0;  // offset of the member's values in the pool
    bool copy = false;   // the caller has to copy the values there first
    // Members that left their places for this member, in this order. Their values may lie in the new place.
    std::vector<Id> evicted;
  };
  // Gives a member a place on the device and makes it the most recently used.
  Place Use(Id id);
  // The values of the member in host memory have changed, so it is no longer on the device.
  void Invalidate(Id id);
  // Adds the duration of a copy.
  void AddCopying(Id id, absl::Duration time);

  int64_t size() const;  // bytes of the pool's memory
  PagingStats stats(Id id) const;
  bool on_device(Id id) const;

 private:
  struct Member {
    int64_t bytes = 0;              // rounded up to kAlignment
    std::optional<int64_t> offset;  // of its place; absent: not on the device
    PagingStats stats;
  };

  // The offset of the first gap of `bytes` bytes between places; nullopt if there is none.
  std::optional<int64_t> GapOf(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Leave(Id id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t limit_bytes_;
  mutable absl::Mutex mutex_;
  std::map<Id, Member> members_ ABSL_GUARDED_BY(mutex_);
  // Members on the device; the most recently used is last.
  std::list<Id> by_use_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, Id> by_offset_ ABSL_GUARDED_BY(mutex_);  // members on the device, by offset
  int64_t size_ ABSL_GUARDED_BY(mutex_) = 0;
  Id last_id_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_TEACHER_POOL_H_
