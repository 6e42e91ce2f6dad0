// SPDX-License-Identifier: Apache-2.0
// What a chunk goes on with when the device has decided whether it is exact (kernels/decision.h).
#ifndef LOSSD_KERNELS_CUDA_PATHS_DECISION_BRANCH_H_
#define LOSSD_KERNELS_CUDA_PATHS_DECISION_BRANCH_H_

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/cuda/device/device_branch.h"
#include "kernels/cuda/paths/chunk_path.h"

namespace lossd::kernels::cuda {

// Enqueues on the device's compute stream what `exact` enqueues if job.decision is to be exact, else what
// `planned` does. As DeviceBranch::Enqueue(); a chunk that is sampled whatever its data enqueues `planned`
// without a branch. Driven by the backend's thread.
absl::Status BranchByDecision(const PathContext& context, const ChunkJob& job, DeviceBranch& branch,
                              absl::FunctionRef<absl::Status()> exact,
                              absl::FunctionRef<absl::Status()> planned);

// The same by any number of the device: `if_set` if it is not 0.
absl::Status BranchByFlag(const PathContext& context, const int32_t* flag, DeviceBranch& branch,
                          absl::FunctionRef<absl::Status()> if_set, absl::FunctionRef<absl::Status()> if_not);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_DECISION_BRANCH_H_
