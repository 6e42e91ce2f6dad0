// SPDX-License-Identifier: Apache-2.0
// The rows of a chunk as kernels see them: what all rows share (LossTerms), what each row brings (RowInputs),
// what becomes of it (RowResults), the matrix of its logits (LogitMatrix), and what kernels keep of a row
// until its loss and its gradient are complete. A launcher takes the groups that its kernels use.
//
// Plain data and pure functions; pointers are device memory of the caller's. The header needs no CUDA, so
// that a head's memory can be planned anywhere.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_LOSS_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_LOSS_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// The loss that all rows of a chunk share; docs/math.md has the formulas.
struct LossTerms {
  int64_t vocab = 0;                     // classes here: V, but for those elsewhere
  const float* bias = nullptr;           // [vocab] or null: none
  const float* class_weights = nullptr;  // [vocab] or null: all 1; those of classes elsewhere lie around them
  float class_weight_sum = 0.0f;         // sum of all class weights; V without them
  float scale = 1.0f;                    // t
  float softcap = 0.0f;                  // c; 0: none
  float smoothing = 0.0f;                // alpha
  float z_loss = 0.0f;                   // lambda
  bool want_entropy = false;             // the entropy of some row is a result
  bool any_coef_entropy = false;         // some row has an upstream gradient of its entropy
  // Of a head that is split by vocabulary. Kernels count classes from the first that is here.
  int64_t first_class = 0;       // in the vocabulary
  int64_t elsewhere = 0;         // classes on other devices
  bool bias_in_targets = false;  // RowInputs::target_dots have the bias of the target already
  bool soft = false;             // rows have soft targets (RowInputs::soft)
  Objective objective;  // in the place of the cross-entropy; then smoothing is 0 and class_weights null
  // Whether the kernels need the general form of the formulas (row_loss.cu).
  bool IsGeneral() const {
    return bias != nullptr || class_weights != nullptr || softcap > 0.0f || smoothing > 0.0f ||
           NeedsEntropy() || scale < 0.0f || soft;
  }
  // Whether entropies of rows have to be computed, as a result or for a gradient.
  bool NeedsEntropy() const { return want_entropy || any_coef_entropy || objective.entropy_bonus != 0.0f; }
  // The same loss with classes counted from `first`.
  LossTerms From(int64_t first) const {
    LossTerms terms = *this;
    if (bias != nullptr) terms.bias += first;
    if (class_weights != nullptr) terms.class_weights += first;
    return terms;
  }
};

// What takes the place of the dot product of a class that is left out of the sums over a row
// (LossTerms::soft): the bits of a NaN that no computation gives.
inline constexpr uint32_t kMaskedDot = 0xffe1a55du;

// What the named classes of a row with soft targets say, the target left out; as Stats of row_loss_math.cuh.
struct NamedRow {
  float max;
  float sum;
  float spread;
  int32_t arg;
  float dot_reference;  // what the exponents of `dot` are relative to, in units of log 2
  float dot;            // sum of q (z f - dot_reference), the target among them
  int32_t has_target;   // the target is named
  float target_weight;  // q of the target
};

// Soft targets of rows (kernels/soft_targets.h), of which each class is named once.
struct SoftRowInputs {
  int count = 0;                     // K
  const int32_t* classes = nullptr;  // [rows, count]: of the vocabulary; -1: none
  const float* weights = nullptr;    // [rows, count]: q
  float* logits = nullptr;           // [rows, count]: z, once LaunchTakeTargets has read it; else 0
  const float* total = nullptr;      // [rows]: s + r
  const float* rest = nullptr;       // [rows]: r
  const NamedRow* named = nullptr;   // [rows], once LaunchNameRows has written it

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

// What each row brings, [rows] each.
struct RowInputs {
  int64_t rows = 0;
  int64_t padded_rows = 0;               // of the matrices beside them; at least `rows`
  const int32_t* targets = nullptr;      // classes in [0, vocab); -1: elsewhere
  const int32_t* all_targets = nullptr;  // the targets wherever they are; null: they are all here
  const float* target_dots = nullptr;    // W x at the target, in fp32; null: as stored among the logits
  const float* weights = nullptr;        // row weight
  const float* coef_loss = nullptr;      // dL/d(loss) with weight and scale, over the gradient unit
  const float* coef_lse = nullptr;       // dL/dlse over the gradient unit
  const float* coef_entropy = nullptr;   // dL/dentropy over the gradient unit, the objective's bonus included
  // What the objective takes with each row; only if there is one.
  const float* advantages = nullptr;
  const float* old_logprobs = nullptr;
  const float* ref_logprobs = nullptr;
  SoftRowInputs soft;  // with LossTerms::soft

  // The rows [begin, begin + padded_count), of which those below `rows` exist.
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

// What becomes of each row, [rows] each; kernels/backend.h (RowOutputs) says what the numbers mean.
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

// Dot products of rows and classes, or what has taken their place: [padded_rows, ld], of which the columns
// from `classes` on are padding.
struct LogitMatrix {
  void* data = nullptr;
  DType dtype = DType::kBFloat16;
  int64_t ld = 0;  // a multiple of 8
  int64_t classes = 0;
};

// What some classes of a row say of its softmax at a temperature T: their largest logit, -infinity if there
// is none, and the sum of exp((z - top) / T) over them.
struct SoftmaxPart {
  float top;
  float sum;
};

// The matrix of `dtype` whose rows begin where those of fp32 logits do.
inline LogitMatrix InPlaceOf(const LogitMatrix& logits, DType dtype) {
  return {logits.data, dtype, logits.ld * static_cast<int64_t>(sizeof(float) / SizeOf(dtype)),
          logits.classes};
}

// dL/dz of a row over the gradient unit, as factors of 2^(z f - reference); see row_loss.cu.
struct GradientRule {
  float softmax;
  float entropy;  // c_H / S
  float uniform;  // c alpha / V
  float reference;
  float log2_sum;
  float row_entropy;
  float target;        // dL/ds of the target itself, but for the uniform part
  float target_slope;  // dz/ds of the target, a factor of that and of the uniform part
  bool valid;          // false: the loss is not finite and the gradient zero
};

// What has to be finite of a row, or its slice fails (LaunchGuard in rows.h).
enum class RowCheck : int32_t {
  kNothing,         // the row is absent (kernels/backend.h)
  kLoss,            // its results
  kHiddenGradient,  // and dx, because it is wanted or goes through a norm into the norm's gradients
};

// ---- statistics of a row over some of its classes, until the other classes have been added ----

// What the blocks of classes so far say of a row, the target left out; as Stats of row_loss_math.cuh.
struct RunningRow {
  float max;
  float sum;
  float spread;
  float weighted;
  int32_t arg;
  float stored_target;  // the target's logit as it comes with the others
};

// What the classes of one device say of a row, the target left out; as Stats of row_loss_math.cuh, but for
// what exponents are relative to and where classes are counted from.
struct RowRecord {
  float reference;  // in units of log 2
  float max;
  float sum;
  float spread;
  float weighted;
  int32_t arg;         // in the vocabulary; INT32_MAX: not known
  float target;        // the target's logit as it comes with the others
  int32_t has_target;  // 0: it is elsewhere, and `target` says nothing
};
static_assert(sizeof(RowRecord) == 32);

// ---- filtered gradients (filtered/filtered.h) ----

// Most candidates of one row; 1 / epsilon of the default.
inline constexpr int kMaxRowCandidates = 4096;

// Threads of a block that holds four 16-byte vectors a thread, the most.
inline constexpr int kMostFilterThreads = 512;
// Whether rows of `ld` elements are short enough for LaunchFilterRows.
constexpr bool CanFilterRows(int64_t ld, DType dtype) {
  return ld * static_cast<int64_t>(SizeOf(dtype)) / 16 <= 4 * kMostFilterThreads;
}

// A row and its candidates: the classes whose probability may reach epsilon, the target left out. The sums
// are over classes other than the target, in units and relative to M as in row_loss.cu.
struct SelectedRow {
  int32_t begin;  // of its candidates in the pool
  int32_t count;
  int32_t finite;  // whether lse and loss are
  float max;       // of z, the target's included: M = max f
  float sum;       // of 2^d
  float spread;    // of 2^d d
  float weighted;  // of u (z - z_y)
  float total;     // sum with the target
  float target_dot;
  float listed_sum;  // of 2^d over the candidates
  float listed_spread;
};

// Runs of entries of one class, and how many of the short ones have been taken up.
struct RunCounters {
  int32_t short_runs = 0;
  int32_t long_runs = 0;
  unsigned long long next_item = 0;
};

// ---- sampled gradients (sampled.h) ----

// Classes of a row at most, the target included.
inline constexpr int kMaxRowSamples = 4096;
// Entries that a row needs room for beside those it may have.
inline constexpr int kSpareEntries = 3;
// More do not fit the shared memory of a block.
inline constexpr int64_t kMostSampledClasses = int64_t{1} << 20;
// A chunk takes tau, or 2 tau, 4 tau, ..., or what is more, 2^-23, 2^-22, ... At the last level hardly
// anything but targets is taken.
inline constexpr int kSampleLevels = 32;

struct SampleEntry {
  int32_t column;
  float value;  // dL/ds over (scale * gradient unit)
};

struct SampledRow {
  int32_t begin;  // of its entries in the list
  int32_t count;
};

// What the rows of a chunk tell each other; zero on entry.
struct SampleCounters {
  int32_t used;   // entries of the list
  int32_t level;  // of the threshold
  // Entries at each level, or more: of all rows, and of the row that has most. First only those of level 0.
  unsigned long long totals[kSampleLevels];
  int32_t most[kSampleLevels];
  int32_t highest;  // level of the rows that have been sampled so far
};

// Columns of the dense matrix; fewer classes may be hot, and the other columns are 0.
inline constexpr int kHotClasses = 2048;
inline constexpr int kHotGroup = 32;  // classes of a word of `bits`
inline constexpr int kHotBins = 256;  // of a histogram of popularity

// Which classes are hot, and how that is found out. All zero: none is, and nothing is known.
struct HotClasses {
  int64_t vocab = 0;
  uint32_t* bits = nullptr;      // [groups], a bit a class
  int32_t* bases = nullptr;      // [groups], hot classes before the group
  int32_t* ids = nullptr;        // [kHotClasses], ascending, of which `count` are valid
  int32_t* count = nullptr;      // [1], of ids
  int32_t* taken = nullptr;      // [vocab], how often classes were taken, in 1/16, since the last choice
  float* popularity = nullptr;   // [vocab], that of earlier times, fading
  int32_t* histogram = nullptr;  // [kHotBins], 0 between the launches

  int64_t groups() const { return (vocab + kHotGroup - 1) / kHotGroup; }
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_LOSS_ROWS_H_
