// SPDX-License-Identifier: Apache-2.0
// Exponentials of 16 bits from which logits can be recovered: 2^d times the slope of a softcap cannot,
// because logits below and above softcap - 1 may have the same.
//
// 2^d alone, rounded to bf16, says d within 0.003, and with it the slope within 0.004 / softcap. That is
// little of a slope that is not small. Where the slope is small, it is stored instead, negative, and 2^64
// times as large if the logit is positive: z = +-softcap sqrt(1 - slope) follows from it within softcap *
// slope / 1000. The limit between the two makes both errors at most 0.003 for softcaps from 4 on; that of
// rounding to bf16 is up to 0.002.
//
// The file is shorter than 60 lines because it is one encoding, which the logit pass writes and the gradient
// of the entropy reads.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_RECOVERABLE_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_RECOVERABLE_CUH_

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda::hopper {

inline constexpr float kPositiveLogit = 0x1p64f;
inline constexpr float kLeastSlope = 0x1p-60f;  // what is below counts as 0

// Slopes below this are stored instead of exponentials.
__host__ __device__ inline float SmallSlope(float softcap) {
  const float limit = 2.0f / softcap;
  return limit < 0.5f ? limit : 0.5f;
}

// `exponential`: of the logit. small_slope: SmallSlope().
__device__ __forceinline__ float MakeRecoverable(float exponential, const Logit& logit, float small_slope) {
  if (logit.slope >= small_slope) return exponential;
  if (!(logit.slope >= kLeastSlope)) return 0.0f;
  return logit.z > 0.0f ? -kPositiveLogit * logit.slope : -logit.slope;
}

struct Recovered {
  float exponential;  // 0: the others say nothing
  float exponent;     // d
  float slope;
};

// What a stored element of a row says; RecoverCapped: of a row with this reference, under a softcap.
__device__ __forceinline__ Recovered RecoverPlain(float stored) { return {stored, __log2f(stored), 1.0f}; }

__device__ __forceinline__ Recovered RecoverCapped(float stored, float reference, float softcap) {
  if (stored == 0.0f) return {};
  if (stored > 0.0f) {
    const float d = __log2f(stored);
    const float t = (d + reference) * kLn2 / softcap;
    return {stored, d, fmaxf(1.0f - t * t, 0.0f)};
  }
  const bool positive = -stored >= 1.0f;
  const float slope = positive ? -stored / kPositiveLogit : -stored;
  const float z = copysignf(softcap * sqrtf(1.0f - slope), positive ? 1.0f : -1.0f);
  const float d = fmaf(z, kLog2E, -reference);
  return {Exp2(d), d, slope};
}

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_RECOVERABLE_CUH_
