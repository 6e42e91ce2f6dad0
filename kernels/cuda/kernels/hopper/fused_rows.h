// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels around the logit pass: what the pass has to know of a row beforehand, from what it
// leaves of a row to the row's results and the factors of its gradient, and from its lists to the candidates
// of filtered gradients.
//
// All enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/filtered/filtered.h"
#include "kernels/cuda/kernels/hopper/logit_pass.h"
#include "kernels/cuda/kernels/hopper/plan.h"
#include "kernels/cuda/kernels/loss_rows.h"

namespace lossd::kernels::cuda::hopper {

// reference and threshold, also of padding rows, and zeros in marked_panels and claimed_positions. `in` has
// target_dots, here and below. With lists: also empty lists and the first lower bounds of the sums.
cudaError_t LaunchPrepareRows(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                              cudaStream_t stream);
cudaError_t LaunchPrepareRows(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                              const CandidateLists& lists, cudaStream_t stream);

// max, sum, spread and arg of all `rows` from the partials. Panels that have a row whose sum is too large for
// 16-bit exponentials get a reference that is right for them, and a mark.
cudaError_t LaunchMergeTiles(const LossTerms& terms, int64_t row_count, const FusedRows& rows,
                             cudaStream_t stream);
// The same for the marked panels, which have been computed again. It marks nothing.
cudaError_t LaunchMergeMarkedTiles(const LossTerms& terms, int64_t row_count, const FusedRows& rows,
                                   cudaStream_t stream);

// Row results.
cudaError_t LaunchFinishRows(const LossTerms& terms, const RowInputs& in, const RowResults& out,
                             const FusedRows& rows, cudaStream_t stream);
// Row results, and rules[r], what the gradient of each row is made of.
cudaError_t LaunchFinishRules(const LossTerms& terms, const RowInputs& in, const RowResults& out,
                              const FusedRows& rows, GradientRule* rules, cudaStream_t stream);
// Row results, factors, the targets' entries in the exponentials [padded_rows, ld], and zeros in padding rows
// and in the rows whose loss is not finite. Rows whose coef_entropy is not 0 have factor 1, and are to go
// through LaunchEntropyGradient().
cudaError_t LaunchFinishExponentials(const LossTerms& terms, const RowInputs& in, const RowResults& out,
                                     const FusedRows& rows, void* exponentials, int64_t ld,
                                     cudaStream_t stream);

// ---- from the lists of the logit pass (CandidateLists) to the candidates of filtered gradients ----

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

// ---- from stored exponentials to gradients in rows that have an upstream gradient of their entropy ----

// Such a gradient is no multiple of the exponentials, and needs the row's complete sums.
// Changes, in place, the rows among in.rows whose coef_entropy is not 0: recoverable exponentials [rows, ld]
// bf16 become what rows.entropy says. The elements of the targets stay as they are.
cudaError_t LaunchEntropyGradient(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                                  void* exponentials, int64_t ld, cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_ROWS_H_
