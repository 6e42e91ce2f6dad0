// SPDX-License-Identifier: Apache-2.0
// RankLink connects a backend with the backends of other processes that have replicas or parts of the same
// heads. It carries the sums and exchanges between them. A backend that was created as one of several ranks
// (BackendChoice::replica) comes with a link. RankState and RankTimes have the state and the times of one
// rank.
//
// A RankLink is driven by the backend's driving thread, except Abort and Times, which are thread-safe. The
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

// The libraries that can carry collectives: sums, copies and exchanges between ranks.
inline constexpr char kNccl[] = "nccl";  // between GPUs, if each rank has one of its own
inline constexpr char kGloo[] = "gloo";  // through host memory

// Properties that must be equal for all ranks, in addition to BackendInfo.
struct RankTraits {
  int64_t device_bytes = 0;  // total memory of the GPU; 0: a CPU
  std::string nccl_version;  // e.g. "2.28.3"; empty: NCCL is not available
};

// Connects the heads of one rank with the heads of the other ranks.
class RankLink {
 public:
  virtual ~RankLink() = default;

  // The traits of this rank; the default is for a link without a GPU.
  virtual RankTraits Traits() const { return {}; }

  // The collectives that this rank can use, the best first.
  virtual std::vector<std::string> CollectivesOffered() const = 0;
  // Sets the collectives, the same on all ranks. Called once, before Address. INVALID_ARGUMENT if they are
  // not offered.
  virtual absl::Status UseCollectives(const std::string& collectives) = 0;
  // The data with which the other ranks connect to this rank. Called once.
  virtual absl::StatusOr<std::string> Address() = 0;
  // Connects this rank with the other ranks. `addresses`: Address() of all ranks, by rank. Called once, after
  // Address. Blocks until all ranks have called it. UNAVAILABLE if a rank cannot be reached in time.
  virtual absl::Status Connect(const std::vector<std::string>& addresses) = 0;

  // Joins this rank's replica of a head with the replicas of the other ranks. All ranks call the functions of
  // their results in the same order, over all heads; each call returns when this rank has done its part.
  // UNAVAILABLE if another rank does not do its part in time; from then on every call fails. `head` belongs
  // to the backend that came with the link. Link and head outlive the result.
  virtual absl::StatusOr<std::unique_ptr<Replicas>> Join(HeadKernels* head) = 0;

  // Joins this rank's part of a head that is split by vocabulary with the parts of the other ranks: exchanges
  // of the head's chunks go over this link. All ranks compute the chunks of all such heads, and all sums, in
  // the same order. `head` belongs to the backend that came with the link, and its split is kVocabulary. The
  // link outlives the head.
  virtual absl::Status JoinClasses(HeadKernels* head) = 0;
  // Sets a function that is called when a chunk's exchange fails. `on_failure` is called with the error,
  // UNAVAILABLE, on the driving thread or on the thread that reports the chunk's results. The chunk then
  // fails with the status that `on_failure` returns. It may block, because no more chunks are computed.
  // Called before the first chunk.
  virtual void WatchChunks(std::function<absl::Status(const absl::Status&)> on_failure) = 0;

  // How long this rank has been in exchanges since the link was created.
  virtual ExchangeTimes Times() const = 0;

  // Called when another rank is lost: all calls that wait for that rank, and all later calls, fail with
  // `reason`.
  virtual void Abort(const absl::Status& reason) = 0;
};

// Bytes of messages between rank 0 and a worker, since the ranks connected.
struct RankTraffic {
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

// The state of one rank: a device of a server that has several devices, in one or more processes.
struct RankState {
  int rank = 0;
  std::string host;
  std::string device;
  bool lost = false;
  MemoryStats memory;                  // the last report of the rank
  int64_t chunks = 0;                  // chunks, or parts of chunks, computed without an error
  int64_t rows = 0;                    // rows of these chunks, including ignored rows
  std::optional<RankTraffic> traffic;  // only for a worker
};

// How a rank has spent its time since it started.
struct RankTimes {
  absl::Duration busy;      // time in which it had a chunk or a request to execute
  ExchangeTimes exchanges;  // the part of `busy` spent in exchanges with other ranks
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_RANK_LINK_H_
