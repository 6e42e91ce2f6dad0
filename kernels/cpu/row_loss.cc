// SPDX-License-Identifier: Apache-2.0
// RowLoss (row_loss.h), then RowSampler, then the exchanges between parts of a split head: SolePartExchange,
// ThreadExchange, RankExchange.
//
// In the comments: z are the logits, y is the target, p the softmax, u the class weights, q the weights of
// soft targets, and g is RowRequest::grad_loss. "Here" are the classes of this part. "Named" classes are the
// classes that a row's soft targets name. Exponentials are relative to a reference: exp(z - reference).
#include "kernels/cpu/row_loss.h"

#include <array>
#include <cmath>
#include <limits>
#include <type_traits>

#include "kernels/errors/status_macros.h"

namespace lossd::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool FiniteInFloat(double value) { return std::isfinite(static_cast<float>(value)); }

// The result of an absent row: lse, entropy and others if its logits are finite, otherwise NaN.
RowResult AbsentRow(const RowStatistics& all, RowResult row, double log_total, double nll, double moment) {
  row.finite = true;
  row.lse = double{all.max} + log_total;
  row.entropy = log_total - moment;
  row.target_logprob = -nll;
  if (all.finite && FiniteInFloat(row.lse)) return row;
  row.lse = row.entropy = row.target_logprob = std::numeric_limits<double>::quiet_NaN();
  row.argmax = -1;
  return row;
}

}  // namespace

RowStatistics Merge(absl::Span<const RowStatistics* const> parts) {
  RowStatistics all = *parts.front();
  if (parts.size() == 1) return all;
  for (const RowStatistics* part : parts) {
    if (part->max > all.max) all.max = part->max;
  }
  all.reference = all.max == -kInfinity ? 0.0f : all.max;
  all.argmax = std::numeric_limits<int32_t>::max();
  all.other_exp = all.moment = all.centred = all.weight_sum = 0.0;
  all.tail_exp = all.soft_dot = all.soft_weight = 0.0;
  for (const RowStatistics* part : parts) {
    all.finite = all.finite && part->finite;
    if (part->max == all.max && part->argmax >= 0) all.argmax = std::min(all.argmax, part->argmax);
    if (part->has_target) {
      all.has_target = true;
      all.target_logit = part->target_logit;
    }
    // A part's sums are relative to its own reference r, and become relative to the common reference R. With
    // shift = r - R: exp(z - R) = exp(shift) exp(z - r), and z - R = (z - r) + shift. If all logits of a part
    // are -infinity, its exponentials are 0 relative to any reference.
    const double shift = part->max == -kInfinity ? 0.0 : double{part->reference} - double{all.reference};
    const double factor = std::exp(shift);
    const double target_exp =
        part->has_target ? std::exp(double{part->target_logit} - double{part->reference}) : 0.0;
    all.other_exp += factor * part->other_exp;
    all.moment += factor * (part->moment + shift * (part->other_exp + target_exp));
    all.centred += part->centred + part->weight_sum * shift;
    all.weight_sum += part->weight_sum;
    all.tail_exp += factor * part->tail_exp;
    if (part->soft_weight > 0.0) all.soft_dot += part->soft_dot + part->soft_weight * shift;
    all.soft_weight += part->soft_weight;
  }
  return all;
}

double LogSumExp(const RowStatistics& all) {
  const double target_exp = std::exp(double{all.target_logit} - double{all.reference});
  const double lse = double{all.max} + std::log(target_exp + all.other_exp);
  return all.finite && FiniteInFloat(lse) ? lse : std::numeric_limits<double>::quiet_NaN();
}

GradientSums Add(absl::Span<const GradientSums* const> parts) {
  GradientSums all;
  for (const GradientSums* part : parts) {
    all.dropped_mass += part->dropped_mass;
    all.sampling_variance += part->sampling_variance;
    all.squared_gradient += part->squared_gradient;
  }
  return all;
}

// Sums over the whole row, and the coefficients of dz = p * slope - smoothing * u without the logit scale.
// Only own_factor is for the classes here. All exponents are relative to `max`.
struct RowLoss::Sums {
  float max = 0.0f;
  float target_logit = 0.0f;
  double target_exp = 0.0;  // exp(z_y - max)
  double other_exp = 0.0;   // sum of exp(z_v - max) over v != y
  double total = 0.0;
  double log_total = 0.0;
  double own_factor = 1.0;  // exponential here * own_factor is relative to max
  // g u_y (1 - alpha), or the slope of the objective. With soft targets, it applies to the classes that are
  // not named.
  double hard_slope = 0.0;
  double soft_slope = 0.0;   // everything else that multiplies p
  double smoothing = 0.0;    // g alpha / V
  double named_slope = 0.0;  // replaces hard_slope for the classes that soft targets name
};

RowStatistics RowLoss::Summarise(const RowRequest& request, float* logits) const {
  const int64_t n = context_.classes;
  RowStatistics own;
  own.finite = Transform(logits);
  own.max = loops_.max(logits, n);
  own.reference = own.max == -kInfinity ? 0.0f : own.max;
  const int64_t place = loops_.find(logits, own.max, n);
  if (place >= 0) own.argmax = static_cast<int32_t>(context_.first_class + place);
  const int64_t target = request.target - context_.first_class;
  own.has_target = target >= 0 && target < n;
  if (own.has_target) own.target_logit = logits[target];
  NameClasses(request, logits);
  if (context_.options.label_smoothing > 0.0f) {
    own.centred = loops_.centred_sum(logits, class_weights(), own.reference, n);
    own.weight_sum = context_.own_weight_sum;
  }
  if (request.want_entropy || request.grad_entropy != 0.0f) {
    own.moment = loops_.exp_moment(logits, own.reference, n);
  }
  if (request.targets != nullptr) {
    SummariseTargets(request, logits, own);
  } else {
    own.other_exp = SumExponentials(request, own, logits);
  }
  return own;
}

// Computes the sums for soft targets. The classes that the targets name are added separately, so that the sum
// over the other classes is as precise as for a row with one target. Leaves the logits as they are.
void RowLoss::SummariseTargets(const RowRequest& request, float* logits, RowStatistics& own) const {
  std::array<float, kMostSoftTargets> kept;
  MaskTargets(request, logits, kept.data());
  const double unnamed = SumExponentials(request, own, logits);  // without the target
  own.other_exp = own.tail_exp = unnamed;
  bool target_named = false;
  for (size_t i = 0; i < request.targets->entries.size(); ++i) {
    const auto& [place, weight] = request.targets->entries[i];
    const int64_t here = place - context_.first_class;
    if (!IsHere(here)) continue;
    logits[here] = kept[i];
    const double relative = double{kept[i]} - double{own.reference};
    if (weight > 0.0f) own.soft_dot += double{weight} * relative;
    own.soft_weight += double{weight};
    if (place == request.target) {
      target_named = true;
    } else {
      own.other_exp += std::exp(relative);
    }
  }
  if (own.has_target && !target_named) {
    own.tail_exp += std::exp(double{own.target_logit} - double{own.reference});
  }
}

// Takes the logits of the named classes here out of the row, into `kept`.
void RowLoss::MaskTargets(const RowRequest& request, float* logits, float* kept) const {
  if (request.targets == nullptr) return;
  for (const SoftRow::Entry& entry : request.targets->entries) {
    const int64_t here = entry.place - context_.first_class;
    if (IsHere(here)) *kept = std::exchange(logits[here], -kInfinity);
    ++kept;
  }
}

// Writes the gradient of the named classes here.
void RowLoss::WriteTargets(const RowRequest& request, const RowResult& row, const Sums& sums,
                           const float* kept, float* logits) const {
  if (request.targets == nullptr) return;
  const double softcap = double{context_.options.softcap};
  for (const auto& [place, weight] : request.targets->entries) {
    const int64_t here = place - context_.first_class;
    const double z = double{*kept++};
    if (!IsHere(here)) continue;
    const double p = std::exp(z - double{sums.max}) / sums.total;
    double gradient = (sums.named_slope + sums.soft_slope) * p - request.grad_loss * double{weight};
    if (p > 0.0) gradient -= double{request.grad_entropy} * p * (std::log(p) + row.entropy);
    if (softcap > 0.0) gradient *= (1.0 - z / softcap) * (1.0 + z / softcap);
    logits[here] = static_cast<float>(double{context_.options.logit_scale} * gradient);
  }
}

// Writes the requested single classes while the logits are still in the row.
void RowLoss::NameClasses(const RowRequest& request, const float* logits) const {
  const int64_t n = context_.classes;
  if (request.top_k > 0)
    SelectTop(loops_, logits, n, context_.first_class, {request.top, static_cast<size_t>(request.top_k)});
  for (int32_t i = 0; i < request.class_count; ++i) {
    const int64_t place = request.classes[i] - context_.first_class;
    request.class_logits[i] = place >= 0 && place < n ? logits[place] : 0.0f;
  }
}

RowResult RowLoss::Finish(const RowRequest& request, const RowStatistics& own, const RowStatistics& all,
                          float* logits) const {
  RowResult row;
  row.argmax = all.argmax;
  const int64_t classes = context_.classes;
  const double u_y = ClassWeight(request.target);
  const double alpha = double{context_.options.label_smoothing};
  const double lambda = double{context_.options.z_loss};
  const double share = alpha / static_cast<double>(context_.vocab_size);
  Sums sums = SumsOf(own, all);

  const double nll = (double{all.max} - double{all.target_logit}) + sums.log_total;
  if (request.absent) return AbsentRow(all, row, sums.log_total, nll, all.moment / sums.total);
  const double row_weight = double{request.row_weight};
  row.lse = double{all.max} + sums.log_total;
  row.z_loss = row_weight * lambda * row.lse * row.lse;
  double slope =
      u_y * (1.0 - alpha);  // the derivative of the row's loss, without the z-loss, with respect to nll
  if (const Objective& objective = context_.options.objective; objective.active()) {
    row.objective = EvaluateObjective(objective, nll, request.numbers);
    slope = row.objective.slope;
    row.loss = row_weight * row.objective.loss + row.z_loss;
  } else if (request.targets != nullptr) {
    // -sum q log p - rest * log(tail): log p = z - reference - log_total, and tail = tail_exp / total.
    const SoftRow& targets = *request.targets;
    double loss = (targets.total - targets.rest) * sums.log_total - all.soft_dot;
    slope = targets.total;
    if (targets.rest > 0.0) {
      loss += targets.rest * (sums.log_total - std::log(all.tail_exp));
      slope -= targets.rest * sums.total / all.tail_exp;
    }
    row.loss = row_weight * loss + row.z_loss;
    sums.named_slope = request.grad_loss * targets.total;
  } else if (request.counts_target) {
    row.loss = row_weight * u_y * (1.0 - alpha) * nll + row.z_loss;
  }
  if (request.counts_target && alpha > 0.0) {
    row.loss += row_weight * share * (context_.class_weight_sum * sums.log_total - all.centred);
  }
  row.entropy = sums.log_total - all.moment / sums.total;
  row.target_logprob = -nll;
  if (const float bonus = context_.options.objective.entropy_bonus; bonus != 0.0f) {
    row.loss -= row_weight * double{bonus} * row.entropy;
  }

  sums.smoothing = request.grad_loss * share;
  sums.hard_slope = request.grad_loss * slope;
  sums.soft_slope = request.grad_loss * 2.0 * lambda * row.lse + double{request.grad_lse};
  if (alpha > 0.0) sums.soft_slope += sums.smoothing * context_.class_weight_sum;
  const double scale = double{context_.options.logit_scale};
  const double hard_slope = request.targets != nullptr ? sums.named_slope : sums.hard_slope;
  row.gradient_factor = std::fabs(hard_slope + sums.soft_slope) + std::fabs(double{request.grad_entropy});
  const bool needs_entropy = request.want_entropy || request.grad_entropy != 0.0f;
  row.finite = all.finite && FiniteInFloat(row.lse) && FiniteInFloat(row.loss) &&
               (!request.counts_target || FiniteInFloat(nll)) &&
               (!needs_entropy || FiniteInFloat(row.entropy)) && FiniteInFloat(scale * sums.hard_slope) &&
               FiniteInFloat(scale * sums.named_slope) && FiniteInFloat(scale * sums.soft_slope) &&
               FiniteInFloat(scale * double{request.grad_entropy});
  if (!request.want_gradient || !row.finite) return row;
  // Masked classes pass through the filter and the loops as -infinity. WriteTargets then computes them from
  // `kept`.
  std::array<float, kMostSoftTargets> kept;
  MaskTargets(request, logits, kept.data());
  const bool filtered = context_.options.gradients == Gradients::kFiltered;
  if (filtered) row.gradient.dropped_mass = Drop(request, own, sums, logits);
  if (request.grad_loss == 0.0 && request.grad_lse == 0.0f && request.grad_entropy == 0.0f) {
    std::fill_n(logits, classes, 0.0f);
    return row;
  }
  const double target_gradient = TargetGradient(request, row, sums);
  if (context_.options.gradients == Gradients::kSampled) {
    Sample(request, own, sums, target_gradient, kept.data(), row, logits);
  } else {
    WriteGradient(request, row, sums, sums.smoothing, logits);
    WriteTargets(request, row, sums, kept.data(), logits);
  }
  if (own.has_target) logits[request.target - context_.first_class] = static_cast<float>(target_gradient);
  return row;
}

// Adds the bias and applies the softcap. False if W x before a softcap is not finite, because the softcap
// would make an infinite value finite. An infinite bias is allowed: its logit is then plus or minus the
// softcap.
bool RowLoss::Transform(float* logits) const {
  const LossOptions& options = context_.options;
  const bool capped = options.softcap > 0.0f;
  if (context_.bias == nullptr) {
    return !capped || loops_.softcap(logits, options.softcap, context_.classes);
  }
  const bool finite = !capped || loops_.all_finite(logits, context_.classes);
  loops_.add_scaled(logits, context_.bias, options.logit_scale, context_.classes);
  if (capped) loops_.softcap(logits, options.softcap, context_.classes);
  return finite;
}

// The sum of the exponentials of the classes here, without the target. Replaces the logits by the
// exponentials if these are enough for the gradient.
double RowLoss::SumExponentials(const RowRequest& request, const RowStatistics& own, float* logits) const {
  const bool in_place = request.want_gradient && !KeepsLogits(request);
  const auto add = [&](float* from, int64_t n) {
    return in_place ? loops_.exp_sum_in_place(from, own.reference, n)
                    : loops_.exp_sum(from, own.reference, n);
  };
  const auto [before, after] = OthersOf(request, own);
  return add(logits, before) + add(logits + context_.classes - after, after);
}

// The numbers of classes here before and after the target. If the target is elsewhere, all classes count as
// before it.
RowLoss::Others RowLoss::OthersOf(const RowRequest& request, const RowStatistics& own) const {
  if (!own.has_target) return {context_.classes, 0};
  const int64_t target = request.target - context_.first_class;
  return {target, context_.classes - target - 1};
}

RowLoss::Sums RowLoss::SumsOf(const RowStatistics& own, const RowStatistics& all) const {
  Sums sums;
  sums.max = all.reference;
  sums.target_logit = all.target_logit;
  sums.target_exp = std::exp(double{all.target_logit} - double{all.reference});
  sums.other_exp = all.other_exp;
  sums.total = sums.target_exp + sums.other_exp;
  sums.log_total = std::log(sums.total);
  if (own.reference != all.reference) {
    sums.own_factor = own.max == -kInfinity ? 0.0 : std::exp(double{own.reference} - double{all.reference});
  }
  return sums;
}

// Removes probabilities below epsilon, except the target's, from the gradient. Returns their sum.
double RowLoss::Drop(const RowRequest& request, const RowStatistics& own, const Sums& sums,
                     float* logits) const {
  const auto [before, after] = OthersOf(request, own);
  float* const rest = logits + context_.classes - after;
  const double least = double{context_.options.filter_epsilon} * sums.total;
  if (KeepsLogits(request)) {
    const auto threshold = static_cast<float>(least);
    return (loops_.drop_logits(logits, sums.max, threshold, before) +
            loops_.drop_logits(rest, sums.max, threshold, after)) /
           sums.total;
  }
  if (sums.own_factor == 0.0) return 0.0;  // all probabilities here are 0
  // The exponentials here are relative to the part's own reference, so the threshold is made relative to it,
  // too.
  const auto threshold = static_cast<float>(least / sums.own_factor);
  return (loops_.drop_exp(logits, threshold, before) + loops_.drop_exp(rest, threshold, after)) / sums.total *
         sums.own_factor;
}

// The gradient with respect to the dot product of the target. For one target: p - 1 is -other_exp / total
// (head of row_loss.h). With soft targets: (slope + ...) p - g q.
double RowLoss::TargetGradient(const RowRequest& request, const RowResult& row, const Sums& sums) const {
  const double entropy_term = double{request.grad_entropy} * (row.target_logprob + row.entropy);
  const double p = sums.target_exp / sums.total;
  double gradient = -sums.hard_slope * (sums.other_exp / sums.total) + (sums.soft_slope - entropy_term) * p -
                    sums.smoothing * ClassWeight(request.target);
  if (request.targets != nullptr) {
    double slope = sums.hard_slope, weight = 0.0;
    for (const SoftRow::Entry& entry : request.targets->entries) {
      if (entry.place != request.target) continue;
      slope = sums.named_slope;
      weight = double{entry.weight};
    }
    gradient = (slope + sums.soft_slope - entropy_term) * p - request.grad_loss * weight;
  }
  const double softcap = double{context_.options.softcap};
  if (softcap > 0.0) {
    const double capped = double{sums.target_logit} / softcap;
    gradient *= 1.0 - capped * capped;
  }
  return double{context_.options.logit_scale} * gradient;
}

// Writes the gradient of all classes except the target. `smoothing` multiplies the class weights.
void RowLoss::WriteGradient(const RowRequest& request, const RowResult& row, const Sums& sums,
                            double smoothing, float* logits) const {
  const int64_t n = context_.classes;
  const double scale = double{context_.options.logit_scale};
  const double softcap = double{context_.options.softcap};
  const double slope = scale * (sums.hard_slope + sums.soft_slope);
  if (!KeepsLogits(request)) {
    loops_.gradient_from_exp(logits, class_weights(),
                             static_cast<float>(slope / sums.total * sums.own_factor),
                             static_cast<float>(scale * smoothing), n);
    return;
  }
  LogitGradientTerms terms;
  terms.max = sums.max;
  terms.inverse_total = static_cast<float>(1.0 / sums.total);
  terms.log_total = static_cast<float>(sums.log_total);
  terms.slope = static_cast<float>(slope);
  terms.entropy_slope = static_cast<float>(scale * double{request.grad_entropy});
  terms.entropy = static_cast<float>(row.entropy);
  terms.smoothing = static_cast<float>(scale * smoothing);
  if (softcap > 0.0) terms.inverse_softcap = static_cast<float>(1.0 / softcap);
  loops_.gradient_from_logits(logits, class_weights(), terms, n);
}

// Writes the gradient, sampled except for the target. Without a softcap, the uniform part of label smoothing
// is added after sampling, so it is not sampled.
void RowLoss::Sample(const RowRequest& request, const RowStatistics& own, const Sums& sums,
                     double target_gradient, const float* kept, RowResult& row, float* logits) const {
  const LossOptions& options = context_.options;
  const bool uniform_after = options.softcap == 0.0f && sums.smoothing != 0.0;
  WriteGradient(request, row, sums, uniform_after ? 0.0 : sums.smoothing, logits);
  WriteTargets(request, row, sums, kept, logits);
  if (own.has_target) {
    logits[request.target - context_.first_class] = static_cast<float>(target_gradient);
  }
  row.gradient =
      SampleGradient(options, row.gradient_factor, request.sample,
                     own.has_target ? request.target - context_.first_class : -1, context_.classes, logits);
  if (!uniform_after) return;
  // e = 1 * e - smoothing * u.
  loops_.gradient_from_exp(logits, class_weights(), 1.0f,
                           static_cast<float>(double{options.logit_scale} * sums.smoothing),
                           context_.classes);
}

// Whether the gradient needs the logits themselves. Otherwise Summarise replaces them by their exponentials,
// which are enough, and which Finish then need not compute again.
bool RowLoss::KeepsLogits(const RowRequest& request) const {
  return context_.options.softcap > 0.0f || request.grad_entropy != 0.0f || request.keeps_logits ||
         context_.options.distillation.used() || request.targets != nullptr;
}

double RowLoss::ClassWeight(int32_t target) const {
  return context_.class_weights == nullptr ? 1.0 : double{context_.class_weights[target]};
}

GradientSums SampleGradient(const LossOptions& options, double kappa, float omega, int64_t target, int64_t n,
                            float* gradient) {
  const double scale = double{options.logit_scale};
  const auto threshold = static_cast<float>(double{options.sample_threshold} * std::fabs(scale) * kappa);
  RowSampler sampler(omega, threshold);
  sampler.Sample(gradient, target < 0 ? n : target);
  if (target >= 0) sampler.Sample(gradient + target + 1, n - target - 1);
  const double of_target = target < 0 ? 0.0 : double{gradient[target]};
  return {.sampling_variance = sampler.variance() / (scale * scale),
          .squared_gradient = (sampler.square() + of_target * of_target) / (scale * scale)};
}

void RowSampler::Sample(float* gradient, int64_t n) {
  const double threshold = double{threshold_};
  for (int64_t v = 0; v < n; ++v) {
    const double size = std::fabs(double{gradient[v]});
    square_ += size * size;
    if (size >= threshold) continue;  // an element at or above the threshold is always kept
    variance_ += size * (threshold - size);
    gradient[v] = sampler_.Take(size / threshold) ? std::copysign(threshold_, gradient[v]) : 0.0f;
  }
}

absl::Status SolePartExchange::MergeStatistics(int, absl::Span<const RowStatistics> own,
                                               absl::Span<RowStatistics> merged) {
  std::copy(own.begin(), own.end(), merged.begin());
  return absl::OkStatus();
}

absl::Status SolePartExchange::MergeGradients(int, absl::Span<const GradientSums> own,
                                              absl::Span<RowResult> results) {
  for (size_t row = 0; row < results.size(); ++row) results[row].gradient = own[row];
  return absl::OkStatus();
}

absl::Status SolePartExchange::MergeTaught(int, absl::Span<const TaughtRow> own, MergeTaughtRow merge) {
  for (size_t row = 0; row < own.size(); ++row) {
    const TaughtRow* const of_part[] = {&own[row]};
    merge(static_cast<int64_t>(row), of_part);
  }
  return absl::OkStatus();
}

absl::StatusOr<RowRange> SolePartExchange::SumRows(int, float*, RowRange rows, int64_t) { return rows; }

absl::Status SolePartExchange::AddSums(int, const float* own, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += own[i];
  return absl::OkStatus();
}

absl::Status SolePartExchange::MergeTop(int, absl::Span<const RankedClass> own, int64_t k, bool takes,
                                        TakeRanked take) {
  const auto each = static_cast<size_t>(k);
  for (size_t row = 0; takes && (row + 1) * each <= own.size(); ++row) {
    take(static_cast<int64_t>(row), own.subspan(row * each, each));
  }
  return absl::OkStatus();
}

absl::StatusOr<RowRange> SolePartExchange::CollectRows(int, float*, RowRange rows, RowRange wanted, int64_t) {
  return Intersect(wanted, rows);
}

ThreadExchange::ThreadExchange(int parts)
    : barrier_(parts),
      statistics_(static_cast<size_t>(parts)),
      gradients_(static_cast<size_t>(parts)),
      taught_(static_cast<size_t>(parts)),
      floats_(static_cast<size_t>(parts)),
      ranked_(static_cast<size_t>(parts)) {}

absl::Status ThreadExchange::MergeStatistics(int part, absl::Span<const RowStatistics> own,
                                             absl::Span<RowStatistics> merged) {
  statistics_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  std::vector<const RowStatistics*> of_row(statistics_.size());
  for (size_t row = 0; row < merged.size(); ++row) {
    for (size_t i = 0; i < of_row.size(); ++i) of_row[i] = &statistics_[i][row];
    merged[row] = Merge(of_row);
  }
  barrier_.arrive_and_wait();  // before it no part may change what other parts read
  return absl::OkStatus();
}

absl::Status ThreadExchange::MergeGradients(int part, absl::Span<const GradientSums> own,
                                            absl::Span<RowResult> results) {
  gradients_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  std::vector<const GradientSums*> of_row(gradients_.size());
  for (size_t row = 0; row < results.size(); ++row) {
    for (size_t i = 0; i < of_row.size(); ++i) of_row[i] = &gradients_[i][row];
    results[row].gradient = Add(of_row);
  }
  barrier_.arrive_and_wait();
  return absl::OkStatus();
}

absl::Status ThreadExchange::MergeTaught(int part, absl::Span<const TaughtRow> own, MergeTaughtRow merge) {
  taught_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  std::vector<const TaughtRow*> of_row(taught_.size());
  for (size_t row = 0; row < own.size(); ++row) {
    for (size_t i = 0; i < of_row.size(); ++i) of_row[i] = &taught_[i][row];
    merge(static_cast<int64_t>(row), of_row);
  }
  barrier_.arrive_and_wait();
  return absl::OkStatus();
}

// A part overwrites only its own range of rows in its own sums; the other parts read other ranges of them.
absl::StatusOr<RowRange> ThreadExchange::SumRows(int part, float* own, RowRange rows, int64_t cols) {
  const RowRange range = RowsOfPart(rows, part, parts());
  floats_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  for (int64_t i = range.begin * cols; i < range.end * cols; ++i) {
    float sum = 0.0f;
    for (const float* of_part : floats_) sum += of_part[i];
    own[i] = sum;
  }
  barrier_.arrive_and_wait();
  return range;
}

absl::Status ThreadExchange::AddSums(int part, const float* own, float* to, int64_t n) {
  floats_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  for (int64_t i = 0; i < n; ++i) {
    float sum = 0.0f;
    for (const float* of_part : floats_) sum += of_part[i];
    to[i] += sum;
  }
  barrier_.arrive_and_wait();
  return absl::OkStatus();
}

absl::Status ThreadExchange::MergeTop(int part, absl::Span<const RankedClass> own, int64_t k, bool takes,
                                      TakeRanked take) {
  ranked_[static_cast<size_t>(part)] = own;
  barrier_.arrive_and_wait();
  if (takes) {
    std::vector<const RankedClass*> of_part;
    for (const auto& ranked : ranked_) of_part.push_back(ranked.data());
    MergeRanked(of_part, static_cast<int64_t>(own.size()) / k, k, take);
  }
  barrier_.arrive_and_wait();
  return absl::OkStatus();
}

absl::StatusOr<RowRange> ThreadExchange::CollectRows(int part, float*, RowRange rows, RowRange wanted,
                                                     int64_t) {
  return Intersect(wanted, RowsOfPart(rows, part, parts()));
}

namespace {

RankTransfer Sending(int rank, const void* data, int64_t elements, size_t size) {
  return {rank, const_cast<void*>(data), static_cast<size_t>(elements) * size};
}

int64_t RowsOf(RowRange range) { return range.end - range.begin; }

}  // namespace

template <typename T>
absl::Status RankExchange::ForAll(
    ExchangeKind kind, int part, const T* own, int64_t n,
    absl::FunctionRef<void(int64_t first, int64_t n, absl::Span<const T* const> of_rank)> merge) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<const T*> of_rank(static_cast<size_t>(ranks()));
  const auto most = static_cast<int64_t>(transfers_->Room(part).size() / sizeof(T));
  for (int64_t first = 0; first < n; first += most) {
    const int64_t count = std::min(most, n - first);
    std::vector<RankTransfer> send, receive;
    for (int rank = 0; rank < ranks(); ++rank) {
      of_rank[static_cast<size_t>(rank)] = own + first;
      if (rank == part) continue;
      uint8_t* const room = transfers_->Room(rank).data();
      of_rank[static_cast<size_t>(rank)] = reinterpret_cast<const T*>(room);
      send.push_back(Sending(rank, own + first, count, sizeof(T)));
      receive.push_back({rank, room, static_cast<size_t>(count) * sizeof(T)});
    }
    LOSSD_RETURN_IF_ERROR(transfers_->Exchange(kind, send, receive));
    merge(first, count, of_rank);
  }
  return absl::OkStatus();
}

// All ranks wait for each other even if the chunk has no rows, so that afterwards all of them have read the
// chunk.
absl::Status RankExchange::MergeStatistics(int part, absl::Span<const RowStatistics> own,
                                           absl::Span<RowStatistics> merged) {
  const RowStatistics none;
  if (own.empty()) return ForAll<RowStatistics>(ExchangeKind::kRowStatistics, part, &none, 1, [](auto...) {});
  std::vector<const RowStatistics*> of_row(static_cast<size_t>(ranks()));
  return ForAll<RowStatistics>(ExchangeKind::kRowStatistics, part, own.data(),
                               static_cast<int64_t>(own.size()),
                               [&](int64_t first, int64_t n, absl::Span<const RowStatistics* const> of_rank) {
                                 for (int64_t row = 0; row < n; ++row) {
                                   for (size_t i = 0; i < of_row.size(); ++i) of_row[i] = of_rank[i] + row;
                                   merged[static_cast<size_t>(first + row)] = Merge(of_row);
                                 }
                               });
}

absl::Status RankExchange::MergeGradients(int part, absl::Span<const GradientSums> own,
                                          absl::Span<RowResult> results) {
  std::vector<const GradientSums*> of_row(static_cast<size_t>(ranks()));
  return ForAll<GradientSums>(ExchangeKind::kRowStatistics, part, own.data(),
                              static_cast<int64_t>(own.size()),
                              [&](int64_t first, int64_t n, absl::Span<const GradientSums* const> of_rank) {
                                for (int64_t row = 0; row < n; ++row) {
                                  for (size_t i = 0; i < of_row.size(); ++i) of_row[i] = of_rank[i] + row;
                                  results[static_cast<size_t>(first + row)].gradient = Add(of_row);
                                }
                              });
}

absl::Status RankExchange::MergeTaught(int part, absl::Span<const TaughtRow> own, MergeTaughtRow merge) {
  std::vector<const TaughtRow*> of_row(static_cast<size_t>(ranks()));
  return ForAll<TaughtRow>(ExchangeKind::kRowStatistics, part, own.data(), static_cast<int64_t>(own.size()),
                           [&](int64_t first, int64_t n, absl::Span<const TaughtRow* const> of_rank) {
                             for (int64_t row = 0; row < n; ++row) {
                               for (size_t i = 0; i < of_row.size(); ++i) of_row[i] = of_rank[i] + row;
                               merge(first + row, of_row);
                             }
                           });
}

// Each rank sends the other ranks their rows, and adds up the rows that it receives for its own range, in
// pieces of the size of Room. Ranges may differ by a row. All ranks take part in as many exchanges as the
// longest range needs; a rank whose own range is complete only sends.
absl::StatusOr<RowRange> RankExchange::SumRows(int part, float* own, RowRange rows, int64_t cols) {
  const auto most = static_cast<int64_t>(transfers_->Room(part).size() / sizeof(float));
  const RowRange here = RowsOfPart(rows, part, ranks());
  int64_t longest = 0;
  for (int rank = 0; rank < ranks(); ++rank) {
    longest = std::max(longest, RowsOf(RowsOfPart(rows, rank, ranks())) * cols);
  }
  std::vector<const float*> of_rank(static_cast<size_t>(ranks()));
  for (int64_t done = 0; done < longest; done += most) {
    const int64_t n = std::clamp<int64_t>(RowsOf(here) * cols - done, 0, most);
    float* const sums = own + here.begin * cols + done;
    std::vector<RankTransfer> send, receive;
    for (int rank = 0; rank < ranks(); ++rank) {
      of_rank[static_cast<size_t>(rank)] = sums;
      if (rank == part) continue;
      const RowRange theirs = RowsOfPart(rows, rank, ranks());
      const int64_t n_theirs = std::clamp<int64_t>(RowsOf(theirs) * cols - done, 0, most);
      if (n_theirs > 0) {
        send.push_back(Sending(rank, own + theirs.begin * cols + done, n_theirs, sizeof(float)));
      }
      uint8_t* const room = transfers_->Room(rank).data();
      of_rank[static_cast<size_t>(rank)] = reinterpret_cast<const float*>(room);
      if (n > 0) receive.push_back({rank, room, static_cast<size_t>(n) * sizeof(float)});
    }
    LOSSD_RETURN_IF_ERROR(transfers_->Exchange(ExchangeKind::kHiddenGradients, send, receive));
    for (int64_t i = 0; i < n; ++i) {
      float sum = 0.0f;
      for (const float* of_part : of_rank) sum += of_part[i];
      sums[i] = sum;
    }
  }
  return here;
}

absl::Status RankExchange::AddSums(int part, const float* own, float* to, int64_t n) {
  return ForAll<float>(ExchangeKind::kHiddenGradients, part, own, n,
                       [&](int64_t first, int64_t count, absl::Span<const float* const> of_rank) {
                         for (int64_t i = 0; i < count; ++i) {
                           float sum = 0.0f;
                           for (const float* of_part : of_rank) sum += of_part[i];
                           to[first + i] += sum;
                         }
                       });
}

// Exchanges pieces of whole rows that fit into Room.
absl::Status RankExchange::MergeTop(int part, absl::Span<const RankedClass> own, int64_t k, bool takes,
                                    TakeRanked take) {
  const auto room = static_cast<int64_t>(transfers_->Room(part).size() / sizeof(RankedClass));
  const int64_t rows = static_cast<int64_t>(own.size()) / k;
  const int64_t piece = std::max<int64_t>(1, room / k);
  for (int64_t first = 0; first < rows; first += piece) {
    const int64_t n = std::min(piece, rows - first);
    LOSSD_RETURN_IF_ERROR(ForAll<RankedClass>(
        ExchangeKind::kRowStatistics, part, own.data() + first * k, n * k,
        [&](int64_t, int64_t, absl::Span<const RankedClass* const> of_rank) {
          if (!takes) return;
          MergeRanked(of_rank, n, k,
                      [&](int64_t row, absl::Span<const RankedClass> ranked) { take(first + row, ranked); });
        }));
  }
  return absl::OkStatus();
}

// Rank 0 delivers all rows, so the other ranks send it the rows that SumRows has left at them.
absl::StatusOr<RowRange> RankExchange::CollectRows(int part, float* own, RowRange rows, RowRange wanted,
                                                   int64_t cols) {
  std::vector<RankTransfer> send, receive;
  for (int rank = 1; rank < ranks(); ++rank) {
    const RowRange theirs = Intersect(wanted, RowsOfPart(rows, rank, ranks()));
    if (RowsOf(theirs) <= 0 || (part != 0 && part != rank)) continue;
    float* const first = own + theirs.begin * cols;
    const size_t bytes = static_cast<size_t>(RowsOf(theirs) * cols) * sizeof(float);
    if (part == 0) {
      receive.push_back({rank, first, bytes});
    } else {
      send.push_back({0, first, bytes});
    }
  }
  LOSSD_RETURN_IF_ERROR(transfers_->Exchange(ExchangeKind::kHiddenGradients, send, receive));
  return part == 0 ? Intersect(wanted, rows) : RowRange();
}

}  // namespace lossd::kernels
