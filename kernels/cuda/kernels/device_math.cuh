// SPDX-License-Identifier: Apache-2.0
// Helpers that all kernels share. On the device: 16-byte vectors of any element type as fp32, fast base-2
// exponentials, reductions in a fixed order, and asynchronous copies to shared memory. On the host: the
// element type of a matrix as a template argument (WithElement), and launches whose blocks may start early
// (EarlyLaunch).
#ifndef LOSSD_KERNELS_CUDA_KERNELS_DEVICE_MATH_CUH_
#define LOSSD_KERNELS_CUDA_KERNELS_DEVICE_MATH_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;
inline constexpr float kLargestHalf = 65504.0f;

__device__ __forceinline__ float NegativeInfinity() { return __int_as_float(0xff800000); }

// 2^x, relative error about 2^-22; 2^-inf = 0.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Limits x to the finite values of fp16.
__device__ __forceinline__ float SaturateHalf(float x) {
  return fminf(fmaxf(x, -kLargestHalf), kLargestHalf);
}

// In a kernel that was launched to start early: waits until the previous kernel has ended and its writes are
// visible.
__device__ __forceinline__ void AwaitKernelBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the blocks of the next kernel, if it is launched to start early, start where there is room while this
// kernel still runs.
__device__ __forceinline__ void LetNextKernelStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// One 16-byte vector of T: its elements as fp32, and their maximum without NaN.
template <typename T>
struct Vec;

template <>
struct Vec<float> {
  static constexpr int kSize = 4;
  __device__ __forceinline__ static float Max(const uint4& raw) {
    return fmaxf(fmaxf(__uint_as_float(raw.x), __uint_as_float(raw.y)),
                 fmaxf(__uint_as_float(raw.z), __uint_as_float(raw.w)));
  }
  __device__ __forceinline__ static void Unpack(const uint4& raw, float (&x)[4]) {
    x[0] = __uint_as_float(raw.x);
    x[1] = __uint_as_float(raw.y);
    x[2] = __uint_as_float(raw.z);
    x[3] = __uint_as_float(raw.w);
  }
  __device__ __forceinline__ static uint4 Pack(const float (&x)[4]) {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                      __float_as_uint(x[3]));
  }
};

template <>
struct Vec<__nv_bfloat16> {
  static constexpr int kSize = 8;
  __device__ __forceinline__ static float Max(const uint4& raw) {
    const auto pair = [](const uint32_t& word) { return *reinterpret_cast<const __nv_bfloat162*>(&word); };
    const __nv_bfloat162 max = __hmax2(__hmax2(pair(raw.x), pair(raw.y)), __hmax2(pair(raw.z), pair(raw.w)));
    return fmaxf(__low2float(max), __high2float(max));
  }
  __device__ __forceinline__ static void Unpack(const uint4& raw, float (&x)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ __forceinline__ static uint4 Pack(const float (&x)[8]) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

template <>
struct Vec<__half> {
  static constexpr int kSize = 8;
  __device__ __forceinline__ static float Max(const uint4& raw) {
    const auto pair = [](const uint32_t& word) { return *reinterpret_cast<const __half2*>(&word); };
    const __half2 max = __hmax2(__hmax2(pair(raw.x), pair(raw.y)), __hmax2(pair(raw.z), pair(raw.w)));
    return fmaxf(__low2float(max), __high2float(max));
  }
  __device__ __forceinline__ static void Unpack(const uint4& raw, float (&x)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
  __device__ __forceinline__ static uint4 Pack(const float (&x)[8]) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// Element `index` of an array whose element type is known only at run time.
__device__ __forceinline__ float LoadElement(const void* base, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(base)[index];
  if (dtype == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[index]);
  return __half2float(static_cast<const __half*>(base)[index]);
}

__device__ __forceinline__ void StoreElement(void* base, DType dtype, int64_t index, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(base)[index] = value;
  } else if (dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(base)[index] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(base)[index] = __float2half_rn(value);
  }
}

// Eight consecutive elements from `index` on, as fp32; elements at or past `end` are 0. `aligned`: every
// group of eight starts on a 16-byte boundary.
__device__ __forceinline__ void Load8(const void* base, DType dtype, int64_t index, int64_t end, bool aligned,
                                      float (&x)[8]) {
  if (aligned && index + 8 <= end) {
    if (dtype == DType::kFloat32) {
      const uint4* p = reinterpret_cast<const uint4*>(static_cast<const float*>(base) + index);
      float low[4], high[4];
      Vec<float>::Unpack(p[0], low);
      Vec<float>::Unpack(p[1], high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = low[i];
        x[4 + i] = high[i];
      }
    } else {
      const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(base) + index);
      if (dtype == DType::kBFloat16) {
        Vec<__nv_bfloat16>::Unpack(raw, x);
      } else {
        Vec<__half>::Unpack(raw, x);
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = index + i < end ? LoadElement(base, dtype, index + i) : 0.0f;
}

// Stores eight consecutive elements, as Load8 loads them; writes nothing at or past `end`.
__device__ __forceinline__ void Store8(void* base, DType dtype, int64_t index, int64_t end, bool aligned,
                                       const float (&x)[8]) {
  if (aligned && index + 8 <= end) {
    if (dtype == DType::kFloat32) {
      uint4* p = reinterpret_cast<uint4*>(static_cast<float*>(base) + index);
      const float low[4] = {x[0], x[1], x[2], x[3]};
      const float high[4] = {x[4], x[5], x[6], x[7]};
      p[0] = Vec<float>::Pack(low);
      p[1] = Vec<float>::Pack(high);
    } else {
      uint4* p = reinterpret_cast<uint4*>(static_cast<uint16_t*>(base) + index);
      *p = dtype == DType::kBFloat16 ? Vec<__nv_bfloat16>::Pack(x) : Vec<__half>::Pack(x);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (index + i < end) StoreElement(base, dtype, index + i, x[i]);
  }
}

// The sum over the block, the same bits in every thread. `scratch`: 33 floats of shared memory; the caller
// must not touch it before the next barrier.
__device__ __forceinline__ float BlockSum(float value, float* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
  const int warp = threadIdx.x >> 5;
  const int warps = (blockDim.x + 31) >> 5;
  if (warps == 1) return value;
  __syncthreads();
  if ((threadIdx.x & 31) == 0) scratch[warp] = value;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < warps; ++i) total += scratch[i];
  return total;
}

// ---- the guard of a slice ----

inline constexpr int kGuardThreads = 1024;  // of a block; often one block for all rows

// The last step of a guard kernel, whose block s guards slice s with the rows [begin, end). `first`: the
// first bad row that the thread has found, or INT32_MAX. If the block has found a bad row, first_bad[s]
// becomes the first one, and no row is kept. Otherwise first_bad[s] becomes -1, and the rows that are to be
// accumulated are kept. Params has first_bad, accumulate and keep. A kernel calls this once.
template <typename Params>
__device__ __forceinline__ void GuardSlice(const Params& p, int32_t begin, int32_t end, int32_t first) {
  __shared__ int32_t warp_first[kGuardThreads / 32];
  for (int offset = 16; offset > 0; offset >>= 1) {
    first = min(first, __shfl_xor_sync(0xffffffffu, first, offset));
  }
  if ((threadIdx.x & 31) == 0) warp_first[threadIdx.x >> 5] = first;
  __syncthreads();
  for (int i = 0; i < kGuardThreads / 32; ++i) first = min(first, warp_first[i]);
  const bool good = first == INT32_MAX;
  if (threadIdx.x == 0) p.first_bad[blockIdx.x] = good ? -1 : first;
  for (int32_t r = begin + static_cast<int32_t>(threadIdx.x); r < end; r += kGuardThreads) {
    p.keep[r] = good && p.accumulate[r] != 0 ? 1 : 0;
  }
}

// ---- asynchronous copies from device memory to shared memory ----
//
// The copies that a thread has started since its last CommitCopies() are one batch; batches end in order.
// After waiting, a thread sees the data that it has copied itself; other threads see it after a barrier that
// follows the wait.

__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Copies 16 bytes, aligned to 16, bypassing L1.
__device__ __forceinline__ void CopyAsync16(uint32_t to_shared, const void* from_global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_shared), "l"(from_global) : "memory");
}

// Copies 4 bytes, aligned to 4.
__device__ __forceinline__ void CopyAsync4(uint32_t to_shared, const void* from_global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to_shared), "l"(from_global) : "memory");
}

__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` (0 to 3) of the thread's batches are not complete.
__device__ __forceinline__ void AwaitCopies(int pending) {
  switch (pending) {
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      return;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      return;
    case 3:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
      return;
    default:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
}

// Waits for all copies of the thread, committed or not.
__device__ __forceinline__ void AwaitAllCopies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- host: a run-time element type as a template argument of a kernel ----

template <typename T>
struct Element {
  using Type = T;
};

// Calls launch(Element<T>()) for the T of `dtype`, and returns its result. For example:
//   WithElement(dtype, [&](auto element) { return Launch<typename decltype(element)::Type>(params); })
template <typename LaunchFn>
cudaError_t WithElement(DType dtype, LaunchFn launch) {
  switch (dtype) {
    case DType::kFloat32:
      return launch(Element<float>());
    case DType::kFloat16:
      return launch(Element<__half>());
    case DType::kBFloat16:
      return launch(Element<__nv_bfloat16>());
  }
  return cudaErrorInvalidValue;
}

// ---- host: early launches ----

// A launch whose blocks may be scheduled while the previous kernel of the stream still runs. The kernel
// itself must wait for the previous kernel (AwaitKernelBefore). Plain data.
class EarlyLaunch {
 public:
  // `possible`: the device supports it (compute capability 9.0 or later); otherwise this is an ordinary
  // launch.
  EarlyLaunch(dim3 grid, dim3 block, size_t shared_bytes, bool possible, cudaStream_t stream) {
    attributes_[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes_[0].val.programmaticStreamSerializationAllowed = 1;
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.dynamicSmemBytes = shared_bytes;
    config_.stream = stream;
    config_.attrs = attributes_;
    config_.numAttrs = possible ? 1 : 0;
  }
  EarlyLaunch(const EarlyLaunch&) = delete;  // config_ points into it
  EarlyLaunch& operator=(const EarlyLaunch&) = delete;

  // Each `blocks` consecutive blocks form a cluster.
  void SetCluster(unsigned blocks) {
    cudaLaunchAttribute& cluster = attributes_[config_.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {blocks, 1, 1};
  }

  const cudaLaunchConfig_t* config() const { return &config_; }

 private:
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_ = {};
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_DEVICE_MATH_CUH_
