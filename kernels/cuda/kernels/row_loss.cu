// SPDX-License-Identifier: Apache-2.0
// The row loss kernel: row results and gradients from fp32 logits.
//
// Math, for one row. z is the logit after bias, scale and softcap in fp32, f = log2(e), and d_v = z_v f - M
// (one fused multiply-add, so that a common offset of any size cancels exactly). u is the class weight, U the
// sum of all class weights, y the target, alpha the smoothing, w the row weight, and c, c_lse and c_H are the
// factors of loss, lse and entropy (RowInputs):
//
//   M = f max z,  S = sum 2^d,  lse = (M + log2 S) ln 2,  p_v = 2^d_v / S
//   nll = ln 2 (log2 S - d_y),  H = ln 2 (log2 S - sum 2^d d / S)
//   loss = w [u_y (1 - alpha) nll + alpha / V (U nll - sum_v u_v (z_v - z_y)) + lambda lse^2]
//   dL/dz_v = p_v (c A + c_lse - c_H (log p_v + H)) - c alpha / V u_v - [v = y] c u_y (1 - alpha)
//     with A = u_y (1 - alpha) + alpha U / V + 2 lambda lse
//
// The target is kept out of M, S and the other sums until they are complete. With S' the sum over the other
// classes, 1 - p_y = S' / S and, for a confident row, nll = log1p(S' / e_y) are exact to fp32.
//
// The plain case (not kGeneral) has no bias, softcap, class weights, smoothing or entropy, and scale > 0. In
// this case z is the dot product itself, and f = scale log2(e), so that z f needs no multiplication of its
// own.
//
// Plan: one thread block cluster (1, 2, 4 or 8 blocks) a row. Each block holds its part of the row in shared
// memory (cp.async), so a row is read once and written once. Rows that do not fit, and all rows on GPUs
// without clusters, are read a second time (mostly from L2). The statistics of threads, warps and blocks are
// combined in a fixed order.
//
// Bytes: rows * V * 4 read and, with the gradient, rows * V * (2 or 4) written. Operations: 2 exponentials
// and about 20 other operations an element. If several blocks share a multiprocessor, they take less time
// than the transfer of the bytes. So a block has at most kTargetBlockBytes.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/row_loss.h"
#include "kernels/cuda/kernels/row_loss_math.cuh"
#include "kernels/cuda/kernels/row_part.cuh"

namespace lossd::kernels::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kMaxCluster = 8;
constexpr int kDotWarps = 8;
constexpr int kTargetBlockBytes = 64 << 10;

// ---- thread block clusters ----

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ __forceinline__ uint32_t ClusterSize() {
  uint32_t size = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  return size;
}

// A mailbox in the shared memory of each block of a cluster. Every block puts its words into the mailboxes of
// all blocks, and reads its own when all words have arrived. It is used once a launch. The order is
// guaranteed because
// - the initialization of a barrier is released to the cluster before its block arrives at the cluster's
//   barrier, and every sender waits at that barrier first;
// - the phase cannot end before the thread that opened the mailbox has arrived and has said, in the same
//   step, how many bytes to expect; bytes may come earlier;
// - remote stores complete on the receiver's barrier, and the receiver acquires at cluster scope.
//
// A block may end when it has read its mailbox, because no other block then has anything left to send to it.
template <int kWords>
struct Mailbox {
  static constexpr int kStride = (kWords + 3) / 4 * 4;
  alignas(16) float words[kMaxCluster * kStride];
  alignas(8) uint64_t barrier;

  // Called by all threads. The mailboxes of the cluster are usable after AwaitOpen().
  __device__ __forceinline__ void Open(uint32_t cluster) {
#if __CUDA_ARCH__ >= 900
    const uint32_t address = SharedAddress(&barrier);
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address),
                   "r"(cluster * kStride * 4u)
                   : "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }
  __device__ __forceinline__ void AwaitOpen() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }
  // Called by one thread for each receiver. Sends `own` (kStride words of this block) to the block `to`, as
  // sender `rank`.
  __device__ __forceinline__ void Send(const float* own, uint32_t rank, uint32_t to) {
#if __CUDA_ARCH__ >= 900
    uint32_t target, target_barrier;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(target)
                 : "r"(SharedAddress(words + rank * kStride)), "r"(to));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(target_barrier)
                 : "r"(SharedAddress(&barrier)), "r"(to));
#pragma unroll
    for (int i = 0; i < kStride; i += 4) {
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::
              "r"(target + 4u * i),
          "f"(own[i]), "f"(own[i + 1]), "f"(own[i + 2]), "f"(own[i + 3]), "r"(target_barrier)
          : "memory");
    }
#endif
  }
  __device__ __forceinline__ void AwaitAll() {
#if __CUDA_ARCH__ >= 900
    const uint32_t address = SharedAddress(&barrier);
    uint32_t complete = 0;
    while (complete == 0) {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; "
          "selp.u32 %0, 1, 0, p; }"
          : "=r"(complete)
          : "r"(address)
          : "memory");
    }
#endif
  }
};

using StatsMailbox = Mailbox<kStatsWords>;

// Called by one warp of each block. Combines the statistics of the block's warps, and then of the cluster's
// blocks.
template <bool kGeneral>
__device__ __forceinline__ Stats ReduceRow(const float* warp_words, float f, uint32_t cluster, uint32_t rank,
                                           StatsMailbox& mailbox) {
  const uint32_t lane = threadIdx.x;
  const uint32_t warps = (blockDim.x + 31) >> 5;
  Stats s = lane < warps ? Get(warp_words + lane * kStatsWords) : NoStats();
  s = ReduceWarp<kGeneral>(s, f);
  if (cluster == 1) return s;
  float words[StatsMailbox::kStride] = {};
  Put(s, words);
  mailbox.AwaitOpen();
  if (lane < cluster) mailbox.Send(words, rank, lane);
  __syncwarp();
  mailbox.AwaitAll();
  s = lane < cluster ? Get(mailbox.words + lane * StatsMailbox::kStride) : NoStats();
  return ReduceWarp<kGeneral>(s, f);
}

// Sets the target and the padding of a plain row to -inf before it is read, so that the loops need no checks.
// The target's element is written again with the gradient.
template <bool kResident>
__device__ __forceinline__ void MaskRow(const LogitMatrix& logits, const RowPart<kResident>& part,
                                        int target) {
  if constexpr (!kResident) __syncthreads();  // all threads have read the target's logit
  part.Mask(target, NegativeInfinity());
  for (int column = static_cast<int>(logits.classes); column < static_cast<int>(logits.ld); ++column)
    part.Mask(column, NegativeInfinity());
}

// ---- the kernel ----

// T: the compute dtype.
template <typename T, bool kGeneral, bool kResident>
__global__ __launch_bounds__(kMaxThreads, kGeneral || !kResident ? 2 : 3) void RowLossKernel(
    const __grid_constant__ RowLossParams p) {
  extern __shared__ uint4 shared_row[];
  const uint32_t cluster = ClusterSize();
  const uint32_t rank = ClusterRank();
  const int64_t row = blockIdx.x / cluster;
  float* const row_logits = static_cast<float*>(p.logits.data) + row * p.logits.ld;
  T* const row_gradient =
      p.gradient.data != nullptr ? static_cast<T*>(p.gradient.data) + row * p.gradient.ld : nullptr;
  const int classes = static_cast<int>(p.logits.classes);

  const int vectors = static_cast<int>(p.logits.ld / kDots);
  const int per_block = (vectors + static_cast<int>(cluster) - 1) / static_cast<int>(cluster);
  RowPart<kResident> part;
  part.row = row_logits;
  part.shared = SharedAddress(shared_row);
  part.begin = min(static_cast<int>(rank) * per_block, vectors);
  part.end = min(part.begin + per_block, vectors);
  if (row >= p.in.rows) {  // a padding row, for the whole cluster
    if (row_gradient != nullptr) WriteZeros(part, row_gradient);
    return;
  }

  __shared__ StatsMailbox mailbox;
  __shared__ float warp_words[kMaxWarps * kStatsWords];
  __shared__ GradientRule shared_rule;
  if (cluster > 1) mailbox.Open(cluster);
  const LogitMap<T, kGeneral> map(p.terms);
  Target target;
  target.column = target.place = p.in.targets[row];
  const float stored_dot = row_logits[target.column];  // read before MaskRow overwrites it
  part.Fetch();
  if constexpr (!kGeneral) MaskRow(p.logits, part, target.column);
  target.logit = map(p.in.target_dots != nullptr ? p.in.target_dots[row] : stored_dot, target.column);
  target.stored_z = map(stored_dot, target.column).z;
  target.class_weight = kGeneral ? ClassWeight(p.terms, target.column) : 1.0f;

  const Stats own =
      ReduceWarp<kGeneral>(RowStats<T, kGeneral, kResident>(p.terms, map, part, classes, target), map.f);
  if ((threadIdx.x & 31) == 0) Put(own, warp_words + (threadIdx.x >> 5) * kStatsWords);
  __syncthreads();
  if (threadIdx.x < 32) {
    const Stats others = ReduceRow<kGeneral>(warp_words, map.f, cluster, rank, mailbox);
    const RowResult result = Finish<kGeneral>(p.terms, p.in, row, target, others, map.f);
    if (rank == 0 && threadIdx.x == 0) WriteRow(p.out, row, result);
    if (threadIdx.x == 0) {
      shared_rule = MakeRule<kGeneral>(p.terms, p.in, row, target, result);
      if (!p.with_uniform) shared_rule.uniform = 0.0f;
    }
  } else if (cluster > 1) {
    // All threads have arrived at the cluster's barrier in Open(), so all must wait at it.
    mailbox.AwaitOpen();
  }
  if (row_gradient == nullptr) return;
  __syncthreads();
  if (shared_rule.valid) {
    WriteGradient(p.terms, map, part, classes, target, shared_rule, row_gradient);
  } else {
    WriteZeros(part, row_gradient);
  }
}

// Grid: one warp a row.
template <typename T>
__global__ void TargetDotsKernel(const __grid_constant__ TargetDotParams p) {
  constexpr int kSize = Vec<T>::kSize;
  const int64_t row = blockIdx.x * int64_t{kDotWarps} + (threadIdx.x >> 5);
  if (row >= p.rows) return;
  const int64_t place = p.targets[row];
  const bool here = p.columns == nullptr || (place >= 0 && place < p.classes);
  if (p.columns != nullptr && (threadIdx.x & 31) == 0) p.columns[row] = here ? p.targets[row] : -1;
  if (!here) {
    if ((threadIdx.x & 31) == 0) p.dots[row] = 0.0f;
    return;
  }
  const auto* x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.hidden) + row * p.ld);
  const auto* w = reinterpret_cast<const uint4*>(static_cast<const T*>(p.weight) + place * p.ld);
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t v = threadIdx.x & 31; v < p.ld / kSize; v += 32) {
    float a[kSize], b[kSize];
    Vec<T>::Unpack(x[v], a);
    Vec<T>::Unpack(w[v], b);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum = fmaf(a[i], b[i], sum);
  }
  for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if ((threadIdx.x & 31) != 0) return;
  // An infinite dot product must not be hidden by a softcap; an infinite bias may be.
  p.dots[row] = p.bias == nullptr ? sum : isinf(sum) ? NAN : sum + p.bias[place];
}

// How a launch divides a row. cluster: blocks of a row. resident: the row is held in shared memory.
struct LaunchPlan {
  int cluster = 1;
  bool resident = true;
  int threads = kMaxThreads;
  int shared_bytes = 0;
};

LaunchPlan Plan(int64_t ld, const DeviceLimits& limits) {
  LaunchPlan plan;
  const int64_t row_bytes = ld * static_cast<int64_t>(sizeof(float));
  const int max_cluster = limits.has_clusters ? kMaxCluster : 1;
  while (plan.cluster < max_cluster && row_bytes > int64_t{plan.cluster} * kTargetBlockBytes)
    plan.cluster *= 2;
  const int64_t vectors = row_bytes / 16;
  const int64_t part_bytes = (vectors + plan.cluster - 1) / plan.cluster * 16;
  // Two blocks a multiprocessor; with one block, loads would wait for arithmetic.
  const int64_t most = std::min(limits.shared_bytes_per_block, limits.shared_bytes_per_sm / 2 - (2 << 10));
  plan.resident = part_bytes <= most;
  if (!plan.resident) plan.cluster = 1;
  plan.shared_bytes = plan.resident ? static_cast<int>(part_bytes) : 0;
  const int64_t block_vectors = plan.resident ? part_bytes / 16 : vectors;
  plan.threads = static_cast<int>(std::clamp<int64_t>((block_vectors + 31) / 32 * 32, 32, kMaxThreads));
  return plan;
}

template <typename T, bool kGeneral, bool kResident>
cudaError_t Launch(const RowLossParams& p, const LaunchPlan& plan, cudaStream_t stream) {
  auto* kernel = RowLossKernel<T, kGeneral, kResident>;
  if (plan.shared_bytes > 0) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.in.padded_rows * plan.cluster));
  config.blockDim = dim3(static_cast<unsigned>(plan.threads));
  config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  config.attrs = &attribute;
  config.numAttrs = plan.cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <typename T>
cudaError_t LaunchTyped(const RowLossParams& p, const LaunchPlan& plan, cudaStream_t stream) {
  if (p.terms.IsGeneral()) {
    return plan.resident ? Launch<T, true, true>(p, plan, stream) : Launch<T, true, false>(p, plan, stream);
  }
  return plan.resident ? Launch<T, false, true>(p, plan, stream) : Launch<T, false, false>(p, plan, stream);
}

}  // namespace

cudaError_t LaunchTargetDots(const TargetDotParams& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((params.rows + kDotWarps - 1) / kDotWarps);
  switch (params.dtype) {
    case DType::kFloat32:
      TargetDotsKernel<float><<<blocks, kDotWarps * 32, 0, stream>>>(params);
      break;
    case DType::kFloat16:
      TargetDotsKernel<__half><<<blocks, kDotWarps * 32, 0, stream>>>(params);
      break;
    case DType::kBFloat16:
      TargetDotsKernel<__nv_bfloat16><<<blocks, kDotWarps * 32, 0, stream>>>(params);
      break;
  }
  return cudaGetLastError();
}

std::string DescribeRowLoss(int64_t ld, const DeviceLimits& limits) {
  const LaunchPlan plan = Plan(ld, limits);
  return absl::StrCat(plan.cluster, plan.cluster == 1 ? " block of " : " blocks of ", plan.threads,
                      " threads a row, ", plan.resident ? "read once" : "too long to be kept");
}

cudaError_t LaunchRowLoss(const RowLossParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  if (params.in.padded_rows == 0) return cudaSuccess;
  const LaunchPlan plan = Plan(params.logits.ld, limits);
  switch (params.gradient.dtype) {
    case DType::kFloat32:
      return LaunchTyped<float>(params, plan, stream);
    case DType::kFloat16:
      return LaunchTyped<__half>(params, plan, stream);
    case DType::kBFloat16:
      return LaunchTyped<__nv_bfloat16>(params, plan, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace lossd::kernels::cuda

LOSSD_KERNEL_FILE(RowLoss)
