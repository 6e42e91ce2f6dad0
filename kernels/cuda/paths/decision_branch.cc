#include "kernels/cuda/paths/decision_branch.h"

namespace lossd::kernels::cuda {

absl::Status BranchByDecision(const PathContext& context, const ChunkJob& job, DeviceBranch& branch,
                              absl::FunctionRef<absl::Status()> exact,
                              absl::FunctionRef<absl::Status()> planned) {
  if (job.plan.gradients == Gradients::kSampled) return planned();
  static_assert(static_cast<int32_t>(Decision::kAsPlanned) == 0, "what is not 0 is exact");
  const auto* decision = reinterpret_cast<const int32_t*>(job.decision);
  const cudaStream_t stream = context.device->compute();
  return context.device->options().host_branches ? BranchOnHost(decision, stream, exact, planned)
                                                 : branch.Enqueue(decision, stream, exact, planned);
}

}  // namespace lossd::kernels::cuda
