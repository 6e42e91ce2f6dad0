// SPDX-License-Identifier: Apache-2.0
// Makes what the CUDA backend offers to the rest of the program: the backend of one GPU (CreateCudaBackend),
// which computes products with cuBLASLt and with kernels of its own (docs/kernels/cuda-exact.md,
// docs/kernels/hopper.md); the link of a process that is one of several ranks (CreateCudaLink); and the
// connection of several GPUs of one process (CudaReplicaGroup).
//
// The program needs neither the CUDA driver nor cuBLAS to start: both are looked up when a backend is
// created. Compute capability 8.0 or later; tuned for 9.0.
#ifndef LOSSD_KERNELS_CUDA_CUDA_BACKEND_H_
#define LOSSD_KERNELS_CUDA_CUDA_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/cuda/cuda_options.h"
#include "kernels/exchange_times.h"
#include "kernels/rank_link.h"
#include "kernels/replica.h"

namespace lossd::kernels {

// The UUIDs of the visible GPUs, by index. UNAVAILABLE if there is no GPU or no driver.
absl::StatusOr<std::vector<std::string>> VisibleGpuUuids();

// The GPU that memory lies on, by index; -1 if it is none of a GPU. Thread-safe.
int GpuOf(const void* memory);

// INVALID_ARGUMENT naming the option if one is out of range (a wrong device index with the number of
// GPUs), UNAVAILABLE if there is no usable GPU, driver or cuBLAS.
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaBackendOptions& options);

// How the GPU of this process is connected with those of the other ranks; each rank has a process and a GPU.
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

// The link of this process. By NCCL, sums are formed as among the GPUs of one process; by Gloo, in the order
// of the ranks. Connections are neither encrypted nor authenticated. INVALID_ARGUMENT naming `collectives` if
// what it asks for is not there, with the reason.
absl::StatusOr<std::unique_ptr<RankLink>> CreateCudaLink(const CudaLinkOptions& options);

// The connection of several GPUs of one process, by NCCL: for replicas of heads, and for the parts of heads
// that are split by vocabulary. Driven by the backends' driving thread.
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
  // split by vocabulary those of each place (validation.h). The group outlives what it gives; so do the
  // heads. UNAVAILABLE if the first head with so many replicas needs connections that cannot be made.
  virtual absl::StatusOr<std::unique_ptr<Replicas>> Connect(absl::Span<HeadKernels* const> heads) = 0;
  // Joins the parts of each replica of a head that is split by vocabulary. `heads` as in Connect.
  virtual absl::Status Join(absl::Span<HeadKernels* const> heads) = 0;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CUDA_CUDA_BACKEND_H_
