// SPDX-License-Identifier: Apache-2.0
// Memory of the host that goes between the processes of one server, which are ranks of it.
#ifndef LOSSD_KERNELS_HOST_TRANSFERS_H_
#define LOSSD_KERNELS_HOST_TRANSFERS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// Memory that goes to another rank, or is filled with what one sends; bytes > 0.
struct RankTransfer {
  int rank = 0;
  void* data = nullptr;
  size_t bytes = 0;
};

// Called by one thread at a time, but for Abort, which is thread-safe. After an error every call fails with
// it.
class HostTransfers {
 public:
  virtual ~HostTransfers() = default;

  virtual Replica replica() const = 0;  // this rank, of how many
  // What the other ranks have to know of this one to reach it. Called once.
  virtual absl::StatusOr<std::string> Address() = 0;
  // Connects this rank with the others. `addresses`: of all ranks, by rank. Blocks until all have called it;
  // called once, after Address. UNAVAILABLE if one cannot be reached in time.
  virtual absl::Status Connect(const std::vector<std::string>& addresses) = 0;
  // Sends and receives at the same time, and returns when all of it is done. Ranks pair off what they send
  // to each other in the order of the calls. UNAVAILABLE if another rank does not do its part in time.
  virtual absl::Status Exchange(absl::Span<const RankTransfer> send,
                                absl::Span<const RankTransfer> receive) = 0;
  // Whatever waits for another rank fails with `reason`, and all that comes.
  virtual void Abort(const absl::Status& reason) = 0;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_HOST_TRANSFERS_H_
