// LayerNorm and RMSNorm backward for rows of 1024 to 12288 columns. Bytes: reads x and dy, writes dx.
//
// As ../norm_backward.cu, but one thread of a group copies whole rows into the group's ring, and a thread
// keeps what it has of a row in registers between the two passes: the barrier of the row's sums also says
// that the row's place in the ring is free.
#include <algorithm>

#include "kernels/cuda/early_launch.h"
#include "kernels/cuda/hopper/norm_backward.h"
#include "kernels/cuda/hopper/norm_ring.cuh"
#include "kernels/cuda/norm_backward_rows.cuh"

namespace lossd::kernels::cuda::hopper {
namespace {

constexpr int kStages = 2;
constexpr int64_t kMostRows = int64_t{1} << 30;
constexpr int64_t kFewestColumns = 1024;  // shorter rows leave too few threads a group

// One thread's vectors of a row, as they came.
template <typename X, typename Dy, int kVectors>
struct HeldRow {
  static constexpr int kXPieces = sizeof(X) / 2;  // of 16 bytes in a vector
  static constexpr int kDyPieces = sizeof(Dy) / 2;
  uint4 x[kVectors][kXPieces];
  uint4 dy[kVectors][kDyPieces];
  RowFacts facts;
  float offset;

  // from: x, then dy.
  __device__ __forceinline__ HeldRow(const uint4* from, int vectors, const RowGroup<false>& group,
                                     const RowFacts& row_facts)
      : facts(row_facts), offset(-row_facts.mean * row_facts.inverse_deviation) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = min(group.thread + i * group.size, vectors - 1);
#pragma unroll
      for (int k = 0; k < kXPieces; ++k) x[i][k] = from[v * kXPieces + k];
#pragma unroll
      for (int k = 0; k < kDyPieces; ++k) dy[i][k] = from[(vectors * kXPieces) + v * kDyPieces + k];
    }
  }
  __device__ __forceinline__ void Load(int i, float (&to_x)[8], float (&to_dy)[8]) const {
    UnpackEight<X>(x[i], to_x);
    UnpackEight<Dy>(dy[i], to_dy);
  }
};

// Those of no row past the last.
__device__ __forceinline__ RowFacts LoadFacts(const NormParams& p, const NormBackwardParams& b, int row) {
  RowFacts facts = {0.0f, 0.0f, 1, row};
  if (row >= p.rows) return facts;
  facts.inverse_deviation = __ldg(p.inverse_deviation + row);
  if (p.centred) facts.mean = __ldg(p.mean + row);
  if (b.keep != nullptr) facts.keep = __ldg(b.keep + row);
  if (p.source != nullptr) facts.raw_row = __ldg(p.source + row);
  return facts;
}

template <typename X, typename Dy, int kVectors, int kThreads>
__global__ __launch_bounds__(kThreads,
                             1) void NormBackwardKernel(const __grid_constant__ NormParams p,
                                                        const __grid_constant__ NormBackwardParams b,
                                                        int group_size) {
  // [groups][kStages] rows of x, then dy; at the end the groups' sums.
  extern __shared__ uint4 shared[];
  __shared__ uint64_t barriers[kMostGroups][kStages];
  __shared__ PairSum::Scratch scratch;
  const RowGroup<false> group(group_size);
  PairSum pair_sum(group, scratch);
  const int groups = static_cast<int>(blockDim.x) / group_size;
  const int vectors = static_cast<int>(p.x.cols / 8);
  const int x_units = vectors * static_cast<int>(sizeof(X) / 2);
  const int row_units = x_units + vectors * static_cast<int>(sizeof(Dy) / 2);
  const float inverse_cols = 1.0f / static_cast<float>(p.x.cols);
  const int step = groups * static_cast<int>(gridDim.x);
  const int group_offset = group.index * static_cast<int>(gridDim.x);

  const auto copy = [&](uint32_t to, uint32_t barrier, int row, int raw_row) {
    const uint32_t x_bytes = 16u * static_cast<uint32_t>(x_units);
    CopyBytesIn(to, NormRow<X>(p.x, raw_row), x_bytes, barrier);
    CopyBytesIn(to + x_bytes, NormRow<Dy>(p.y, row), 16u * static_cast<uint32_t>(row_units) - x_bytes,
                barrier);
  };
  const int first = static_cast<int>(blockIdx.x) + group_offset;
  RowRing<kStages, decltype(copy)> ring(p, shared + group.index * kStages * row_units, barriers[group.index],
                                        row_units, first, step, group.thread == 0, copy);
  __syncthreads();
  AwaitKernelBefore();
  ring.Start();
  RowFacts next_facts = LoadFacts(p, b, first);
  const Gain<kVectors> gains(p.gain, nullptr, vectors, group);

  ColumnSums<kVectors> sums;
  // All groups take part in every round, with a row or without.
  for (int round = static_cast<int>(blockIdx.x); round < p.rows; round += step) {
    const int row = round + group_offset;
    const bool has_row = row < p.rows;
    const RowFacts facts = next_facts;
    next_facts = LoadFacts(p, b, row + step);
    const HeldRow<X, Dy, kVectors> held(ring.Await(has_row), vectors, group, facts);
    GroupValues<2> own = {};
    if (has_row) own = AddRow(held, group, vectors, gains, sums);
    const float2 total = pair_sum(own.at[0], own.at[1]);
    ring.Release();
    if (has_row && b.dx.data != nullptr) {
      WriteGradient(held, group, vectors, gains, b.scale, p.centred ? total.x * inverse_cols : 0.0f,
                    total.y * inverse_cols, NormRow<X>(b.dx, facts.raw_row));
    }
  }
  LetNextKernelStart();
  if (b.partials == nullptr) return;
  WritePartials(sums, reinterpret_cast<float4*>(shared), vectors, group, p.centred, b.scale, b.partials);
}

// A launch of the kernel.
struct Launch {
  const NormParams& p;
  const NormBackwardParams& b;
  const DeviceLimits& limits;
  cudaStream_t stream;
  bool asks = false;  // whether it would fit; launches nothing

  template <typename X, typename Dy, int kVectors, int kThreads>
  bool IfFits(cudaError_t* error) const {
    const int64_t cols = p.x.cols;
    if (cols > int64_t{kMostGroupWarps} * 32 * 8 * kVectors) return false;
    const int64_t ring_bytes = kStages * cols * static_cast<int64_t>(sizeof(X) + sizeof(Dy));
    const int64_t sum_bytes = 2 * cols * static_cast<int64_t>(sizeof(float));
    const int64_t group_bytes = std::max(ring_bytes, sum_bytes);
    const int group = NormGroupSize(cols, kVectors);
    const auto groups = static_cast<int>(
        std::min<int64_t>({kThreads / group, limits.shared_bytes_per_block / group_bytes, kMostGroups}));
    if (groups == 0) return false;
    if (asks) return true;
    const auto kernel = NormBackwardKernel<X, Dy, kVectors, kThreads>;
    const auto shared_bytes = static_cast<int>(groups * group_bytes);
    *error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (*error != cudaSuccess) return true;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(p.rows, limits.multiprocessors));
    EarlyLaunch launch(blocks, static_cast<unsigned>(group * groups), shared_bytes, true, stream);
    *error = cudaLaunchKernelEx(launch.config(), kernel, p, b, group);
    return true;
  }
  // As many threads as registers suffice for.
  template <typename X, typename Dy>
  bool IfFits(cudaError_t* error) const {
    if constexpr (sizeof(X) == 2 && sizeof(Dy) == 2) {
      return IfFits<X, Dy, 2, 640>(error) || IfFits<X, Dy, 3, 512>(error);
    } else {
      return IfFits<X, Dy, 2, 512>(error);
    }
  }
};

}  // namespace

absl::string_view WhyNoNormBackward(const NormParams& params, const NormBackwardParams& backward,
                                    const DeviceLimits& limits) {
  if (!limits.is_hopper) return "not a Hopper GPU";
  if (params.x.cols < kFewestColumns) return "short rows";
  if (params.rows > kMostRows) return "many rows";
  cudaError_t error = cudaSuccess;
  const Launch launch = {params, backward, limits, nullptr, /*asks=*/true};
  return LaunchIfPaired(launch, params, backward, &error) ? "" : "long rows";
}

bool LaunchNormBackwardIfFits(const NormParams& params, const NormBackwardParams& backward,
                              const DeviceLimits& limits, cudaStream_t stream, cudaError_t* error) {
  if (!WhyNoNormBackward(params, backward, limits).empty()) return false;
  return LaunchIfPaired(Launch{params, backward, limits, stream}, params, backward, error);
}

}  // namespace lossd::kernels::cuda::hopper
