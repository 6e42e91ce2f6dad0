// SPDX-License-Identifier: Apache-2.0
// Row kernels before and after the logit pass (fused_rows.h).
//
// Math. For a row, c is its reference, S' the sum over all classes but the target that the pass has stored,
// relative to c, and M the reference that row_loss_math.cuh uses:
//
//   S'_M = S' 2^(c - M),   ds_v = rule.softmax 2^(c - M) * stored_v
//   stored_y = ds_y / (rule.softmax 2^(c - M))
//
// So stored exponentials lack only one factor a row. The factor is multiplied into x before the product of
// the weight gradient, and into dx after the product of the hidden gradient. The rounding error of 2^(c - M)
// is the same for all classes, so the sum of p is still 1. In rows with an upstream gradient of the entropy,
// the factor is a function of d (EntropyRow).
//
// The choice of c: the target's logit is known in advance, and lse is at least as large. With c = z_y f + 48,
// stored exponentials are at most 2^-48 e_y too small, and sums stay below 2^60 if the loss is below 75 nats.
// Panels with rows of larger loss are computed again with c = max z f (LaunchMergeTiles). The launches for
// this are always made, even if there are no such panels.
//
// Names in this file: w is the FusedRows of the chunk. A rule is the GradientRule of a row (loss_rows.h). The
// statistics of a row never include its target; the functions that read them add it.
#include <cfloat>
#include <cstdint>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/filtered/filtered_row.cuh"
#include "kernels/cuda/kernels/hopper/fused_rows.h"
#include "kernels/cuda/kernels/hopper/plan.h"
#include "kernels/cuda/kernels/hopper/recoverable.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda::hopper {
namespace {

constexpr float kHeadroom = 48.0f;
constexpr float kPaddingReference = 200.0f;  // 2^(0 - 200) is 0
// Another kernel has computed the target's dot product, with other roundings than the logit pass. So a tile's
// maximum may seem smaller than the target's logit although it is not. These are the largest absolute
// difference, in units of log 2, and the largest relative difference.
constexpr float kMargin = 0.25f;
constexpr float kRelativeMargin = 0x1p-10f;
// If the gradients of all other classes together are smaller than this times the target's gradient, they
// become 0.
constexpr float kNegligible = 0x1p-20f;

constexpr int kThreads = 256;
static_assert(kMostClusters <= kThreads, "PrepareRowsKernel");
constexpr int kMergeRows = 32;  // rows of a block; divides kPanelRows
constexpr int kMergeWarps = 8;
constexpr int kFinishWarps = 4;  // rows of a block

// ---- values of a row when its tiles have been merged ----

// The target of a row, from its dot product (in.target_dots).
template <bool kGeneral>
__device__ __forceinline__ Target MakeTarget(const LossTerms& terms, const RowInputs& in, int64_t row) {
  return MakeTargetOf(terms, in, LogitMap<__nv_bfloat16, kGeneral>(terms), row, 0);
}

struct FusedRow {
  float f;
  Target target;
  Stats others;   // over all classes but the target, rebased to the row's largest logit; arg is not set
  float shift;    // c - M, for the exponentials that are stored here
  float rescale;  // 2^shift
};

// Stored exponentials are relative to w.reference, the merged sums to w.sum_reference. The results are
// relative to M, the reference of the row's largest logit.
template <bool kGeneral>
__device__ __forceinline__ FusedRow LoadFusedRow(const LossTerms& terms, const RowInputs& in,
                                                 const FusedRows& w, int64_t row) {
  FusedRow r;
  r.f = LogitMap<__nv_bfloat16, kGeneral>(terms).f;
  r.target = MakeTarget<kGeneral>(terms, in, row);
  r.others = NoStats();
  r.others.max = fmaxf(w.max[row], r.target.logit.z);
  r.shift = w.reference[row] - Reference(r.others.max, r.f);
  r.rescale = Exp2(r.shift);
  const float shift = w.sum_reference[row] - Reference(r.others.max, r.f);
  const float rescale = Exp2(shift);
  r.others.sum = w.sum[row] * rescale;
  r.others.spread = rescale * (w.spread[row] + w.sum[row] * shift);
  return r;
}

// ---- before the pass ----

template <bool kGeneral>
__global__ void PrepareRowsKernel(const __grid_constant__ LossTerms terms,
                                  const __grid_constant__ RowInputs in, const __grid_constant__ FusedRows w,
                                  const __grid_constant__ CandidateLists lists, int panels) {
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row <= panels) w.marked_panels[row] = 0;
  if (row < kMostClusters) w.claimed_positions[row] = 0;
  if (row >= in.padded_rows) return;
  if (lists.entries != nullptr) {
    lists.counts[row] = 0;
    // The target's term, 2^(z_y f - c) = 2^-kHeadroom, is a first lower bound of the sum. For padding rows
    // the bound is infinite, so that no candidates are listed.
    lists.sum_bound[row] = row < in.rows ? Exp2(-kHeadroom) : -NegativeInfinity();
  }
  if (row >= in.rows) {
    w.reference[row] = kPaddingReference;
    w.threshold[row] = -NegativeInfinity();
    return;
  }
  const Target target = MakeTarget<kGeneral>(terms, in, row);
  const float f = LogitMap<__nv_bfloat16, kGeneral>(terms).f;
  // s: the target's logit before the softcap. The row's largest logit is at least as large, but for rounding.
  float s = in.target_dots[row];
  if constexpr (kGeneral) {
    const bool add_bias = terms.bias != nullptr && !terms.bias_in_targets;
    s = terms.scale * (s + (add_bias ? terms.bias[target.column] : 0.0f));
  }
  w.reference[row] = target.logit.z * f + kHeadroom;
  w.threshold[row] = s - fabsf(s) * kRelativeMargin - kMargin / f;
}

// ---- tiles of a row ----

struct Merged {
  float sum, spread, max;
  int tile;  // the first tile that has `max`
};

__device__ __forceinline__ void Add(Merged& into, const Merged& other) {
  into.sum += other.sum;
  into.spread += other.spread;
  if (other.max > into.max || (other.max == into.max && other.tile < into.tile)) {
    into.max = other.max;
    into.tile = other.tile;
  }
}

// A block has kMergeRows rows, one for each lane. Each of its warps adds every kMergeWarps-th tile; then the
// warps are added in order. Without `again`, marks the panels that must be computed again. With `again`, only
// merges the tiles of these panels, after they have been computed again.
__global__ void MergeTilesKernel(const __grid_constant__ FusedRows w, int64_t rows, int tiles, float f,
                                 bool with_spread, bool again) {
  __shared__ Merged shared[kMergeWarps][kMergeRows];
  const int64_t row = blockIdx.x * int64_t{kMergeRows} + threadIdx.x;
  const int64_t panel = row / kPanelRows;
  if (again && (w.marked_panels[0] == 0 || w.marked_panels[1 + panel] == 0)) return;
  Merged own = {0.0f, 0.0f, NegativeInfinity(), tiles};
  if (row < rows) {
#pragma unroll 4
    for (int tile = threadIdx.y; tile < tiles; tile += kMergeWarps) {
      const int64_t at = tile * w.partials.ld + row;
      Add(own, {w.partials.sum[at], with_spread ? w.partials.spread[at] : 0.0f, w.partials.max[at], tile});
    }
  }
  shared[threadIdx.y][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y != 0 || row >= rows) return;
  for (int i = 1; i < kMergeWarps; ++i) Add(own, shared[i][threadIdx.x]);
  w.sum[row] = own.sum;
  w.spread[row] = own.spread;
  w.max[row] = own.max;
  w.arg[row] = own.max == NegativeInfinity()
                   ? INT32_MAX
                   : own.tile * kVocabTile + w.partials.arg[own.tile * w.partials.ld + row];
  // If the maximum is not finite, another reference would not help; the row fails. Several threads may write
  // the same mark.
  if (!again && own.sum > kLargestSum && fabsf(own.max) <= FLT_MAX) {
    w.reference[row] = own.max * f;
    w.marked_panels[1 + panel] = 1;
    w.marked_panels[0] = 1;
  }
}

// ---- results ----

// How a row of stored exponentials becomes a gradient.
struct RowGradient {
  float factor;
  float entry;  // the element of the target
  bool clear;   // the other elements of the row become 0
};

// With d' = d + c - M and the rule: the gradient is 2^d' (softmax - entropy ((d' - log2 S) ln 2 + H)). This
// returns the factor of 2^d'.
__device__ __forceinline__ float EntropyFactor(const GradientRule& rule, float exponent) {
  return rule.softmax - rule.entropy * ((exponent - rule.log2_sum) * kLn2 + rule.row_entropy);
}

// How the exponentials of a row become its gradient, if its entropy has an upstream gradient.
__device__ __forceinline__ EntropyRow MakeEntropyRow(const FusedRows& w, int64_t row, const FusedRow& fused,
                                                     const GradientRule& rule, int64_t classes) {
  if (!rule.valid) return {0.0f, 0.0f, 0.0f, -1};  // all elements of the row are 0
  EntropyRow r = {fused.rescale * EntropyFactor(rule, fused.shift), -fused.rescale * rule.entropy * kLn2,
                  0.0f, -1};
  if (w.max[row] == NegativeInfinity() || w.arg[row] < 0 || w.arg[row] >= classes) return r;
  const float exponent = fmaf(w.max[row], fused.f, -rule.reference);
  r.top = w.arg[row];
  r.top_gradient = Exp2(exponent) * EntropyFactor(rule, exponent);
  return r;
}

// The same, if its entropy has none.
__device__ __forceinline__ RowGradient MakeGradient(const GradientRule& rule, const RowResult& r,
                                                    float rescale) {
  if (!rule.valid) return {0.0f, 0.0f, true};
  // The softmax factor without 1 / S: an upper bound of the gradient of the other classes. If it is
  // negligible, the row's only element is the target's: 1, with the target's gradient as the factor of the
  // row.
  const float others = rule.softmax / r.inverse_sum;
  if (!(fabsf(others) > kNegligible * fabsf(rule.target))) return {rule.target, 1.0f, true};
  const float factor = rule.softmax * rescale;
  // If the largest logits are on another device, 2^(c - M) may be 0. The exponentials stored here sum up to
  // at most kLargestSum.
  if (!(fabsf(factor) * kLargestSum > kNegligible * fabsf(rule.target))) return {rule.target, 1.0f, true};
  return {factor, rule.target / factor, false};
}

// The members `rules` and `exponentials` are null if they are not wanted.
struct FinishParams {
  LossTerms terms;
  RowInputs in;
  RowResults out;
  FusedRows rows;
  GradientRule* rules = nullptr;          // [rows]
  __nv_bfloat16* exponentials = nullptr;  // [padded_rows, ld]
  int64_t ld = 0;
};

// Called by one lane. Writes the results of a row, and returns the values from which its gradient is made.
template <bool kGeneral>
__device__ __forceinline__ RowGradient FinishRow(const FinishParams& p, int64_t row) {
  const FusedRows& w = p.rows;
  const FusedRow fused = LoadFusedRow<kGeneral>(p.terms, p.in, w, row);
  const Target& target = fused.target;
  RowResult r = FinishSums<kGeneral>(p.terms, p.in, row, target, fused.others, fused.f);
  // The target is compared with the other classes by its logit from the logit pass, which has their
  // roundings.
  r.argmax = target.place;
  const float same_way = w.partials.target[row];
  if (w.max[row] > same_way || (w.max[row] == same_way && w.arg[row] < r.argmax)) r.argmax = w.arg[row];
  r.argmax += static_cast<int32_t>(p.terms.first_class);
  WriteRow(p.out, row, r);
  const GradientRule rule = MakeRule<kGeneral>(p.terms, p.in, row, target, r);
  if (p.rules != nullptr) p.rules[row] = rule;
  if (kGeneral && p.exponentials != nullptr && p.in.coef_entropy[row] != 0.0f) {
    w.entropy[row] = MakeEntropyRow(w, row, fused, rule, p.terms.vocab);
    if (rule.valid) return {1.0f, rule.target, false};
  }
  return MakeGradient(rule, r, fused.rescale);
}

// Grid: one warp a row.
template <bool kGeneral>
__global__ void FinishRowsKernel(const __grid_constant__ FinishParams p) {
  const int64_t row = blockIdx.x * int64_t{kFinishWarps} + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x & 31);
  if (row >= p.in.rows) return;
  RowGradient gradient = {};
  if (lane == 0) gradient = FinishRow<kGeneral>(p, row);
  if (p.exponentials == nullptr) return;
  auto* exponentials = p.exponentials + row * p.ld;
  if (__shfl_sync(0xffffffffu, static_cast<int>(gradient.clear), 0) != 0) {
    auto* vectors = reinterpret_cast<uint4*>(exponentials);
    for (int64_t v = lane; v < p.ld / 8; v += 32) vectors[v] = make_uint4(0, 0, 0, 0);
    __syncwarp();
  }
  if (lane != 0) return;
  if (p.in.targets[row] >= 0) exponentials[p.in.targets[row]] = __float2bfloat16_rn(gradient.entry);
  p.rows.factor[row] = gradient.factor;
}

unsigned Blocks(int64_t count, int64_t per_block) { return static_cast<unsigned>(CeilDiv(count, per_block)); }

// again: merges only the marked panels, and marks nothing.
cudaError_t LaunchMerge(const LossTerms& terms, int64_t row_count, const FusedRows& rows, bool again,
                        cudaStream_t stream) {
  const bool general = terms.IsGeneral();
  MergeTilesKernel<<<Blocks(row_count, kMergeRows), dim3(kMergeRows, kMergeWarps), 0, stream>>>(
      rows, row_count, static_cast<int>(VocabTiles(terms.vocab)), general ? kLog2E : terms.scale * kLog2E,
      general && terms.NeedsEntropy(), again);
  return cudaGetLastError();
}

cudaError_t LaunchFinish(const FinishParams& params, cudaStream_t stream) {
  auto* kernel = params.terms.IsGeneral() ? FinishRowsKernel<true> : FinishRowsKernel<false>;
  kernel<<<Blocks(params.in.rows, kFinishWarps), kFinishWarps * 32, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchPrepareRows(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                              cudaStream_t stream) {
  return LaunchPrepareRows(terms, in, rows, CandidateLists{}, stream);
}

cudaError_t LaunchPrepareRows(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                              const CandidateLists& lists, cudaStream_t stream) {
  const auto panels = static_cast<int>(Panels(in.padded_rows));
  auto* kernel = terms.IsGeneral() ? PrepareRowsKernel<true> : PrepareRowsKernel<false>;
  kernel<<<Blocks(in.padded_rows + 1, kThreads), kThreads, 0, stream>>>(terms, in, rows, lists, panels);
  return cudaGetLastError();
}

cudaError_t LaunchMergeTiles(const LossTerms& terms, int64_t row_count, const FusedRows& rows,
                             cudaStream_t stream) {
  return LaunchMerge(terms, row_count, rows, false, stream);
}

cudaError_t LaunchMergeMarkedTiles(const LossTerms& terms, int64_t row_count, const FusedRows& rows,
                                   cudaStream_t stream) {
  return LaunchMerge(terms, row_count, rows, true, stream);
}

cudaError_t LaunchFinishRows(const LossTerms& terms, const RowInputs& in, const RowResults& out,
                             const FusedRows& rows, cudaStream_t stream) {
  return LaunchFinish({terms, in, out, rows}, stream);
}

cudaError_t LaunchFinishRules(const LossTerms& terms, const RowInputs& in, const RowResults& out,
                              const FusedRows& rows, GradientRule* rules, cudaStream_t stream) {
  return LaunchFinish({terms, in, out, rows, rules}, stream);
}

cudaError_t LaunchFinishExponentials(const LossTerms& terms, const RowInputs& in, const RowResults& out,
                                     const FusedRows& rows, void* exponentials, int64_t ld,
                                     cudaStream_t stream) {
  auto* const elements = static_cast<__nv_bfloat16*>(exponentials);
  if (const cudaError_t error = LaunchFinish({terms, in, out, rows, nullptr, elements, ld}, stream);
      error != cudaSuccess)
    return error;
  // Zero the padding rows: if a weight is not finite they hold NaN, and 0 times NaN would reach the weight
  // gradient.
  const int64_t padding = in.padded_rows - in.rows;
  if (padding == 0) return cudaSuccess;
  return cudaMemsetAsync(elements + in.rows * ld, 0, static_cast<size_t>(padding * ld) * sizeof(*elements),
                         stream);
}

// ---- from the lists of the logit pass to filtered gradients ----
//
// fused_rows.h says in which order the lists are made. LaunchSelectListed tests all listed classes again with
// the complete sum, because some were listed with a lower bound of the sum. Bytes: 8 for each listed class.

namespace {

constexpr int kSelectThreads = 128;

// A block has a panel, a thread has a row. If a list of the panel is incomplete and the panel is not `done`,
// empties all lists of the panel, marks the panel, and returns true in all threads. Otherwise removes the
// mark. `done`: the panel's lists were already made with complete sums; if they are incomplete, there is no
// room for them.
__device__ __forceinline__ bool Reopen(const FusedRows& w, const CandidateLists& lists, int64_t row,
                                       bool exists, bool done) {
  const bool incomplete = __syncthreads_or(exists && lists.counts[row] > lists.capacity) != 0;
  const bool again = incomplete && !done;
  if (threadIdx.x == 0) w.marked_panels[1 + blockIdx.x] = again ? 1 : 0;
  if (again && exists) lists.counts[row] = 0;
  return again;
}

template <bool kGeneral>
__global__ void PrepareSecondListingKernel(const __grid_constant__ LossTerms terms,
                                           const __grid_constant__ RowInputs in,
                                           const __grid_constant__ FusedRows w,
                                           const __grid_constant__ CandidateLists lists) {
  const int64_t row = blockIdx.x * int64_t{kPanelRows} + threadIdx.x;
  const bool exists = row < in.rows;
  Reopen(w, lists, row, exists, false);
  // The second listing reads only the marks of the panels; LaunchPrepareLastListing sets the first word.
  if (row == 0) w.marked_panels[0] = 0;
  if (!exists) return;
  const Target target = MakeTarget<kGeneral>(terms, in, row);
  const float f = LogitMap<__nv_bfloat16, kGeneral>(terms).f;
  lists.sum_bound[row] = w.sum[row] + Exp2(fmaf(target.logit.z, f, -w.reference[row]));
}

__global__ void PrepareLastListingKernel(const __grid_constant__ FusedRows w,
                                         const __grid_constant__ CandidateLists lists, int64_t rows) {
  const int64_t row = blockIdx.x * int64_t{kPanelRows} + threadIdx.x;
  const bool again = Reopen(w, lists, row, row < rows, w.marked_panels[1 + blockIdx.x] != 0);
  if (again && threadIdx.x == 0) w.marked_panels[0] = 1;
}

template <bool kGeneral>
__global__ __launch_bounds__(kSelectThreads) void SelectListedKernel(
    const __grid_constant__ LossTerms terms, const __grid_constant__ RowInputs in,
    const __grid_constant__ FusedRows w, const __grid_constant__ CandidateLists lists,
    const __grid_constant__ RowSelection selection) {
  __shared__ int32_t columns[kMostListed];
  __shared__ float exponents[kMostListed];
  __shared__ float sorted[kMostListed];
  __shared__ RowCandidates shared;
  const int64_t row = blockIdx.x;
  const CandidateColumns list = {columns, exponents, sorted};
  const float f = LogitMap<__nv_bfloat16, kGeneral>(terms).f;
  if (threadIdx.x == 0) {
    const FusedRow fused = LoadFusedRow<kGeneral>(terms, in, w, row);
    const RowResult result = FinishSums<kGeneral>(terms, in, row, fused.target, fused.others, f);
    shared.Start(fused.others, result, in.target_dots[row], log2f(selection.epsilon), f);
  }
  __syncthreads();
  const int listed = lists.counts[row];
  if (listed > lists.capacity) {
    // Tells SelectCandidates that the list is incomplete.
    if (threadIdx.x == 0) shared.count = listed;
  } else {
    const Candidate* entries = lists.entries + row * lists.capacity;
    for (int i = threadIdx.x; i < listed; i += kSelectThreads) {
      const Candidate candidate = entries[i];
      if (!(candidate.z >= shared.threshold)) continue;
      shared.Add(list, lists.capacity, candidate.column, candidate.z * f);
    }
  }
  __syncthreads();
  SelectCandidates<kGeneral, kSelectThreads>(selection, row, list, lists.capacity, shared);
}

}  // namespace

cudaError_t LaunchPrepareSecondListing(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                                       const CandidateLists& lists, cudaStream_t stream) {
  auto* kernel = terms.IsGeneral() ? PrepareSecondListingKernel<true> : PrepareSecondListingKernel<false>;
  kernel<<<static_cast<unsigned>(Panels(in.padded_rows)), kPanelRows, 0, stream>>>(terms, in, rows, lists);
  return cudaGetLastError();
}

cudaError_t LaunchPrepareLastListing(const RowInputs& in, const FusedRows& rows, const CandidateLists& lists,
                                     cudaStream_t stream) {
  PrepareLastListingKernel<<<static_cast<unsigned>(Panels(in.padded_rows)), kPanelRows, 0, stream>>>(
      rows, lists, in.rows);
  return cudaGetLastError();
}

cudaError_t LaunchSelectListed(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                               const CandidateLists& lists, const RowSelection& selection,
                               cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  auto* kernel = terms.IsGeneral() ? SelectListedKernel<true> : SelectListedKernel<false>;
  kernel<<<static_cast<unsigned>(in.rows), kSelectThreads, 0, stream>>>(terms, in, rows, lists, selection);
  return cudaGetLastError();
}

// ---- gradients of rows with an upstream gradient of their entropy ----
//
// Turns 2^d into (factor + tilt d) 2^d slope (EntropyRow); d and the slope are recovered from the 16 bits of
// 2^d (recoverable.cuh).
//
// Plan: a block has kBlockVectors vectors of eight elements of one row. A thread loads all its vectors before
// it uses the first. Blocks whose row has no upstream gradient of the entropy end at once.
//
// Bytes: 4 for each element of rows with such a gradient. Operations: a logarithm and about 8 others; with a
// softcap about 20.

namespace {

constexpr int kThreadVectors = 4;
constexpr int kBlockVectors = kThreads * kThreadVectors;
using Elements = Vec<__nv_bfloat16>;

struct Params {
  const float* coef_entropy;
  const int32_t* targets;
  const float* reference;
  const EntropyRow* rows;
  uint4* exponentials;  // [rows, vectors]
  int vectors;          // vectors of a row
  int parts;            // blocks of a row
  float softcap;
};

struct Row {
  EntropyRow entropy;
  float reference;
  int target;
};

// top: the class is EntropyRow::top, whose gradient is known except for the slope.
template <bool kCapped>
__device__ __forceinline__ float GradientOf(const Params& p, const Row& row, float stored, bool top) {
  const Recovered r = kCapped ? RecoverCapped(stored, row.reference, p.softcap) : RecoverPlain(stored);
  if (top) return row.entropy.top_gradient * r.slope;
  if (r.exponential == 0.0f) return 0.0f;
  return fmaf(row.entropy.tilt, r.exponent, row.entropy.factor) * r.exponential * r.slope;
}

// The gradients of vector `v` of the row. The target's element does not change: FinishRowsKernel has written
// it.
template <bool kCapped>
__device__ __forceinline__ uint4 GradientsOf(const Params& p, const Row& row, const uint4& raw, int v) {
  constexpr int kSize = Elements::kSize;
  const int target = row.target - v * kSize, top = row.entropy.top - v * kSize;
  float x[kSize];
  Elements::Unpack(raw, x);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float g = GradientOf<kCapped>(p, row, x[i], i == top);
    x[i] = i == target ? x[i] : g;
  }
  return Elements::Pack(x);
}

template <bool kCapped>
__global__ __launch_bounds__(kThreads) void EntropyGradientKernel(const __grid_constant__ Params p) {
  const int64_t index = blockIdx.x / p.parts;
  if (p.coef_entropy[index] == 0.0f) return;
  const Row row = {p.rows[index], p.reference[index], p.targets[index]};
  uint4* const vectors = p.exponentials + index * p.vectors;
  const int first = static_cast<int>(blockIdx.x) % p.parts * kBlockVectors + static_cast<int>(threadIdx.x);
  uint4 raw[kThreadVectors] = {};
#pragma unroll
  for (int i = 0; i < kThreadVectors; ++i) {
    const int v = first + i * kThreads;
    if (v < p.vectors) raw[i] = vectors[v];
  }
#pragma unroll
  for (int i = 0; i < kThreadVectors; ++i) {
    const int v = first + i * kThreads;
    if (v < p.vectors) vectors[v] = GradientsOf<kCapped>(p, row, raw[i], v);
  }
}

}  // namespace

cudaError_t LaunchEntropyGradient(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                                  void* exponentials, int64_t ld, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  Params p = {};
  p.coef_entropy = in.coef_entropy;
  p.targets = in.targets;
  p.reference = rows.reference;
  p.rows = rows.entropy;
  p.exponentials = static_cast<uint4*>(exponentials);
  p.vectors = static_cast<int>(ld / Elements::kSize);
  p.parts = static_cast<int>(CeilDiv(p.vectors, kBlockVectors));
  p.softcap = terms.softcap;
  auto* kernel = terms.softcap > 0.0f ? EntropyGradientKernel<true> : EntropyGradientKernel<false>;
  kernel<<<static_cast<unsigned>(in.rows * p.parts), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda::hopper

LOSSD_KERNEL_FILE(FusedRows)
