// SPDX-License-Identifier: Apache-2.0
// Launchers of the row kernels before and after the logit pass (logit_pass.h). Before it, they prepare the
// values that the pass needs for each row. After it, they compute row results and factors of gradients from
// the sums that the pass has stored, and turn its lists into candidates of filtered gradients.
//
// All launchers enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
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

// Writes reference and threshold, also for padding rows. Zeroes marked_panels and claimed_positions. `in` has
// target_dots, here and in the functions below. The variant with lists also empties the lists and writes the
// first lower bounds of the sums.
cudaError_t LaunchPrepareRows(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                              cudaStream_t stream);
cudaError_t LaunchPrepareRows(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                              const CandidateLists& lists, cudaStream_t stream);

// Computes max, sum, spread and arg of all `rows` from the partial results of tiles. If a panel has a row
// whose sum is too large for 16-bit exponentials, the panel gets a suitable reference, and a mark that it
// must be computed again.
cudaError_t LaunchMergeTiles(const LossTerms& terms, int64_t row_count, const FusedRows& rows,
                             cudaStream_t stream);
// The same for the marked panels after they have been computed again. Marks nothing.
cudaError_t LaunchMergeMarkedTiles(const LossTerms& terms, int64_t row_count, const FusedRows& rows,
                                   cudaStream_t stream);

// Computes row results.
cudaError_t LaunchFinishRows(const LossTerms& terms, const RowInputs& in, const RowResults& out,
                             const FusedRows& rows, cudaStream_t stream);
// Computes row results, and rules[r], from which the gradient of each row is made.
cudaError_t LaunchFinishRules(const LossTerms& terms, const RowInputs& in, const RowResults& out,
                              const FusedRows& rows, GradientRule* rules, cudaStream_t stream);
// Computes row results and factors, writes the targets' elements of the exponentials [padded_rows, ld], and
// zeroes padding rows and rows whose loss is not finite. Rows whose coef_entropy is not 0 get factor 1, and
// must go through LaunchEntropyGradient().
cudaError_t LaunchFinishExponentials(const LossTerms& terms, const RowInputs& in, const RowResults& out,
                                     const FusedRows& rows, void* exponentials, int64_t ld,
                                     cudaStream_t stream);

// ---- from the lists of the logit pass (CandidateLists) to the candidates of filtered gradients ----
//
// The lists of candidates are made in up to three passes. The first, ListingPass, computes the sums and lists
// candidates at the same time, by lower bounds of the sums; it leaves out the first tiles, where the bounds
// are too low. When the sums are complete, SecondListingPass lists the candidates of the first tiles. It also
// makes the lists of a panel anew if one of them is incomplete, because too many classes passed the lower
// bounds. LastListingPass does so for panels in which the second pass has found that a list has too little
// room.

// Call after the marked panels have been merged. Sets sum_bound to the row's sum. Marks in marked_panels, for
// SecondListingPass::anew, the panels that have a row with an incomplete list, and empties the lists of these
// panels.
cudaError_t LaunchPrepareSecondListing(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                                       const CandidateLists& lists, cudaStream_t stream);

// Call after the second listing. Marks in marked_panels, for LastListingPass, the panels that were not listed
// anew and still have a row with an incomplete list, and empties the lists of these panels. Such a list had
// room for the candidates that were listed during the first pass, but not in addition for the candidates of
// the first tiles. Whether this happens depends on the order of the tiles. The new list does not depend on
// the order, because it is made with complete sums.
cudaError_t LaunchPrepareLastListing(const RowInputs& in, const FusedRows& rows, const CandidateLists& lists,
                                     cudaStream_t stream);

// As LaunchSelectRows() (filtered/filtered.h), but from complete lists instead of logits, and without row
// results. If a row has more candidates than its list has room for, `used` is above capacity on return.
cudaError_t LaunchSelectListed(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                               const CandidateLists& lists, const RowSelection& selection,
                               cudaStream_t stream);

// ---- rows with an upstream gradient of their entropy: from stored exponentials to gradients ----

// The gradient of such a row is not a multiple of its exponentials, and depends on the row's complete sums.
// In the rows in.rows whose coef_entropy is not 0, recoverable exponentials [rows, ld] bf16 become the
// gradient that rows.entropy describes, in place. The elements of the targets do not change.
cudaError_t LaunchEntropyGradient(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                                  void* exponentials, int64_t ld, cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_ROWS_H_
