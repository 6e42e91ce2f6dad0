// SPDX-License-Identifier: Apache-2.0
// DeviceBranch enqueues a choice between two pieces of work. The choice depends on a number that the device
// computes. The device makes the choice when it reaches it, without the host: DeviceBranch builds a graph
// with a conditional node from the work that two functions enqueue, and launches the graph into the stream.
// BranchOnHost is the alternative where graphs are not wanted: the host waits for the number and makes the
// choice.
#ifndef LOSSD_KERNELS_CUDA_DEVICE_DEVICE_BRANCH_H_
#define LOSSD_KERNELS_CUDA_DEVICE_DEVICE_BRANCH_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace lossd::kernels::cuda {

// The driver version from which conditional nodes have an else branch.
inline constexpr int kBranchDriverVersion = 12080;

// Owns the executable graph of a branch. If the work differs from the last enqueued work only in parameters,
// and in kernels with the same cluster dimensions, the graph is updated (some 50 us of the host's time).
// Otherwise it is replaced, which waits for the device. Destroy it, or enqueue again, only after the device
// has finished the work enqueued last. Not thread-safe.
class DeviceBranch {
 public:
  DeviceBranch() = default;
  DeviceBranch(const DeviceBranch&) = delete;
  DeviceBranch& operator=(const DeviceBranch&) = delete;
  ~DeviceBranch() { Reset(); }

  // Enqueues a branch on `stream`: if *flag (device memory) is not 0 when the stream reaches the branch, the
  // work of `if_set` is done, else the work of `if_not`. Each function is called once. They may launch
  // kernels, copy and set memory, all on `stream`, but use no events. After an error nothing was enqueued.
  absl::Status Enqueue(const int32_t* flag, cudaStream_t stream, absl::FunctionRef<absl::Status()> if_set,
                       absl::FunctionRef<absl::Status()> if_not);

 private:
  bool Update(cudaGraph_t graph);  // false: exec_ cannot be updated to `graph`
  void Reset();

  cudaGraphExec_t exec_ = nullptr;
  std::vector<std::array<unsigned, 3>> clusters_;  // of the kernels of exec_, first those of if_set
};

// Does what DeviceBranch::Enqueue does, but waits until the stream has reached the branch, and calls only the
// function that is chosen. For tools that cannot follow conditional graphs.
absl::Status BranchOnHost(const int32_t* flag, cudaStream_t stream, absl::FunctionRef<absl::Status()> if_set,
                          absl::FunctionRef<absl::Status()> if_not);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_DEVICE_DEVICE_BRANCH_H_
