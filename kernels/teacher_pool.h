// SPDX-License-Identifier: Apache-2.0
// The pool of a device for heads that live in host memory (Residency::kHost): which of them are on the device
// now, and where in the pool's memory. A backend has one pool for each device. The pool decides, and the
// backend owns the memory and copies.
//
// Members are such heads. A member that is used gets a place of its size. If there is no room for it, others
// leave the pool, those first whose last use is longest ago, until the room is there. Their values stay in
// host memory, so nothing is copied back.
//
// Errors leave the pool as it was.
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

// How a head that lives in host memory has come to the device and gone, since it was created. Plain data; of
// several devices the sums.
struct PagingStats {
  bool on_device = false;    // now; of several devices: on all of them
  int64_t value_bytes = 0;   // that one copy takes
  int64_t hits = 0;          // chunks that found the head on the device
  int64_t copies = 0;        // chunks that it was copied for
  int64_t evictions = 0;     // times that it left for another head
  int64_t copied_bytes = 0;  // of all copies
  absl::Duration copying;    // how long the copies took on their stream; of those that have ended

  PagingStats& operator+=(const PagingStats& other);
};

// Thread-safe. The backend's driving thread changes the pool; other threads read what it says.
class TeacherPool {
 public:
  // Names a member; no two members of a pool ever have the same.
  using Id = uint64_t;
  // Places begin at multiples of this, and take multiples of it.
  static constexpr int64_t kAlignment = 256;

  // `limit_bytes`: the size of the pool; 0: as large as its largest member.
  explicit TeacherPool(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // How many bytes the pool has when it has a further member of `bytes` >= 0. RESOURCE_EXHAUSTED with both
  // numbers if the member alone is larger than the limit.
  absl::StatusOr<int64_t> SizeWith(int64_t bytes) const;
  // A new member, which is not on the device. The pool then has SizeWith(bytes), which has to be OK. If that
  // is more than before, its memory is another one, and no member is on the device.
  Id Add(int64_t bytes);
  // A pool without members has no memory.
  void Remove(Id id);

  // What a use finds, or has to do.
  struct Place {
    int64_t offset = 0;       // of the member's bytes in the pool
    bool copy = false;        // its values have to be copied there first
    std::vector<Id> evicted;  // for it, in this order; something of theirs may lie in its place
  };
  // Brings a member to the device, where it is the one that was used last.
  Place Use(Id id);
  // The values of the member in host memory have changed: if it was on the device, it is not any more.
  void Invalidate(Id id);
  // A copy has taken so long.
  void AddCopying(Id id, absl::Duration time);

  int64_t size() const;  // bytes of its memory
  PagingStats stats(Id id) const;
  bool on_device(Id id) const;

 private:
  struct Member {
    int64_t bytes = 0;              // rounded up
    std::optional<int64_t> offset;  // of its place, on the device
    PagingStats stats;
  };

  // The first gap of so many bytes between the places; nullopt: there is none.
  std::optional<int64_t> GapOf(int64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Leave(Id id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t limit_bytes_;
  mutable absl::Mutex mutex_;
  std::map<Id, Member> members_ ABSL_GUARDED_BY(mutex_);
  std::list<Id> by_use_ ABSL_GUARDED_BY(mutex_);             // on the device; the one used last at the end
  std::map<int64_t, Id> by_offset_ ABSL_GUARDED_BY(mutex_);  // the same
  int64_t size_ ABSL_GUARDED_BY(mutex_) = 0;
  Id last_id_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_TEACHER_POOL_H_
