// SPDX-License-Identifier: Apache-2.0
// Launchers of the row loss kernel, fp32 logits of some rows in, row results and their gradient out, and of
// the kernel that computes the targets' own logits.
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

// dots[r] = hidden[r] . weight[targets[r]] in fp32 for r in [0, rows); both matrices have `ld` columns, a
// multiple of 8, and the same dtype.
struct TargetDotParams {
  const void* hidden = nullptr;  // [rows, ld]
  const void* weight = nullptr;  // [vocab, ld]
  DType dtype = DType::kBFloat16;
  int64_t ld = 0;
  int64_t rows = 0;
  const int32_t* targets = nullptr;  // [rows]
  float* dots = nullptr;             // [rows]
  // Of a head that is split by vocabulary: `targets` may be classes elsewhere, whose dots are 0, and dots
  // include the bias.
  int32_t* columns = nullptr;   // [rows], out: the target, or -1 if it is elsewhere. Null: none is
  int64_t classes = 0;          // that are here
  const float* bias = nullptr;  // [classes] or null: none
};
cudaError_t LaunchTargetDots(const TargetDotParams& params, cudaStream_t stream);

struct RowLossParams {
  LogitMatrix logits;  // fp32, W x of the whole vocabulary; overwritten
  // Out, in the compute dtype: dL/ds over (scale * gradient unit), 0 in padding rows and columns and in rows
  // whose loss is not finite. It may be InPlaceOf(logits). data null: not wanted.
  LogitMatrix gradient;
  LossTerms terms;
  RowInputs in;
  RowResults out;
  bool with_uniform = true;  // ds has the uniform part of label smoothing
};
cudaError_t LaunchRowLoss(const RowLossParams& params, const DeviceLimits& limits, cudaStream_t stream);

// How LaunchRowLoss() goes about rows of `ld` logits, for people.
std::string DescribeRowLoss(int64_t ld, const DeviceLimits& limits);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_ROW_LOSS_H_
