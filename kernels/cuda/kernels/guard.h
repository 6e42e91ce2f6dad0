// SPDX-License-Identifier: Apache-2.0
// Launchers of the guard, which finds the rows of a chunk that may not reach the accumulators: all rows of a
// slice in which something is not finite.
//
// All enqueue on `stream`; all pointers are device memory. Thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_GUARD_H_
#define LOSSD_KERNELS_CUDA_KERNELS_GUARD_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/kernels/row_checks.h"
#include "kernels/cuda/kernels/rows.h"

namespace lossd::kernels::cuda {

// keep[r] = accumulate[r], unless a row of r's slice is not finite: its loss, lse or target_logprob, its
// entropy if that is needed, or what its gradient is at most. first_bad[s]: the first such compact row of
// slice s, or -1. Slice s has the compact rows [slice_begin[s], slice_begin[s + 1]). Absent rows are not
// looked at.
struct GuardParams {
  int64_t slices = 0;
  const int32_t* slice_begin = nullptr;  // [slices + 1]
  const int32_t* accumulate = nullptr;   // [rows]
  const RowCheck* checks = nullptr;      // [rows]
  LossTerms terms;
  RowInputs in;
  RowResults out;
  float gradient_scale = 1.0f;   // by which gradients over (logit scale * gradient unit) will be multiplied
  int32_t* first_bad = nullptr;  // [slices]
  int32_t* keep = nullptr;       // [rows]
};
cudaError_t LaunchGuard(const GuardParams& params, cudaStream_t stream);

// Rows of dx that are not finite, of those whose dx is to be: their loss becomes NaN, so that a guard after
// this finds them.
struct HiddenGuardParams {
  DeviceMatrix gradient;  // dx, or what goes through a norm; rows begin on 32 bytes
  float scale = 1.0f;     // by which it is still to be multiplied
  // dx in fp16 as its client gets it, where infinity is what a gradient is that is too large (a loss scaler
  // wants to see it): only NaN counts.
  bool may_overflow = false;
  int64_t begin = 0;  // rows [begin, end) are complete here
  int64_t end = 0;
  const RowCheck* checks = nullptr;  // [rows]
  const int32_t* keep = nullptr;     // [rows], of the guard before
  float* loss = nullptr;             // [rows]
  // 1 if there is such a row that was kept, or with `accumulate` [rows] one that is not accumulated anyway;
  // null: not wanted. Else as it was.
  int32_t* lost = nullptr;
  const int32_t* accumulate = nullptr;
};
cudaError_t LaunchHiddenGuard(const HiddenGuardParams& params, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_GUARD_H_
