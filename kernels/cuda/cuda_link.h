// SPDX-License-Identifier: Apache-2.0
// The GPU of this process as one of several ranks, which have a process and a GPU each.
#ifndef LOSSD_KERNELS_CUDA_CUDA_LINK_H_
#define LOSSD_KERNELS_CUDA_CUDA_LINK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/host_transfers.h"
#include "kernels/rank_link.h"
#include "kernels/replica.h"

namespace lossd::kernels {

struct CudaLinkOptions {
  int device = 0;  // GPU, by index
  Replica replica;
  absl::Duration timeout = absl::Minutes(1);  // how long one rank waits for another
  // Which collectives the ranks may use: "nccl", "gloo", or "auto" for what there is of them.
  std::string collectives = "auto";
  // What carries the exchanges of "gloo". UNAVAILABLE if there is nothing.
  std::function<absl::StatusOr<std::unique_ptr<HostTransfers>>()> make_transfers;
  // Told of memory of the host that the link is about to take for good.
  std::function<absl::Status(int64_t bytes)> plan_memory = [](int64_t) { return absl::OkStatus(); };
};

// By NCCL, sums are formed as among the GPUs of one process; by Gloo, in the order of the ranks. Connections
// are neither encrypted nor authenticated. INVALID_ARGUMENT naming `collectives` if what it asks for is not
// there, with the reason.
absl::StatusOr<std::unique_ptr<RankLink>> CreateCudaLink(const CudaLinkOptions& options);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CUDA_CUDA_LINK_H_
