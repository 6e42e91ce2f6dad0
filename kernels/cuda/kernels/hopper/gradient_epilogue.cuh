// SPDX-License-Identifier: Apache-2.0
// What becomes of the logits of a tile of the logit pass (logit_epilogue.cuh) if they are to be gradients.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_GRADIENT_EPILOGUE_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_GRADIENT_EPILOGUE_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/hopper/logit_epilogue.cuh"
#include "kernels/cuda/kernels/hopper/out_boxes.cuh"

namespace lossd::kernels::cuda::hopper {

// fp16 has no room for what is far above the gradient unit.
template <typename T>
__device__ __forceinline__ uint32_t PackGradients(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return PackBf16(low, high);
  const __half2 pair = __floats2half2_rn(SaturateHalf(low), SaturateHalf(high));
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Writes the targets' entries over what the warp has put into a box.
template <typename T>
__device__ __forceinline__ void PutEntries(const RowPair& rows, const OutBoxes& out, int box) {
  const int column0 = rows.target[0] - box * kBoxColumns;
  const int column1 = rows.target[1] - box * kBoxColumns;
  const bool mine0 = static_cast<unsigned>(column0) < kBoxColumns;
  const bool mine1 = static_cast<unsigned>(column1) < kBoxColumns;
  if (!__any_sync(0xffffffffu, mine0 || mine1)) return;
  __syncwarp();
  const int row = 16 * static_cast<int>((threadIdx.x >> 5) & 3) + static_cast<int>(threadIdx.x & 31) / 4;
  if ((threadIdx.x & 3) != 0) return;
  if (mine0) out.Replace(box & 1, row, column0, PackGradients<T>(rows.entry[0], 0.0f));
  if (mine1) out.Replace(box & 1, row + 8, column1, PackGradients<T>(rows.entry[1], 0.0f));
}

// The gradient of a class whose row does have one.
template <Form kForm>
__device__ __forceinline__ float GradientOf(const LogitKernelParams& p, const RowPair& rows, int h, float s) {
  const Logit logit = ToLogit<kForm>(p, s);
  const float d = fmaf(logit.z, p.f, -rows.reference[h]);
  if constexpr (kForm == Form::kPlain) return rows.factor[h] * Exp2(d);
  const float bounded = fmaxf(d, kNothing);
  const float g = fmaf(rows.tilt[h], bounded, rows.factor[h]) * Exp2(bounded);
  return kForm == Form::kCapped ? g * logit.slope : g;
}

// A row whose factors are 0 is 0 whatever its logits are.
template <typename T, Form kForm>
__device__ __forceinline__ void Gradients(const LogitKernelParams& p, const float (&logits)[128],
                                          const RowPair& rows, const OutBoxes& out, int column, int row) {
  ForEachBox<true>(
      logits, out, column, row,
      [&](float s0, float s1, int h) -> uint32_t {
        const bool none = rows.factor[h] == 0.0f && (kForm == Form::kPlain || rows.tilt[h] == 0.0f);
        return none ? 0u
                    : PackGradients<T>(GradientOf<kForm>(p, rows, h, s0), GradientOf<kForm>(p, rows, h, s1));
      },
      [&](int box) { PutEntries<T>(rows, out, box); });
}

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_GRADIENT_EPILOGUE_CUH_
