// The rows of a chunk before and after the logit pass. With c a row's reference, S' the sum over all classes
// but the target as the pass left it, relative to c, and M the reference that row_loss_math.cuh wants:
//
//   S'_M = S' 2^(c - M),   ds_v = rule.softmax 2^(c - M) * stored_v,   stored_y = ds_y / (rule.softmax 2^(c -
//   M))
//
// so that one factor a row is all that is left to do; it goes into x before the weight gradient and into dx
// after its product. What 2^(c - M) rounds to is the same everywhere: p still sums to 1.
//
// The target's logit is known beforehand, and lse is not below it. So c = z_y f + 48 leaves stored
// exponentials at most 2^-48 e_y too small, and sums up to 2^60, for losses below 75 nats. Rows beyond are
// done again with c = max z f (LaunchMergeTiles), in the same launches whether there are any or not.
#include <cfloat>

#include "kernels/cuda/hopper/fused_row.cuh"

namespace lossd::kernels::cuda::hopper {
namespace {

constexpr float kHeadroom = 48.0f;
constexpr float kPaddingReference = 200.0f;  // 2^(0 - 200) is 0
// How far below the target, in units of log 2 and relative, a tile's maximum may seem without being so.
constexpr float kMargin = 0.25f;
constexpr float kRelativeMargin = 0x1p-10f;
// A softmax factor this much smaller than the target's gradient is left out.
constexpr float kNegligible = 0x1p-20f;

constexpr int kThreads = 256;
static_assert(kMostClusters <= kThreads, "PrepareRowsKernel");
constexpr int kMergeRows = 32;  // a block; divides kPanelRows
constexpr int kMergeWarps = 8;
constexpr int kFinishWarps = 4;  // rows a block

template <bool kGeneral>
__global__ void PrepareRowsKernel(const __grid_constant__ RowLossParams p,
                                  const __grid_constant__ FusedRows w, int panels) {
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row <= panels) w.redo[row] = 0;
  if (row < kMostClusters) w.taken[row] = 0;
  if (row >= p.padded_rows) return;
  if (w.lists.entries != nullptr) {
    w.lists.counts[row] = 0;
    w.lists.known[row] =
        row < p.rows ? Exp2(-kHeadroom) : -NegativeInfinity();  // the target's, or no candidates
  }
  if (row >= p.rows) {
    w.reference[row] = kPaddingReference;
    w.threshold[row] = -NegativeInfinity();
    return;
  }
  const Target target = MakeTarget<kGeneral>(p, row);
  const float f = LogitMap<__nv_bfloat16, kGeneral>(p).f;
  float s = p.target_dots[row];
  if constexpr (kGeneral) s = p.scale * (s + (p.bias != nullptr ? p.bias[target.column] : 0.0f));
  w.reference[row] = target.logit.z * f + kHeadroom;
  w.threshold[row] = s - fabsf(s) * kRelativeMargin - kMargin / f;
}

// ---- tiles of a row ----

struct Merged {
  float sum, spread, max;
  int tile;  // the first that has max
};

__device__ __forceinline__ void Add(Merged& into, const Merged& other) {
  into.sum += other.sum;
  into.spread += other.spread;
  if (other.max > into.max || (other.max == into.max && other.tile < into.tile)) {
    into.max = other.max;
    into.tile = other.tile;
  }
}

// A block has kMergeRows rows, a lane each; its warps take every kMergeWarps-th tile and are added in order.
__global__ void MergeTilesKernel(const __grid_constant__ FusedRows w, int64_t rows, int tiles, float f,
                                 bool with_spread, bool again) {
  __shared__ Merged shared[kMergeWarps][kMergeRows];
  const int64_t row = blockIdx.x * int64_t{kMergeRows} + threadIdx.x;
  const int64_t panel = row / kPanelRows;
  if (again && (w.redo[0] == 0 || w.redo[1 + panel] == 0)) return;
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
  if (!again && own.sum > kLargestSum && fabsf(own.max) <= FLT_MAX) {
    w.reference[row] = own.max * f;
    w.redo[1 + panel] = 1;
    w.redo[0] = 1;
  }
}

// ---- results ----

// What a row of stored exponentials becomes.
struct RowGradient {
  float factor;
  float entry;  // at the target
  bool clear;   // the rest of the row is to be zero
};

__device__ __forceinline__ RowGradient MakeGradient(const GradientRule& rule, const RowResult& r,
                                                    float rescale) {
  if (!rule.valid) return {0.0f, 0.0f, true};
  const float others = rule.softmax / r.inverse_sum;
  if (!(fabsf(others) > kNegligible * fabsf(rule.target))) return {rule.target, 1.0f, true};
  const float factor = rule.softmax * rescale;
  return {factor, rule.target / factor, false};
}

// One lane: the results of a row, and what its gradient is made of.
template <bool kGeneral>
__device__ __forceinline__ RowGradient FinishRow(const RowLossParams& p, const FusedRows& w,
                                                 GradientRule* rules, int64_t row) {
  const FusedRow fused = LoadFusedRow<kGeneral>(p, w, row);
  const Target& target = fused.target;
  RowResult r = FinishSums<kGeneral>(p, row, target, fused.rest, fused.f);
  r.argmax = target.column;
  const float same_way = w.partials.target[row];
  if (w.max[row] > same_way || (w.max[row] == same_way && w.arg[row] < r.argmax)) r.argmax = w.arg[row];
  WriteRow(p, row, r);
  const GradientRule rule = MakeRule<kGeneral>(p, row, target, r);
  if (rules != nullptr) rules[row] = rule;
  return MakeGradient(rule, r, fused.rescale);
}

// A warp a row.
template <bool kGeneral>
__global__ void FinishRowsKernel(const __grid_constant__ RowLossParams p, const __grid_constant__ FusedRows w,
                                 GradientRule* rules) {
  const int64_t row = blockIdx.x * int64_t{kFinishWarps} + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x & 31);
  if (row >= p.rows) return;
  RowGradient gradient = {};
  if (lane == 0) gradient = FinishRow<kGeneral>(p, w, rules, row);
  if (!p.write_gradient) return;
  auto* exponentials = static_cast<__nv_bfloat16*>(p.logits) + row * p.ld;
  if (__shfl_sync(0xffffffffu, static_cast<int>(gradient.clear), 0) != 0) {
    auto* vectors = reinterpret_cast<uint4*>(exponentials);
    for (int64_t v = lane; v < p.ld / 8; v += 32) vectors[v] = make_uint4(0, 0, 0, 0);
    __syncwarp();
  }
  if (lane != 0) return;
  exponentials[p.targets[row]] = __float2bfloat16_rn(gradient.entry);
  w.factor[row] = gradient.factor;
}

unsigned Blocks(int64_t count, int64_t per_block) { return static_cast<unsigned>(CeilDiv(count, per_block)); }

}  // namespace

FusedRows FusedRows::Carve(Carver& carver, int64_t capacity) {
  FusedRows w;
  w.reference = carver.Take<float>(capacity);
  w.threshold = carver.Take<float>(capacity);
  w.max = carver.Take<float>(capacity);
  w.sum = carver.Take<float>(capacity);
  w.spread = carver.Take<float>(capacity);
  w.arg = carver.Take<int32_t>(capacity);
  w.factor = carver.Take<float>(capacity);
  w.redo = carver.Take<int32_t>(1 + Panels(capacity));
  w.taken = carver.Take<uint32_t>(kMostClusters);
  return w;
}

cudaError_t LaunchPrepareRows(const RowLossParams& loss, const FusedRows& rows, cudaStream_t stream) {
  const int64_t panels = Panels(loss.padded_rows);
  auto* kernel = loss.IsGeneral() ? PrepareRowsKernel<true> : PrepareRowsKernel<false>;
  kernel<<<Blocks(loss.padded_rows + 1, kThreads), kThreads, 0, stream>>>(loss, rows,
                                                                          static_cast<int>(panels));
  return cudaGetLastError();
}

cudaError_t LaunchMergeTiles(const RowLossParams& loss, const FusedRows& rows, bool again,
                             cudaStream_t stream) {
  const bool general = loss.IsGeneral();
  MergeTilesKernel<<<Blocks(loss.rows, kMergeRows), dim3(kMergeRows, kMergeWarps), 0, stream>>>(
      rows, loss.rows, static_cast<int>(VocabTiles(loss.vocab)), general ? kLog2E : loss.scale * kLog2E,
      general && loss.want_entropy, again);
  return cudaGetLastError();
}

cudaError_t LaunchFinishRows(const RowLossParams& loss, const FusedRows& rows, GradientRule* rules,
                             cudaStream_t stream) {
  auto* kernel = loss.IsGeneral() ? FinishRowsKernel<true> : FinishRowsKernel<false>;
  kernel<<<Blocks(loss.rows, kFinishWarps), kFinishWarps * 32, 0, stream>>>(loss, rows, rules);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda::hopper
