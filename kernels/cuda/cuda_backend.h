// SPDX-License-Identifier: Apache-2.0
// The entry points of the CUDA backend for the rest of the program:
// - CreateCudaBackend makes the backend of one GPU. It computes products with cuBLASLt and with kernels of
//   its own (docs/kernels/cuda-exact.md, docs/kernels/hopper.md).
// - CreateCudaLink makes the link of a process that is one of several ranks.
// - CudaReplicaGroup connects several GPUs of one process.
//
// The program starts without the CUDA driver and cuBLAS: both are looked up when a backend is created. GPUs
// need compute capability 8.0 or later; the kernels are tuned for 9.0.
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

// The index of the GPU whose memory `memory` is; -1 if it is not memory of a GPU. Thread-safe.
int GpuOf(const void* memory);

// Errors: INVALID_ARGUMENT if an option is out of range; the message names the option (for a wrong device
// index also the number of GPUs). UNAVAILABLE if there is no usable GPU, driver or cuBLAS.
absl::StatusOr<std::unique_ptr<Backend>> CreateCudaBackend(const CudaBackendOptions& options);

// How the GPU of this process is connected with the GPUs of the other ranks. Each rank is one process with
// one GPU.
struct CudaLinkOptions {
  int device = 0;  // index of this process's GPU
  Replica replica;
  absl::Duration timeout = absl::Minutes(1);  // how long one rank waits for another
  // Which collectives the ranks may use: "nccl", "gloo", or "auto" for all that are available.
  std::string collectives = "auto";
  // Makes the transfers between hosts that "gloo" uses. UNAVAILABLE if there are none.
  std::function<absl::StatusOr<std::unique_ptr<HostTransfers>>()> make_transfers;
  // Called before the link takes `bytes` of host memory, which it keeps.
  std::function<absl::Status(int64_t bytes)> plan_memory = [](int64_t) { return absl::OkStatus(); };
};

// Makes the link of this process. With NCCL, gradients are summed as among the GPUs of one process; with
// Gloo, in the order of the ranks. Connections are neither encrypted nor authenticated. INVALID_ARGUMENT
// naming `collectives`, with the reason, if the collectives that it names are not available.
absl::StatusOr<std::unique_ptr<RankLink>> CreateCudaLink(const CudaLinkOptions& options);

// Connects several GPUs of one process by NCCL: replicas of heads, and parts of heads that are split by
// vocabulary. Driven by the thread that drives the backends.
class CudaReplicaGroup {
 public:
  virtual ~CudaReplicaGroup() = default;
  // `devices`: indices of GPUs, in the order of the replicas, each GPU once. `timeout`: how long one GPU
  // waits for another, including the time of chunks that the other computes meanwhile. After a timeout the
  // group exchanges nothing any more. UNAVAILABLE if NCCL cannot be loaded or cannot connect the GPUs.
  static absl::StatusOr<std::unique_ptr<CudaReplicaGroup>> Create(std::vector<int> devices,
                                                                  absl::Duration timeout = absl::Minutes(1));
  // The clocks that count the exchanges in chunks of heads split by vocabulary: one for each GPU, in the
  // order of `devices`.
  virtual const std::shared_ptr<MemberExchanges>& exchanges() const = 0;
  // Connects the replicas of one head. `heads` are in order, made by CUDA backends with replica = {i, count}.
  // For a head that is split by vocabulary, the heads of each place (validation.h) are replicas of each
  // other. The group and the heads outlive the result. UNAVAILABLE if this is the first head with so many
  // replicas and the connections that it needs cannot be made.
  virtual absl::StatusOr<std::unique_ptr<Replicas>> Connect(absl::Span<HeadKernels* const> heads) = 0;
  // Connects the parts of each replica of a head that is split by vocabulary. `heads` as in Connect.
  virtual absl::Status Join(absl::Span<HeadKernels* const> heads) = 0;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CUDA_CUDA_BACKEND_H_
