// SPDX-License-Identifier: Apache-2.0
// A choice between two pieces of work by a number that the device computes. The device makes the choice when
// it gets there, without the host: a graph with a conditional node is built from what two functions enqueue,
// and launched into the stream. Where that is not wanted, the host waits for the number and makes the choice.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_DEVICE_BRANCH_H_
#define LOSSD_KERNELS_CUDA_DEVICE_DEVICE_BRANCH_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace lossd::kernels::cuda {

// Conditional nodes with an else branch need this much of the driver.
inline constexpr int kBranchDriverVersion = 12080;

// Owns the executable graph of a branch. As long as the work differs from that enqueued before in parameters
// and kernels of the same cluster dimensions only, the graph is updated (some 50 us of the host's time); else
// it is replaced, which waits for the device. Destroy or enqueue again only when the device is through with
// it. Not thread-safe.
class DeviceBranch {
 public:
  DeviceBranch() = default;
  DeviceBranch(const DeviceBranch&) = delete;
  DeviceBranch& operator=(const DeviceBranch&) = delete;
  ~DeviceBranch() { Reset(); }

  // Enqueues on `stream` what `if_set` enqueues there if *flag (device memory) is not 0 when the stream gets
  // to it, else what `if_not` does. Both functions are called, once; they may launch kernels, copy and set
  // memory, all on `stream`, but use no events. After an error nothing was enqueued.
  absl::Status Enqueue(const int32_t* flag, cudaStream_t stream, absl::FunctionRef<absl::Status()> if_set,
                       absl::FunctionRef<absl::Status()> if_not);

 private:
  bool Update(cudaGraph_t graph);  // false: exec_ cannot be made to do what `graph` does
  void Reset();

  cudaGraphExec_t exec_ = nullptr;
  std::vector<std::array<unsigned, 3>> clusters_;  // of the kernels of both bodies of exec_, in order
};

// As DeviceBranch::Enqueue, but waits until the stream has got there, and calls the one function that is
// chosen. For tools that cannot follow conditional graphs.
absl::Status BranchOnHost(const int32_t* flag, cudaStream_t stream, absl::FunctionRef<absl::Status()> if_set,
                          absl::FunctionRef<absl::Status()> if_not);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_DEVICE_BRANCH_H_
