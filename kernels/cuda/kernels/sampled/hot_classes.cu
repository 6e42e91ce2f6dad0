// SPDX-License-Identifier: Apache-2.0
// Which classes are hot: those whose popularity falls into the highest bins of a histogram, as many bins as
// hold at most kHotClasses classes. Counts are integers, so the same chunks in the same order give the same
// choice.
#include <algorithm>

#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/element_type.cuh"
#include "kernels/cuda/kernels/sampled/hot_classes.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kNumberThreads = 512;
constexpr int kCountThreads = 512;
constexpr int kCountRows = 64;  // a block
constexpr float kFading = 0.5f;
constexpr float kTakenUnit = 1.0f / 16;

// Eight bins for each power of two above `least`; -1: below it.
__device__ __forceinline__ int BinOf(float popularity, float least) {
  if (!(popularity >= least)) return -1;
  return min(static_cast<int>(8.0f * log2f(popularity / least)), kHotBins - 1);
}

__global__ void UpdatePopularityKernel(HotClasses hot, float least) {
  __shared__ int bins[kHotBins];
  for (int i = static_cast<int>(threadIdx.x); i < kHotBins; i += kThreads) bins[i] = 0;
  __syncthreads();
  const int64_t v = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (v < hot.vocab) {
    const float popularity = kFading * hot.popularity[v] + kTakenUnit * static_cast<float>(hot.taken[v]);
    hot.popularity[v] = popularity;
    hot.taken[v] = 0;
    const int bin = BinOf(popularity, least);
    if (bin >= 0) atomicAdd(bins + bin, 1);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kHotBins; i += kThreads) {
    if (bins[i] > 0) atomicAdd(hot.histogram + i, bins[i]);
  }
}

// The lowest bin from which on there are at most kHotClasses classes. By one thread, in shared memory.
__device__ __forceinline__ int LowestBin(const int32_t* histogram) {
  int bin = kHotBins;
  for (int classes = 0; bin > 0 && classes + histogram[bin - 1] <= kHotClasses; --bin) {
    classes += histogram[bin - 1];
  }
  return bin;
}

// A warp a group, a lane a class.
__global__ void MarkHotKernel(HotClasses hot, float least) {
  __shared__ int32_t histogram[kHotBins];
  __shared__ int lowest;
  for (int i = static_cast<int>(threadIdx.x); i < kHotBins; i += kThreads) histogram[i] = hot.histogram[i];
  __syncthreads();
  if (threadIdx.x == 0) lowest = LowestBin(histogram);
  __syncthreads();
  const int64_t v = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const bool is_hot = v < hot.vocab && BinOf(hot.popularity[v], least) >= lowest;
  const unsigned bits = __ballot_sync(0xffffffffu, is_hot);
  if (v % kHotGroup == 0 && v < hot.vocab) hot.bits[v / kHotGroup] = bits;
}

// One block: numbers the hot classes.
__global__ __launch_bounds__(kNumberThreads) void NumberHotKernel(HotClasses hot, int groups) {
  __shared__ int warps[kNumberThreads / 32];
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
  const int each = (groups + kNumberThreads - 1) / kNumberThreads;
  const int first = min(thread * each, groups), last = min(first + each, groups);
  for (int i = thread; i < kHotBins; i += kNumberThreads) hot.histogram[i] = 0;
  int own = 0;
  for (int g = first; g < last; ++g) own += __popc(hot.bits[g]);
  int upto = own;
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int before = __shfl_up_sync(0xffffffffu, upto, offset);
    if (lane >= offset) upto += before;
  }
  if (lane == 31) warps[warp] = upto;
  __syncthreads();
  int at = upto - own, total = 0;
  for (int w = 0; w < kNumberThreads / 32; ++w) {
    if (w < warp) at += warps[w];
    total += warps[w];
  }
  for (int g = first; g < last; ++g) {
    hot.bases[g] = at;
    for (uint32_t bits = hot.bits[g]; bits != 0; bits &= bits - 1, ++at) {
      hot.ids[at] = g * kHotGroup + __ffs(static_cast<int>(bits)) - 1;
    }
  }
  if (thread == 0) *hot.count = total;
}

// A thread has a column of the block's rows.
template <typename T>
__global__ __launch_bounds__(kCountThreads) void CountHotKernel(const __grid_constant__ CountHotParams p) {
  const int slot = static_cast<int>(blockIdx.y * kCountThreads + threadIdx.x);
  if (slot >= *p.hot.count) return;
  const int64_t first = blockIdx.x * int64_t{kCountRows};
  const int64_t last = min(first + kCountRows, p.rows);
  const T* elements = static_cast<const T*>(p.elements);
  float sum = 0.0f;
  for (int64_t row = first; row < last; ++row) {
    sum += fminf(fabsf(static_cast<float>(elements[row * kHotClasses + slot])) * p.widths[row], 1.0f);
  }
  atomicAdd(p.hot.taken + p.hot.ids[slot], __float2int_rn(sum / kTakenUnit));
}

// A block a hot class; 16-byte vectors.
__global__ void GatherHotKernel(HotClasses hot, const uint4* weight, int64_t vectors, uint4* to) {
  const int64_t slot = blockIdx.x;
  const bool exists = slot < *hot.count;
  const int64_t id = exists ? hot.ids[slot] : 0;
  for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
    to[slot * vectors + v] = exists ? __ldg(weight + id * vectors + v) : make_uint4(0, 0, 0, 0);
  }
}

__global__ void ScatterHotKernel(const __grid_constant__ ScatterHotParams p) {
  const int64_t slot = blockIdx.x;
  if (slot >= *p.hot.count) return;
  const int64_t id = p.hot.ids[slot];
  float* to = p.weight_gradient + id * p.ld;
  const float* from = p.from + slot * p.ld;
  for (int64_t c = threadIdx.x; c < p.ld; c += kThreads) to[c] += p.scale * from[c];
  if (p.bias_gradient != nullptr && threadIdx.x == 0) p.bias_gradient[id] += p.bias_from[slot];
}

}  // namespace

cudaError_t LaunchChooseHot(const HotClasses& hot, float least, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(CeilDiv(hot.vocab, kThreads));
  UpdatePopularityKernel<<<blocks, kThreads, 0, stream>>>(hot, least);
  MarkHotKernel<<<blocks, kThreads, 0, stream>>>(hot, least);
  NumberHotKernel<<<1, kNumberThreads, 0, stream>>>(hot, static_cast<int>(hot.groups()));
  return cudaGetLastError();
}

cudaError_t LaunchCountHot(const CountHotParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  const dim3 blocks(static_cast<unsigned>(CeilDiv(params.rows, kCountRows)),
                    static_cast<unsigned>(CeilDiv(kHotClasses, kCountThreads)));
  return WithElement(params.dtype, [&](auto element) {
    CountHotKernel<typename decltype(element)::Type><<<blocks, kCountThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t LaunchGatherHot(const HotClasses& hot, const void* weight, DType dtype, int64_t ld, void* to,
                            cudaStream_t stream) {
  const int64_t vectors = ld * static_cast<int64_t>(SizeOf(dtype)) / 16;
  GatherHotKernel<<<kHotClasses, kThreads, 0, stream>>>(hot, static_cast<const uint4*>(weight), vectors,
                                                        static_cast<uint4*>(to));
  return cudaGetLastError();
}

cudaError_t LaunchScatterHot(const ScatterHotParams& params, cudaStream_t stream) {
  ScatterHotKernel<<<kHotClasses, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda
