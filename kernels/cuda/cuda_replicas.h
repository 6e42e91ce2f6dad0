// SPDX-License-Identifier: Apache-2.0
// Replicas of heads on several GPUs of one process, and the parts of heads that are split by vocabulary: what
// they exchange goes by NCCL.
#ifndef LOSSD_KERNELS_CUDA_CUDA_REPLICAS_H_
#define LOSSD_KERNELS_CUDA_CUDA_REPLICAS_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/exchange_times.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// The connection of some GPUs. Driven by the backends' driving thread.
class CudaReplicaGroup {
 public:
  virtual ~CudaReplicaGroup() = default;
  // GPUs by index, in the order of the replicas, each once. UNAVAILABLE if NCCL cannot be loaded or cannot
  // connect them. `timeout`: how long one GPU waits for another, chunks that it computes meanwhile included;
  // after that none of them exchanges anything any more.
  static absl::StatusOr<std::unique_ptr<CudaReplicaGroup>> Create(std::vector<int> devices,
                                                                  absl::Duration timeout = absl::Minutes(1));
  // What the exchanges of chunks by vocabulary count at, those of the replicas in order.
  virtual const std::shared_ptr<MemberExchanges>& exchanges() const = 0;
  // The replicas of one head, in order, made by CUDA backends with replica = {i, count}; of a head that is
  // split by vocabulary those of each place (shard_rows.h). The group outlives what it gives; so do the
  // heads. UNAVAILABLE if the first head with so many replicas needs connections that cannot be made.
  virtual absl::StatusOr<std::unique_ptr<Replicas>> Connect(absl::Span<HeadKernels* const> heads) = 0;
  // The parts of each replica of a head that is split by vocabulary, likewise.
  virtual absl::Status Join(absl::Span<HeadKernels* const> heads) = 0;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CUDA_CUDA_REPLICAS_H_
