// SPDX-License-Identifier: Apache-2.0
// Heads whose replicas lie in several processes, one replica in each. RankLink is how a process takes part in
// the sums; a backend that was made as one of several ranks (BackendChoice::replica) comes with a link.
// RankState and RankTimes are what a server knows of one rank.
//
// A RankLink is driven by the backend's driving thread, but for Abort and Times, which are thread-safe. The
// structs are plain data; thread-compatible.
#ifndef LOSSD_KERNELS_RANK_LINK_H_
#define LOSSD_KERNELS_RANK_LINK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/exchange_times.h"

namespace lossd::kernels {

// What carries the collectives: sums, copies and exchanges between ranks.
inline constexpr char kNccl[] = "nccl";  // among GPUs, of which each rank has one of its own
inline constexpr char kGloo[] = "gloo";  // through the memory of the hosts

// What ranks have to have alike beyond what their backends say of themselves.
struct RankTraits {
  int64_t device_bytes = 0;  // memory of the GPU in all; 0: a CPU
  std::string nccl_version;  // "2.28.3"; empty: NCCL is not offered
};

// Connects the heads of one rank with those of the others.
class RankLink {
 public:
  virtual ~RankLink() = default;

  // Of this rank. A link without a GPU has none.
  virtual RankTraits Traits() const { return {}; }

  // What this rank can use of these, the best first.
  virtual std::vector<std::string> CollectivesOffered() const = 0;
  // The choice, which all ranks make alike. Called once, before Address. INVALID_ARGUMENT if it is not
  // offered.
  virtual absl::Status UseCollectives(const std::string& collectives) = 0;
  // What the other ranks have to know of this one to reach it. Called once.
  virtual absl::StatusOr<std::string> Address() = 0;
  // Connects this rank with the others. `addresses`: of all ranks, by rank. Blocks until all have called it;
  // called once, after Address. UNAVAILABLE if one cannot be reached in time.
  virtual absl::Status Connect(const std::vector<std::string>& addresses) = 0;

  // This rank's part in the sums of one head, which every rank makes of its replica. All ranks call the same
  // functions of theirs in the same order, for all heads together; each returns when this rank has done its
  // part. UNAVAILABLE if another rank does not do its own in time; from then on every call fails.
  // The link outlives the result, and so does `head`, of the backend that came with the link.
  virtual absl::StatusOr<std::unique_ptr<Replicas>> Join(HeadKernels* head) = 0;

  // Joins the parts of one head that is split by vocabulary, of which every rank has one: what its chunks
  // exchange goes over this link. All ranks compute the same chunks of all such heads, and sums, in the same
  // order. The link outlives `head`, of the backend that came with the link, whose split is kVocabulary.
  virtual absl::Status JoinClasses(HeadKernels* head) = 0;
  // From now on, when a chunk's exchange fails, which is UNAVAILABLE, `on_failure` is told why, on the
  // driving thread or the one that tells the chunk's results, and the chunk fails with what it returns. It
  // may block: no chunk is computed any more. Called before the first chunk.
  virtual void WatchChunks(std::function<absl::Status(const absl::Status&)> on_failure) = 0;

  // How long this rank has been in exchanges, since the link was made.
  virtual ExchangeTimes Times() const = 0;

  // Another rank is known to be lost: whatever waits for it fails with `reason`, and all that comes.
  virtual void Abort(const absl::Status& reason) = 0;
};

// What has gone from rank 0 to a worker in messages and come back, since the ranks came together.
struct RankTraffic {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

// What is known of one rank: a device of a server that has several devices, in one process or more.
struct RankState {
  int rank = 0;
  std::string host;
  std::string device;
  bool lost = false;
  MemoryStats memory;                  // as the rank last said
  int64_t chunks = 0;                  // or parts of them, computed without an error
  int64_t rows = 0;                    // of these, those without a target included
  std::optional<RankTraffic> traffic;  // of a worker
};

// What a rank's time went into, since it started.
struct RankTimes {
  absl::Duration busy;      // there was a chunk to compute or a request to carry out
  ExchangeTimes exchanges;  // of that, in exchanges with other ranks
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_RANK_LINK_H_
