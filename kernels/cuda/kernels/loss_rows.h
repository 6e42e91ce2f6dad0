// SPDX-License-Identifier: Apache-2.0
// The rows of a chunk as kernels see them:
// - LossTerms: the loss that all rows share,
// - RowInputs: the inputs of each row, and RowResults: its results,
// - LogitMatrix: the logits of the rows,
// - intermediate values of a row (RunningRow, SelectedRow and others), which kernels keep until the row's
//   loss and gradient are complete.
//
// A launcher takes the structs that its kernels use.
//
// Words in these structs: z is a logit and s its value before the softcap. The number z f is the logit in
// units of log 2. Gradients are divided by the gradient unit, a power of two that the factors of a chunk have
// in common (ChunkLayout::unit in paths/chunk_plan.h), so that they fit into 16 bits. A padding row or column
// exists only because matrices are rounded up to whole tiles.
//
// Plain data and pure functions; pointers are to device memory that the caller owns. The header needs no
// CUDA, so a head's memory can be planned on any machine.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_LOSS_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_LOSS_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// The loss that all rows of a chunk share; docs/math.md has the formulas.
struct LossTerms {
  int64_t vocab = 0;            // classes on this device
  const float* bias = nullptr;  // [vocab] or null: none
  // [vocab] or null: all 1; the weights of classes on other devices lie before and behind them
  const float* class_weights = nullptr;
  float class_weight_sum = 0.0f;  // sum of all class weights; V without them
  float scale = 1.0f;             // t
  float softcap = 0.0f;           // c; 0: none
  float smoothing = 0.0f;         // alpha
  float z_loss = 0.0f;            // lambda
  bool want_entropy = false;      // the entropy of some row is a result
  bool any_coef_entropy = false;  // some row has an upstream gradient of its entropy
  // For a head that is split by vocabulary. Kernels count classes from the first class on this device.
  int64_t first_class = 0;       // number of the first class here, in the vocabulary
  int64_t elsewhere = 0;         // classes on other devices
  bool bias_in_targets = false;  // RowInputs::target_dots already include the bias of the target
  bool soft = false;             // rows have soft targets (RowInputs::soft)
  // Replaces the cross-entropy if objective.active(); then smoothing is 0 and class_weights is null.
  Objective objective;
  // Whether kernels need the general form of the formulas (row_loss.cu).
  bool IsGeneral() const {
    return bias != nullptr || class_weights != nullptr || softcap > 0.0f || smoothing > 0.0f ||
           NeedsEntropy() || scale < 0.0f || soft;
  }
  // Whether the entropies of rows have to be computed, as a result or for a gradient.
  bool NeedsEntropy() const { return want_entropy || any_coef_entropy || objective.entropy_bonus != 0.0f; }
  // The same loss, with classes counted from class `first`.
  LossTerms From(int64_t first) const {
    LossTerms terms = *this;
    if (bias != nullptr) terms.bias += first;
    if (class_weights != nullptr) terms.class_weights += first;
    return terms;
  }
};

// With soft targets (LossTerms::soft), some classes are left out of the sums over a row. This value replaces
// their dot products: the bits of a NaN that no computation produces.
inline constexpr uint32_t kMaskedDot = 0xffe1a55du;

// The statistics of the classes that a row's soft targets name, without the target. The members that also
// Stats has (row_loss_math.cuh) have the same meaning here.
struct NamedRow {
  float max;
  float sum;
  float spread;
  int32_t arg;
  float dot_reference;  // the value that `dot` is relative to, in units of log 2
  float dot;            // sum of q (z f - dot_reference), including the target
  int32_t has_target;   // 1: the soft targets name the row's target
  float target_weight;  // q of the target
};

// Soft targets of rows (kernels/soft_targets.h). A row names each class once.
struct SoftRowInputs {
  int count = 0;                     // K
  const int32_t* classes = nullptr;  // [rows, count]: number in the vocabulary; -1: none
  const float* weights = nullptr;    // [rows, count]: q
  // [rows, count]: z of the classes on this device, written by LaunchTakeTargets; 0 for other classes
  float* logits = nullptr;
  const float* total = nullptr;     // [rows]: s + r
  const float* rest = nullptr;      // [rows]: r
  const NamedRow* named = nullptr;  // [rows], written by LaunchNameRows

  SoftRowInputs From(int64_t begin) const {
    if (count == 0) return {};
    return {count,
            classes + begin * count,
            weights + begin * count,
            logits + begin * count,
            total + begin,
            rest + begin,
            named + begin};
  }
};

// The inputs of each row, [rows] each.
struct RowInputs {
  int64_t rows = 0;
  int64_t padded_rows = 0;               // the number of rows in matrices of these rows; at least `rows`
  const int32_t* targets = nullptr;      // classes in [0, vocab); -1: the target is on another device
  const int32_t* all_targets = nullptr;  // the targets on all devices; null: all targets are on this device
  // The dot product W x of the target, in fp32; null: kernels take it from the logits.
  const float* target_dots = nullptr;
  const float* weights = nullptr;    // row weight
  const float* coef_loss = nullptr;  // dL/d(loss) with row weight and scale, divided by the gradient unit
  const float* coef_lse = nullptr;   // dL/dlse divided by the gradient unit
  // dL/dentropy divided by the gradient unit, with the objective's entropy bonus.
  const float* coef_entropy = nullptr;
  // Inputs of the objective; null if there is none.
  const float* advantages = nullptr;
  const float* old_logprobs = nullptr;
  const float* ref_logprobs = nullptr;
  SoftRowInputs soft;  // if LossTerms::soft

  // The rows [begin, begin + padded_count) of these; rows from index `rows` on are padding.
  RowInputs Block(int64_t begin, int64_t padded_count) const {
    return {.rows = std::clamp<int64_t>(rows - begin, 0, padded_count),
            .padded_rows = padded_count,
            .targets = targets + begin,
            .all_targets = all_targets == nullptr ? nullptr : all_targets + begin,
            .target_dots = target_dots == nullptr ? nullptr : target_dots + begin,
            .weights = weights + begin,
            .coef_loss = coef_loss + begin,
            .coef_lse = coef_lse + begin,
            .coef_entropy = coef_entropy + begin,
            .advantages = advantages == nullptr ? nullptr : advantages + begin,
            .old_logprobs = old_logprobs == nullptr ? nullptr : old_logprobs + begin,
            .ref_logprobs = ref_logprobs == nullptr ? nullptr : ref_logprobs + begin,
            .soft = soft.From(begin)};
  }
};

// The results of each row, [rows] each; kernels/backend.h (RowOutputs) defines them.
struct RowResults {
  float* loss = nullptr;
  float* z_loss_part = nullptr;
  float* lse = nullptr;
  float* entropy = nullptr;
  float* target_logprob = nullptr;
  int32_t* argmax = nullptr;

  RowResults From(int64_t begin) const {
    return {loss + begin,    z_loss_part + begin,    lse + begin,
            entropy + begin, target_logprob + begin, argmax + begin};
  }
};

// A matrix [padded_rows, ld] with the dot products of rows and classes, or with values that have replaced
// them (logits, exponentials, gradients). The columns from `classes` on are padding.
struct LogitMatrix {
  void* data = nullptr;
  DType dtype = DType::kBFloat16;
  int64_t ld = 0;  // a multiple of 8
  int64_t classes = 0;
};

// A part of a row's softmax at a temperature T, for some of the classes. `top`: the largest logit z of these
// classes, -infinity if there is none. The other member: the sum of exp((z - top) / T) over these classes.
struct SoftmaxPart {
  float top;
  float sum;
};

// The matrix of `dtype` whose rows begin where the rows of the fp32 logits begin.
inline LogitMatrix InPlaceOf(const LogitMatrix& logits, DType dtype) {
  return {logits.data, dtype, logits.ld * static_cast<int64_t>(sizeof(float) / SizeOf(dtype)),
          logits.classes};
}

// The rule by which the gradient of a row is computed from its logits: dL/dz, divided by the gradient unit,
// as factors of 2^(z f - reference). row_loss.cu has the formulas.
struct GradientRule {
  float softmax;
  float entropy;  // c_H / S
  float uniform;  // c alpha / V
  float reference;
  float log2_sum;
  float row_entropy;
  float target;        // dL/ds of the target itself, without the uniform part
  float target_slope;  // dz/ds of the target, a factor of `target` and of the uniform part
  bool valid;          // false: the loss is not finite, and the gradient is zero
};

// Which values of a row must be finite. If one of these values is not finite, the row's slice fails
// (LaunchGuard in rows.h).
enum class RowCheck : int32_t {
  kNothing,         // nothing: the row is absent (kernels/backend.h)
  kLoss,            // the row's results
  kHiddenGradient,  // also dx, because it is wanted or enters the gradients of a norm
};

// ---- statistics of a row over some of its classes, until other classes are added ----

// The statistics of a row over the blocks of classes that have been computed, without the target. The members
// that also Stats has (row_loss_math.cuh) have the same meaning here.
struct RunningRow {
  float max;
  float sum;
  float spread;
  float weighted;
  int32_t arg;
  float stored_target;  // the target's logit as computed with the other logits
};

// The statistics of a row over the classes of one device, without the target. The members that also Stats has
// (row_loss_math.cuh) have the same meaning here, except that exponents are relative to `reference`, and
// `arg` is the number of a class in the whole vocabulary.
struct RowRecord {
  float reference;  // in units of log 2
  float max;
  float sum;
  float spread;
  float weighted;
  int32_t arg;         // number in the vocabulary; INT32_MAX: not known
  float target;        // the target's logit as computed with the other logits
  int32_t has_target;  // 0: the target is on another device, and `target` has no meaning
};
static_assert(sizeof(RowRecord) == 32);

// ---- filtered gradients (filtered/filtered.h) ----

// The most candidates of one row: 1 / epsilon for the default epsilon.
inline constexpr int kMaxRowCandidates = 4096;

// The most threads of a block whose threads hold up to four 16-byte vectors each.
inline constexpr int kMostFilterThreads = 512;
// Whether rows of `ld` elements are short enough for LaunchFilterRows.
constexpr bool CanFilterRows(int64_t ld, DType dtype) {
  return ld * static_cast<int64_t>(SizeOf(dtype)) / 16 <= 4 * kMostFilterThreads;
}

// A row and its candidates: the classes whose probability may reach epsilon, without the target. The sums are
// over all classes but the target. Their units, and M to which they are relative, are those of row_loss.cu.
struct SelectedRow {
  int32_t begin;  // index of the row's first candidate in the pool
  int32_t count;
  int32_t finite;  // whether lse and loss are finite
  float max;       // of z, including z of the target: M = max f
  float sum;       // of 2^d
  float spread;    // of 2^d d
  float weighted;  // of u (z - z_y)
  float total;     // sum including the target
  float target_dot;
  float listed_sum;  // of 2^d over the candidates
  float listed_spread;
};

// The kept elements of filtered gradients are sorted by class. A run is the elements of one class; short and
// long runs are processed in different ways (filtered/filtered_weight.cu). next_item: the first piece of
// work, a short run and a tile of its columns, that no warp has begun.
struct RunCounters {
  int32_t short_runs = 0;
  int32_t long_runs = 0;
  unsigned long long next_item = 0;
};

// ---- sampled gradients (sampled.h) ----
//
// Sampling takes a few classes of each row, most of them by chance: the smaller the class's gradient is
// compared with a threshold, the less often. The list of a chunk has an entry for each class that a row has
// taken. If the entries do not fit into the list, the chunk uses a larger threshold.

// The most classes that a row takes, including the target.
inline constexpr int kMaxRowSamples = 4096;
// Each row needs room for this many entries in addition to the sum of the sizes of its classes.
inline constexpr int kSpareEntries = 3;
// The most classes of a head with sampled gradients: more do not fit into the shared memory of a block.
inline constexpr int64_t kMostSampledClasses = int64_t{1} << 20;
// The number of levels of a chunk's threshold. The threshold is tau at level 0 and tau 2^i at level i; from
// level 1 on it is at least 2^(i - 24). At the last level almost only targets are taken.
inline constexpr int kSampleLevels = 32;

// An entry of the list: a class that a row has taken, and its value.
struct SampleEntry {
  int32_t column;
  float value;  // dL/ds divided by (scale * gradient unit)
};

// A row's part of the list of entries.
struct SampledRow {
  int32_t begin;  // index of the row's first entry in the list; -1: the row has no gradient
  int32_t count;
};

// Counters that the rows of a chunk, or of a block of its rows, share. Zero on entry; if the chunk has
// several blocks of rows, `highest` is zero only before the first block.
struct SampleCounters {
  int32_t used;   // entries of the list
  int32_t level;  // level of the threshold
  // Upper bounds of the number of entries at each level: `totals` of all rows together, and `most` of the row
  // with the most entries. At first only the entries of level 0 are counted.
  unsigned long long totals[kSampleLevels];
  int32_t most[kSampleLevels];
  int32_t highest;  // highest level of the rows that have been sampled so far
};

// Hot classes are the classes that the rows of earlier chunks have taken most often. Their part of the
// gradient is not sampled: it is a dense matrix with a column for each of them. If fewer than kHotClasses
// classes are hot, the other columns are 0.
inline constexpr int kHotClasses = 2048;
inline constexpr int kHotGroup = 32;  // classes in a word of `bits`
inline constexpr int kHotBins = 256;  // bins of the histogram of popularity

// Which classes are hot, and the counts from which the hot classes are chosen. If all memory is zero, no
// class is hot, and nothing has been counted.
struct HotClasses {
  int64_t vocab = 0;
  uint32_t* bits = nullptr;  // [groups], one bit for each class
  int32_t* bases = nullptr;  // [groups], number of hot classes before the group: their columns come first
  int32_t* ids = nullptr;    // [kHotClasses], ascending; the first `count` are valid
  int32_t* count = nullptr;  // [1], number of valid ids
  int32_t* taken = nullptr;  // [vocab], how often each class was taken since the last choice, in 1/16
  // [vocab], how often a class was taken, with a weight that fades with each choice
  float* popularity = nullptr;
  int32_t* histogram = nullptr;  // [kHotBins], 0 between launches

  int64_t groups() const { return (vocab + kHotGroup - 1) / kHotGroup; }
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_LOSS_ROWS_H_
