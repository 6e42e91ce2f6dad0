// Launchers of the kernels that turn the lists of the logit pass (candidates.h) into the candidates of the
// filtered algorithm.
//
// All enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_HOPPER_FUSED_LISTS_H_
#define LOSSD_KERNELS_CUDA_HOPPER_FUSED_LISTS_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/filtered/filtered.h"
#include "kernels/cuda/hopper/fused_rows.h"
#include "kernels/cuda/row_loss.h"

namespace lossd::kernels::cuda::hopper {

// After LaunchMergeTiles(): `known` becomes the row's sum, and redo, from now on the pass's relist, tells the
// panels that have a row with an incomplete list; their lists are empty again.
cudaError_t LaunchPrepareRelist(const RowLossParams& loss, const FusedRows& rows, cudaStream_t stream);

// After the pass has gone over them: redo, from now on the pass's redo and relist, tells the panels that were
// not listed anew and yet have a row with an incomplete list; their lists are empty again. Such a list had
// room for what was listed as the pass went by but not for the first tiles' candidates beside it, which
// depends on the order of the tiles; listed anew, by sums that are known, it does not.
cudaError_t LaunchPrepareLastRelist(const RowLossParams& loss, const FusedRows& rows, cudaStream_t stream);

// As LaunchSelectRows(), from complete lists instead of logits, without row results. A row with more
// candidates than a list holds leaves `used` above capacity.
cudaError_t LaunchSelectListed(const RowLossParams& loss, const FusedRows& rows,
                               const RowSelection& selection, cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_FUSED_LISTS_H_
