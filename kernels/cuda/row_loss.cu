// The fused loss kernel. Per row, with a = z log2(e) in fp32 (z: logit after bias, scale and softcap):
//
//   m = max a,  S = sum 2^(a - m),  lse = (m + log2 S) ln 2,  p_v = 2^(a_v - m - log2 S)
//   nll = lse - z_y,  H = ln 2 (log2 S - sum 2^(a - m) (a - m) / S)
//   loss = w [u_y (1 - alpha) nll + alpha / V (U nll - sum_v u_v (z_v - z_y)) + lambda lse^2]
//   dL/dz_v = p_v (c A + c_lse - c_H (log p_v + H)) - c alpha / V u_v - [v = y] c u_y (1 - alpha)
//     with A = u_y (1 - alpha) + alpha U / V + 2 lambda lse
//
// The target is kept out of m, S and so on until the row's sums are complete: with S' the sum of the
// others, 1 - p_y = S' / S and, for a confident row, nll = log1p(S' / e_y) are exact to fp32, whatever
// the storage type of the logits.
//
// Plan: one thread block cluster (1, 2, 4 or 8 blocks) per row; each block holds its part of the row in
// shared memory (cp.async), so a row is read once and written once. Rows that do not fit, and GPUs without
// clusters, read the row a second time (mostly from L2). The statistics of threads, warps and blocks
// are combined in a fixed order.
//
// Bytes: rows * V * (2 or 4) read and, with the gradient, as many written. Operations: 2 exponentials
// and about 20 others an element, which is below the time of the bytes as long as several blocks
// share a multiprocessor: hence at most kTargetBlockBytes a block.
#include <algorithm>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/row_loss.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kMaxCluster = 8;
constexpr int kTargetBlockBytes = 64 << 10;
// Vectors loaded ahead of their use, from shared memory and from global memory.
constexpr int kSharedUnroll = 2;
constexpr int kGlobalUnroll = 4;

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

__device__ __forceinline__ void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// A float of the shared memory of block `rank` of this cluster; `local` is its address in ours.
__device__ __forceinline__ float LoadFromPeer(const float* local, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(local));
  uint32_t remote;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
  return value;
#else
  return *local;
#endif
}

__device__ __forceinline__ void CopyAsync16(uint4* to_shared, const uint4* from_global) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from_global) : "memory");
}

__device__ __forceinline__ void CopyAsyncWaitAll() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- running statistics of a part of a row, the target left out ----

struct Stats {
  float max;       // of a
  float sum;       // of 2^(a - max)
  float spread;    // of 2^(a - max) (a - max)
  float weighted;  // of u (z - z_y)
  int32_t arg;     // the smallest class that has max
};
constexpr int kStatsWords = 5;

__device__ __forceinline__ Stats NoStats() { return {NegativeInfinity(), 0.0f, 0.0f, 0.0f, INT32_MAX}; }

// The statistics of `s` relative to the maximum `max` >= s.max; a maximum of -inf means that there is
// nothing yet (or only NaN, which stays in the sum).
__device__ __forceinline__ void Rebase(Stats& s, float max) {
  if (s.max == max) return;
  const float shift = s.max - max;
  const float factor = Exp2(shift);
  s.spread = s.sum == 0.0f ? 0.0f : factor * (s.spread + s.sum * shift);
  s.sum *= factor;
  s.max = max;
}

__device__ __forceinline__ Stats Combine(Stats a, Stats b) {
  const bool b_larger = b.max > a.max;
  const bool tie = b.max == a.max;
  const int32_t arg = tie ? min(a.arg, b.arg) : (b_larger ? b.arg : a.arg);
  const float max = b_larger ? b.max : a.max;
  Rebase(a, max);
  Rebase(b, max);
  return {max, a.sum + b.sum, a.spread + b.spread, a.weighted + b.weighted, arg};
}

__device__ __forceinline__ Stats ShuffleXor(const Stats& s, int offset) {
  return {__shfl_xor_sync(0xffffffffu, s.max, offset), __shfl_xor_sync(0xffffffffu, s.sum, offset),
          __shfl_xor_sync(0xffffffffu, s.spread, offset), __shfl_xor_sync(0xffffffffu, s.weighted, offset),
          __shfl_xor_sync(0xffffffffu, s.arg, offset)};
}

__device__ __forceinline__ void Put(const Stats& s, float* words) {
  words[0] = s.max;
  words[1] = s.sum;
  words[2] = s.spread;
  words[3] = s.weighted;
  words[4] = __int_as_float(s.arg);
}

__device__ __forceinline__ Stats Get(const float* words) {
  return {words[0], words[1], words[2], words[3], __float_as_int(words[4])};
}

__device__ __forceinline__ Stats GetFromPeer(const float* words, uint32_t rank) {
  return {LoadFromPeer(words, rank), LoadFromPeer(words + 1, rank), LoadFromPeer(words + 2, rank),
          LoadFromPeer(words + 3, rank), __float_as_int(LoadFromPeer(words + 4, rank))};
}

__device__ __forceinline__ Stats ReduceWarp(Stats s) {
  for (int offset = 1; offset < 32; offset <<= 1) {
    // Combine in lane order, so that both partners compute the same bits.
    const Stats other = ShuffleXor(s, offset);
    s = (threadIdx.x & offset) == 0 ? Combine(s, other) : Combine(other, s);
  }
  return s;
}

// Every thread of the cluster gets the row's statistics. The caller has to ClusterWait() before it ends.
__device__ __forceinline__ Stats ReduceRow(Stats s, uint32_t cluster) {
  __shared__ float warp_words[kMaxWarps * kStatsWords];
  __shared__ float block_words[kStatsWords];
  s = ReduceWarp(s);
  const int warps = (blockDim.x + 31) >> 5;
  if ((threadIdx.x & 31) == 0) Put(s, warp_words + (threadIdx.x >> 5) * kStatsWords);
  __syncthreads();
  if (threadIdx.x < 32) {
    s = static_cast<int>(threadIdx.x) < warps ? Get(warp_words + threadIdx.x * kStatsWords) : NoStats();
    s = ReduceWarp(s);
    if (threadIdx.x == 0) Put(s, block_words);
  }
  __syncthreads();
  if (cluster == 1) return Get(block_words);
  ClusterArrive();
  ClusterWait();
  s = GetFromPeer(block_words, 0);
  for (uint32_t rank = 1; rank < cluster; ++rank) s = Combine(s, GetFromPeer(block_words, rank));
  ClusterArrive();
  return s;
}

// ---- logits ----

struct Logit {
  float a;      // z log2(e); -inf for padding
  float slope;  // dz/ds: 1 - (z/c)^2 with a softcap, else 1
};

// tanh(x) and its derivative without cancellation.
template <bool kPrecise>
__device__ __forceinline__ float2 TanhAndSlope(float x) {
  const float t = fabsf(x);
  const float e = kPrecise ? expf(-2.0f * t) : Exp2(-2.0f * kLog2E * t);
  const float denominator = 1.0f + e;
  const float inverse = kPrecise ? 1.0f / denominator : __fdividef(1.0f, denominator);
  const float value = kPrecise ? tanhf(t) : (1.0f - e) * inverse;
  return make_float2(copysignf(value, x), 4.0f * e * inverse * inverse);
}

template <typename T, bool kGeneral>
struct LogitMap {
  float factor;  // plain: scale * log2(e)
  float scale;
  float softcap;
  float inverse_cap;
  const float* bias;

  __device__ __forceinline__ explicit LogitMap(const RowLossParams& p)
      : factor(p.scale * kLog2E),
        scale(p.scale),
        softcap(p.softcap),
        inverse_cap(p.softcap > 0.0f ? 1.0f / p.softcap : 0.0f),
        bias(p.bias) {}

  __device__ __forceinline__ Logit operator()(float dot, int64_t column) const {
    if constexpr (!kGeneral) return {dot * factor, 1.0f};
    const float s = scale * (dot + (bias != nullptr ? __ldg(bias + column) : 0.0f));
    if (softcap == 0.0f) return {s * kLog2E, 1.0f};
    const float2 t = TanhAndSlope<sizeof(T) == 4>(s * inverse_cap);
    // An infinite dot product must not hide behind the cap.
    const float z = isinf(dot) ? NAN : softcap * t.x;
    return {z * kLog2E, t.y};
  }
};

__device__ __forceinline__ float ClassWeight(const RowLossParams& p, int64_t column) {
  return p.class_weights != nullptr ? __ldg(p.class_weights + column) : 1.0f;
}

template <typename T>
__device__ __forceinline__ float LoadScalar(const T* from) {
  if constexpr (sizeof(T) == 4) {
    return *from;
  } else {
    return static_cast<float>(*from);
  }
}

// What all threads know about the row before its sums.
struct Target {
  int64_t column;
  Logit logit;
  float class_weight;
};

// What they know after.
struct RowResult {
  float lse2;  // log2 of the sum of exponentials
  float lse;
  float nll;
  float p_target;
  float p_others;  // 1 - p_target
  float entropy;
  float loss;
  float z_loss_part;
  int32_t argmax;
};

template <bool kGeneral>
__device__ __forceinline__ RowResult Finish(const RowLossParams& p, int64_t row, const Target& target,
                                            const Stats& others) {
  RowResult r;
  const float a = target.logit.a;
  const float max = fmaxf(others.max, a);
  Stats rest = others;
  Rebase(rest, max);
  const float e_target = Exp2(a - max);
  const float sum = rest.sum + e_target;
  const float log2_sum = log2f(sum);
  r.lse2 = max + log2_sum;
  r.lse = r.lse2 * kLn2;
  r.p_target = e_target / sum;
  r.p_others = rest.sum / sum;
  r.nll = e_target > 0.5f * sum ? log1pf(rest.sum / e_target) : ((max - a) + log2_sum) * kLn2;
  const float target_spread = e_target > 0.0f ? e_target * (a - max) : 0.0f;
  r.entropy = kLn2 * (log2_sum - (rest.spread + target_spread) / sum);
  const float weight = p.weights[row];
  float hard = (1.0f - p.smoothing) * r.nll;
  if constexpr (kGeneral) {
    hard *= target.class_weight;
    if (p.smoothing > 0.0f) {
      hard += p.smoothing * ((p.class_weight_sum * r.nll - others.weighted) / static_cast<float>(p.vocab));
    }
  }
  r.z_loss_part = weight * p.z_loss * r.lse * r.lse;
  r.loss = weight * hard + r.z_loss_part;
  r.argmax = static_cast<int32_t>(target.column);
  if (others.max > a || (others.max == a && others.arg < r.argmax)) r.argmax = others.arg;
  return r;
}

__device__ __forceinline__ void WriteRow(const RowLossParams& p, int64_t row, const RowResult& r) {
  p.loss[row] = r.loss;
  p.z_loss_part[row] = r.z_loss_part;
  p.lse[row] = r.lse;
  p.entropy[row] = r.entropy;
  p.target_logprob[row] = -r.nll;
  p.argmax[row] = r.argmax;
}

// dL/dz of a row over the gradient unit.
struct GradientRule {
  float softmax;  // factor of p_v
  float entropy;  // c_H
  float uniform;  // c alpha / V
  float lse2;
  float row_entropy;
  float target;  // dL/ds of the target itself
};

template <bool kGeneral>
__device__ __forceinline__ GradientRule MakeRule(const RowLossParams& p, int64_t row, const Target& target,
                                                 const RowResult& r) {
  GradientRule rule;
  const float c = p.coef_loss[row];
  const float hard = (kGeneral ? target.class_weight : 1.0f) * (1.0f - p.smoothing);
  const float share = p.smoothing / static_cast<float>(p.vocab);
  const float soft = c * (share * p.class_weight_sum + 2.0f * p.z_loss * r.lse) + p.coef_lse[row];
  rule.softmax = c * hard + soft;
  rule.entropy = kGeneral ? p.coef_entropy[row] : 0.0f;
  rule.uniform = c * share;
  rule.lse2 = r.lse2;
  rule.row_entropy = r.entropy;
  float target_grad = -c * hard * r.p_others + r.p_target * soft;
  if constexpr (kGeneral) {
    if (r.p_target > 0.0f) target_grad -= r.p_target * rule.entropy * (r.entropy - r.nll);
    target_grad -= rule.uniform * target.class_weight;
  }
  rule.target = target_grad * target.logit.slope;
  return rule;
}

template <bool kGeneral>
__device__ __forceinline__ float Gradient(const RowLossParams& p, const GradientRule& rule,
                                          const Logit& logit, int64_t column) {
  const float log2_p = logit.a - rule.lse2;
  const float prob = Exp2(log2_p);
  if constexpr (!kGeneral) return prob * rule.softmax;
  float g = prob * rule.softmax;
  if (rule.entropy != 0.0f && prob > 0.0f) g -= prob * rule.entropy * (log2_p * kLn2 + rule.row_entropy);
  if (rule.uniform != 0.0f) g -= rule.uniform * ClassWeight(p, column);
  return g * logit.slope;
}

// ---- the kernel ----

// The part of a row that this block works on, in vectors of 16 bytes.
template <typename T, bool kResident>
struct RowPart {
  static constexpr int kUnroll = kResident ? kSharedUnroll : kGlobalUnroll;
  uint4* global;  // the whole row
  uint4* shared;
  int begin;
  int end;

  __device__ __forceinline__ void Fetch() const {
    if constexpr (kResident) {
      for (int v = begin + threadIdx.x; v < end; v += blockDim.x)
        CopyAsync16(shared + (v - begin), global + v);
      CopyAsyncWaitAll();
    }
  }
  // Threads read only the vectors that they have fetched themselves.
  __device__ __forceinline__ uint4 Load(int v) const {
    if constexpr (kResident) return shared[v - begin];
    return __ldcg(global + v);
  }
};

// Applies body(raw vector, index) to this thread's vectors, a few loads ahead.
template <typename Part, typename Body>
__device__ __forceinline__ void ForEachVector(const Part& part, Body body) {
  constexpr int kUnroll = Part::kUnroll;
  const int step = static_cast<int>(blockDim.x);
  for (int base = part.begin + static_cast<int>(threadIdx.x); base < part.end; base += kUnroll * step) {
    uint4 raw[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (base + i * step < part.end) raw[i] = part.Load(base + i * step);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (base + i * step < part.end) body(raw[i], base + i * step);
    }
  }
}

// The `a` values of one vector: -inf in padding and at the target.
template <typename T, bool kGeneral>
__device__ __forceinline__ void VectorLogits(const LogitMap<T, kGeneral>& map, const uint4& raw,
                                             int64_t first, int64_t vocab, int64_t target,
                                             Logit (&logits)[Vec<T>::kSize]) {
  constexpr int kSize = Vec<T>::kSize;
  float dots[kSize];
  Vec<T>::Unpack(raw, dots);
  const bool whole = first + kSize <= vocab;
  const int target_index = static_cast<int>(min(max(target - first, int64_t{-1}), int64_t{kSize}));
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (whole || first + i < vocab) {
      logits[i] = map(dots[i], first + i);
    } else {
      logits[i] = {NegativeInfinity(), 0.0f};
    }
  }
  if (target_index >= 0 && target_index < kSize) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i == target_index) logits[i].a = NegativeInfinity();
    }
  }
}

template <typename T, bool kGeneral, bool kResident>
__device__ __forceinline__ Stats RowStats(const RowLossParams& p, const LogitMap<T, kGeneral>& map,
                                          const RowPart<T, kResident>& part, const Target& target) {
  constexpr int kSize = Vec<T>::kSize;
  Stats s = NoStats();
  int best = -1;
  const bool weigh = kGeneral && p.smoothing > 0.0f;
  ForEachVector(part, [&](const uint4& raw, int v) {
    const int64_t first = static_cast<int64_t>(v) * kSize;
    Logit logits[kSize];
    VectorLogits(map, raw, first, p.vocab, target.column, logits);
    float max = logits[0].a;
#pragma unroll
    for (int i = 1; i < kSize; ++i) max = fmaxf(max, logits[i].a);
    if (max > s.max) {
      best = v;
      Rebase(s, max);
    }
    const float base = s.max == NegativeInfinity() ? 0.0f : s.max;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float e = Exp2(logits[i].a - base);
      s.sum += e;
      if constexpr (kGeneral) {
        if (e > 0.0f) s.spread += e * (logits[i].a - base);
        if (weigh && first + i < p.vocab && first + i != target.column) {
          s.weighted += ClassWeight(p, first + i) * ((logits[i].a - target.logit.a) * kLn2);
        }
      }
    }
  });
  if (best >= 0) {
    Logit logits[kSize];
    VectorLogits(map, part.Load(best), static_cast<int64_t>(best) * kSize, p.vocab, target.column, logits);
#pragma unroll
    for (int i = kSize - 1; i >= 0; --i) {
      if (logits[i].a == s.max) s.arg = best * kSize + i;
    }
  }
  return s;
}

template <typename T, bool kGeneral, bool kResident>
__device__ __forceinline__ void WriteGradient(const RowLossParams& p, const LogitMap<T, kGeneral>& map,
                                              const RowPart<T, kResident>& part, const Target& target,
                                              const GradientRule& rule) {
  constexpr int kSize = Vec<T>::kSize;
  ForEachVector(part, [&](const uint4& raw, int v) {
    const int64_t first = static_cast<int64_t>(v) * kSize;
    Logit logits[kSize];
    VectorLogits(map, raw, first, p.vocab, target.column, logits);
    float g[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      g[i] = Gradient<kGeneral>(p, rule, logits[i], first + i);
      if (kGeneral && first + i >= p.vocab) g[i] = 0.0f;
    }
    if (target.column >= first && target.column < first + kSize) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (first + i == target.column) g[i] = rule.target;
      }
    }
    if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) g[i] = SaturateHalf(g[i]);
    }
    part.global[v] = Vec<T>::Pack(g);
  });
}

template <typename Part>
__device__ __forceinline__ void WriteZeros(const Part& part) {
  for (int v = part.begin + threadIdx.x; v < part.end; v += blockDim.x)
    part.global[v] = make_uint4(0, 0, 0, 0);
}

template <typename T, bool kGeneral, bool kResident>
__global__ __launch_bounds__(kMaxThreads, kGeneral || !kResident ? 2 : 3) void RowLossKernel(
    const __grid_constant__ RowLossParams p) {
  extern __shared__ uint4 shared_row[];
  constexpr int kSize = Vec<T>::kSize;
  const uint32_t cluster = ClusterSize();
  const uint32_t rank = ClusterRank();
  const int64_t row = blockIdx.x / cluster;
  T* row_logits = static_cast<T*>(p.logits) + row * p.ld;

  const int vectors = static_cast<int>(p.ld / kSize);
  const int per_block = (vectors + static_cast<int>(cluster) - 1) / static_cast<int>(cluster);
  RowPart<T, kResident> part;
  part.global = reinterpret_cast<uint4*>(row_logits);
  part.shared = shared_row;
  part.begin = min(static_cast<int>(rank) * per_block, vectors);
  part.end = min(part.begin + per_block, vectors);
  if (row >= p.rows) {  // a padding row; the whole cluster takes this way
    WriteZeros(part);
    return;
  }

  const LogitMap<T, kGeneral> map(p);
  Target target;
  target.column = p.targets[row];
  const float target_dot = LoadScalar(row_logits + target.column);
  part.Fetch();
  target.logit = map(target_dot, target.column);
  target.class_weight = kGeneral ? ClassWeight(p, target.column) : 1.0f;

  const Stats others = ReduceRow(RowStats<T, kGeneral, kResident>(p, map, part, target), cluster);
  const RowResult result = Finish<kGeneral>(p, row, target, others);
  if (rank == 0 && threadIdx.x == 0) WriteRow(p, row, result);
  if (p.write_gradient) {
    if (isfinite(result.lse) && isfinite(result.loss)) {
      WriteGradient(p, map, part, target, MakeRule<kGeneral>(p, row, target, result));
    } else {
      WriteZeros(part);
    }
  }
  if (cluster > 1) ClusterWait();
}

struct LaunchPlan {
  int cluster = 1;
  bool resident = true;
  int threads = kMaxThreads;
  int shared_bytes = 0;
};

LaunchPlan Plan(const RowLossParams& p, const DeviceLimits& limits) {
  LaunchPlan plan;
  const int64_t row_bytes = p.ld * static_cast<int64_t>(SizeOf(p.dtype));
  const int max_cluster = limits.has_clusters ? kMaxCluster : 1;
  while (plan.cluster < max_cluster && row_bytes > int64_t{plan.cluster} * kTargetBlockBytes)
    plan.cluster *= 2;
  const int64_t vectors = row_bytes / 16;
  const int64_t part_bytes = (vectors + plan.cluster - 1) / plan.cluster * 16;
  // Two blocks a multiprocessor, or the loads of one row wait for the arithmetic of another.
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
  config.gridDim = dim3(static_cast<unsigned>(p.padded_rows * plan.cluster));
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
  const bool general = p.bias != nullptr || p.class_weights != nullptr || p.softcap > 0.0f ||
                       p.smoothing > 0.0f || p.want_entropy || p.any_coef_entropy;
  if (general) {
    return plan.resident ? Launch<T, true, true>(p, plan, stream) : Launch<T, true, false>(p, plan, stream);
  }
  return plan.resident ? Launch<T, false, true>(p, plan, stream) : Launch<T, false, false>(p, plan, stream);
}

}  // namespace

cudaError_t LaunchRowLoss(const RowLossParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  const LaunchPlan plan = Plan(params, limits);
  switch (params.dtype) {
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
