// SPDX-License-Identifier: Apache-2.0
// Row kernels for heads that recompute logits: the logits come one block of classes after the other
// (recomputed_rows.h). Grid: one thread block a row. The formulas are those of row_loss.cu in their general
// form; bias, class weights and target are counted from the first class of the block. The statistics of the
// blocks are combined in the order of classes.
//
// Bytes: fp32 logits of a block are read once for the statistics. For the gradient they are read once more,
// and the gradient is written in the compute dtype. As long as a block stays in L2, the kernels are bound by
// arithmetic.
#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/recomputed_rows.h"
#include "kernels/cuda/kernels/row_loss_math.cuh"
#include "kernels/cuda/kernels/row_part.cuh"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// A block of classes of some rows; the terms count classes from the first class of the block.
struct BlockParams {
  LogitMatrix logits;
  LogitMatrix gradient;
  LossTerms terms;
  RowInputs in;
};

// The block, with terms that count classes from its first class.
BlockParams Within(const ClassBlock& block, const LossTerms& terms, const RowInputs& in) {
  return {block.logits, block.gradient, terms.From(block.first_class), in};
}

// The row of the block as a RowPart that is not held in shared memory.
__device__ __forceinline__ RowPart<false> WholeBlock(const LogitMatrix& logits, int64_t row) {
  return {static_cast<float*>(logits.data) + row * logits.ld, 0, 0, static_cast<int>(logits.ld / kDots)};
}

__device__ __forceinline__ Stats ToStats(const RunningRow& r) {
  return {r.max, r.sum, r.spread, r.weighted, r.arg};
}

// The combined statistics of the earlier blocks and the next block.
__device__ __forceinline__ Stats Join(Stats before, Stats next, float f) {
  const float max = fmaxf(before.max, next.max);
  const int32_t arg = before.max == max ? before.arg : next.arg;
  Rebase(before, max, f);
  Rebase(next, max, f);
  return {max, before.sum + next.sum, before.spread + next.spread, before.weighted + next.weighted, arg};
}

// T: the compute dtype, or another dtype with the same precision.
template <typename T>
__global__ __launch_bounds__(kThreads) void FoldBlockKernel(const __grid_constant__ BlockParams p,
                                                            int first_class, RunningRow* running) {
  __shared__ float words[kWarps * kStatsWords];
  const int64_t row = blockIdx.x;
  const LogitMap<T, true> map(p.terms);
  const RowPart<false> part = WholeBlock(p.logits, row);
  const Target target = MakeTargetOf<T>(p.terms, p.in, map, row, first_class);
  const int classes = static_cast<int>(p.logits.classes);
  const Stats own = ReduceWarp<true>(RowStats<T, true, false>(p.terms, map, part, classes, target), map.f);
  if ((threadIdx.x & 31) == 0) Put(own, words + (threadIdx.x >> 5) * kStatsWords);
  __syncthreads();
  if (threadIdx.x >= 32) return;
  Stats all = threadIdx.x < kWarps ? Get(words + threadIdx.x * kStatsWords) : NoStats();
  all = ReduceWarp<true>(all, map.f);
  if (threadIdx.x != 0) return;
  if (all.arg != INT32_MAX) all.arg += first_class;
  float stored_target = first_class > 0 ? running[row].stored_target : 0.0f;
  if (target.column >= 0 && target.column < p.logits.classes) {
    // RowStats leaves the target out of the sums but does not overwrite it, and LaunchTakeTargets does not
    // mask it.
    stored_target = map(part.row[target.column], target.column).z;
  }
  if (first_class > 0) all = Join(ToStats(running[row]), all, map.f);
  running[row] = {all.max, all.sum, all.spread, all.weighted, all.arg, stored_target};
}

template <typename T>
__global__ void FinishRunningKernel(const __grid_constant__ LossTerms terms,
                                    const __grid_constant__ RowInputs in,
                                    const __grid_constant__ RowResults out, const RunningRow* running,
                                    GradientRule* rules, bool with_uniform) {
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= in.rows) return;
  const LogitMap<T, true> map(terms);
  Target target = MakeTargetOf<T>(terms, in, map, row, 0);
  target.stored_z = running[row].stored_target;
  const Stats others = ToStats(running[row]);
  const RowResult result = terms.soft ? FinishSoft(terms, in, row, target, others, map.f)
                                      : Finish<true>(terms, in, row, target, others, map.f);
  WriteRow(out, row, result);
  rules[row] = MakeRule<true>(terms, in, row, target, result);
  if (!with_uniform) rules[row].uniform = 0.0f;
}

__global__ void SettleRulesKernel(const __grid_constant__ SettleParams p) {
  const int64_t row = blockIdx.x;
  const bool padding = row >= p.rows;
  const bool dropped = !padding && p.accumulate[row] != 0 && p.keep[row] == 0;
  if (!padding && !dropped && p.rules[row].valid) return;
  __syncthreads();  // all threads have read the rule
  if (threadIdx.x == 0) p.rules[row] = GradientRule{};
  if (padding) return;
  // A hidden state that is not finite would make NaN even with a gradient of 0, so it becomes 0, too.
  const float zeros[8] = {};
  const int64_t first = row * p.hidden.ld;
  for (int64_t c = threadIdx.x * 8; c < p.hidden.ld; c += kThreads * 8) {
    Store8(p.hidden.data, p.hidden.dtype, first + c, first + p.hidden.ld, true, zeros);
  }
}

template <typename T>
__global__ __launch_bounds__(kThreads) void GradientBlockKernel(const __grid_constant__ BlockParams p,
                                                                int first_class, const GradientRule* rules) {
  const int64_t row = blockIdx.x;
  const RowPart<false> part = WholeBlock(p.logits, row);
  T* const to = static_cast<T*>(p.gradient.data) + row * p.gradient.ld;
  const GradientRule rule = rules[row];
  if (!rule.valid) {
    WriteZeros(part, to);
    return;
  }
  const LogitMap<T, true> map(p.terms);
  const Target target = MakeTargetOf<T>(p.terms, p.in, map, row, first_class);
  WriteGradient(p.terms, map, part, static_cast<int>(p.logits.classes), target, rule, to);
}

template <typename T>
__global__ __launch_bounds__(kThreads) void FilteredBlockKernel(const __grid_constant__ BlockParams p,
                                                                int first_class, const GradientRule* rules,
                                                                const __grid_constant__ BlockFilter filter) {
  __shared__ float scratch[33];
  const int64_t row = blockIdx.x;
  const RowPart<false> part = WholeBlock(p.logits, row);
  T* const to = static_cast<T*>(p.gradient.data) + row * p.gradient.ld;
  GradientRule rule = rules[row];
  if (!filter.with_uniform) rule.uniform = 0.0f;
  float dropped = 0.0f;
  if (rule.valid) {
    const LogitMap<T, true> map(p.terms);
    const Target target = MakeTargetOf<T>(p.terms, p.in, map, row, first_class);
    GradientRule rest = rule;  // the rule for dropped classes
    rest.softmax = 0.0f;
    WriteElements(map, part, static_cast<int>(p.logits.classes), target, rule, to,
                  [&](const Logit& logit, int column) {
                    const float probability = Exp2(fmaf(logit.z, map.f, -rule.reference) - rule.log2_sum);
                    const bool drop = probability < filter.epsilon;
                    dropped += drop ? probability : 0.0f;
                    return Gradient<true>(p.terms, drop ? rest : rule, logit, map.f, column);
                  });
  } else {
    WriteZeros(part, to);
  }
  dropped = BlockSum(dropped, scratch);
  if (threadIdx.x != 0 || row >= p.in.rows) return;
  filter.dropped_mass[row] = filter.with_gradient[row] != 0 ? dropped : 0.0f;
}

template <typename T>
cudaError_t LaunchFold(const BlockParams& p, int64_t first_class, RunningRow* running, cudaStream_t stream) {
  FoldBlockKernel<T>
      <<<static_cast<unsigned>(p.in.rows), kThreads, 0, stream>>>(p, static_cast<int>(first_class), running);
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchGradient(const BlockParams& p, int64_t first_class, const GradientRule* rules,
                           cudaStream_t stream) {
  GradientBlockKernel<T><<<static_cast<unsigned>(p.in.padded_rows), kThreads, 0, stream>>>(
      p, static_cast<int>(first_class), rules);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchFoldBlock(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                            RunningRow* running, cudaStream_t stream) {
  const BlockParams p = Within(block, terms, in);
  if (in.rows == 0) return cudaSuccess;
  return p.gradient.dtype == DType::kFloat32
             ? LaunchFold<float>(p, block.first_class, running, stream)
             : LaunchFold<__nv_bfloat16>(p, block.first_class, running, stream);
}

cudaError_t LaunchFinishRunning(const LossTerms& terms, const RowInputs& in, DType compute,
                                const RowResults& out, const RunningRow* running, GradientRule* rules,
                                bool with_uniform, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((in.rows + kThreads - 1) / kThreads);
  auto* kernel = compute == DType::kFloat32 ? FinishRunningKernel<float> : FinishRunningKernel<__nv_bfloat16>;
  kernel<<<blocks, kThreads, 0, stream>>>(terms, in, out, running, rules, with_uniform);
  return cudaGetLastError();
}

cudaError_t LaunchSettleRules(const SettleParams& params, cudaStream_t stream) {
  if (params.padded_rows == 0) return cudaSuccess;
  SettleRulesKernel<<<static_cast<unsigned>(params.padded_rows), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t LaunchGradientBlock(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                                const GradientRule* rules, cudaStream_t stream) {
  const BlockParams p = Within(block, terms, in);
  if (in.padded_rows == 0) return cudaSuccess;
  return WithElement(p.gradient.dtype, [&](auto element) {
    return LaunchGradient<typename decltype(element)::Type>(p, block.first_class, rules, stream);
  });
}

cudaError_t LaunchFilteredBlock(const ClassBlock& block, const LossTerms& terms, const RowInputs& in,
                                const GradientRule* rules, const BlockFilter& filter, cudaStream_t stream) {
  const BlockParams p = Within(block, terms, in);
  if (in.padded_rows == 0) return cudaSuccess;
  return WithElement(p.gradient.dtype, [&](auto element) {
    FilteredBlockKernel<typename decltype(element)::Type>
        <<<static_cast<unsigned>(p.in.padded_rows), kThreads, 0, stream>>>(
            p, static_cast<int>(block.first_class), rules, filter);
    return cudaGetLastError();
  });
}

}  // namespace lossd::kernels::cuda

LOSSD_KERNEL_FILE(RecomputedRows)
