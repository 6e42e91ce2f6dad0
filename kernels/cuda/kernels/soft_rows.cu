// SPDX-License-Identifier: Apache-2.0
// Kernels for rows with soft targets (soft_rows.h). q, s, r and T are defined in kernels/soft_targets.h, all
// other symbols in row_loss.cu:
//
//   loss = w [s ln 2 log2 S - ln 2 sum_k q_k d_k - r ln T + lambda lse^2],  T = (S - sum of the named) / S
//   dL/dz_k = p_k (c (s + r) + c_soft - c_H (log p_k + H)) - c q_k    of a named class
//   dL/dz_v = p_v (c (s + r - r / T) + c_soft - c_H (log p_v + H))    of another one
//     with c_soft = 2 c lambda lse + c_lse
//
// "S - sum of the named" is not computed by subtraction, which would cancel digits: the named classes are
// masked in the logits, and the sum over the other classes is computed directly.
//
// Bytes: 12 for each named class of a row; most of them go once over the bus between host and device.
#include <cstdint>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"
#include "kernels/cuda/kernels/row_part.cuh"
#include "kernels/cuda/kernels/soft_rows.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 128;

// The column of a class of the vocabulary in the block that begins at `first_class` here; -1: it is not in
// the block.
__device__ __forceinline__ int ColumnOf(int32_t place, const LossTerms& terms, int64_t first_class,
                                        int64_t classes) {
  if (place < 0) return -1;
  const int64_t column = place - terms.first_class - first_class;
  return column >= 0 && column < classes ? static_cast<int>(column) : -1;
}

// Takes the logits of the block's named classes, and masks their dot products. Grid: one thread block a row.
// `terms` are for all classes on this device.
template <typename T>
__global__ __launch_bounds__(kThreads) void TakeTargetsKernel(const __grid_constant__ LogitMatrix logits,
                                                              int64_t first_class,
                                                              const __grid_constant__ LossTerms terms,
                                                              const __grid_constant__ RowInputs in,
                                                              float* target_dots) {
  const int64_t row = blockIdx.x;
  float* const dots = static_cast<float*>(logits.data) + row * logits.ld;
  const LogitMap<T, true> map(terms);
  const int target = in.targets[row] < 0 ? -1 : in.targets[row] - static_cast<int>(first_class);
  if (target_dots != nullptr && threadIdx.x == 0 && target >= 0) target_dots[row] = dots[target];
  for (int i = static_cast<int>(threadIdx.x); i < in.soft.count; i += kThreads) {
    const int64_t entry = row * in.soft.count + i;
    const int column = ColumnOf(in.soft.classes[entry], terms, first_class, logits.classes);
    if (column < 0) {
      // The first block sets all logits that it does not have to 0; later blocks write theirs over the 0.
      if (first_class == 0) in.soft.logits[entry] = 0.0f;
      continue;
    }
    in.soft.logits[entry] = map(dots[column], column + static_cast<int>(first_class)).z;
    // The target stays: it is kept out of the sums anyway, and its logit is still needed.
    if (column != target) dots[column] = __uint_as_float(kMaskedDot);
  }
}

// Computes NamedRow. Grid: one warp a row.
__global__ __launch_bounds__(kThreads) void NameRowsKernel(const __grid_constant__ LossTerms terms,
                                                           const __grid_constant__ RowInputs in,
                                                           NamedRow* named) {
  const int64_t row = blockIdx.x * int64_t{kThreads / 32} + (threadIdx.x >> 5);
  if (row >= in.rows) return;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t target = (in.all_targets != nullptr ? in.all_targets[row] : in.targets[row]) +
                         terms.first_class;  // number in the vocabulary
  const int32_t* const classes = in.soft.classes + row * in.soft.count;
  const float* const logits = in.soft.logits + row * in.soft.count;
  const float* const weights = in.soft.weights + row * in.soft.count;

  float max = NegativeInfinity(), all_max = NegativeInfinity();
  for (int i = lane; i < in.soft.count; i += 32) {
    if (classes[i] < 0) continue;
    all_max = fmaxf(all_max, logits[i]);
    if (classes[i] != target) max = fmaxf(max, logits[i]);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
    all_max = fmaxf(all_max, __shfl_xor_sync(0xffffffffu, all_max, offset));
  }

  const float reference = Reference(max, kLog2E);
  NamedRow result = {max, 0.0f, 0.0f, INT32_MAX, Reference(all_max, kLog2E), 0.0f, 0, 0.0f};
  for (int i = lane; i < in.soft.count; i += 32) {
    if (classes[i] < 0) continue;
    const float z = logits[i];
    if (weights[i] > 0.0f) result.dot += weights[i] * fmaf(z, kLog2E, -result.dot_reference);
    if (classes[i] == target) {
      result.has_target = 1;
      result.target_weight = weights[i];
      continue;
    }
    const float d = fmaf(z, kLog2E, -reference);
    const float e = Exp2(d);
    result.sum += e;
    if (e > 0.0f) result.spread += e * d;
    if (z == max) result.arg = min(result.arg, classes[i] - static_cast<int32_t>(terms.first_class));
  }
  result.sum = WarpSum(result.sum);
  result.spread = WarpSum(result.spread);
  result.dot = WarpSum(result.dot);
  result.target_weight = WarpSum(result.target_weight);
  result.arg = __reduce_min_sync(0xffffffffu, result.arg);
  result.has_target = __reduce_max_sync(0xffffffffu, result.has_target);
  if (lane == 0) named[row] = result;
}

// Writes the gradient's elements of the named classes of the block. Grid: one thread block a row.
template <typename T>
__global__ __launch_bounds__(kThreads) void WriteTargetsKernel(const __grid_constant__ LogitMatrix gradient,
                                                               int64_t first_class,
                                                               const __grid_constant__ LossTerms terms,
                                                               const __grid_constant__ RowInputs in,
                                                               const __grid_constant__ RowResults out,
                                                               const GradientRule* rules) {
  const int64_t row = blockIdx.x;
  const GradientRule rule = rules[row];
  if (!rule.valid) return;
  T* const to = static_cast<T*>(gradient.data) + row * gradient.ld;
  const float c = in.coef_loss[row];
  // The factor of p_k: c (s + r) + c_soft.
  const float factor = c * in.soft.total[row] + 2.0f * c * terms.z_loss * out.lse[row] + in.coef_lse[row];
  const float inverse_cap = terms.softcap > 0.0f ? 1.0f / terms.softcap : 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < in.soft.count; i += kThreads) {
    const int64_t entry = row * in.soft.count + i;
    const int column = ColumnOf(in.soft.classes[entry], terms, first_class, gradient.classes);
    if (column < 0) continue;
    const float z = in.soft.logits[entry];
    const float d = fmaf(z, kLog2E, -rule.reference) - rule.log2_sum;
    const float p = Exp2(d);
    float g = fmaf(p, factor, -c * in.soft.weights[entry]);
    if (p > 0.0f) g -= p * in.coef_entropy[row] * (d * kLn2 + rule.row_entropy);
    // dz/ds = 1 - (z / softcap)^2.
    if (terms.softcap > 0.0f) g *= (1.0f - z * inverse_cap) * (1.0f + z * inverse_cap);
    to[column] = static_cast<T>(SaturateIf<T>(g));
  }
}

}  // namespace

cudaError_t LaunchTakeTargets(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                              DType compute, float* target_dots, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  auto* const kernel =
      compute == DType::kFloat32 ? TakeTargetsKernel<float> : TakeTargetsKernel<__nv_bfloat16>;
  kernel<<<static_cast<unsigned>(in.rows), kThreads, 0, stream>>>(block.logits, block.first_class, terms, in,
                                                                  target_dots);
  return cudaGetLastError();
}

cudaError_t LaunchNameRows(const LossTerms& terms, const RowInputs& in, NamedRow* named,
                           cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  constexpr int kRows = kThreads / 32;
  const auto blocks = static_cast<unsigned>((in.rows + kRows - 1) / kRows);
  NameRowsKernel<<<blocks, kThreads, 0, stream>>>(terms, in, named);
  return cudaGetLastError();
}

cudaError_t LaunchWriteTargets(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                               const RowResults& out, const GradientRule* rules, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  return WithElement(block.gradient.dtype, [&](auto element) {
    WriteTargetsKernel<typename decltype(element)::Type>
        <<<static_cast<unsigned>(in.rows), kThreads, 0, stream>>>(block.gradient, block.first_class, terms,
                                                                  in, out, rules);
    return cudaGetLastError();
  });
}

}  // namespace lossd::kernels::cuda

LOSSD_KERNEL_FILE(SoftRows)
