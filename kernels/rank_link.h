// Heads whose replicas lie in several processes, one replica in each: how a process takes part in the sums.
// A backend that was made as one of several ranks (BackendChoice::replica) comes with a link.
//
// Driven by the backend's driving thread, but for Abort, which is thread-safe.
#ifndef LOSSD_KERNELS_RANK_LINK_H_
#define LOSSD_KERNELS_RANK_LINK_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"

namespace lossd::kernels {

class RankLink {
 public:
  virtual ~RankLink() = default;

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

  // Another rank is known to be lost: whatever waits for it fails with `reason`, and all that comes.
  virtual void Abort(const absl::Status& reason) = 0;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_RANK_LINK_H_
