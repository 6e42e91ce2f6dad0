// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels that move, mask and reduce the rows of a chunk, and of the guard. The guard finds
// the rows that must not be accumulated: if a row of a slice has a value that is not finite, these are all
// rows of the slice.
//
// All launchers enqueue on `stream`; all pointers are device memory unless said otherwise. Thread-safe. "Raw"
// rows are the rows of all slices as the host has them; "compact" rows are those of them that have a target,
// one after the other.
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

// matrix[r] *= scale * factors[r], or 0 where keep[r] == 0, for r in [0, rows). If keep is null, all rows are
// scaled.
cudaError_t LaunchScaleRows(const DeviceMatrix& matrix, const float* factors, float scale,
                            const int32_t* keep, int64_t rows, cudaStream_t stream);

// accumulator[c] += scale * the sum over kept rows r of factors[r] * matrix[r, c], for c in [0, matrix.cols).
// keep null: all rows are kept; factors null: all 1. partials: ColumnSumScratch(matrix.cols) floats.
cudaError_t LaunchColumnSum(const DeviceMatrix& matrix, const int32_t* keep, const float* factors,
                            int64_t rows, float scale, float* partials, float* accumulator,
                            cudaStream_t stream);

// first[c] += scale * the sum over i < parts of partials[i * cols + c], in a fixed order. If `second` is not
// null, does the same for `second` with the partial sums from partials + parts * cols on. start_early: the
// blocks may be scheduled before the previous kernel has ended; they then wait for its end (compute
// capability 9.0 or later).
cudaError_t LaunchAddPartials(const float* partials, int64_t parts, int64_t cols, float scale, float* first,
                              float* second, bool start_early, cudaStream_t stream);

// ---- the guard ----

// keep[r] = accumulate[r], but 0 if any row of r's slice is not finite. A row is not finite if its loss, lse,
// target_logprob, its entropy (if needed) or the upper bound of its gradient is not finite. first_bad[s]: the
// first such compact row of slice s, or -1. Slice s has the compact rows [slice_begin[s], slice_begin[s +
// 1]). Absent rows are not checked.
struct GuardParams {
  int64_t slices = 0;
  const int32_t* slice_begin = nullptr;  // [slices + 1]
  const int32_t* accumulate = nullptr;   // [rows]
  const RowCheck* checks = nullptr;      // [rows]
  LossTerms terms;
  RowInputs in;
  RowResults out;
  // The factor by which gradients divided by (logit scale * gradient unit) are multiplied later.
  float gradient_scale = 1.0f;
  int32_t* first_bad = nullptr;  // [slices]
  int32_t* keep = nullptr;       // [rows]
};
cudaError_t LaunchGuard(const GuardParams& params, cudaStream_t stream);

// Finds rows whose dx must be finite but is not. Sets the loss of these rows to NaN, so that a later
// LaunchGuard finds them.
struct HiddenGuardParams {
  DeviceMatrix gradient;  // dx, or the gradient before a norm's backward pass; rows 32-byte aligned
  float scale = 1.0f;     // the factor by which the gradient is multiplied later
  // True if the gradient is dx in fp16, in the form that the client gets. In this form infinity means that a
  // gradient is too large, which a loss scaler wants to see. So only NaN counts as not finite.
  bool may_overflow = false;
  int64_t begin = 0;  // rows [begin, end) are complete here
  int64_t end = 0;
  const RowCheck* checks = nullptr;  // [rows]
  const int32_t* keep = nullptr;     // [rows], written by the guard before this one
  float* loss = nullptr;             // [rows]
  // [1]. Becomes 1 if a row was found that had been kept or, if `accumulate` [rows] is given, one that is not
  // accumulated. Otherwise unchanged. Null: not wanted.
  int32_t* lost = nullptr;
  const int32_t* accumulate = nullptr;
};
cudaError_t LaunchHiddenGuard(const HiddenGuardParams& params, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_ROWS_H_
