// LayerNorm and RMSNorm forward for 16-bit rows of 4096 to 12288 columns. Bytes: reads x, writes y.
//
// One thread of a group copies whole rows into the group's ring; gain and shift stay in registers. Mean and
// variance come from one pair of sums, about a pivot p near the mean m: sums of x - p and of (x - p)^2. With
// p the mean of eight columns, (m - p)^2 is at most D / 8 variances, so that the variance loses at most D / 8
// roundings of fp32 (1e-4 of it at 12288 columns, in rows made for that; elsewhere about one).
#include "kernels/cuda/early_launch.h"
#include "kernels/cuda/hopper/norm.h"
#include "kernels/cuda/hopper/norm_ring.cuh"

namespace lossd::kernels::cuda::hopper {
namespace {

constexpr int64_t kFewestForwardColumns = 4096;

template <typename T>
__device__ __forceinline__ float MeanOfEight(const uint4& vector) {
  float x[8];
  Vec<T>::Unpack(vector, x);
  return 0.125f * (((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])));
}

template <typename T, int kVectors, int kStages, int kThreads>
__global__ __launch_bounds__(kThreads, 1) void NormForwardKernel(const __grid_constant__ NormParams p,
                                                                 int group_size) {
  static_assert(sizeof(T) == 2);
  extern __shared__ uint4 shared[];  // [groups][kStages] rows
  __shared__ uint64_t barriers[kMostGroups][kStages];
  __shared__ PairSum::Scratch scratch;
  const RowGroup<false> group(group_size);
  PairSum pair_sum(group, scratch);
  const int groups = static_cast<int>(blockDim.x) / group_size;
  const int vectors = static_cast<int>(p.x.cols / 8);
  const float inverse_cols = 1.0f / static_cast<float>(p.x.cols);
  const int step = groups * static_cast<int>(gridDim.x);
  const int group_offset = group.index * static_cast<int>(gridDim.x);

  const auto copy = [&](uint32_t to, uint32_t barrier, int, int raw_row) {
    CopyBytesIn(to, NormRow<T>(p.x, raw_row), 16u * static_cast<uint32_t>(vectors), barrier);
  };
  RowRing<kStages, decltype(copy)> ring(p, shared + group.index * kStages * vectors, barriers[group.index],
                                        vectors, static_cast<int>(blockIdx.x) + group_offset, step,
                                        group.thread == 0, copy);
  __syncthreads();
  AwaitKernelBefore();
  LetNextKernelStart();
  ring.Start();
  float gain[kVectors][8], shift[kVectors][8];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int c = 8 * (group.thread + i * group.size);
    Load8(p.gain, DType::kFloat32, c, p.x.cols, true, gain[i]);
    Load8(p.shift, DType::kFloat32, c, p.centred ? p.x.cols : 0, true, shift[i]);
  }

  // All groups take part in every round, with a row or without.
  for (int round = static_cast<int>(blockIdx.x); round < p.rows; round += step) {
    const int row = round + group_offset;
    const bool has_row = row < p.rows;
    const uint4* from = ring.Await(has_row);
    const float pivot = p.centred ? MeanOfEight<T>(from[0]) : 0.0f;
    uint4 raw[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) raw[i] = from[min(group.thread + i * group.size, vectors - 1)];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (group.thread + i * group.size >= vectors) continue;
      float x[8];
      Vec<T>::Unpack(raw[i], x);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum += x[j] - pivot;
        squares = fmaf(x[j] - pivot, x[j] - pivot, squares);
      }
    }
    const float2 total = pair_sum(sum, squares);
    ring.Release();
    if (!has_row) continue;
    const float shifted_mean = p.centred ? total.x * inverse_cols : 0.0f;
    const float mean = pivot + shifted_mean;
    const float variance = fmaxf(fmaf(total.y, inverse_cols, -shifted_mean * shifted_mean), 0.0f);
    const float r = rsqrtf(variance + p.epsilon);
    if (group.thread == 0) {
      p.mean[row] = mean;
      p.inverse_deviation[row] = r;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = group.thread + i * group.size;
      if (v >= vectors) continue;
      float x[8];
      Vec<T>::Unpack(raw[i], x);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = fmaf((x[j] - mean) * r, gain[i][j], shift[i][j]);
      Store8(AnyNormRow(p.y, row), p.y.dtype, 8 * v, p.y.cols, true, x);
    }
  }
}

template <typename T, int kVectors, int kStages, int kThreads>
bool LaunchIfFits(const NormParams& p, const DeviceLimits& limits, cudaStream_t stream, cudaError_t* error) {
  const int64_t ring_bytes = kStages * p.x.cols * static_cast<int64_t>(sizeof(T));
  const RingPlan plan = MakeRingPlan(p.x.cols, kVectors, kThreads, ring_bytes, limits);
  if (plan.groups == 0) return false;
  const auto kernel = NormForwardKernel<T, kVectors, kStages, kThreads>;
  *error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
  if (*error != cudaSuccess) return true;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(p.rows, limits.multiprocessors));
  EarlyLaunch launch(blocks, plan.threads(), plan.shared_bytes, true, stream);
  *error = cudaLaunchKernelEx(launch.config(), kernel, p, plan.group);
  return true;
}

template <typename T>
bool LaunchIfFits(const NormParams& p, const DeviceLimits& limits, cudaStream_t stream, cudaError_t* error) {
  return LaunchIfFits<T, 2, 4, 640>(p, limits, stream, error) ||
         LaunchIfFits<T, 3, 2, 512>(p, limits, stream, error);
}

}  // namespace

bool LaunchNormForwardIfFits(const NormParams& params, const DeviceLimits& limits, cudaStream_t stream,
                             cudaError_t* error) {
  if (!FitsRing(params, limits) || params.x.cols < kFewestForwardColumns || params.y.ld != params.x.cols)
    return false;
  switch (params.x.dtype) {
    case DType::kFloat16:
      return LaunchIfFits<__half>(params, limits, stream, error);
    case DType::kBFloat16:
      return LaunchIfFits<__nv_bfloat16>(params, limits, stream, error);
    case DType::kFloat32:
      return false;
  }
  return false;
}

}  // namespace lossd::kernels::cuda::hopper
