// SPDX-License-Identifier: Apache-2.0
// Launchers of two kernels: the row loss kernel (input: fp32 logits of some rows; output: row results and the
// gradient of the logits), and the kernel that computes the dot products of rows with their targets.
//
// Both enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_ROW_LOSS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_ROW_LOSS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// dots[r] = hidden[r] . weight[targets[r]] in fp32, for r in [0, rows). Both matrices have `ld` columns, a
// multiple of 8, and the same dtype.
struct TargetDotParams {
  const void* hidden = nullptr;  // [rows, ld]
  const void* weight = nullptr;  // [vocab, ld]
  DType dtype = DType::kBFloat16;
  int64_t ld = 0;
  int64_t rows = 0;
  const int32_t* targets = nullptr;  // [rows]
  float* dots = nullptr;             // [rows]
  // For a head that is split by vocabulary. Some `targets` may be on other devices; the dots of these rows
  // are 0. All other dots include `bias`.
  //
  // [rows], out: the target, or -1 if it is on another device. Null: all targets are here.
  int32_t* columns = nullptr;
  int64_t classes = 0;          // classes that are here
  const float* bias = nullptr;  // [classes] or null: none
};
cudaError_t LaunchTargetDots(const TargetDotParams& params, cudaStream_t stream);

// Computes row results and the gradient of some rows.
struct RowLossParams {
  LogitMatrix logits;  // fp32, W x for all classes; overwritten
  // Out, in the compute dtype: dL/ds divided by (scale * gradient unit); 0 in padding rows and columns, and
  // in rows whose loss is not finite. May be InPlaceOf(logits). data null: not wanted.
  LogitMatrix gradient;
  LossTerms terms;
  RowInputs in;
  RowResults out;
  bool with_uniform = true;  // ds includes the uniform part of label smoothing
};
cudaError_t LaunchRowLoss(const RowLossParams& params, const DeviceLimits& limits, cudaStream_t stream);

// How LaunchRowLoss() processes rows of `ld` logits, for people.
std::string DescribeRowLoss(int64_t ld, const DeviceLimits& limits);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_ROW_LOSS_H_
