// Which kernels compute a chunk, and why those: decided from what is known before anything is enqueued. Pure
// functions; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_CHUNK_PLAN_H_
#define LOSSD_KERNELS_CUDA_CHUNK_PLAN_H_

#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/choice.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/filtered/filter_plan.h"
#include "kernels/cuda/norm/norm.h"
#include "kernels/cuda/row_loss.h"
#include "kernels/loss_options.h"

namespace lossd::kernels::cuda {

struct ChunkPlan {
  // kFiltered and kAuto: the device decides when it has seen the logits.
  Algorithm algorithm = Algorithm::kExact;
  absl::string_view why_exact;      // "" unless the algorithm is kExact
  absl::string_view why_not_fused;  // "": the loss is computed in the epilogue of the logits product
  // "": the gradients are products of our own (hopper/product.h) instead of cuBLASLt's.
  absl::string_view why_library_products;
  std::optional<NormPlan> norm;           // none: the head has no norm
  std::optional<NormPlan> norm_gradient;  // none: it has no norm, or none is wanted

  bool filtered() const { return algorithm != Algorithm::kExact; }
  bool fused() const { return why_not_fused.empty(); }
  bool own_products() const { return why_library_products.empty(); }
};

// All but the norm. `loss` as the row loss kernel would get it; `filter` of the head.
ChunkPlan PlanChunk(const LossOptions& options, const RowLossParams& loss, const FilterShape& filter,
                    const DeviceLimits& limits, FusedLoss fused_loss);

// Likewise of a head for Algorithm::kCut. Products are cuBLASLt's; the pass that computes the loss writes no
// gradient.
ChunkPlan PlanCutChunk(const LossOptions& options, const RowLossParams& loss, const FilterShape& filter,
                       const DeviceLimits& limits, FusedLoss fused_loss);

std::vector<Choice> Describe(const ChunkPlan& plan);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_CHUNK_PLAN_H_
