// The fused loss: the first product of a chunk with its loss in the epilogue, on Hopper
// (docs/kernels/hopper.md).
//
// Enqueues on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_HOPPER_FUSED_LOSS_H_
#define LOSSD_KERNELS_CUDA_HOPPER_FUSED_LOSS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/cuda/hopper/fused_rows.h"
#include "kernels/cuda/row_loss.h"
#include "kernels/dtype.h"

namespace lossd::kernels::cuda::hopper {

// Why the loss of a chunk cannot be fused, or "". `loss` as LaunchFusedLoss() would get it; clusters as
// LogitPassClusters() says.
absl::string_view WhyNotFused(const RowLossParams& loss, int clusters);
// Why a chunk whose loss can be fused is better not, or "".
absl::string_view WhyNotFaster(const RowLossParams& loss);

struct FusedLossParams {
  // As LaunchRowLoss() takes it, with target_dots, but logits need not hold anything on entry. With
  // write_gradient they are, on return, exponentials: row r times rows.factor[r] is dL/ds over (scale *
  // gradient unit), 0 in padding columns and in rows whose loss is not finite. Without it they are not
  // touched.
  RowLossParams loss;
  const void* hidden = nullptr;  // [loss.padded_rows, inner], loss.dtype
  const void* weight = nullptr;  // [loss.ld, inner], loss.dtype
  int64_t inner = 0;             // a multiple of 8
  FusedRows rows;  // with lists only without write_gradient; complete on return, but for rows with too many
  GradientRule* rules = nullptr;        // [loss.rows], out, or null: for a logit pass that writes gradients
  const ClusterOrder* order = nullptr;  // of the device; host memory, or null
};
cudaError_t LaunchFusedLoss(const FusedLossParams& params, int clusters, cudaStream_t stream);

// The gradient over a block of classes of rows whose rules are known.
struct FusedGradientParams {
  // As for LaunchFusedLoss(), but logits [padded_rows, ld] hold, on return, dL/ds over (scale * gradient
  // unit) of the classes [first_class, first_class + classes), 0 in padding columns.
  RowLossParams loss;
  const void* hidden = nullptr;         // [loss.padded_rows, inner], loss.dtype
  const void* weight = nullptr;         // [ld, inner], from first_class on
  int64_t inner = 0;                    // a multiple of 8
  const GradientRule* rules = nullptr;  // [loss.padded_rows]
  int64_t first_class = 0;
  int64_t classes = 0;
};
cudaError_t LaunchFusedGradient(const FusedGradientParams& params, int clusters, cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_FUSED_LOSS_H_
