// Floats as integers of the same order, for atomic maxima. Pure functions; NaN has no place in the order.
#ifndef LOSSD_KERNELS_CUDA_HOPPER_ORDERED_H_
#define LOSSD_KERNELS_CUDA_HOPPER_ORDERED_H_

#include <cuda_runtime_api.h>

#include <bit>
#include <cstdint>

namespace lossd::kernels::cuda::hopper {

__host__ __device__ constexpr int32_t Reorder(int32_t bits) { return bits >= 0 ? bits : bits ^ 0x7fffffff; }

__host__ __device__ constexpr int32_t ToOrdered(float x) { return Reorder(__builtin_bit_cast(int32_t, x)); }
__host__ __device__ constexpr float FromOrdered(int32_t x) { return __builtin_bit_cast(float, Reorder(x)); }

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_ORDERED_H_
