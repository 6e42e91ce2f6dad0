// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels for heads that are split by vocabulary. Each device has statistics of a row over
// its own classes; these kernels merge the statistics of all devices. Each device calls LaunchRecordRows; the
// caller gathers the records of all devices on each device; then each device calls LaunchMergeRows.
//
// All launchers enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_SPLIT_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_SPLIT_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/hopper/fused_rows.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/kernels/recomputed_rows.h"

namespace lossd::kernels::cuda {

// LaunchRecordRows writes one record for each row. LaunchMergeRows adds up the records `all` [parts, rows] of
// all devices, in the order of the devices, so that every device gets the same bits. `rows.sum_reference`
// must not be the memory of `rows.reference`: the merged sums get another reference, but the exponentials
// that this device has stored stay relative to rows.reference.
cudaError_t LaunchRecordRows(const LossTerms& terms, const RowInputs& in, const hopper::FusedRows& rows,
                             RowRecord* records, cudaStream_t stream);
cudaError_t LaunchMergeRows(const LossTerms& terms, const RowInputs& in, const RowRecord* all, int parts,
                            const hopper::FusedRows& rows, cudaStream_t stream);

// The same for a head that recomputes logits, whose classes come in blocks.
cudaError_t LaunchRecordRows(const LossTerms& terms, const RowInputs& in, const RunningRow* rows,
                             RowRecord* records, cudaStream_t stream);
cudaError_t LaunchMergeRows(const LossTerms& terms, const RowInputs& in, const RowRecord* all, int parts,
                            RunningRow* rows, cudaStream_t stream);

// to[i] = the sum of all[part][i] over the parts, in their order, for i < n. all: [parts, n].
cudaError_t LaunchAddParts(const float* all, int parts, int64_t n, float* to, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_SPLIT_ROWS_H_
