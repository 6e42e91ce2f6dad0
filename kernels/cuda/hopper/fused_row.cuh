// What is known of a row when its tiles are merged, as the kernels after the logit pass need it
// (fused_rows.cu has the formulas).
#ifndef LOSSD_KERNELS_CUDA_HOPPER_FUSED_ROW_CUH_
#define LOSSD_KERNELS_CUDA_HOPPER_FUSED_ROW_CUH_

#include <cstdint>

#include "kernels/cuda/hopper/fused_rows.h"
#include "kernels/cuda/row_loss_math.cuh"

namespace lossd::kernels::cuda::hopper {

template <bool kGeneral>
__device__ __forceinline__ Target MakeTarget(const RowLossParams& p, int64_t row) {
  const LogitMap<__nv_bfloat16, kGeneral> map(p);
  Target target;
  target.column = p.targets[row];
  target.logit = map(p.target_dots[row], target.column);
  target.class_weight = kGeneral ? ClassWeight(p, target.column) : 1.0f;
  return target;
}

struct FusedRow {
  float f;
  Target target;
  Stats rest;     // of all classes but the target, rebased to the largest logit of the row; without arg
  float rescale;  // 2^(c - M)
};

template <bool kGeneral>
__device__ __forceinline__ FusedRow LoadFusedRow(const RowLossParams& p, const FusedRows& w, int64_t row) {
  FusedRow r;
  r.f = LogitMap<__nv_bfloat16, kGeneral>(p).f;
  r.target = MakeTarget<kGeneral>(p, row);
  r.rest = NoStats();
  r.rest.max = fmaxf(w.max[row], r.target.logit.z);
  const float shift = w.reference[row] - Reference(r.rest.max, r.f);
  r.rescale = Exp2(shift);
  r.rest.sum = w.sum[row] * r.rescale;
  r.rest.spread = r.rescale * (w.spread[row] + w.sum[row] * shift);
  return r;
}

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_FUSED_ROW_CUH_
