// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels that move, mask and reduce the rows of a chunk, and of the guard. The guard finds
// the rows that may not be accumulated: all rows of a slice in which a value is not finite.
//
// All enqueue on `stream`; all pointers are device memory unless said otherwise. Thread-safe.
// "Raw" rows are the rows of all slices as the host has them; "compact" rows are those with a target.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/launch_plan.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// A matrix [rows, cols] whose rows are `ld` elements apart.
struct DeviceMatrix {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t cols = 0;
  int64_t ld = 0;
};

// to[map[i]] = from[i] for i in [0, rows) where map[i] >= 0. The columns from from.cols up to to.ld become 0.
cudaError_t LaunchGatherRows(const DeviceMatrix& from, const DeviceMatrix& to, const int32_t* map,
                             int64_t rows, cudaStream_t stream);

// to[i] = scale * from[map[i]], or 0 where map[i] < 0, for i in [0, rows).
cudaError_t LaunchScatterRows(const DeviceMatrix& from, const DeviceMatrix& to, const int32_t* map,
                              int64_t rows, float scale, cudaStream_t stream);

// rows[i] = 0 where map[i] < 0, for i in [0, count).
cudaError_t LaunchZeroUnmappedRows(const DeviceMatrix& rows, const int32_t* map, int64_t count,
                                   cudaStream_t stream);

// matrix[r] = 0 where keep[r] == 0 (LaunchGuard), for r in [0, rows).
cudaError_t LaunchZeroDroppedRows(const DeviceMatrix& matrix, const int32_t* keep, int64_t rows,
                                  cudaStream_t stream);

// matrix[r] *= scale * factors[r], or 0 where keep[r] == 0, for r in [0, rows). keep may be null (all rows).
cudaError_t LaunchScaleRows(const DeviceMatrix& matrix, const float* factors, float scale,
                            const int32_t* keep, int64_t rows, cudaStream_t stream);

// accumulator[c] += scale * the sum over kept rows r of factors[r] * matrix[r, c], for c in [0, matrix.cols).
// keep null: all rows are kept; factors null: all 1. partials: ColumnSumScratch(matrix.cols) floats.
cudaError_t LaunchColumnSum(const DeviceMatrix& matrix, const int32_t* keep, const float* factors,
                            int64_t rows, float scale, float* partials, float* accumulator,
                            cudaStream_t stream);

// first[c] += scale * the sum over i < parts of partials[i * cols + c], in a fixed order. Unless `second` is
// null, the same for `second`, from partials + parts * cols on. start_early: blocks may be scheduled before
// the previous kernel has ended, and wait for it (compute capability 9.0 or later).
cudaError_t LaunchAddPartials(const float* partials, int64_t parts, int64_t cols, float scale, float* first,
                              float* second, bool start_early, cudaStream_t stream);

// ---- the guard ----

// keep[r] = accumulate[r], unless a row of r's slice is not finite; then 0. A row is not finite if its loss,
// lse, target_logprob, its entropy (if that is needed) or the upper bound of its gradient is not.
// first_bad[s]: the first such compact row of slice s, or -1. Slice s has the compact rows [slice_begin[s],
// slice_begin[s + 1]). Absent rows are not checked.
struct GuardParams {
  int64_t slices = 0;
  const int32_t* slice_begin = nullptr;  // [slices + 1]
  const int32_t* accumulate = nullptr;   // [rows]
  const RowCheck* checks = nullptr;      // [rows]
  LossTerms terms;
  RowInputs in;
  RowResults out;
  float gradient_scale = 1.0f;   // gradients over (logit scale * gradient unit) are multiplied by it later
  int32_t* first_bad = nullptr;  // [slices]
  int32_t* keep = nullptr;       // [rows]
};
cudaError_t LaunchGuard(const GuardParams& params, cudaStream_t stream);

// Finds rows whose dx must be finite and is not. Their loss becomes NaN, so that a guard after this finds
// them.
struct HiddenGuardParams {
  DeviceMatrix gradient;  // dx, or the gradient before a norm's backward pass; rows 32-byte aligned
  float scale = 1.0f;     // the gradient is multiplied by it later
  // The gradient is dx in fp16, in the form that the client gets. There, infinity means that a gradient is
  // too large (a loss scaler wants to see it), so only NaN counts.
  bool may_overflow = false;
  int64_t begin = 0;  // rows [begin, end) are complete here
  int64_t end = 0;
  const RowCheck* checks = nullptr;  // [rows]
  const int32_t* keep = nullptr;     // [rows], from the guard before
  float* loss = nullptr;             // [rows]
  // Becomes 1 if there is such a row that was kept; with `accumulate` [rows], if there is one that is not
  // accumulated. Otherwise unchanged. Null: not wanted.
  int32_t* lost = nullptr;
  const int32_t* accumulate = nullptr;
};
cudaError_t LaunchHiddenGuard(const HiddenGuardParams& params, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_ROWS_H_
