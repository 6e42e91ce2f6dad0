// SPDX-License-Identifier: Apache-2.0
// The regions of a server: memory of the host or of its device that clients of this host have opened, by
// their ids, which nobody can guess.
//
// A region is in the table as long as its session (session_server.h) is open. Whoever uses it holds a share
// of it, so that the memory stays until the last use has ended; it counts as used until then.
#ifndef LOSSD_SERVER_REGIONS_REGIONS_H_
#define LOSSD_SERVER_REGIONS_REGIONS_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/backend.h"
#include "server/engine/fair_share.h"
#include "server/regions/region_memory.h"

namespace lossd::regions {

// What the regions of one server may take, and have. Thread-safe.
class RegionBudget {
 public:
  RegionBudget(int64_t bytes, double peer_share)
      : most_(static_cast<int64_t>(peer_share * static_cast<double>(bytes))), shares_(bytes, peer_share) {}

  // `bytes`, but at most the share, which holds for the first region as well; or half of it, and so on, as
  // long as that is at least `least` and `holder` may have it; 0: it may not.
  int64_t Take(absl::string_view holder, int64_t bytes, int64_t least) ABSL_LOCKS_EXCLUDED(mutex_);
  void Give(absl::string_view holder, int64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  int64_t used() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const int64_t most_;  // of one holder
  mutable absl::Mutex mutex_;
  engine::FairShare shares_ ABSL_GUARDED_BY(mutex_);
};

// Thread-safe.
class Region {
 public:
  Region(std::string id, std::unique_ptr<RegionMemory> memory)
      : id_(std::move(id)), memory_(std::move(memory)) {}

  const std::string& id() const { return id_; }
  const RegionMemory& memory() const { return *memory_; }
  absl::Span<uint8_t> bytes() const { return memory_->bytes(); }

 private:
  const std::string id_;
  const std::unique_ptr<RegionMemory> memory_;
};

// Bytes that all regions of a kind together have at most; 0: none.
struct RegionLimits {
  int64_t host_bytes = 0;
  int64_t device_bytes = 0;
};

// Thread-safe. The backend outlives it and all regions.
class Regions {
 public:
  static constexpr int64_t kLeastBytes = int64_t{1} << 20;  // of a region, unless less is asked for

  // One process has at most `peer_share` of the bytes of a kind, as engine::FairShare.
  Regions(kernels::Backend* backend, const RegionLimits& limits, double peer_share)
      : backend_(backend),
        host_budget_(std::make_shared<RegionBudget>(limits.host_bytes, peer_share)),
        device_budget_(std::make_shared<RegionBudget>(limits.device_bytes, peer_share)) {}

  // A new region of `bytes` > 0, or of less if `holder` may not have so much. RESOURCE_EXHAUSTED; for memory
  // of the device UNIMPLEMENTED if the backend shares none.
  enum class Kind : uint8_t { kHost, kDevice };
  absl::StatusOr<std::shared_ptr<Region>> Create(const std::string& holder, Kind kind, int64_t bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Its session is over.
  void Forget(const std::string& id) ABSL_LOCKS_EXCLUDED(mutex_);
  // The region of that id, which belongs to the first `identity` that asks for it; null for others, and if
  // there is none. "": a caller whom the server has not asked who it is, who is an identity like others.
  std::shared_ptr<Region> Claim(absl::string_view id, absl::string_view identity) ABSL_LOCKS_EXCLUDED(mutex_);

  // Of both kinds.
  int64_t used_bytes() const { return host_budget_->used() + device_budget_->used(); }

 private:
  struct Entry {
    std::shared_ptr<Region> region;
    std::optional<std::string> owner;  // the identity that has claimed it
  };

  kernels::Backend* const backend_;
  const std::shared_ptr<RegionBudget> host_budget_, device_budget_;  // regions may outlive the table
  absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::regions

#endif  // LOSSD_SERVER_REGIONS_REGIONS_H_
