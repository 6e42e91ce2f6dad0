// SPDX-License-Identifier: Apache-2.0
// The logit pass (logit_pass.h): Z = X W^T for X [rows, inner] and W [vocab, inner], tile by tile. Z is
// stored only by SoftmaxPass, for rows that have a teacher; all other passes keep Z in registers.
//
// Plan: a persistent grid of clusters of two blocks. A cluster takes tiles of 256 rows x 256 classes. Each
// block has 128 of the rows. It fetches the hidden states of its rows and half of the weights; the other
// block sends the other half of the weights by multicast. A producer thread fills a ring of four stages of 64
// inner elements (TMA, mbarriers). Two consumer warpgroups multiply 64 x 256 each from shared memory (wgmma).
// The sums stay in registers, and the warpgroups turn them into statistics and exponentials while the
// producer fetches for the next tile.
//
// FLOP: 2 rows vocab inner. Bytes from L2 for each block and stage: 16 + 16 KB for 4.2 MFLOP. Exponentials:
// rows * vocab. A multiprocessor computes 16 a clock, which takes 2048 clocks a tile; the products of a tile
// take 1024 inner / 64 clocks.
//
// Exponents are relative to a reference that the caller knows in advance. So one pass over the sums is
// enough, and stored values need no correction for each tile. docs/kernels/hopper.md says more.
//
// Names in this file: s is a logit before the softcap, z the logit itself, and d = z f - reference its
// exponent (logit_pass.h). A `logits` array has a thread's 128 elements of a tile: first dot products, then
// s. e is 2^d. Candidates and their lists are explained in plan.h.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/hopper/cluster_launch.h"
#include "kernels/cuda/kernels/hopper/logit_pass.h"
#include "kernels/cuda/kernels/hopper/main_loop.cuh"
#include "kernels/cuda/kernels/hopper/recoverable.cuh"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda::hopper {
namespace {

// ---- processing the sums of a tile while they are in registers ----
//
// Sums become logits, then statistics, exponentials or gradients (logit_pass.h has the formulas). A thread
// holds 64 columns of each of two rows ("halves"); the four lanes of a quad share the rows. Until
// exponentials are computed, the elements are logits before the softcap.

// How dot products become logits (LogitForm). kCapped: the general form with a softcap.
enum class Form { kPlain, kGeneral, kCapped };

// What the pass writes.
enum class Output {
  kStatistics,
  kCandidates,    // candidates and statistics
  kExponentials,  // exponentials and statistics
  kRecoverable,   // as kExponentials, but the exponentials of some rows are recoverable
  kGradient,
  kSoftmax  // softmaxes and the dot products
};

// Whether tiles of 16-bit elements are stored through boxes.
template <Output kOutput>
constexpr bool kStores =
    kOutput == Output::kExponentials || kOutput == Output::kRecoverable || kOutput == Output::kGradient;

// The operands and the type of a pass, in the form that the kernel gets. Members that the type of pass does
// not use are null.
struct LogitKernelParams {
  // last_bias: the last column from which two biases may be read. group: PanelsPerGroup(). small_slope:
  // SmallSlope() (recoverable.cuh). largest_bias: BoundedBias().
  int rows, classes, last_bias, first_class;
  int inner_tiles, vocab_tiles, panels, group;
  float f, scale, softcap, inverse_cap, small_slope, largest_bias;
  const float* bias;
  const int32_t* targets;
  const float* reference;
  const float* threshold;
  const float* coef_entropy;
  const GradientRule* rules;
  const int32_t* marked_panels;  // null: all panels
  TilePartials partials;
  float* dots;
  int dots_ld;
  SoftmaxPart* softmax_parts;
  CandidateLists lists;
  int first_listed;            // FirstListedTile()
  const int32_t* listed_anew;  // panels whose tiles are all listed again; null: sums are not complete yet
  ClusterPositions positions;
};

struct LogitTile {
  int panel;  // of kPanelRows rows
  int vocab_tile;
};

// Values of a thread's two rows that are known before the tile is computed.
struct RowPair {
  int row[2];
  int target[2];        // column within the tile, if it is in the tile
  float reference[2];   // in units of log 2
  float threshold[2];   // for statistics
  float sum_bound[2];   // for candidates: lower bound of the row's sum; infinite if none are listed
  bool recoverable[2];  // for exponentials
  // For gradients: the gradient of a class is (factor + tilt d) 2^d, and the gradient of the target is
  // `entry`.
  float factor[2];
  float tilt[2];
  float entry[2];
};

// Sets factor, tilt and entry of half `h`. By the rule of the row (GradientRule), the gradient of a class is
//   2^d (softmax - entropy ((d - log2_sum) ln 2 + row_entropy)).
template <Form kForm>
__device__ __forceinline__ void SetRule(const GradientRule& rule, int h, RowPair& r) {
  r.factor[h] = rule.softmax;
  r.tilt[h] = 0.0f;
  r.entry[h] = rule.target;
  if constexpr (kForm != Form::kPlain) {
    if (rule.entropy == 0.0f) return;
    r.factor[h] += rule.entropy * (rule.log2_sum * kLn2 - rule.row_entropy);
    r.tilt[h] = -rule.entropy * kLn2;
  }
}

template <Form kForm, Output kOutput>
__device__ __forceinline__ RowPair LoadRows(const LogitKernelParams& p, const LogitTile& tile,
                                            int first_row) {
  RowPair r;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + 8 * h;
    const bool exists = row < p.rows;
    r.row[h] = row;
    if constexpr (kOutput == Output::kSoftmax) {
      r.target[h] = -1;
      continue;
    }
    r.target[h] = exists ? p.targets[row] - p.first_class - tile.vocab_tile * kVocabTile : -1;
    if constexpr (kOutput == Output::kGradient) {
      const GradientRule rule = exists ? p.rules[row] : GradientRule{};
      r.reference[h] = rule.reference;
      SetRule<kForm>(rule, h, r);
    } else {
      r.reference[h] = exists ? p.reference[row] : 0.0f;
      r.threshold[h] = exists ? p.threshold[row] : -NegativeInfinity();
    }
    if constexpr (kOutput == Output::kRecoverable) {
      r.recoverable[h] = exists && p.coef_entropy[row] != 0.0f;
    }
  }
  return r;
}

// Loads the lower bounds of the sums. Other clusters add to these bounds, so they are loaded as late as
// possible, but so early that no thread waits for them.
__device__ __forceinline__ void LoadSumBounds(const LogitKernelParams& p, const LogitTile& tile, RowPair& r) {
  const bool lists = p.listed_anew != nullptr || tile.vocab_tile >= p.first_listed;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // Minus NegativeInfinity() is +infinity: no class can be a candidate.
    r.sum_bound[h] = lists && r.row[h] < p.rows ? __ldcg(p.lists.sum_bound + r.row[h]) : -NegativeInfinity();
  }
}

// The first column within the tile that a lane holds. The lane holds this column and the next, and both again
// every 8 columns.
__device__ __forceinline__ int LaneColumn() { return 2 * static_cast<int>(threadIdx.x & 3); }

// Applies body(element, half, column within the tile).
template <typename Body>
__device__ __forceinline__ void ForEachElement(float (&logits)[128], Body body) {
  const int lane_column = LaneColumn();
#pragma unroll
  for (int i = 0; i < 128; ++i) body(logits[i], (i >> 1) & 1, 8 * (i >> 2) + lane_column + (i & 1));
}

// Bounds an infinite bias under a softcap. It then gives a large finite logit, from which ToLogit makes the
// softcap itself.
template <Form kForm>
__device__ __forceinline__ float BoundedBias(const LogitKernelParams& p, float bias) {
  if constexpr (kForm != Form::kCapped) return bias;
  const float most = bias > p.largest_bias ? p.largest_bias : bias;  // NaN stays
  return most < -p.largest_bias ? -p.largest_bias : most;
}

template <Form kForm>
__device__ __forceinline__ void ScaleAndShift(const LogitKernelParams& p, const LogitTile& tile,
                                              float (&logits)[128]) {
  // Columns past the last bias get that bias; Mask() removes them.
  const int first = tile.vocab_tile * kVocabTile + LaneColumn();
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    float2 bias = make_float2(0.0f, 0.0f);
    if (p.bias != nullptr)
      bias = __ldg(reinterpret_cast<const float2*>(p.bias + min(first + 8 * j, p.last_bias)));
    bias = make_float2(BoundedBias<kForm>(p, bias.x), BoundedBias<kForm>(p, bias.y));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      logits[4 * j + 2 * h] = p.scale * (logits[4 * j + 2 * h] + bias.x);
      logits[4 * j + 2 * h + 1] = p.scale * (logits[4 * j + 2 * h + 1] + bias.y);
    }
  }
}

// The logit and its slope. Infinities do not change: -inf is a masked class, and the cap must not hide +inf.
template <Form kForm>
__device__ __forceinline__ Logit ToLogit(const LogitKernelParams& p, float s) {
  if constexpr (kForm != Form::kCapped) return {s, 1.0f};
  const float2 t = TanhAndSlope<false>(s * p.inverse_cap);
  return {isinf(s) ? s : p.softcap * t.x, t.y};
}

// Masks the targets and the columns past the vocabulary: their logits become -inf. Also writes the targets'
// logits.
template <Form kForm, Output kOutput>
__device__ __forceinline__ void Mask(const LogitKernelParams& p, const LogitTile& tile, const RowPair& r,
                                     float (&logits)[128]) {
  const bool mine0 = static_cast<unsigned>(r.target[0]) < kVocabTile;
  const bool mine1 = static_cast<unsigned>(r.target[1]) < kVocabTile;
  if (__any_sync(0xffffffffu, mine0 || mine1)) {
    ForEachElement(logits, [&](float& s, int h, int column) {
      if (column == r.target[h]) {
        if constexpr (kOutput != Output::kGradient) p.partials.target[r.row[h]] = ToLogit<kForm>(p, s).z;
        s = NegativeInfinity();
      }
    });
  }
  const int columns = p.classes - tile.vocab_tile * kVocabTile;
  if (columns < kVocabTile) {
    ForEachElement(logits, [&](float& s, int, int column) {
      if (column >= columns) s = NegativeInfinity();
    });
  }
}

__device__ __forceinline__ float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ int QuadMin(int x) {
  x = min(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return min(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Turns each lane's maximum of a half into the quad's maximum, and finds the first column that has it. The
// loop goes backwards, so the smallest column is found last.
__device__ __forceinline__ void FindMax(const float (&logits)[128], float (&max)[2], int (&arg)[2]) {
  int found[2] = {kVocabTile, kVocabTile};
#pragma unroll
  for (int h = 0; h < 2; ++h) max[h] = QuadMax(max[h]);
#pragma unroll
  for (int i = 127; i >= 0; --i) {
    const int h = (i >> 1) & 1;
    if (logits[i] == max[h]) found[h] = 8 * (i >> 2) + (i & 1);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) arg[h] = QuadMin(found[h] + LaneColumn());
}

__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The columns of a box of 16-bit elements, and the groups of 8 columns in it.
constexpr int kBoxColumns = kBoxRowBytes / 2;
constexpr int kGroups = kBoxColumns / 8;

// Turns pairs of neighboring elements into words, word = body(s0, s1, half). With kStore, sends the words out
// one box (OutBoxes in main_loop.cuh) at a time; without kStore, a box is only a group of kBoxColumns
// columns. end_box(box) is called before a box is sent, when the warp has written its words to the box.
template <bool kStore, typename Body, typename EndBox>
__device__ __forceinline__ void ForEachBox(const float (&logits)[128], const OutBoxes& out, int column,
                                           int row, Body body, EndBox end_box) {
#pragma unroll
  for (int box = 0; box < kVocabTile / kBoxColumns; ++box) {
    if constexpr (kStore) out.Open();
#pragma unroll
    for (int group = 0; group < kGroups; group += 2) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int h = w & 1;
        const int i = 4 * (box * kGroups + group + (w >> 1)) + 2 * h;
        words[w] = body(logits[i], logits[i + 1], h);
      }
      if constexpr (kStore) out.Put(box & 1, group, words);
    }
    end_box(box);
    if constexpr (kStore) out.Send(box & 1, column + box * kBoxColumns, row);
  }
}

// A thread's sums over its columns. max: the maximum of the logits before the softcap; box_max: the maximum
// of the logits in the current box.
struct ThreadSums {
  float sum[2] = {};
  float spread[2] = {};
  float max[2] = {NegativeInfinity(), NegativeInfinity()};
  float box_max[2] = {NegativeInfinity(), NegativeInfinity()};

  __device__ __forceinline__ void EndBox() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max[h] = fmaxf(max[h], box_max[h]);
      box_max[h] = NegativeInfinity();
    }
  }
};

// A lower bound of d in products of d and 2^d. 2^d is 0 there. Without the bound, the product of 0 and d =
// -inf would be NaN.
constexpr float kNothing = -1000.0f;

// Processes two neighboring elements of a half: adds them to the sums, and returns the exponentials to be
// stored.
template <Form kForm, Output kOutput>
__device__ __forceinline__ uint32_t TakePair(const LogitKernelParams& p, float s0, float s1,
                                             const RowPair& rows, int h, ThreadSums& sums) {
  sums.box_max[h] = fmaxf(sums.box_max[h], fmaxf(s0, s1));
  const Logit z0 = ToLogit<kForm>(p, s0), z1 = ToLogit<kForm>(p, s1);
  const float d0 = fmaf(z0.z, p.f, -rows.reference[h]), d1 = fmaf(z1.z, p.f, -rows.reference[h]);
  const float e0 = Exp2(d0), e1 = Exp2(d1);
  sums.sum[h] += e0 + e1;
  if constexpr (kForm != Form::kPlain) {
    sums.spread[h] += e0 * fmaxf(d0, kNothing) + e1 * fmaxf(d1, kNothing);
  }
  if constexpr (kForm == Form::kCapped && kOutput == Output::kRecoverable) {
    if (rows.recoverable[h]) {
      return PackBf16(MakeRecoverable(e0, z0, p.small_slope), MakeRecoverable(e1, z1, p.small_slope));
    }
  }
  if constexpr (kForm == Form::kCapped) return PackBf16(e0 * z0.slope, e1 * z1.slope);
  return PackBf16(e0, e1);
}

// The largest error of an exponent by all roundings between this test of a class and the last one, which the
// filtered gradients make with fp32 logits: absolute, in units of log 2, and relative.
constexpr float kListMargin = 0.02f;
constexpr float kRelativeListMargin = 0x1p-14f;

// The smallest logit before the softcap with which a class of the row may reach epsilon: 2^d must be at least
// epsilon * sum_bound. NaN if `sum_bound` is infinite or the row is not finite; no class reaches NaN.
template <Form kForm>
__device__ __forceinline__ float LeastCandidate(const LogitKernelParams& p, float sum_bound,
                                                float reference) {
  const float log2_sum = log2f(sum_bound) + reference;
  // While sums still grow, the margin is doubled, so that every class that would be listed with the complete
  // sum is listed now.
  const float own_margin = p.listed_anew == nullptr ? 2.0f * kListMargin : kListMargin;
  const float margin = own_margin + kRelativeListMargin * fabsf(log2_sum);
  float least = (log2_sum + p.lists.log2_epsilon - margin) / p.f;
  if constexpr (kForm == Form::kCapped) {
    // `least` is a bound for z. A z at or above the softcap is never reached, and one at or below its
    // negative always.
    const float t = least * p.inverse_cap;
    least = t >= 1.0f ? -NegativeInfinity() : t <= -1.0f ? NegativeInfinity() : p.softcap * atanhf(t);
  }
  return least < -FLT_MAX ? -FLT_MAX : least;  // masked logits are below it
}

// Lists the candidates of a box: elements that are not below `least`. The count of a row may exceed the
// capacity; then the list is incomplete, and it is made again (fused_rows.h).
template <Form kForm>
__device__ __forceinline__ void ListBox(const LogitKernelParams& p, const float (&logits)[128],
                                        const RowPair& rows, const float (&least)[2], int column, int box) {
  constexpr int kElements = 4 * kGroups;
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    const int i = kElements * box + e;
    const int h = (i >> 1) & 1;
    if (!(logits[i] >= least[h])) continue;
    const int64_t row = rows.row[h];
    const int at = atomicAdd(p.lists.counts + row, 1);
    if (at >= p.lists.capacity) continue;
    p.lists.entries[row * p.lists.capacity + at] = {column + 8 * (i >> 2) + LaneColumn() + (i & 1),
                                                    ToLogit<kForm>(p, logits[i]).z};
  }
}

template <Form kForm, Output kOutput>
__device__ __forceinline__ ThreadSums Exponentials(const LogitKernelParams& p, const float (&logits)[128],
                                                   const RowPair& rows, const OutBoxes& out, int column,
                                                   int row) {
  ThreadSums sums;
  float least[2];
  if constexpr (kOutput == Output::kCandidates) {
#pragma unroll
    for (int h = 0; h < 2; ++h) least[h] = LeastCandidate<kForm>(p, rows.sum_bound[h], rows.reference[h]);
  }
  ForEachBox<kStores<kOutput>>(
      logits, out, column, row,
      [&](float s0, float s1, int h) { return TakePair<kForm, kOutput>(p, s0, s1, rows, h, sums); },
      [&](int box) {
        if constexpr (kOutput == Output::kCandidates) {
          const bool some = sums.box_max[0] >= least[0] || sums.box_max[1] >= least[1];
          if (some) ListBox<kForm>(p, logits, rows, least, column, box);
        }
        sums.EndBox();
      });
  return sums;
}

// Writes the statistics that a quad has computed for its two rows of a tile. When candidates are listed, also
// raises the rows' lower bounds by the tile's sums, for the tiles that come later.
template <Form kForm, Output kOutput>
__device__ __forceinline__ void WritePartials(const LogitKernelParams& p, const LogitTile& tile,
                                              const RowPair& rows, const float (&logits)[128],
                                              ThreadSums sums) {
  int arg[2] = {0, 0};
  const bool contends = sums.max[0] >= rows.threshold[0] || sums.max[1] >= rows.threshold[1];
  if (__any_sync(0xffffffffu, contends)) {
    FindMax(logits, sums.max, arg);
  } else {
    sums.max[0] = sums.max[1] = NegativeInfinity();
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = QuadSum(sums.sum[h]);
    const float spread = kForm != Form::kPlain ? QuadSum(sums.spread[h]) : 0.0f;
    if ((threadIdx.x & 3) != 0 || rows.row[h] >= p.rows) continue;
    const int64_t at = tile.vocab_tile * p.partials.ld + rows.row[h];
    p.partials.max[at] = ToLogit<kForm>(p, sums.max[h]).z;
    p.partials.sum[at] = sum;
    p.partials.arg[at] = static_cast<uint8_t>(arg[h]);
    if (kForm != Form::kPlain && p.partials.spread != nullptr) p.partials.spread[at] = spread;
    if constexpr (kOutput == Output::kCandidates) {
      if (sum <= kLargestSum) atomicAdd(p.lists.sum_bound + rows.row[h], sum);
    }
  }
}

// ---- processing the logits of a tile if they become gradients ----

// fp16 cannot represent values far above the gradient unit.
template <typename T>
__device__ __forceinline__ uint32_t PackGradients(float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return PackBf16(low, high);
  const __half2 pair = __floats2half2_rn(SaturateHalf(low), SaturateHalf(high));
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Overwrites, in a box that the warp has filled, the elements of the targets.
template <typename T>
__device__ __forceinline__ void PutEntries(const RowPair& rows, const OutBoxes& out, int box) {
  const int column0 = rows.target[0] - box * kBoxColumns;
  const int column1 = rows.target[1] - box * kBoxColumns;
  const bool mine0 = static_cast<unsigned>(column0) < kBoxColumns;
  const bool mine1 = static_cast<unsigned>(column1) < kBoxColumns;
  if (!__any_sync(0xffffffffu, mine0 || mine1)) return;
  __syncwarp();
  const int row = 16 * static_cast<int>((threadIdx.x >> 5) & 3) + static_cast<int>(threadIdx.x & 31) / 4;
  if ((threadIdx.x & 3) != 0) return;
  if (mine0) out.Replace(box & 1, row, column0, PackGradients<T>(rows.entry[0], 0.0f));
  if (mine1) out.Replace(box & 1, row + 8, column1, PackGradients<T>(rows.entry[1], 0.0f));
}

// The gradient of a class; only for rows that have one.
template <Form kForm>
__device__ __forceinline__ float GradientOf(const LogitKernelParams& p, const RowPair& rows, int h, float s) {
  const Logit logit = ToLogit<kForm>(p, s);
  const float d = fmaf(logit.z, p.f, -rows.reference[h]);
  if constexpr (kForm == Form::kPlain) return rows.factor[h] * Exp2(d);
  const float bounded = fmaxf(d, kNothing);
  const float g = fmaf(rows.tilt[h], bounded, rows.factor[h]) * Exp2(bounded);
  return kForm == Form::kCapped ? g * logit.slope : g;
}

// Writes the gradients of a tile. A row whose factors are 0 gets a gradient of 0 for any logits, even NaN.
template <typename T, Form kForm>
__device__ __forceinline__ void Gradients(const LogitKernelParams& p, const float (&logits)[128],
                                          const RowPair& rows, const OutBoxes& out, int column, int row) {
  ForEachBox<true>(
      logits, out, column, row,
      [&](float s0, float s1, int h) -> uint32_t {
        const bool none = rows.factor[h] == 0.0f && (kForm == Form::kPlain || rows.tilt[h] == 0.0f);
        return none ? 0u
                    : PackGradients<T>(GradientOf<kForm>(p, rows, h, s0), GradientOf<kForm>(p, rows, h, s1));
      },
      [&](int box) { PutEntries<T>(rows, out, box); });
}

// ---- processing the sums of a tile if they are stored ----

// Stores the dot products directly from the registers. So no thread waits for a store; with boxes, threads
// would wait for a free box. Two lanes exchange halves of two groups of 8 columns, so that each lane writes
// 16 bytes and a quad writes whole sectors.
__device__ __forceinline__ void StoreDots(const LogitKernelParams& p, const RowPair& rows, int column,
                                          const float (&dots)[128]) {
  const bool odd = (threadIdx.x & 1) != 0;
  const int first = column + (odd ? 8 : 0) + 2 * static_cast<int>(threadIdx.x & 2);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float* const to = p.dots + int64_t{rows.row[h]} * p.dots_ld + first;
    const bool exists = rows.row[h] < p.rows;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
      const float2 own = make_float2(dots[4 * j + 2 * h], dots[4 * j + 2 * h + 1]);
      const float2 next = make_float2(dots[4 * j + 4 + 2 * h], dots[4 * j + 5 + 2 * h]);
      const float x = __shfl_xor_sync(0xffffffffu, odd ? own.x : next.x, 1);
      const float y = __shfl_xor_sync(0xffffffffu, odd ? own.y : next.y, 1);
      const float4 all = odd ? make_float4(x, y, next.x, next.y) : make_float4(own.x, own.y, x, y);
      if (exists && first + 8 * j < p.dots_ld) __stcs(reinterpret_cast<float4*>(to + 8 * j), all);
    }
  }
}

// Writes the tile's parts of the softmaxes (SoftmaxPart). p.f is log2(e) / temperature. `logits` are before
// the softcap. Each half has several sums, because each addition to a sum waits for the previous one.
template <Form kForm>
__device__ __forceinline__ void WriteSoftmax(const LogitKernelParams& p, const LogitTile& tile,
                                             const RowPair& rows, float (&logits)[128]) {
  constexpr int kChains = 4;  // sums of each half
  float max[2][kChains], sum[2][kChains] = {}, base[2];
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    const int h = (i >> 1) & 1, chain = 2 * ((i >> 2) & 1) + (i & 1);
    if constexpr (kForm == Form::kCapped) logits[i] = ToLogit<kForm>(p, logits[i]).z;
    max[h][chain] = i < 8 ? logits[i] : fmaxf(max[h][chain], logits[i]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    max[h][0] = QuadMax(fmaxf(fmaxf(max[h][0], max[h][1]), fmaxf(max[h][2], max[h][3])));
    base[h] = max[h][0] == NegativeInfinity() ? 0.0f : max[h][0];
  }
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    const int h = (i >> 1) & 1, chain = 2 * ((i >> 2) & 1) + (i & 1);
    sum[h][chain] += Exp2((logits[i] - base[h]) * p.f);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float all = QuadSum((sum[h][0] + sum[h][1]) + (sum[h][2] + sum[h][3]));
    if ((threadIdx.x & 3) != 0 || rows.row[h] >= p.rows) continue;
    p.softmax_parts[int64_t{rows.row[h]} * p.vocab_tiles + tile.vocab_tile] = {max[h][0], all};
  }
}

// ---- the pass ----

struct Maps {
  CUtensorMap hidden, weight, stored;
};

// The tile with number `index`. Within a group of panels, classes are the outer loop. So clusters that run at
// the same time share hidden states and weights, and the group's hidden states are used again for the next
// classes.
__device__ __forceinline__ LogitTile TileAt(const LogitKernelParams& p, int index) {
  const int group_tiles = p.group * p.vocab_tiles;
  const int group = index / group_tiles;
  const int first = group * p.group;
  const int size = min(p.group, p.panels - first);
  const int within = index - group * group_tiles;
  const int vocab_tile = within / size;
  return {first + within - vocab_tile * size, vocab_tile};
}

__device__ __forceinline__ int Clusters() { return static_cast<int>(gridDim.x) / kClusterBlocks; }

// Applies body(tile) to the tiles of a cluster. Clusters with neighboring positions have tiles of the same
// classes, so a group of multiprocessors loads the weights of these classes once.
template <typename Body>
__device__ __forceinline__ void ForEachTile(const LogitKernelParams& p, int position, Body body) {
  const int tiles = p.panels * p.vocab_tiles;
  for (int i = position; i < tiles; i += Clusters()) {
    const LogitTile tile = TileAt(p, i);
    if (p.marked_panels != nullptr && p.marked_panels[1 + tile.panel] == 0) continue;
    if (p.listed_anew != nullptr && tile.vocab_tile >= p.first_listed && p.listed_anew[1 + tile.panel] == 0)
      continue;
    body(tile);
  }
}

// Called by one thread. Fetches this block's hidden states, and its share of the weights for the whole
// cluster.
__device__ __forceinline__ void Produce(const Maps& maps, const LogitKernelParams& p, Ring ring,
                                        uint32_t rank, int position) {
  ForEachTile(p, position, [&](const LogitTile& tile) {
    const int row = tile.panel * kPanelRows + static_cast<int>(rank) * kRowTile;
    const int column = tile.vocab_tile * kVocabTile + static_cast<int>(rank) * kPartColumns;
    for (int k = 0; k < p.inner_tiles; ++k) {
      Fetch<Major::kInner, Major::kInner>(maps.hidden, maps.weight, row, column, k * kInnerTile, rank, ring);
    }
  });
}

template <typename T, Form kForm, Output kOutput>
__device__ __forceinline__ void Consume(const Maps& maps, const LogitKernelParams& p, Ring ring,
                                        uint32_t rank, int position, int consumer, uint32_t boxes) {
  const int warp = static_cast<int>((threadIdx.x >> 5) & 3);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int product_row = static_cast<int>(rank) * kRowTile + consumer * kProductRows;
  const OutBoxes out(maps.stored, boxes, consumer);
  float logits[128];
  ForEachTile(p, position, [&](const LogitTile& tile) {
    const int first_row = tile.panel * kPanelRows + product_row;
    RowPair rows = LoadRows<kForm, kOutput>(p, tile, first_row + warp * 16 + lane / 4);
    Multiply<T, Major::kInner, Major::kInner>(p.inner_tiles, consumer, ring, logits, [&] {
      if constexpr (kOutput == Output::kCandidates) LoadSumBounds(p, tile, rows);
    });
    const int column = tile.vocab_tile * kVocabTile;
    if constexpr (kOutput == Output::kSoftmax) StoreDots(p, rows, column, logits);
    if constexpr (kForm != Form::kPlain) ScaleAndShift<kForm>(p, tile, logits);
    Mask<kForm, kOutput>(p, tile, rows, logits);
    if constexpr (kOutput == Output::kSoftmax) {
      WriteSoftmax<kForm>(p, tile, rows, logits);
    } else if constexpr (kOutput == Output::kGradient) {
      Gradients<T, kForm>(p, logits, rows, out, column, first_row);
    } else {
      const ThreadSums sums = Exponentials<kForm, kOutput>(p, logits, rows, out, column, first_row);
      if (kOutput != Output::kCandidates || p.listed_anew == nullptr) {
        WritePartials<kForm, kOutput>(p, tile, rows, logits, sums);
      }
    }
  });
  if constexpr (kStores<kOutput>) out.Finish();
}

template <typename T, Form kForm, Output kOutput>
__global__ __cluster_dims__(kClusterBlocks)
    __launch_bounds__(kThreads, 1) void LogitPassKernel(const __grid_constant__ Maps maps,
                                                        const __grid_constant__ LogitKernelParams p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  if (p.marked_panels != nullptr && p.marked_panels[0] == 0) return;
  const uint32_t stages = SharedAddress(shared);
  const uint32_t boxes = stages + kRingBytes;
  const uint32_t barriers = boxes + (kStores<kOutput> ? kOutBytes : 0);
  const uint32_t position_word = barriers + kRingBarrierBytes;
  const Ring ring(stages, barriers);
  const uint32_t rank = ClusterRank();
  if (rank == 0 && threadIdx.x == 0) TakePosition(p.positions, Clusters(), position_word);
  ring.Start();
  const int position = Position(position_word);
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    LowerRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) Produce(maps, p, ring, rank, position);
  } else {
    RaiseRegisters<kConsumerRegisters>();
    Consume<T, kForm, kOutput>(maps, p, ring, rank, position, warpgroup - 1, boxes);
  }
  ClusterSync();  // the other block may still send to this block's shared memory
}

template <typename T, Form kForm, Output kOutput>
struct Kernel {
  static constexpr auto kFunction = LogitPassKernel<T, kForm, kOutput>;
  static constexpr int kSharedBytes =
      kRingBytes + (kStores<kOutput> ? kOutBytes : 0) + kRingBarrierBytes + kPositionBytes;

  static cudaError_t AllowSharedBytes() {
    return cudaFuncSetAttribute(kFunction, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  static cudaError_t Launch(const Maps& maps, const LogitKernelParams& p, int clusters, cudaStream_t stream) {
    if (const cudaError_t error = AllowSharedBytes(); error != cudaSuccess) return error;
    kFunction<<<clusters * kClusterBlocks, kThreads, kSharedBytes, stream>>>(maps, p);
    return cudaGetLastError();
  }
};

// Recoverable exponentials exist only with a softcap, and softmaxes only in the general form; so the kernels
// of other forms are not built for them.
template <typename T, Output kOutput>
cudaError_t LaunchForm(const Maps& maps, const LogitKernelParams& p, bool general, int clusters,
                       cudaStream_t stream) {
  if constexpr (kOutput != Output::kRecoverable) {
    if constexpr (kOutput != Output::kSoftmax) {
      if (!general) return Kernel<T, Form::kPlain, kOutput>::Launch(maps, p, clusters, stream);
    }
    if (p.softcap == 0.0f) return Kernel<T, Form::kGeneral, kOutput>::Launch(maps, p, clusters, stream);
  }
  return Kernel<T, Form::kCapped, kOutput>::Launch(maps, p, clusters, stream);
}

// Makes all tensor maps except the map of the stored elements.
cudaError_t MakeMaps(const LogitOperands& o, Maps& maps) {
  const BoxedMatrix hidden = {o.hidden, o.dtype, o.rows, o.inner, kRowTile};
  const BoxedMatrix weight = {o.weight, o.dtype, o.padded_classes, o.inner, kPartColumns};
  if (const cudaError_t error = MakeTensorMap(hidden, maps.hidden); error != cudaSuccess) return error;
  return MakeTensorMap(weight, maps.weight);
}

LogitKernelParams MakeKernelParams(const LogitOperands& o) {
  LogitKernelParams p = {};
  p.rows = static_cast<int>(o.rows);
  p.classes = static_cast<int>(o.classes);
  p.last_bias = static_cast<int>(o.padded_classes) - 2;
  p.first_class = static_cast<int>(o.first_class);
  p.inner_tiles = static_cast<int>(CeilDiv(o.inner, kInnerTile));
  p.vocab_tiles = static_cast<int>(VocabTiles(o.classes));
  p.panels = static_cast<int>(Panels(o.rows));
  p.group = static_cast<int>(PanelsPerGroup(p.panels, o.inner));
  p.f = o.form.general ? kLog2E : o.form.scale * kLog2E;
  p.scale = o.form.scale;
  p.softcap = o.form.softcap;
  p.inverse_cap = o.form.softcap > 0.0f ? 1.0f / o.form.softcap : 0.0f;
  p.small_slope = SmallSlope(o.form.softcap);
  // So that scale * bias is finite in fp32.
  p.largest_bias = 1e37f / std::max(1.0f, std::fabs(o.form.scale));
  p.bias = o.form.bias;
  p.targets = o.targets;
  p.first_listed = static_cast<int>(FirstListedTile(p.vocab_tiles));
  return p;
}

void Set(const AllPanels& panels, LogitKernelParams& p) {
  if (panels.order != nullptr) p.positions = {*panels.order, panels.claimed_positions};
}

void Set(const MarkedPanels& panels, LogitKernelParams& p) { p.marked_panels = panels.marks; }

void Set(const RowReferences& references, const TilePartials& partials, LogitKernelParams& p) {
  p.reference = references.reference;
  p.threshold = references.threshold;
  p.partials = partials;
}

void Set(const StatisticsPass& pass, LogitKernelParams& p) {
  Set(pass.references, pass.partials, p);
  std::visit([&p](const auto& panels) { Set(panels, p); }, pass.panels);
}

// The kernel reads thresholds together with references, so `threshold` must point to something; this pass
// finds no maximum.
void Set(const CompleteSums& sums, const int32_t* listed_anew, LogitKernelParams& p) {
  p.reference = p.threshold = sums.reference;
  p.partials.target = sums.target;
  p.lists = sums.lists;
  p.listed_anew = listed_anew;
}

template <Output kOutput>
cudaError_t LaunchTyped(const LogitOperands& o, const LogitKernelParams& p, const Maps& maps, int clusters,
                        cudaStream_t stream) {
  const bool general = o.form.general;
  if (o.dtype == DType::kBFloat16)
    return LaunchForm<__nv_bfloat16, kOutput>(maps, p, general, clusters, stream);
  if constexpr (kOutput != Output::kExponentials && kOutput != Output::kRecoverable) {
    if (o.dtype == DType::kFloat16) return LaunchForm<__half, kOutput>(maps, p, general, clusters, stream);
  }
  return cudaErrorInvalidValue;
}

template <Output kOutput>
cudaError_t LaunchUnstored(const LogitOperands& o, const LogitKernelParams& p, int clusters,
                           cudaStream_t stream) {
  Maps maps = {};
  if (o.rows == 0) return cudaSuccess;
  if (const cudaError_t error = MakeMaps(o, maps); error != cudaSuccess) return error;
  return LaunchTyped<kOutput>(o, p, maps, clusters, stream);
}

// `out`: [rows, padded_classes] of the operands' dtype.
template <Output kOutput>
cudaError_t LaunchStored(const LogitOperands& o, const LogitKernelParams& p, void* out, int clusters,
                         cudaStream_t stream) {
  Maps maps = {};
  if (o.rows == 0) return cudaSuccess;
  if (const cudaError_t error = MakeMaps(o, maps); error != cudaSuccess) return error;
  const BoxedMatrix stored = {out, o.dtype, o.rows, o.padded_classes, kProductRows};
  if (const cudaError_t error = MakeTensorMap(stored, maps.stored); error != cudaSuccess) return error;
  return LaunchTyped<kOutput>(o, p, maps, clusters, stream);
}

}  // namespace

int LogitPassClusters() {
  // The kernel that needs the most shared memory. A multiprocessor holds one block of any of the kernels.
  using Largest = Kernel<__nv_bfloat16, Form::kPlain, Output::kExponentials>;
  if (Largest::AllowSharedBytes() != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kClusterBlocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = Largest::kSharedBytes;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, Largest::kFunction, &config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return clusters;
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const StatisticsPass& pass, int clusters,
                            cudaStream_t stream) {
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass, p);
  return LaunchUnstored<Output::kStatistics>(operands, p, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const ExponentialsPass& pass, int clusters,
                            cudaStream_t stream) {
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass.statistics, p);
  return LaunchStored<Output::kExponentials>(operands, p, pass.exponentials, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const RecoverablePass& pass, int clusters,
                            cudaStream_t stream) {
  if (operands.form.softcap == 0.0f) {  // the slope is 1, so all exponentials are recoverable
    return LaunchLogitPass(operands, ExponentialsPass{pass.statistics, pass.exponentials}, clusters, stream);
  }
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass.statistics, p);
  p.coef_entropy = pass.coef_entropy;
  return LaunchStored<Output::kRecoverable>(operands, p, pass.exponentials, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const ListingPass& pass, int clusters,
                            cudaStream_t stream) {
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass.references, pass.partials, p);
  Set(pass.panels, p);
  p.lists = pass.lists;
  return LaunchUnstored<Output::kCandidates>(operands, p, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const SecondListingPass& pass, int clusters,
                            cudaStream_t stream) {
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass.sums, pass.anew, p);
  return LaunchUnstored<Output::kCandidates>(operands, p, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const LastListingPass& pass, int clusters,
                            cudaStream_t stream) {
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass.sums, pass.panels.marks, p);
  Set(pass.panels, p);
  return LaunchUnstored<Output::kCandidates>(operands, p, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const GradientPass& pass, int clusters,
                            cudaStream_t stream) {
  LogitKernelParams p = MakeKernelParams(operands);
  p.rules = pass.rules;
  return LaunchStored<Output::kGradient>(operands, p, pass.gradient, clusters, stream);
}

cudaError_t LaunchLogitPass(const LogitOperands& operands, const SoftmaxPass& pass, int clusters,
                            cudaStream_t stream) {
  if (!operands.form.general) return cudaErrorInvalidValue;
  LogitKernelParams p = MakeKernelParams(operands);
  Set(pass.panels, p);
  p.f = kLog2E / pass.temperature;
  p.dots = pass.dots;
  p.dots_ld = static_cast<int>(operands.padded_classes);
  p.softmax_parts = pass.parts;
  return LaunchUnstored<Output::kSoftmax>(operands, p, clusters, stream);
}

}  // namespace lossd::kernels::cuda::hopper

LOSSD_KERNEL_FILE(LogitPass)
