// SPDX-License-Identifier: Apache-2.0
// What is known of a row when its tiles are merged, as the kernels after the logit pass need it
// (fused_rows.cu has the formulas).
//
// The file is shorter than 60 lines because two kernels include it: fused_rows.cu and fused_lists.cu.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_ROW_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_ROW_CUH_

#include <cstdint>

#include "kernels/cuda/kernels/hopper/fused_rows.h"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda::hopper {

template <bool kGeneral>
__device__ __forceinline__ Target MakeTarget(const LossTerms& terms, const RowInputs& in, int64_t row) {
  return MakeTargetOf(terms, in, LogitMap<__nv_bfloat16, kGeneral>(terms), row, 0);
}

struct FusedRow {
  float f;
  Target target;
  Stats others;   // of all classes but the target, rebased to the largest logit of the row; without arg
  float shift;    // c - M, of what is stored here
  float rescale;  // 2^shift
};

template <bool kGeneral>
__device__ __forceinline__ FusedRow LoadFusedRow(const LossTerms& terms, const RowInputs& in,
                                                 const FusedRows& w, int64_t row) {
  FusedRow r;
  r.f = LogitMap<__nv_bfloat16, kGeneral>(terms).f;
  r.target = MakeTarget<kGeneral>(terms, in, row);
  r.others = NoStats();
  r.others.max = fmaxf(w.max[row], r.target.logit.z);
  r.shift = w.reference[row] - Reference(r.others.max, r.f);
  r.rescale = Exp2(r.shift);
  const float shift = w.sum_reference[row] - Reference(r.others.max, r.f);
  const float rescale = Exp2(shift);
  r.others.sum = w.sum[row] * rescale;
  r.others.spread = rescale * (w.spread[row] + w.sum[row] * shift);
  return r;
}

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_FUSED_ROW_CUH_
