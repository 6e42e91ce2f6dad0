// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/decision_branch.h"

namespace lossd::kernels::cuda {

absl::Status BranchByDecision(const PathContext& context, const ChunkJob& job, DeviceBranch& branch,
                              absl::FunctionRef<absl::Status()> exact,
                              absl::FunctionRef<absl::Status()> planned) {
  if (job.plan.gradients == Gradients::kSampled) return planned();
  static_assert(static_cast<int32_t>(Decision::kAsPlanned) == 0, "what is not 0 is exact");
  return BranchByFlag(context, reinterpret_cast<const int32_t*>(job.decision), branch, exact, planned);
}

absl::Status BranchByFlag(const PathContext& context, const int32_t* flag, DeviceBranch& branch,
                          absl::FunctionRef<absl::Status()> if_set,
                          absl::FunctionRef<absl::Status()> if_not) {
  const cudaStream_t stream = context.device->compute();
  return context.device->options().host_branches ? BranchOnHost(flag, stream, if_set, if_not)
                                                 : branch.Enqueue(flag, stream, if_set, if_not);
}

}  // namespace lossd::kernels::cuda
