// SPDX-License-Identifier: Apache-2.0
// LayerNorm and RMSNorm, forward and backward. norm.h has the formulas of the forward pass; those of the
// backward pass and its plan stand above its kernels. norm_rows.cuh has what these kernels share with
// hopper/norm_backward.cu: groups of threads that work on a row (RowGroup; RowGroup<true>: the block is one
// group), their sums (GroupSum), and rows in shared memory. A vector has eight columns.
//
// Forward. A block holds a row in registers, so x is read once and y is written once; gain and shift come
// from L1 or L2. A block that works on long rows of 16-bit elements holds two rows, so that it loads gain and
// shift once for both. (Gain and shift are fp32, twice as large as x and y of such a row, and would not stay
// in L1 beside x and y.) Rows with more than kMostNormColumns columns, with a number of columns that is not a
// multiple of 8, or that are not aligned are read again for each pass (NormForwardAnyKernel).
#include <algorithm>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/norm.h"
#include "kernels/cuda/kernels/norm_rows.cuh"

namespace lossd::kernels::cuda {
namespace {

// ---- forward ----

constexpr int64_t kPairColumns = 4096;  // rows with at least so many columns are processed in pairs

// Any dtype and number of columns. Grid: one block a row.
__global__ __launch_bounds__(kNormThreads) void NormForwardAnyKernel(const __grid_constant__ NormParams p) {
  __shared__ float scratch[33];
  const int64_t row = blockIdx.x;
  const int64_t cols = p.x.cols;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const void* x_row = AnyNormRow(p.x, p.source != nullptr ? p.source[row] : row);
  void* y_row = AnyNormRow(p.y, row);
  const bool aligned = NormAligned(p.x);
  float mean = 0.0f;
  if (p.centred) {
    float sum = 0.0f;
    ForEachEight(cols, [&](int64_t c) {
      float x[8];
      Load8(x_row, p.x.dtype, c, cols, aligned, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += x[j];
    });
    mean = BlockSum(sum, scratch) * inverse_cols;
  }
  float squares = 0.0f;
  ForEachEight(cols, [&](int64_t c) {
    float x[8];
    Load8(x_row, p.x.dtype, c, cols, aligned, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float d = c + j < cols ? x[j] - mean : 0.0f;
      squares += d * d;
    }
  });
  const float r = 1.0f / sqrtf(BlockSum(squares, scratch) * inverse_cols + p.epsilon);
  if (threadIdx.x == 0) {
    p.mean[row] = mean;
    p.inverse_deviation[row] = r;
  }
  ForEachEight(cols, [&](int64_t c) {
    float x[8], gain[8], shift[8];
    Load8(x_row, p.x.dtype, c, cols, aligned, x);
    Load8(p.gain, DType::kFloat32, c, cols, true, gain);
    if (p.centred) Load8(p.shift, DType::kFloat32, c, cols, true, shift);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      x[j] = (x[j] - mean) * r * gain[j] + (p.centred ? shift[j] : 0.0f);
      if (c + j >= cols) x[j] = 0.0f;
    }
    Store8(y_row, p.y.dtype, c, p.y.ld, NormAligned(p.y), x);
  });
}

// One thread's vectors of a row.
template <typename T>
struct HeldRow {
  static constexpr int kPieces = sizeof(T) / 2;  // 16-byte pieces of a vector
  uint4 raw[kMostNormVectors][kPieces];

  __device__ __forceinline__ void Load(const T* row, const RowGroup<true>& group, int vectors) {
    const auto* from = reinterpret_cast<const uint4*>(row);
#pragma unroll
    for (int i = 0; i < kMostNormVectors; ++i) {
      const int v = group.thread + i * group.size;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        raw[i][k] =
            v < vectors ? __ldcs(from + v * kPieces + k) : make_uint4(0, 0, 0, 0);  // read once: bypass L1
      }
    }
  }
  __device__ __forceinline__ void Unpack(int i, float (&x)[8]) const { UnpackEight<T>(raw[i], x); }
};

// A block processes kRows rows at once, so that gain and shift are loaded once for all of them.
template <typename T, int kRows>
__global__ __launch_bounds__(kNormThreads, 2) void NormForwardKernel(const __grid_constant__ NormParams p) {
  using Sums = GroupValues<kRows>;
  __shared__ Sums scratch[2 * kNormThreads / 32];
  const RowGroup<true> group(static_cast<int>(blockDim.x));
  GroupSum<true, kRows> group_sum(group, scratch);
  AwaitKernelBefore();
  LetNextKernelStart();
  const int64_t first = int64_t{blockIdx.x} * kRows;
  const int vectors = static_cast<int>(p.x.cols) / 8;
  const float inverse_cols = 1.0f / static_cast<float>(p.x.cols);
  HeldRow<T> rows[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const int64_t row = min(first + k, p.rows - 1);
    rows[k].Load(NormRow<T>(p.x, p.source != nullptr ? p.source[row] : row), group, vectors);
  }
  Sums mean = {};
  if (p.centred) {
    Sums sum = {};
#pragma unroll
    for (int i = 0; i < kMostNormVectors; ++i) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        float x[8];
        rows[k].Unpack(i, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum.at[k] += x[j];
      }
    }
    mean = group_sum(sum);
#pragma unroll
    for (int k = 0; k < kRows; ++k) mean.at[k] *= inverse_cols;
  }
  Sums squares = {};
#pragma unroll
  for (int i = 0; i < kMostNormVectors; ++i) {
    if (group.thread + i * group.size >= vectors) continue;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      float x[8];
      rows[k].Unpack(i, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) squares.at[k] += (x[j] - mean.at[k]) * (x[j] - mean.at[k]);
    }
  }
  Sums r = group_sum(squares);
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    r.at[k] = rsqrtf(r.at[k] * inverse_cols + p.epsilon);
    if (group.thread == 0 && first + k < p.rows) {
      p.mean[first + k] = mean.at[k];
      p.inverse_deviation[first + k] = r.at[k];
    }
  }
#pragma unroll
  for (int i = 0; i < kMostNormVectors; ++i) {
    const int v = group.thread + i * group.size;
    if (v >= vectors) continue;
    float gain[8], shift[8];
    Load8(p.gain, DType::kFloat32, 8 * v, p.x.cols, true, gain);
    Load8(p.shift, DType::kFloat32, 8 * v, p.centred ? p.x.cols : 0, true, shift);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (first + k >= p.rows) continue;
      float x[8];
      rows[k].Unpack(i, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = fmaf((x[j] - mean.at[k]) * r.at[k], gain[j], shift[j]);
      Store8(AnyNormRow(p.y, first + k), p.y.dtype, 8 * v, p.y.cols, true, x);
    }
  }
}

// Launches NormForwardKernel, which holds rows in registers.
template <typename T, int kRows>
cudaError_t LaunchHeld(const NormParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.rows + kRows - 1) / kRows);
  const auto threads = static_cast<unsigned>(NormGroupSize(p.x.cols, kMostNormVectors));
  EarlyLaunch launch(blocks, threads, 0, limits.has_clusters, stream);
  return cudaLaunchKernelEx(launch.config(), NormForwardKernel<T, kRows>, p);
}

template <typename T>
cudaError_t LaunchHeld(const NormParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  // Two fp32 rows do not fit into the registers.
  if constexpr (sizeof(T) == 2) {
    if (p.x.cols >= kPairColumns) return LaunchHeld<T, 2>(p, limits, stream);
  }
  return LaunchHeld<T, 1>(p, limits, stream);
}

// "" if a block can hold rows in registers, else the reason why not.
absl::string_view WhyNotHeld(const NormParams& p) {
  if (p.x.cols % 8 != 0) return "8 does not divide the columns";
  if (p.x.cols > kMostNormColumns) return "long rows";
  return p.y.ld != p.x.cols || !NormAligned(p.x) || !NormAligned(p.y) ? "rows that are not aligned" : "";
}

}  // namespace

NormPlan PlanNormForward(const NormParams& params) {
  const absl::string_view reason = WhyNotHeld(params);
  return {reason.empty() ? NormRows::kRegisters : NormRows::kNowhere, reason};
}

cudaError_t LaunchNormForward(const NormParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  // kNowhere: the rows are not kept on the multiprocessor; each pass reads them again.
  if (PlanNormForward(params).rows == NormRows::kNowhere) {
    NormForwardAnyKernel<<<static_cast<unsigned>(params.rows), NormThreadsForAny(params.x.cols), 0, stream>>>(
        params);
    return cudaGetLastError();
  }
  return WithElement(params.x.dtype, [&](auto element) {
    return LaunchHeld<typename decltype(element)::Type>(params, limits, stream);
  });
}

// ---- backward, with gain and shift gradients ----
//
// With unit = (x - mean) r, the normalized row, and g = gain dy (dy = scale * p.y):
//
//   dx = r (g - mean(g) - unit mean(g unit)); RMSNorm: without mean(g)
//   the gradients of gain and shift are the sums of dy unit and of dy over the rows
//
// Bytes: reads x and dy, writes dx.
//
// Plan: one block a multiprocessor; its groups of threads (RowGroup, one row at a time each) take rows in
// turn. Each warp has a ring of kStages parts of rows in shared memory, into which it copies its own threads'
// vectors of the next rows. So no barrier is needed between loads and arithmetic; only the sums over a row
// need a barrier. A thread sums the parameter gradients of its columns in registers, over all rows of its
// group. The sums of a block's groups are added in shared memory. A second kernel adds the partial sums of
// the blocks. The order is always the same.
//
// A thread has either two vectors of a row and their gain in registers, or four vectors and the gain in
// shared memory. A launch takes the one with which more threads of a block have work: usually two vectors for
// short rows, four for long rows. Some rows are read again for each pass (NormBackwardAnyKernel): rows so
// long that kStages of them do not fit into shared memory, rows whose number of columns is not a multiple of
// 8, rows that are not aligned, and rows with rare pairs of dtypes of x and dy. On Hopper most rows of 1024
// to 32768 columns use hopper/norm_backward.cu.

namespace {

constexpr int kStages = 2;  // a third stage gains nothing and starts later

__device__ __forceinline__ void AddEight(float* sums, int64_t c, int64_t cols, const float (&x)[8]) {
  for (int j = 0; j < 8 && c + j < cols; ++j) sums[c + j] += x[j];
}

// partials: [gridDim.x, D] for the sums of the gain, then as many for the shift. All kernels of this file lay
// out partials in this way.
__global__ __launch_bounds__(kNormThreads) void NormBackwardAnyKernel(
    const __grid_constant__ NormParams p, const __grid_constant__ NormBackwardParams b) {
  __shared__ float scratch[2][33];
  const int64_t cols = p.x.cols;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const bool x_aligned = NormAligned(p.x);
  const bool y_aligned = NormAligned(p.y);
  float* gain_sums = b.partials + blockIdx.x * cols;
  float* shift_sums = gain_sums + gridDim.x * cols;
  if (b.partials != nullptr) {
    ForEachEight(cols, [&](int64_t c) {
      for (int j = 0; j < 8 && c + j < cols; ++j) {
        gain_sums[c + j] = 0.0f;
        shift_sums[c + j] = 0.0f;
      }
    });
  }
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t raw_row = p.source != nullptr ? p.source[row] : row;
    const void* x_row = AnyNormRow(p.x, raw_row);
    const void* y_row = AnyNormRow(p.y, row);
    const float mean = p.centred ? p.mean[row] : 0.0f;
    const float r = p.inverse_deviation[row];
    const bool kept = b.partials != nullptr && (b.keep == nullptr || b.keep[row] != 0);
    float sum_g = 0.0f;       // sum of gain dy
    float sum_g_unit = 0.0f;  // sum of gain dy unit
    ForEachEight(cols, [&](int64_t c) {
      float unit[8], dy[8], gain[8], product[8];
      Load8(x_row, p.x.dtype, c, cols, x_aligned, unit);
      Load8(y_row, p.y.dtype, c, cols, y_aligned, dy);
      Load8(p.gain, DType::kFloat32, c, cols, true, gain);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        unit[j] = (unit[j] - mean) * r;
        dy[j] *= b.scale;
        product[j] = dy[j] * unit[j];
        sum_g += gain[j] * dy[j];
        sum_g_unit += gain[j] * product[j];
      }
      if (kept) {
        AddEight(gain_sums, c, cols, product);
        if (p.centred) AddEight(shift_sums, c, cols, dy);
      }
    });
    const float mean_g = p.centred ? BlockSum(sum_g, scratch[0]) * inverse_cols : 0.0f;
    const float mean_g_unit = BlockSum(sum_g_unit, scratch[1]) * inverse_cols;
    if (b.dx.data == nullptr) continue;
    void* dx_row = AnyNormRow(b.dx, raw_row);
    ForEachEight(cols, [&](int64_t c) {
      float x[8], dy[8], gain[8];
      Load8(x_row, p.x.dtype, c, cols, x_aligned, x);
      Load8(y_row, p.y.dtype, c, cols, y_aligned, dy);
      Load8(p.gain, DType::kFloat32, c, cols, true, gain);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] = r * (gain[j] * dy[j] * b.scale - mean_g - (x[j] - mean) * r * mean_g_unit);
      }
      Store8(dx_row, b.dx.dtype, c, cols, NormAligned(b.dx), x);
    });
  }
}

// ---- backward, with rows through shared memory ----

// A warp's part of a row in shared memory, in 16-byte units: RowFacts (r, mean, keep and the raw row's
// number), x, dy.
template <typename X, typename Dy, int kVectors>
struct Stage {
  using XPart = WarpPart<X, kVectors>;
  using DyPart = WarpPart<Dy, kVectors>;
  static constexpr int kX = 1;
  static constexpr int kDy = kX + XPart::kLength;
  static constexpr int kLength = kDy + DyPart::kLength;
};

// The array from which a lane copies its word of RowFacts; null: the word keeps its initial value.
__device__ __forceinline__ const void* FactColumn(const NormParams& p, const NormBackwardParams& b,
                                                  int lane) {
  if (lane == 0) return p.inverse_deviation;
  if (lane == 1) return p.centred ? p.mean : nullptr;
  if (lane == 2) return b.keep;
  return lane == 3 ? p.source : nullptr;
}

// The next rows of a warp's group, in the stages of the warp's ring.
template <typename X, typename Dy, int kVectors>
class RowQueue {
 public:
  using Layout = Stage<X, Dy, kVectors>;

  // Called by all lanes. ring: [kStages][stride] units; the first Layout::kLength units of each stage are the
  // warp's.
  __device__ __forceinline__ RowQueue(const NormParams& p, const NormBackwardParams& b,
                                      const RowGroup<false>& group, uint4* ring, int stride, int64_t first,
                                      int64_t step)
      : p_(p),
        group_(group),
        ring_(ring),
        stride_(stride),
        sources_(p, first, step),
        facts_(static_cast<const int32_t*>(FactColumn(p, b, group.lane))) {}

  __device__ __forceinline__ void Start() {
    for (int stage = 0; stage < kStages; ++stage) {
      if (group_.lane == 0) *reinterpret_cast<RowFacts*>(at(stage)) = {0.0f, 0.0f, 1, 0};
    }
    __syncwarp();
    for (int stage = 0; stage < kStages; ++stage) Fetch(stage);
  }
  // Starts one batch of copies, which is empty past the last row. All lanes must have read the old contents
  // of the stage.
  __device__ __forceinline__ void Fetch(int stage) {
    const int64_t row = sources_.row();
    const int64_t raw_row = sources_.Take();
    if (raw_row >= 0) {
      uint4* to = at(stage);
      const int vectors = static_cast<int>(p_.x.cols / 8);
      Layout::XPart::Fetch(to + Layout::kX, NormRow<X>(p_.x, raw_row), group_, vectors);
      Layout::DyPart::Fetch(to + Layout::kDy, NormRow<Dy>(p_.y, row), group_, vectors);
      if (facts_ != nullptr)
        CopyAsync4(SharedAddress(to) + 4u * static_cast<uint32_t>(group_.lane), facts_ + row);
    }
    CommitCopies();
  }
  __device__ __forceinline__ uint4* at(int stage) const { return ring_ + stage * stride_; }

 private:
  const NormParams& p_;
  const RowGroup<false>& group_;
  uint4* ring_;
  int stride_;
  SourceRows sources_;
  const int32_t* facts_;
};

// A row in a stage; unit = x r + offset.
template <typename X, typename Dy, int kVectors>
struct StagedRow {
  using Layout = Stage<X, Dy, kVectors>;
  const uint4* stage;
  int lane;
  RowFacts facts;
  float offset;

  __device__ __forceinline__ StagedRow(const uint4* from, int from_lane)
      : stage(from),
        lane(from_lane),
        facts(*reinterpret_cast<const RowFacts*>(from)),
        offset(-facts.mean * facts.inverse_deviation) {}
  __device__ __forceinline__ void Load(int i, float (&x)[8], float (&dy)[8]) const {
    Layout::XPart::Load(stage + Layout::kX, i, lane, x);
    Layout::DyPart::Load(stage + Layout::kDy, i, lane, dy);
  }
};

template <typename X, typename Dy, int kVectors>
__global__ __launch_bounds__(kNormThreads,
                             1) void NormBackwardKernel(const __grid_constant__ NormParams p,
                                                        const __grid_constant__ NormBackwardParams b,
                                                        int group_size) {
  // [kStages][warps] parts of rows; at the end their memory is used for the sums of the groups. Behind them
  // lies the gain, unless it is in registers.
  extern __shared__ uint4 shared[];
  __shared__ GroupValues<2> scratch[2 * kNormThreads / 32];
  constexpr int kLength = Stage<X, Dy, kVectors>::kLength;
  const RowGroup<false> group(group_size);
  GroupSum<false, 2> group_sum(group, scratch);
  const int groups = static_cast<int>(blockDim.x) / group_size;
  const int vectors = static_cast<int>(p.x.cols / 8);
  const int stride = static_cast<int>(blockDim.x) / 32 * kLength;
  const float inverse_cols = 1.0f / static_cast<float>(p.x.cols);
  const int64_t step = static_cast<int64_t>(groups) * gridDim.x;
  const int64_t group_offset = static_cast<int64_t>(group.index) * gridDim.x;

  AwaitKernelBefore();
  RowQueue<X, Dy, kVectors> queue(p, b, group, shared + threadIdx.x / 32 * kLength, stride,
                                  blockIdx.x + group_offset, step);
  queue.Start();
  const Gain<kVectors> gains(p.gain, reinterpret_cast<float4*>(shared + kStages * stride), vectors, group);
  __syncthreads();

  ColumnSums<kVectors> sums;
  int stage = 0;
  // All groups take part in every round, even without a row.
  for (int64_t round = blockIdx.x; round < p.rows; round += step) {
    const int64_t row = round + group_offset;
    // Waits for the oldest batch of copies, which brings this row; the others may still be under way.
    AwaitCopies(kStages - 1);
    __syncwarp();
    const StagedRow<X, Dy, kVectors> staged(queue.at(stage), group.lane);
    GroupValues<2> total = {};
    if (row < p.rows) total = AddRow(staged, group, vectors, gains, sums);
    total = group_sum(total);
    if (row < p.rows && b.dx.data != nullptr) {
      const int64_t raw_row = p.source != nullptr ? staged.facts.raw_row : row;
      WriteGradient(staged, group, vectors, gains, b.scale, p.centred ? total.at[0] * inverse_cols : 0.0f,
                    total.at[1] * inverse_cols, NormRow<X>(b.dx, raw_row));
    }
    __syncwarp();  // all lanes have read the row, so the next one may take its place
    queue.Fetch(stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  LetNextKernelStart();
  if (b.partials == nullptr) return;
  const PartialRow to = {b.partials, static_cast<int>(gridDim.x), static_cast<int>(blockIdx.x), vectors, 0};
  WritePartials(sums, reinterpret_cast<float4*>(shared), vectors, group, p.centred, b.scale, to);
}

// How a launch divides a block. groups == 0: such rows do not fit.
struct Plan {
  int group = 0;  // threads for each row
  int groups = 0;
  int shared_bytes = 0;

  int threads() const { return group * groups; }
};

template <typename X, typename Dy, int kVectors>
Plan MakePlan(int64_t cols, const DeviceLimits& limits) {
  constexpr int kWarpBytes = kStages * Stage<X, Dy, kVectors>::kLength * static_cast<int>(sizeof(uint4));
  // The memory of a group's ring is also used for the group's sums of both parameters.
  static_assert(kWarpBytes >= 2 * kVectors * 8 * 32 * static_cast<int>(sizeof(float)));
  Plan plan;
  if (cols % 8 != 0 || cols > int64_t{kNormThreads} * kVectors * 8) return plan;
  const int gain_bytes = Gain<kVectors>::kHeld ? 0 : static_cast<int>(cols * sizeof(float));
  plan.group = NormGroupSize(cols, kVectors);
  const int group_bytes = plan.group / 32 * kWarpBytes;
  plan.groups =
      std::min(kNormThreads / plan.group, (limits.shared_bytes_per_block - gain_bytes) / group_bytes);
  if (plan.groups <= 0) return Plan{};
  plan.shared_bytes = gain_bytes + plan.groups * group_bytes;
  return plan;
}

// A launch of NormBackwardKernel, which copies rows to shared memory.
struct Launch {
  const NormParams& p;
  const NormBackwardParams& b;
  const DeviceLimits& limits;
  unsigned blocks;
  cudaStream_t stream;
  bool asks = false;  // only tests whether rows fit; launches nothing

  // Launches the kernel with kVectors vectors a thread.
  template <typename X, typename Dy, int kVectors>
  cudaError_t Run(const Plan& plan) const {
    const auto kernel = NormBackwardKernel<X, Dy, kVectors>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
    if (error != cudaSuccess) return error;
    EarlyLaunch launch(blocks, plan.threads(), plan.shared_bytes, limits.has_clusters, stream);
    return cudaLaunchKernelEx(launch.config(), kernel, p, b, plan.group);
  }
  // Returns false if the rows do not fit. Otherwise *error is the error of the launch.
  template <typename X, typename Dy>
  bool IfFits(cudaError_t* error) const {
    const Plan two = MakePlan<X, Dy, 2>(p.x.cols, limits);
    const Plan four = MakePlan<X, Dy, 4>(p.x.cols, limits);
    if (two.groups == 0 && four.groups == 0) return false;
    if (asks) return true;
    *error = two.threads() >= four.threads() ? Run<X, Dy, 2>(two) : Run<X, Dy, 4>(four);
    return true;
  }
};

}  // namespace

NormPlan PlanNormBackward(const NormParams& params, const NormBackwardParams& backward,
                          const DeviceLimits& limits) {
  const absl::string_view why_no_vectors = WhyNotInVectors(params, backward);
  if (!why_no_vectors.empty()) return {NormRows::kNowhere, why_no_vectors};
  const absl::string_view why_not_hopper = hopper::WhyNoNormBackward(params, backward, limits);
  if (why_not_hopper.empty()) return {NormRows::kBulkCopies, ""};
  cudaError_t error = cudaSuccess;
  const Launch launch = {params, backward, limits, 0, nullptr, /*asks=*/true};
  // LaunchIfPaired (norm_rows.cuh) calls launch.IfFits for the pair of dtypes of x and dy.
  if (LaunchIfPaired(launch, params, backward, &error)) return {NormRows::kWarpCopies, why_not_hopper};
  return {NormRows::kNowhere, "long rows"};
}

cudaError_t LaunchNormBackward(const NormParams& params, const NormBackwardParams& backward,
                               const DeviceLimits& limits, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  NormBackwardParams b = backward;
  // Without parameter gradients, the kernels write no partial sums.
  if (b.gain_gradient == nullptr) b.partials = nullptr;
  const int64_t cols = params.x.cols;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(params.rows, limits.multiprocessors));
  int64_t partial_rows = blocks;
  cudaError_t error = cudaSuccess;
  switch (PlanNormBackward(params, b, limits).rows) {
    case NormRows::kBulkCopies:
      hopper::LaunchNormBackwardIfFits(params, b, limits, stream, &partial_rows, &error);
      break;
    case NormRows::kWarpCopies:
      LaunchIfPaired(Launch{params, b, limits, blocks, stream}, params, b, &error);
      break;
    case NormRows::kRegisters:  // forward only
    case NormRows::kNowhere:
      NormBackwardAnyKernel<<<blocks, NormThreadsForAny(cols), 0, stream>>>(params, b);
      error = cudaGetLastError();
      break;
  }
  if (error != cudaSuccess || b.partials == nullptr) return error;
  return LaunchAddPartials(b.partials, partial_rows, cols, 1.0f, b.gain_gradient,
                           params.centred ? b.shift_gradient : nullptr, limits.has_clusters, stream);
}

}  // namespace lossd::kernels::cuda

LOSSD_KERNEL_FILE(Norm)
