// SPDX-License-Identifier: Apache-2.0
// A 16-bit encoding of exponentials 2^d from which d and the slope of the softcap, dz/ds, can be recovered
// (logit_pass.h defines z and s, plan.h defines d). Rows with an upstream gradient of their entropy need both
// values, when their sums are complete. Other rows store 2^d times the slope. From this product the logit
// cannot be recovered under a softcap: a logit below softcap - 1 and one above it may give the same product.
//
// There are two cases:
// - If the slope is not small, 2^d alone is stored, rounded to bf16. This gives d within 0.003, and the slope
//   within 0.004 / softcap.
// - If the slope is small, the slope is stored instead of 2^d: as a negative number, and multiplied by 2^64
//   if the logit is positive. The slope is 1 - (z / softcap)^2, so z = +-softcap sqrt(1 - slope) is known
//   within softcap * slope / 1000.
//
// With the limit between the two cases (SmallSlope), both errors are at most 0.003 for softcaps of at least
// 4. Rounding to bf16 alone has an error of up to 0.002.
//
// The encoding has a file of its own because the logit pass writes it and the gradient of the entropy reads
// it.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_RECOVERABLE_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_RECOVERABLE_CUH_

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda::hopper {

inline constexpr float kPositiveLogit = 0x1p64f;
inline constexpr float kLeastSlope = 0x1p-60f;  // smaller slopes count as 0

// The limit between the two cases: smaller slopes are stored instead of exponentials.
__host__ __device__ inline float SmallSlope(float softcap) {
  const float limit = 2.0f / softcap;
  return limit < 0.5f ? limit : 0.5f;
}

// `exponential`: 2^d of the logit. small_slope: SmallSlope().
__device__ __forceinline__ float MakeRecoverable(float exponential, const Logit& logit, float small_slope) {
  if (logit.slope >= small_slope) return exponential;
  if (!(logit.slope >= kLeastSlope)) return 0.0f;
  return logit.z > 0.0f ? -kPositiveLogit * logit.slope : -logit.slope;
}

// The values that are recovered from a stored element.
struct Recovered {
  float exponential;  // 0: the other members have no meaning
  float exponent;     // d
  float slope;
};

// Decodes a stored element of a row. RecoverCapped: under a softcap, for a row with this reference.
__device__ __forceinline__ Recovered RecoverPlain(float stored) { return {stored, __log2f(stored), 1.0f}; }

__device__ __forceinline__ Recovered RecoverCapped(float stored, float reference, float softcap) {
  if (stored == 0.0f) return {};
  if (stored > 0.0f) {
    const float d = __log2f(stored);
    // t = z / softcap, so the slope is 1 - t^2.
    const float t = (d + reference) * kLn2 / softcap;
    return {stored, d, fmaxf(1.0f - t * t, 0.0f)};
  }
  // Stored slopes are below 1/2. If they are multiplied by kPositiveLogit, they are at least 16, because of
  // kLeastSlope.
  const bool positive = -stored >= 1.0f;
  const float slope = positive ? -stored / kPositiveLogit : -stored;
  const float z = copysignf(softcap * sqrtf(1.0f - slope), positive ? 1.0f : -1.0f);
  const float d = fmaf(z, kLog2E, -reference);
  return {Exp2(d), d, slope};
}

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_RECOVERABLE_CUH_
