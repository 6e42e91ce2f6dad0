// SPDX-License-Identifier: Apache-2.0
// The plan of a chunk (PlanChunk), the layout of its rows (LayOutChunk), and the copy of its results to the
// slices (UnpackResults). See chunk_plan.h.
//
// The functions WhyX return "" if the chunk takes the faster way, else the reason why it does not, as a text
// for people. "Raw" rows are all rows of a chunk; "compact" rows are the rows with a target, in the same
// order, which are the rows on the device.
#include "kernels/cuda/paths/chunk_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/kernels/hopper/plan.h"
#include "kernels/cuda/paths/path_memory.h"
#include "kernels/decision.h"

namespace lossd::kernels::cuda {
namespace {

absl::string_view WhyChunkIsExact(const LossOptions& options, const ChunkFacts& chunk,
                                  const PlanLimits& limits) {
  const absl::string_view reason = WhyExact(options, chunk.terms.any_coef_entropy);
  if (!reason.empty()) return reason;
  if (!chunk.wants_gradient) return "no gradient is wanted";
  if (chunk.distilled && limits.logits == Logits::kRecomputed)
    return "logits are recomputed, and compared with a teacher's";
  if (chunk.terms.vocab + chunk.terms.elsewhere == 1 && options.label_smoothing > 0.0f)
    return "one class has no gradient";
  // If the head is split or rows have soft targets, filtered elements are listed by the kernels that list
  // sampled elements.
  return options.gradients == Gradients::kFiltered && !limits.split && !options.has_soft_targets()
             ? WhyNotFilteredOnDevice(limits.filter, limits.device)
             : WhyNotSampledOnDevice(limits.filter, limits.device);
}

absl::string_view WhyChunkIsNotFused(const ChunkFacts& chunk, bool filtered, const PlanLimits& limits) {
  const bool stored = limits.logits == Logits::kStored;
  if (chunk.distilled) return "the logits are compared with a teacher's";
  if (chunk.terms.soft) return "the classes that rows name are taken out of the logits";
  if (filtered && (stored || limits.split)) return "filtered gradients are selected from the logits";
  // A fused loss stores exponentials. The most probable classes can be selected from them only if their order
  // is the order of the logits.
  if (chunk.selects_top && (!stored || limits.split || chunk.terms.softcap != 0.0f)) {
    return "the most probable classes are selected from the logits";
  }
  if (limits.fused_loss == FusedLoss::kNever) return "switched off";
  const bool exponentials = stored && (chunk.wants_gradient || chunk.selects_top);
  const absl::string_view reason =
      hopper::WhyNotFused(chunk.terms, limits.filter.dtype, exponentials, limits.device.fused_clusters);
  if (!reason.empty() || limits.fused_loss == FusedLoss::kWherePossible) return reason;
  return hopper::WhyNotFaster(chunk.padded_rows, limits.filter.vocab);
}

absl::string_view WhyLogitsAreReadTwice(const LossOptions& options, const ChunkFacts& chunk,
                                        const PlanLimits& limits) {
  if (!chunk.distilled) return "the rows have no teacher";
  const Distillation& distillation = options.distillation;
  if (distillation.divergence != Divergence::kForwardKl) return "gradients need the divergence of the row";
  if (distillation.target_weight != 0.0f || chunk.terms.soft) return "the loss with targets counts";
  if (limits.logits != Logits::kStored) return "logits are recomputed";
  if (limits.split) return "other devices have classes of the row";
  // The lists of top classes take the memory that the softmaxes would need.
  if (chunk.selects_top) return "the most probable classes are selected from the logits";
  if (limits.fused_loss == FusedLoss::kNever) return "switched off";
  // This pass stores no exponentials (the `false` below).
  const absl::string_view reason =
      hopper::WhyNotFused(chunk.terms, limits.filter.dtype, false, limits.device.fused_clusters);
  if (!reason.empty() || limits.fused_loss == FusedLoss::kWherePossible) return reason;
  return hopper::WhyNotFaster(chunk.padded_rows, limits.filter.vocab);
}

absl::string_view WhyLibraryGemms(const ChunkFacts& chunk, const PlanLimits& limits) {
  if (limits.logits == Logits::kRecomputed) return "block by block";
  if (!chunk.wants_gradient) return "no gradient is wanted";
  if (limits.fused_loss == FusedLoss::kNever) return "switched off";
  const absl::string_view reason = hopper::WhyNoGradientGemms(limits.filter.dtype, limits.device);
  if (!reason.empty() || limits.fused_loss == FusedLoss::kWherePossible) return reason;
  return hopper::WhyNoFasterGradientGemms(chunk.rows);
}

// How the device will decide, as a text for people; "" if nothing is left to decide.
absl::string_view WhatDecides(const ChunkPlan& plan) {
  switch (plan.gradients) {
    case Gradients::kExact:
      break;
    case Gradients::kFiltered:
      return "exact if there are too many candidates";
    case Gradients::kSampled:
      return "";
    case Gradients::kAuto:
      return "sampled or exact, by the predicted error";
  }
  return "";
}

}  // namespace

ChunkPlan PlanChunk(const LossOptions& options, const ChunkFacts& chunk, const PlanLimits& limits) {
  ChunkPlan plan;
  plan.distilled = chunk.distilled;
  plan.why_exact = WhyChunkIsExact(options, chunk, limits);
  plan.gradients = GradientsOf(options, plan.why_exact);
  plan.filters_elements = (limits.split || options.has_soft_targets()) && plan.filtered();
  // With kAuto the gradients may come from the matrix of ds, which must then have the uniform part. With a
  // softcap the uniform part depends on the logits, so it has no closed form.
  const bool apart = plan.gradients == Gradients::kSampled ||
                     (plan.filters_elements && limits.logits == Logits::kRecomputed);
  plan.uniform_apart = apart && options.label_smoothing > 0.0f && options.softcap == 0.0f && !chunk.distilled;
  plan.why_not_fused = WhyChunkIsNotFused(chunk, plan.filtered(), limits);
  plan.why_logits_twice = WhyLogitsAreReadTwice(options, chunk, limits);
  plan.why_library_gemms = WhyLibraryGemms(chunk, limits);
  return plan;
}

std::vector<Choice> Describe(const ChunkPlan& plan) {
  const std::string product = plan.own_gemms() ? "own product" : "library product";
  const std::string why_product(plan.why_library_gemms);
  std::vector<Choice> choices = {
      GradientsChoice(plan.gradients, plan.exact() ? plan.why_exact : WhatDecides(plan)),
      {.what = "loss",
       .choice = plan.fused() ? "in the logits product" : "after the logits product",
       .reason = std::string(plan.why_not_fused)},
      {.what = "hidden gradient", .choice = product, .reason = why_product},
      {.what = "weight gradient", .choice = product, .reason = why_product}};
  if (plan.distilled) {
    choices.push_back({.what = "logits of student and teacher",
                       .choice = plan.why_logits_twice.empty() ? "read once" : "read twice",
                       .reason = std::string(plan.why_logits_twice)});
  }
  const auto add_norm = [&choices](absl::string_view what, const NormPlan& norm) {
    choices.push_back({.what = std::string(what),
                       .choice = std::string(Name(norm.rows)),
                       .reason = std::string(norm.reason)});
  };
  if (plan.norm.has_value()) add_norm("norm", *plan.norm);
  if (plan.norm_gradient.has_value()) add_norm("norm gradient", *plan.norm_gradient);
  return choices;
}

namespace {

// fp16 represents 2^-24 ... 2^16. If the gradient unit is smaller than the largest factor by this ratio,
// gradients lie at the upper end of that range, with some room for the z-loss and entropy terms.
constexpr double kHalfHeadroom = 8192.0;

float ValueOr(const float* values, int64_t row, float missing) {
  return values != nullptr ? values[row] : missing;
}

// The factors of a row's gradient, in double, before they are divided by the gradient unit.
struct RowFactors {
  double loss, lse, entropy;
};

RowFactors FactorsOf(const Objective& objective, const Slice& slice, int64_t row) {
  if (IsAbsent(slice, row)) return {0.0, 0.0, 0.0};
  return {GradLossOf(slice, row), static_cast<double>(ValueOr(slice.grad_lse, row, 0.0f)),
          GradEntropyOf(objective, slice, row)};
}

// The part of the largest derivative of a row's loss with respect to a logit that LargestSlope(options)
// leaves out: the part of the row's objective or soft targets. 0 for other rows.
double SlopeOf(const LossOptions& options, const Slice& slice, int64_t row) {
  if (options.objective.active()) return LargestSlope(options.objective, NumbersOf(slice, row));
  if (!options.has_soft_targets()) return 0.0;
  if (options.rest == Rest::kRenormalized) return 1.0;
  double sum = 0.0;
  for (int64_t i = row * slice.target_count; i < (row + 1) * slice.target_count; ++i) {
    sum += static_cast<double>(slice.target_weights[i]);
  }
  return options.rest == Rest::kOneClass ? std::max(sum, 1.0) : sum;
}

// Whether FillRow and CheckOf give the same inputs to all rows of the slice that have a target. Then
// RepeatRow copies the inputs of the first such row.
bool IsUniform(const LossOptions& options, const Slice& slice) {
  return slice.row_weights == nullptr && slice.accumulate == nullptr && slice.grad_loss == nullptr &&
         slice.grad_lse == nullptr && slice.grad_entropy == nullptr && !options.objective.active() &&
         !options.has_soft_targets();
}

// The power of two that brings the largest factor of the chunk to about 1 (for fp16: kHalfHeadroom).
float UnitFor(const LayoutHead& head, const Chunk& chunk) {
  if (chunk.options.is_embedding()) return 1.0f;  // no gradient is stored in 16 bits
  const Objective& objective = chunk.options.objective;
  const double slope = LargestSlope(chunk.options, static_cast<double>(head.largest_class_weight));
  double largest = 0.0;
  for (const Slice& slice : chunk.slices) {
    const bool uniform = IsUniform(chunk.options, slice);
    for (int64_t r = 0; r < slice.rows; ++r) {
      if (slice.targets[r] == kIgnoredTarget) continue;
      const RowFactors f = FactorsOf(objective, slice, r);
      const double row_slope = SlopeOf(chunk.options, slice, r);
      const double size = std::fabs(f.loss) * (slope + row_slope) + std::fabs(f.lse) + std::fabs(f.entropy);
      if (std::isfinite(size)) largest = std::max(largest, size);
      if (uniform) break;
    }
  }
  if (largest == 0.0) return 1.0f;
  if (head.compute_dtype == DType::kFloat16) largest /= kHalfHeadroom;
  // Within these bounds the unit and its inverse are normal numbers of fp32.
  const int exponent = std::clamp(std::ilogb(largest), -120, 120);
  return std::ldexp(1.0f, exponent);
}

// dx must be finite if it is a result, or if it enters the gradients of the norm's parameters.
RowCheck CheckOf(const LayoutHead& head, const Slice& slice, int64_t row, bool accumulate) {
  if (IsAbsent(slice, row)) return RowCheck::kNothing;
  const bool through_norm = accumulate && head.config.norm != Norm::kNone;
  return slice.grad_hidden != nullptr || through_norm ? RowCheck::kHiddenGradient : RowCheck::kLoss;
}

// Adds the slice's rows to `layout`, behind the rows of earlier slices. Fills compact_of_raw,
// gradient_of_raw, raw_of_compact and target. Does not look for absent rows: LayOutChunk counts absent rows,
// and corrects their gradient_of_raw.
SliceLayout PlaceRows(Slice& slice, int32_t first_class, const RowInputBlock& inputs, ChunkLayout& layout) {
  int64_t compact = layout.compact_rows;
  for (int64_t r = 0; r < slice.rows; ++r) {
    const int64_t raw = layout.raw_rows + r;
    const bool has_target = slice.targets[r] != kIgnoredTarget;
    inputs.compact_of_raw[raw] = inputs.gradient_of_raw[raw] =
        has_target ? static_cast<int32_t>(compact) : -1;
    if (!has_target) continue;
    inputs.raw_of_compact[compact] = static_cast<int32_t>(raw);
    inputs.target[compact++] = slice.targets[r] - first_class;
  }
  const SliceLayout place{.slice = &slice,
                          .raw_begin = layout.raw_rows,
                          .compact_begin = layout.compact_rows,
                          .compact_rows = compact - layout.compact_rows};
  layout.raw_rows += slice.rows;
  layout.compact_rows = compact;
  return place;
}

// Fills the inputs of a row that PlaceRows does not fill, except `checks` and `omega`. Returns whether the
// entropy of the row has a gradient. An embedding row has no loss, so only `accumulate` and `coef_loss` are
// filled.
bool FillRow(const LossOptions& options, const Slice& slice, int64_t row, bool accumulate, double inverse,
             const RowInputBlock& inputs, int64_t compact) {
  const RowFactors f = FactorsOf(options.objective, slice, row);
  inputs.accumulate[compact] = accumulate ? 1 : 0;
  inputs.coef_loss[compact] = static_cast<float>(f.loss * inverse);
  if (options.is_embedding()) return false;
  const bool with_gradient =
      !slice.stands_in && !IsAbsent(slice, row) && (accumulate || slice.grad_hidden != nullptr);
  inputs.with_gradient[compact] = with_gradient ? 1 : 0;
  // A factor that is not finite gets a NaN weight: then the row's loss is not finite, and the row fails.
  const bool finite = std::isfinite(f.loss) && std::isfinite(f.lse) && std::isfinite(f.entropy);
  inputs.weight[compact] =
      finite ? ValueOr(slice.row_weights, row, 1.0f) : std::numeric_limits<float>::quiet_NaN();
  inputs.coef_lse[compact] = static_cast<float>(f.lse * inverse);
  const auto coef_entropy = static_cast<float>(f.entropy * inverse);
  inputs.coef_entropy[compact] = coef_entropy;
  if (options.objective.active()) {
    inputs.advantages[compact] = ValueOr(slice.advantages, row, 0.0f);
    inputs.old_logprobs[compact] = ValueOr(slice.old_logprobs, row, 0.0f);
    inputs.ref_logprobs[compact] = ValueOr(slice.ref_logprobs, row, 0.0f);
  }
  return coef_entropy != 0.0f;
}

// Gives rows [first + 1, end) the inputs of row `first` that FillRow and CheckOf determine. Whole arrays are
// filled one after another, which takes a fraction of the time of filling them row by row.
void RepeatRow(bool is_embedding, int64_t first, int64_t end, const RowInputBlock& inputs) {
  const auto repeat = [first, end](auto* values) {
    std::fill(values + first + 1, values + end, values[first]);
  };
  repeat(inputs.accumulate);
  repeat(inputs.coef_loss);
  repeat(inputs.checks);
  if (is_embedding) return;
  repeat(inputs.with_gradient);
  for (float* const values : {inputs.weight, inputs.coef_lse, inputs.coef_entropy}) repeat(values);
}

// Sets the results of an absent row: its loss is 0, and its other results are kept only if its logits are
// finite.
void SettleAbsentRow(int64_t compact, const RowOutputBlock& outputs) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  outputs.loss[compact] = outputs.z_loss[compact] = 0.0f;
  if (std::isfinite(outputs.lse[compact])) return;
  outputs.lse[compact] = outputs.entropy[compact] = outputs.target_logprob[compact] = kNan;
  outputs.argmax[compact] = -1;
}

// Whether results of single rows are wanted.
bool WantsRows(const Slice& slice) {
  const RowOutputs& out = slice.out;
  return out.loss != nullptr || out.lse != nullptr || out.entropy != nullptr ||
         out.target_logprob != nullptr || out.argmax != nullptr || slice.class_count > 0 || slice.top_k > 0;
}

void UnpackRow(const Slice& slice, int64_t row, int64_t compact, const RowOutputBlock& outputs) {
  const RowOutputs& out = slice.out;
  const bool valid = compact >= 0;
  if (out.loss != nullptr) out.loss[row] = valid ? outputs.loss[compact] : 0.0f;
  if (out.lse != nullptr) out.lse[row] = valid ? outputs.lse[compact] : 0.0f;
  if (out.entropy != nullptr) out.entropy[row] = valid ? outputs.entropy[compact] : 0.0f;
  if (out.target_logprob != nullptr) out.target_logprob[row] = valid ? outputs.target_logprob[compact] : 0.0f;
  if (out.argmax != nullptr) out.argmax[row] = valid ? outputs.argmax[compact] : -1;
}

// Adds the divergence and the loss with the target of a row with a teacher to `sums`. The row's
// loss is weight * divergence + target_weight * target loss, each times the row weight. The device returns
// only `loss` and `divergence`, so the loss with the target is computed back from them.
void AddDivergence(const Distillation& distillation, const Slice& slice, int64_t row, double divergence,
                   double loss, LossSums& sums) {
  const double weighted = static_cast<double>(ValueOr(slice.row_weights, row, 1.0f)) * divergence;
  sums.divergence += weighted;
  if (distillation.target_weight == 0.0f) return;
  sums.target_loss += (loss - static_cast<double>(distillation.weight) * weighted) /
                      static_cast<double>(distillation.target_weight);
}

// Adds the results of row `row` of the slice to `sums`.
void AddToSums(const LossOptions& options, const Slice& slice, int64_t row, int64_t compact,
               const ChunkLayout& layout, const RowInputBlock& inputs, const RowOutputBlock& outputs,
               LossSums& sums) {
  const Objective& objective = options.objective;
  if (objective.active() && !IsAbsent(slice, row)) {
    sums.objective.Add(EvaluateObjective(objective, -static_cast<double>(outputs.target_logprob[compact]),
                                         NumbersOf(slice, row)));
  }
  if (layout.planned == Gradients::kFiltered) {
    sums.dropped_mass += static_cast<double>(outputs.dropped_mass[compact]);
  } else if (layout.planned != Gradients::kExact && *outputs.decision == Decision::kAsPlanned) {
    const double unit = static_cast<double>(layout.unit);
    sums.sampling_variance += unit * unit * static_cast<double>(outputs.variance[compact]);
    sums.squared_gradient += unit * unit * static_cast<double>(outputs.square[compact]);
  }
  sums.loss += static_cast<double>(outputs.loss[compact]);
  if (options.distillation.used() && !IsAbsent(slice, row)) {
    AddDivergence(options.distillation, slice, row, static_cast<double>(outputs.divergence[compact]),
                  static_cast<double>(outputs.loss[compact]), sums);
  }
  sums.z_loss += static_cast<double>(outputs.z_loss[compact]);
  if (slice.out.entropy != nullptr && std::isfinite(outputs.entropy[compact])) {
    sums.entropy += static_cast<double>(outputs.entropy[compact]);
  }
  ++sums.valid_rows;
  if (outputs.argmax[compact] == inputs.target[compact]) ++sums.correct_rows;
}

// Writes the device's decision to the chunk. The first of the chunk's choices is the one about its gradients
// (Describe).
void TellDecision(Chunk& chunk, const RowOutputBlock& outputs) {
  const Gradients asked = chunk.options.gradients;
  chunk.gradients = GradientsOf(asked, *outputs.decision);
  chunk.choices.front() = GradientsChoice(asked, *outputs.decision);
  if (chunk.gradients != Gradients::kSampled) return;
  chunk.sample_threshold = *outputs.sample_threshold;
  chunk.choices.push_back(ThresholdChoice(chunk.options.sample_threshold, chunk.sample_threshold));
}

}  // namespace

RowInputBlock RowInputBlock::Carve(Carver& carver, int64_t capacity) {
  RowInputBlock block;
  block.compact_of_raw = carver.TakeRows<int32_t>(capacity);
  block.raw_of_compact = carver.TakeRows<int32_t>(capacity);
  block.gradient_of_raw = carver.TakeRows<int32_t>(capacity);
  block.target = carver.TakeRows<int32_t>(capacity);
  block.accumulate = carver.TakeRows<int32_t>(capacity);
  block.with_gradient = carver.TakeRows<int32_t>(capacity);
  block.checks = carver.TakeRows<RowCheck>(capacity);
  block.weight = carver.TakeRows<float>(capacity);
  block.coef_loss = carver.TakeRows<float>(capacity);
  block.coef_lse = carver.TakeRows<float>(capacity);
  block.coef_entropy = carver.TakeRows<float>(capacity);
  block.advantages = carver.TakeRows<float>(capacity);
  block.old_logprobs = carver.TakeRows<float>(capacity);
  block.ref_logprobs = carver.TakeRows<float>(capacity);
  block.target_total = carver.TakeRows<float>(capacity);
  block.target_rest = carver.TakeRows<float>(capacity);
  block.omega = carver.TakeRows<float>(capacity);
  block.slice_begin = carver.TakeRows<int32_t>(capacity + 1);
  return block;
}

RowOutputBlock RowOutputBlock::Carve(Carver& carver, int64_t capacity) {
  RowOutputBlock block;
  // Their places do not depend on the capacity.
  block.sample_threshold = carver.Take<float>(1);
  block.lost = carver.Take<int32_t>(1);
  block.decision = carver.Take<Decision>(1);
  block.loss = carver.TakeRows<float>(capacity);
  block.z_loss = carver.TakeRows<float>(capacity);
  block.lse = carver.TakeRows<float>(capacity);
  block.entropy = carver.TakeRows<float>(capacity);
  block.target_logprob = carver.TakeRows<float>(capacity);
  block.argmax = carver.TakeRows<int32_t>(capacity);
  block.dropped_mass = carver.TakeRows<float>(capacity);
  block.variance = carver.TakeRows<float>(capacity);
  block.square = carver.TakeRows<float>(capacity);
  block.divergence = carver.TakeRows<float>(capacity);
  block.first_bad = carver.TakeRows<int32_t>(capacity);
  return block;
}

RowClassBlock RowClassBlock::Carve(Carver& carver, int64_t capacity) {
  RowClassBlock block;
  block.classes = carver.Take<int32_t>(capacity * kMostGivenClasses);
  static_assert(kMostSoftTargets <= kMostGivenClasses && kMostSoftTargets <= 2 * kMostTopClasses);
  block.top_logits = carver.Take<float>(capacity * 2 * kMostTopClasses);
  if (block.top_logits != nullptr) {
    block.top_places = reinterpret_cast<int32_t*>(block.top_logits + capacity * kMostTopClasses);
  }
  block.target_logits = carver.Take<float>(capacity * kMostSoftTargets);
  block.named = carver.Take<NamedRow>(capacity);
  block.target_dots = carver.Take<float>(capacity);
  return block;
}

int64_t ClassBlockBytes(int64_t capacity) {
  Carver carver(nullptr);
  RowClassBlock::Carve(carver, capacity);
  return carver.used();
}

int64_t InputBlockBytes(int64_t capacity) {
  Carver carver(nullptr);
  RowInputBlock::Carve(carver, capacity);
  return carver.used();
}

int64_t OutputBlockBytes(int64_t capacity) {
  Carver carver(nullptr);
  RowOutputBlock::Carve(carver, capacity);
  return carver.used();
}

ChunkLayout LayOutChunk(const LayoutHead& head, const Chunk& chunk, const RowInputBlock& inputs) {
  ChunkLayout layout;
  layout.unit = UnitFor(head, chunk);
  const double inverse = 1.0 / static_cast<double>(layout.unit);
  const bool samples = MaySample(chunk.options.gradients);
  for (Slice& slice : chunk.slices) {
    SliceLayout place = PlaceRows(slice, static_cast<int32_t>(head.first_class), inputs, layout);
    const bool uniform = IsUniform(chunk.options, slice);
    const int64_t first = place.compact_begin;
    const int64_t end = uniform ? std::min(first + 1, layout.compact_rows) : layout.compact_rows;
    for (int64_t compact = first; compact < end; ++compact) {
      const int64_t raw = inputs.raw_of_compact[compact], r = raw - place.raw_begin;
      const bool absent = IsAbsent(slice, r);
      const bool accumulate =
          chunk.accumulate_gradients && !absent && (slice.accumulate == nullptr || slice.accumulate[r] != 0);
      if (absent) {
        ++place.absent_rows;
        inputs.gradient_of_raw[raw] = -1;
      }
      inputs.checks[compact] = CheckOf(head, slice, r, accumulate);
      layout.any_coef_entropy |= FillRow(chunk.options, slice, r, accumulate, inverse, inputs, compact);
      layout.accumulate |= accumulate;
      // An absent row has a gradient of 0, so it need not be zeroed before the product for dW.
      layout.accumulate_all &= accumulate || absent;
    }
    if (uniform && first < end) RepeatRow(chunk.options.is_embedding(), first, layout.compact_rows, inputs);
    for (int64_t compact = first; samples && compact < layout.compact_rows; ++compact) {
      const int64_t row = slice.first_row + inputs.raw_of_compact[compact] - place.raw_begin;
      inputs.omega[compact] =
          SampleOf(slice.sample_seed, static_cast<uint64_t>(row), static_cast<uint64_t>(head.first_class));
    }
    layout.absent_rows += place.absent_rows;
    if (place.compact_rows > 0) {
      place.device_index = layout.device_slices;
      inputs.slice_begin[layout.device_slices++] = static_cast<int32_t>(place.compact_begin);
      layout.want_hidden_gradient |= slice.grad_hidden != nullptr;
      layout.want_entropy |= slice.out.entropy != nullptr;
      layout.class_count = std::max(layout.class_count, slice.class_count);
      layout.top_k = std::max(layout.top_k, slice.top_k);
      layout.target_count = std::max(layout.target_count, slice.target_count);
    }
    layout.slices.push_back(place);
  }
  inputs.slice_begin[layout.device_slices] = static_cast<int32_t>(layout.compact_rows);
  layout.padded_rows = PadRows(layout.compact_rows);
  return layout;
}

// If a slice wants fewer classes than there is room for, the remaining places of its rows get class 0.
void PlaceClasses(const ChunkLayout& layout, const RowInputBlock& inputs, const RowClassBlock& classes) {
  if (layout.class_count == 0) return;
  for (const SliceLayout& place : layout.slices) {
    const Slice& slice = *place.slice;
    for (int64_t r = 0; r < slice.rows; ++r) {
      const int64_t compact = inputs.compact_of_raw[place.raw_begin + r];
      if (compact < 0) continue;
      int32_t* const to = classes.classes + compact * layout.class_count;
      std::fill_n(to, layout.class_count, 0);
      if (slice.class_count > 0) std::copy_n(ClassesOf(slice, r), slice.class_count, to);
    }
  }
}

// Each class of a row is named once; the remaining places get kNoClass.
void PlaceSoftTargets(const ChunkLayout& layout, Rest rest, const RowInputBlock& inputs,
                      const RowClassBlock& classes) {
  if (layout.target_count == 0) return;
  SoftRow soft;
  for (const SliceLayout& place : layout.slices) {
    const Slice& slice = *place.slice;
    for (int64_t r = 0; r < slice.rows; ++r) {
      const int64_t compact = inputs.compact_of_raw[place.raw_begin + r];
      if (compact < 0) continue;
      SoftRowOf(rest, slice, r, soft);
      int32_t* const to = classes.target_classes() + compact * layout.target_count;
      float* const weights = classes.target_weights() + compact * layout.target_count;
      std::fill_n(to, layout.target_count, kNoClass);
      std::fill_n(weights, layout.target_count, 0.0f);
      for (size_t i = 0; i < soft.entries.size(); ++i) {
        to[i] = soft.entries[i].place;
        weights[i] = soft.entries[i].weight;
      }
      inputs.target_total[compact] = static_cast<float>(soft.total);
      inputs.target_rest[compact] = static_cast<float>(soft.rest);
    }
  }
}

namespace {

// A row of a chunk that is to be sorted by its class. `place` is the class, counted from the first class
// here.
struct ClassRow {
  uint32_t place;
  int32_t row;
};

// Sorts rows by class; rows of the same class stay in their order. This is a radix sort: for some thousand
// rows it takes a tenth of the time of a comparison sort. The time matters because it is spent on the thread
// that drives the device.
void SortByPlace(std::vector<ClassRow>& rows, int64_t classes) {
  constexpr int kDigitBits = 11;
  constexpr uint32_t kDigits = 1u << kDigitBits;
  std::vector<ClassRow> sorted(rows.size());
  std::vector<int32_t> begin(kDigits);
  for (int shift = 0; ((classes - 1) >> shift) > 0; shift += kDigitBits) {
    const auto digit = [shift](const ClassRow& row) { return (row.place >> shift) & (kDigits - 1); };
    std::fill(begin.begin(), begin.end(), 0);
    for (const ClassRow& row : rows) ++begin[digit(row)];
    std::exclusive_scan(begin.begin(), begin.end(), begin.begin(), 0);
    for (const ClassRow& row : rows) sorted[static_cast<size_t>(begin[digit(row)]++)] = row;
    rows.swap(sorted);
  }
}

}  // namespace

ClassRuns OrderByClass(const ChunkLayout& layout, int64_t classes, const RowInputBlock& inputs) {
  std::vector<ClassRow> rows;
  rows.reserve(static_cast<size_t>(layout.compact_rows));
  for (int64_t row = 0; row < layout.compact_rows; ++row) {
    const int32_t place = inputs.target[row];
    if (inputs.accumulate[row] == 0 || place < 0 || place >= classes) continue;
    rows.push_back({static_cast<uint32_t>(place), static_cast<int32_t>(row)});
  }
  SortByPlace(rows, classes);
  ClassRuns runs = {.rows = static_cast<int64_t>(rows.size())};
  for (const bool is_long : {true, false}) {
    for (size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
      while (end < rows.size() && rows[end].place == rows[begin].place) ++end;
      const auto length = static_cast<int32_t>(end - begin);
      if ((length >= kLongClassRun) != is_long) continue;
      inputs.run_begin()[runs.runs] = static_cast<int32_t>(begin);
      inputs.run_rows()[runs.runs++] = length;
    }
    if (is_long) runs.long_runs = runs.runs;
  }
  for (size_t i = 0; i < rows.size(); ++i) inputs.row_order()[i] = rows[i].row;
  return runs;
}

namespace {

// logit - lse, but at most 0 even if rounding makes the difference positive. NaN if `lse` is NaN.
float LogProbability(float logit, double lse) {
  const double value = double{logit} - lse;
  return static_cast<float>(value > 0.0 ? 0.0 : value);
}

// Copies the results for single classes of row r of a slice. compact < 0: the row has no target.
void UnpackClasses(const Slice& slice, int64_t r, int64_t compact, const ChunkLayout& layout,
                   const RowOutputBlock& outputs, const RowClassBlock& classes) {
  const bool ignored = compact < 0;
  const double lse = ignored ? 0.0 : double{outputs.lse[compact]};
  for (int32_t i = 0; i < slice.class_count; ++i) {
    slice.out.class_logprobs[r * slice.class_count + i] =
        ignored ? 0.0f : LogProbability(classes.class_logits()[compact * layout.class_count + i], lse);
  }
  for (int32_t i = 0; i < slice.top_k; ++i) {
    const int64_t from = compact * layout.top_k + i, to = r * slice.top_k + i;
    slice.out.top_logprobs[to] = ignored ? 0.0f : LogProbability(classes.top_logits[from], lse);
    slice.out.top_classes[to] = ignored || std::isnan(lse) ? -1 : classes.top_places[from];
  }
}

// The row of the slice that the guard on the device has found, or -1.
int64_t FirstBadRow(const SliceLayout& place, const RowInputBlock& inputs, const RowOutputBlock& outputs) {
  if (place.device_index < 0) return -1;
  const int64_t compact = outputs.first_bad[place.device_index];
  return compact < 0 ? -1 : inputs.raw_of_compact[compact] - place.raw_begin;
}

// Embedding rows have no results. Only chunks that bring gradients have first_bad.
void UnpackEmbedding(Chunk& chunk, const ChunkLayout& layout, const RowInputBlock& inputs,
                     const RowOutputBlock& outputs) {
  for (const SliceLayout& place : layout.slices) {
    Slice& slice = *place.slice;
    slice.sums = LossSums();
    slice.sums.valid_rows = place.compact_rows;
    slice.first_nonfinite_row =
        chunk.options.embedding == Embedding::kGradients ? FirstBadRow(place, inputs, outputs) : -1;
  }
}

}  // namespace

void UnpackResults(Chunk& chunk, const ChunkLayout& layout, const RowInputBlock& inputs,
                   const RowOutputBlock& outputs, const RowClassBlock& classes) {
  if (chunk.options.is_embedding()) return UnpackEmbedding(chunk, layout, inputs, outputs);
  if (layout.planned != Gradients::kExact && layout.compact_rows > 0) {
    TellDecision(chunk, outputs);
  } else if (layout.planned != Gradients::kExact) {
    chunk.choices.front() = GradientsChoice(Gradients::kExact, "no row has a target");
  }
  for (const SliceLayout& place : layout.slices) {
    Slice& slice = *place.slice;
    const int64_t first = place.compact_begin, end = first + place.compact_rows;
    for (int64_t compact = first; place.absent_rows > 0 && compact < end; ++compact) {
      if (inputs.checks[compact] == RowCheck::kNothing) SettleAbsentRow(compact, outputs);
    }
    for (int64_t r = 0; WantsRows(slice) && r < slice.rows; ++r) {
      const int64_t compact = inputs.compact_of_raw[place.raw_begin + r];
      UnpackRow(slice, r, compact, outputs);
      UnpackClasses(slice, r, compact, layout, outputs, classes);
    }
    LossSums sums;
    for (int64_t compact = first; compact < end; ++compact) {
      AddToSums(chunk.options, slice, inputs.raw_of_compact[compact] - place.raw_begin, compact, layout,
                inputs, outputs, sums);
    }
    slice.sums = sums;
    slice.first_nonfinite_row = FirstBadRow(place, inputs, outputs);
  }
}

}  // namespace lossd::kernels::cuda
