// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels that turn the lists of the logit pass (candidates.h) into the candidates of
// filtered gradients.
//
// All enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_LISTS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_LISTS_H_

#include <cuda_runtime_api.h>

#include "kernels/cuda/kernels/filtered/filtered.h"
#include "kernels/cuda/kernels/hopper/fused_rows.h"
#include "kernels/cuda/kernels/loss_rows.h"

namespace lossd::kernels::cuda::hopper {

// After the marked panels have been merged: sum_bound becomes the row's sum, and marked_panels, from now on
// SecondListingPass::anew, tells the panels that have a row with an incomplete list; their lists are empty
// again.
cudaError_t LaunchPrepareSecondListing(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                                       const CandidateLists& lists, cudaStream_t stream);

// After the second listing: marked_panels, from now on those of LastListingPass, tells the panels that were
// not listed anew and yet have a row with an incomplete list; their lists are empty again. Such a list had
// room for what was listed as the pass went by but not for the first tiles' candidates beside it, which
// depends on the order of the tiles. Listed anew, by complete sums, it does not.
cudaError_t LaunchPrepareLastListing(const RowInputs& in, const FusedRows& rows, const CandidateLists& lists,
                                     cudaStream_t stream);

// As LaunchSelectRows(), from complete lists instead of logits, without row results. A row with more
// candidates than a list holds leaves `used` above capacity.
cudaError_t LaunchSelectListed(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                               const CandidateLists& lists, const RowSelection& selection,
                               cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_LISTS_H_
