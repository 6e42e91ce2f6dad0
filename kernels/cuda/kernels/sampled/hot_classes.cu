// Which classes are hot: those whose popularity falls into the highest bins of a histogram, as many bins as
// hold at most kHotClasses classes. Counts are integers, so the same chunks in the same order give the same
// choice.
#include <algorithm>

#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/sampled/hot_classes.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChooseThreads = 1024;
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
    const float popularity =
        kFading * hot.popularity[v] + kTakenUnit * static_cast<float>(hot.taken[v]);
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

// The lowest bin from which on there are at most kHotClasses classes.
__device__ __forceinline__ int LowestBin(const int* histogram) {
  int bin = kHotBins;
  for (int classes = 0; bin > 0 && classes + histogram[bin - 1] <= kHotClasses; --bin) {
    classes += histogram[bin - 1];
  }
  return bin;
}

// One block.
__global__ __launch_bounds__(kChooseThreads) void ChooseHotKernel(HotClasses hot, int groups, float least) {
  __shared__ int histogram[kHotBins];
  __shared__ int lowest;
  __shared__ int warps[32];
  for (int i = static_cast<int>(threadIdx.x); i < kHotBins; i += kChooseThreads) {
    histogram[i] = hot.histogram[i];
    hot.histogram[i] = 0;
  }
  for (int i = static_cast<int>(threadIdx.x); i < kHotClasses; i += kChooseThreads) hot.ids[i] = -1;
  __syncthreads();
  if (threadIdx.x == 0) lowest = LowestBin(histogram);
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x & 31), warp = static_cast<int>(threadIdx.x >> 5);
  int base = 0;
  // A warp a group, a lane a class; 32 groups at a time.
  for (int first = 0; first < groups; first += 32) {
    const int g = first + warp;
    const int64_t v = int64_t{g} * kHotGroup + lane;
    const bool is_hot = v < hot.vocab && BinOf(hot.popularity[v], least) >= lowest;
    const unsigned bits = __ballot_sync(0xffffffffu, is_hot);
    __syncthreads();
    if (lane == 0) warps[warp] = __popc(bits);
    __syncthreads();
    int before = base, total = 0;
    for (int w = 0; w < 32; ++w) {
      if (w == warp) before = base + total;
      total += warps[w];
    }
    base += total;
    if (g >= groups) continue;
    if (lane == 0) {
      hot.bits[g] = bits;
      hot.bases[g] = before;
    }
    if (is_hot) hot.ids[before + __popc(bits & ((1u << lane) - 1))] = static_cast<int32_t>(v);
  }
  if (threadIdx.x == 0) *hot.count = base;
}

// A thread has a column of the block's rows.
template <typename T>
__global__ __launch_bounds__(kHotClasses) void CountHotKernel(const __grid_constant__ CountHotParams p) {
  const int slot = static_cast<int>(threadIdx.x);
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
static_assert(kHotClasses <= 1024, "one block has a thread for each");

// A block a hot class; 16-byte vectors.
__global__ void GatherHotKernel(HotClasses hot, const uint4* weight, int64_t vectors, uint4* to) {
  const int64_t slot = blockIdx.x;
  const int64_t id = hot.ids[slot];
  const bool exists = slot < *hot.count;
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
  ChooseHotKernel<<<1, kChooseThreads, 0, stream>>>(hot, static_cast<int>(hot.groups()), least);
  return cudaGetLastError();
}

cudaError_t LaunchCountHot(const CountHotParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(CeilDiv(params.rows, kCountRows));
  switch (params.dtype) {
    case DType::kFloat32:
      CountHotKernel<float><<<blocks, kHotClasses, 0, stream>>>(params);
      break;
    case DType::kFloat16:
      CountHotKernel<__half><<<blocks, kHotClasses, 0, stream>>>(params);
      break;
    case DType::kBFloat16:
      CountHotKernel<__nv_bfloat16><<<blocks, kHotClasses, 0, stream>>>(params);
      break;
  }
  return cudaGetLastError();
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
