// SPDX-License-Identifier: Apache-2.0
// The reference implementation of the loss head (reference.h): optimizer, sampling, norm, and Compute.
// Objectives, soft targets and divergences are in objective.cc. Compute takes each row through the same
// steps: norm, softmax, upstream gradients (Upstream), gradient by dot products (LogitGradient), gradient
// before the norm, parameter gradients.
#include "kernels/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/decision.h"
#include "kernels/replica.h"

namespace lossd::kernels::reference {
namespace {

void ApplyAdamW(const OptimizerOptions& options, int64_t update, double decay, double gradient, double& value,
                double& moment1, double& moment2) {
  value -= options.learning_rate * decay * value;
  moment1 = options.beta1 * moment1 + (1.0 - options.beta1) * gradient;
  moment2 = options.beta2 * moment2 + (1.0 - options.beta2) * gradient * gradient;
  const double mean = moment1 / (1.0 - std::pow(options.beta1, static_cast<double>(update)));
  const double square = moment2 / (1.0 - std::pow(options.beta2, static_cast<double>(update)));
  // A parameter that never had a gradient does not change, even with epsilon 0.
  if (moment1 != 0.0) value -= options.learning_rate * mean / (std::sqrt(square) + options.epsilon);
}

void ApplySgd(const OptimizerOptions& options, int64_t update, double decay, double gradient, double& value,
              double& buffer) {
  // Without decay, a value of -infinity does not change.
  double step = decay == 0.0 ? gradient : gradient + decay * value;
  if (options.momentum > 0.0) {
    buffer = update == 1 ? step : options.momentum * buffer + (1.0 - options.dampening) * step;
    step = options.nesterov ? step + options.momentum * buffer : buffer;
  }
  value -= options.learning_rate * step;
}

}  // namespace

void ApplyUpdate(const OptimizerOptions& options, int64_t update, bool is_vector,
                 const std::vector<double>& gradient, std::vector<double>& values, OptimizerMoments& moments,
                 size_t cols) {
  moments.moment1.resize(values.size(), 0.0);
  moments.moment2.resize(values.size(), 0.0);
  const double decay = is_vector && !options.decay_vectors ? 0.0 : options.weight_decay;
  const auto is_idle = [&](size_t row) {
    const auto first = gradient.begin() + static_cast<std::ptrdiff_t>(row * cols);
    return std::all_of(first, first + static_cast<std::ptrdiff_t>(cols), [](double g) { return g == 0.0; });
  };
  for (size_t i = 0; i < values.size(); ++i) {
    if (options.lazy_rows && !is_vector && is_idle(i / cols)) continue;
    const double g = options.grad_multiplier * gradient[i];
    if (options.kind == OptimizerOptions::Kind::kAdamW) {
      ApplyAdamW(options, update, decay, g, values[i], moments.moment1[i], moments.moment2[i]);
    } else {
      ApplySgd(options, update, decay, g, values[i], moments.moment1[i]);
    }
  }
}

namespace {

// The elements of `values` [V] that belong to the classes of the part.
std::vector<double> ValuesOfPart(const SampledPart& part, const std::vector<double>& values) {
  return {values.begin() + static_cast<std::ptrdiff_t>(part.begin),
          values.begin() + static_cast<std::ptrdiff_t>(part.end)};
}

// The width of a class on the line of classes: its size, but at most 1.
double WidthOf(double size) { return std::clamp(size, 0.0, 1.0); }

// A class for which errors may decide whether it is taken: its place on the line of classes, and the error of
// this place, which is the sum of the errors of all widths up to there.
struct OpenClass {
  size_t v;
  double begin, end;
  double error;
};

// The classes for which errors may decide. A class whose width is certainly 1 is always taken, and one whose
// width is certainly 0 never.
std::vector<OpenClass> OpenClasses(const std::vector<double>& sizes, const std::vector<double>& errors) {
  std::vector<OpenClass> open;
  double end = 0.0, error = 0.0;
  for (size_t v = 0; v < sizes.size(); ++v) {
    const double width = WidthOf(sizes[v]);
    const double least = WidthOf(sizes[v] - errors[v]), most = WidthOf(sizes[v] + errors[v]);
    error += std::max(most - width, width - least);
    if (least < 1.0 && most > 0.0) open.push_back({v, end, end + width, error});
    end += width;
  }
  return open;
}

// A class on which a point falls or may fall.
struct Candidate {
  size_t v;
  size_t point;
  bool taken;
  double share;  // the part of the point's possible places that lies in this class
};

// Adds a candidate for each point that falls on class `c` or may fall on it, unless the point certainly does:
// the true place of point x is anywhere in [x - error, x + error].
void AddCandidates(const OpenClass& c, double omega, std::vector<Candidate>& candidates) {
  const double first = std::max(0.0, std::ceil(c.begin - c.error - omega));
  for (double k = first; omega + k <= c.end + c.error; k += 1.0) {
    const double x = omega + k;
    if (x - c.error > c.begin && x + c.error < c.end) continue;  // certain
    const double share = (std::min(c.end, x + c.error) - std::max(c.begin, x - c.error)) / (2.0 * c.error);
    const bool taken = x > c.begin && x <= c.end;
    if (taken || share > 0.0) candidates.push_back({c.v, static_cast<size_t>(k), taken, share});
  }
}

}  // namespace

std::vector<SampledPart> SampledPartsOf(size_t classes, int parts, absl::Span<const int32_t> shares,
                                        uint64_t seed, uint64_t row) {
  std::vector<SampledPart> all;
  for (int part = 0; part < parts; ++part) {
    const Shard shard = ClassShardOf(static_cast<int64_t>(classes), {part, parts}, shares);
    const auto first = static_cast<uint64_t>(shard.first_class);
    all.push_back({static_cast<size_t>(shard.first_class), static_cast<size_t>(shard.end_class()),
                   static_cast<double>(SampleOf(seed, row, first))});
  }
  return all;
}

std::vector<uint8_t> TakenClasses(const std::vector<double>& sizes, double omega) {
  SystematicSampler<double> sampler(omega);
  std::vector<uint8_t> taken;
  for (const double size : sizes) taken.push_back(sampler.Take(size) ? 1 : 0);
  return taken;
}

std::vector<double> UndecidedClasses(const std::vector<double>& sizes, const std::vector<double>& errors,
                                     double omega) {
  std::vector<double> undecided(sizes.size());
  std::vector<Candidate> candidates;
  for (const OpenClass& c : OpenClasses(sizes, errors)) {
    const double width = c.end - c.begin;
    // Two independent draws with probability `width` have this expected squared difference.
    if (c.error >= 0.5) undecided[c.v] = std::max(0.25, 2.0 * width * (1.0 - width));
    if (c.error > 0.0 && c.error < 0.5) AddCandidates(c, omega, candidates);
  }
  // For each point, the sum of the shares of the classes that the point may fall on but does not fall on
  // here. The line has at most one point for each class, and two more because of errors.
  std::vector<double> others(sizes.size() + 2);
  for (const Candidate& c : candidates) others[c.point] += c.taken ? 0.0 : c.share;
  for (const Candidate& c : candidates) {
    undecided[c.v] = std::min(1.0, undecided[c.v] + (c.taken ? 1.0 : c.share / others[c.point]));
  }
  return undecided;
}

std::vector<uint8_t> TakenClasses(const std::vector<double>& sizes, const std::vector<SampledPart>& parts) {
  std::vector<uint8_t> all;
  for (const SampledPart& part : parts) {
    const std::vector<uint8_t> taken = TakenClasses(ValuesOfPart(part, sizes), part.omega);
    all.insert(all.end(), taken.begin(), taken.end());
  }
  return all;
}

std::vector<double> UndecidedClasses(const std::vector<double>& sizes, const std::vector<double>& errors,
                                     const std::vector<SampledPart>& parts) {
  std::vector<double> all;
  for (const SampledPart& part : parts) {
    const std::vector<double> undecided =
        UndecidedClasses(ValuesOfPart(part, sizes), ValuesOfPart(part, errors), part.omega);
    all.insert(all.end(), undecided.begin(), undecided.end());
  }
  return all;
}

namespace {

// One row after the norm.
struct NormedRow {
  std::vector<double> unit;  // before gain and shift
  std::vector<double> y;     // the input of the classifier
  double inverse_deviation = 1.0;
};

NormedRow ApplyNorm(const Head& head, const double* x) {
  const size_t d = static_cast<size_t>(head.config.hidden_size);
  NormedRow row;
  row.unit.assign(x, x + d);
  row.y = row.unit;
  if (head.config.norm == Norm::kNone) return row;
  const bool is_layer_norm = head.config.norm == Norm::kLayerNorm;
  double mean = 0.0;
  if (is_layer_norm) {
    for (size_t i = 0; i < d; ++i) mean += x[i] / static_cast<double>(d);
  }
  double mean_square = 0.0;
  for (size_t i = 0; i < d; ++i) mean_square += (x[i] - mean) * (x[i] - mean) / static_cast<double>(d);
  row.inverse_deviation = 1.0 / std::sqrt(mean_square + static_cast<double>(head.config.norm_epsilon));
  for (size_t i = 0; i < d; ++i) {
    row.unit[i] = (x[i] - mean) * row.inverse_deviation;
    row.y[i] = row.unit[i] * head.norm_gain[i] + (is_layer_norm ? head.norm_shift[i] : 0.0);
  }
  return row;
}

// Computes the gradient before the norm from the gradient after it, by applying the Jacobian term by term.
// Writes it to `grad_x` from element `begin` on. The errors of all elements of a row may have the same sign,
// so the standard deviations of the elements are added.
void NormBackward(const Head& head, const NormedRow& row, const Gradient& grad_y, size_t begin,
                  Gradient& grad_x) {
  const size_t d = row.y.size();
  for (size_t i = 0; i < d; ++i) {
    if (head.config.norm == Norm::kNone) {
      grad_x.value[begin + i] = grad_y.value[i];
      grad_x.magnitude[begin + i] = grad_y.magnitude[i];
      grad_x.variance[begin + i] = grad_y.variance[i];
      grad_x.undecided[begin + i] = grad_y.undecided[i];
      continue;
    }
    const double mean_part = head.config.norm == Norm::kLayerNorm ? 1.0 / static_cast<double>(d) : 0.0;
    double value = 0.0;
    double magnitude = 0.0;
    double deviation = 0.0;
    double undecided = 0.0;
    for (size_t j = 0; j < d; ++j) {
      // d unit_j / d x_i, without the factor inverse_deviation.
      const double identity = i == j ? 1.0 : 0.0;
      const double scale_part = row.unit[i] * row.unit[j] / static_cast<double>(d);
      const double slope = head.norm_gain[j] * (identity - mean_part - scale_part);
      value += grad_y.value[j] * slope;
      deviation += std::sqrt(grad_y.variance[j]) * std::fabs(slope);
      undecided += std::sqrt(grad_y.undecided[j]) * std::fabs(slope);
      magnitude +=
          grad_y.magnitude[j] * std::fabs(head.norm_gain[j]) * (identity + mean_part + std::fabs(scale_part));
    }
    grad_x.value[begin + i] = value * row.inverse_deviation;
    grad_x.magnitude[begin + i] = magnitude * row.inverse_deviation;
    grad_x.variance[begin + i] = std::pow(deviation * row.inverse_deviation, 2);
    grad_x.undecided[begin + i] = std::pow(undecided * row.inverse_deviation, 2);
  }
}

// The weight of the loss with the target: Distillation::target_weight, or 1 without a teacher.
double TargetWeight(const LossOptions& options) {
  return options.distillation.used() ? static_cast<double>(options.distillation.target_weight) : 1.0;
}

// The divergence of row n from its teacher; empty without a teacher.
RowDivergence DivergenceOf(const Head& head, const LossOptions& options, const Rows& rows,
                           const Softmax& soft, size_t n, Result& result) {
  const Distillation& distillation = options.distillation;
  if (!distillation.used()) return {};
  const Head& teacher = head.teacher.front();
  const auto d = static_cast<size_t>(teacher.config.hidden_size);
  const LossOptions of_teacher = {.logit_scale = distillation.teacher_logit_scale,
                                  .softcap = distillation.teacher_softcap};
  const Softmax teaching =
      ComputeSoftmax(teacher, of_teacher, ApplyNorm(teacher, &rows.teacher_hidden[n * d]).y);
  RowDivergence divergence = ComputeDivergence(distillation, soft, teaching);
  const double sharpest = std::max(1.0, 1.0 / static_cast<double>(distillation.temperature));
  divergence.max_abs_logit = sharpest * std::max(MaxAbs(soft.z), MaxAbs(teaching.z));
  result.max_abs_logit[n] = divergence.max_abs_logit;
  result.divergence_slope[n] = divergence.slope;
  return divergence;
}

// Adds the divergence to the upstream gradients of a row with a teacher.
Upstream WithDivergence(const LossOptions& options, Upstream upstream, const RowDivergence& divergence) {
  if (!options.distillation.used()) return upstream;
  upstream.divergence = divergence;
  upstream.by_divergence = upstream.loss * static_cast<double>(options.distillation.weight);
  upstream.loss *= TargetWeight(options);
  return upstream;
}

// Writes the results of row n, and adds them to the sums.
void RecordRow(const LossOptions& options, const ClassWeights& u, const Softmax& soft, size_t target,
               double row_weight, const Upstream& upstream, const RowDivergence& divergence, size_t n,
               Result& result) {
  const double target_weight = TargetWeight(options);
  const bool counts_target_loss = row_weight != 0.0 && target_weight != 0.0;
  const RowLoss row = counts_target_loss
                          ? ComputeRowLoss(options, u, soft, target, upstream.objective, upstream.targets)
                          : RowLoss();
  // With soft targets: a bound on the sum of |dloss/dz| over the logits.
  result.loss_sensitivity[n] = !counts_target_loss       ? 0.0
                               : upstream.targets.used() ? 2.0 * upstream.targets.total
                                                         : upstream.objective.sensitivity;
  result.loss[n] = row_weight * target_weight * row.loss;
  if (row_weight != 0.0 && options.distillation.used()) {
    result.loss[n] += row_weight * static_cast<double>(options.distillation.weight) * divergence.value;
    result.sums.divergence += row_weight * divergence.value;
    result.sums.target_loss += row_weight * row.loss;
  }
  result.z_loss[n] = row_weight * target_weight * row.z_loss;
  result.lse[n] = soft.lse;
  result.entropy[n] = soft.entropy;
  result.target_logprob[n] = soft.log_p[target];
  const auto top = std::max_element(soft.z.begin(), soft.z.end());
  result.argmax[n] = static_cast<int32_t>(top - soft.z.begin());
  result.top_gap[n] = std::numeric_limits<double>::infinity();
  result.max_abs_logit[n] = std::max(result.max_abs_logit[n], MaxAbs(soft.z));
  for (size_t v = 0; v < soft.z.size(); ++v) {
    if (static_cast<int32_t>(v) == result.argmax[n]) continue;
    result.top_gap[n] = std::min(result.top_gap[n], *top - soft.z[v]);
  }
  result.sums.loss += result.loss[n];
  result.sums.z_loss += result.z_loss[n];
  if (std::isfinite(soft.entropy)) result.sums.entropy += soft.entropy;
  result.sums.valid_rows += 1;
  result.sums.correct_rows += result.argmax[n] == static_cast<int32_t>(target) ? 1 : 0;
}

// to[begin + i] += factors[i] * from[j], for each i. Each member has a loop of its own, which the compiler
// vectorizes. Memory traffic is the main cost, so variance and undecided are skipped if they are 0, as in
// most gradients.
void Add(const Gradient& from, size_t j, absl::Span<const double> factors, Gradient& to, size_t begin) {
  const size_t count = factors.size();
  const double* const f = factors.data();
  const auto add = [count](double x, double* out, auto weight_of) {
    for (size_t i = 0; i < count; ++i) out[i] += weight_of(i) * x;
  };
  const auto square = [f](size_t i) { return f[i] * f[i]; };
  add(from.value[j], &to.value[begin], [f](size_t i) { return f[i]; });
  add(from.magnitude[j], &to.magnitude[begin], [f](size_t i) { return std::fabs(f[i]); });
  if (from.variance[j] != 0.0) add(from.variance[j], &to.variance[begin], square);
  if (from.undecided[j] != 0.0) add(from.undecided[j], &to.undecided[begin], square);
}

void Add(const Gradient& from, size_t j, double factor, Gradient& to, size_t i) {
  Add(from, j, absl::MakeConstSpan(&factor, 1), to, i);
}

// Adds a row to the parameter gradients. ds: the gradient by dot products; grad_y: the gradient after the
// norm.
void AccumulateParams(const HeadConfig& config, const NormedRow& row, const Gradient& ds,
                      const Gradient& grad_y, ParamGradients& gradients) {
  const size_t d = row.y.size();
  for (size_t v = 0; v < ds.value.size(); ++v) {
    Add(ds, v, row.y, gradients.weight, v * d);
    if (config.has_bias) Add(ds, v, 1.0, gradients.bias, v);
  }
  for (size_t i = 0; i < d; ++i) {
    if (config.norm != Norm::kNone) Add(grad_y, i, row.unit[i], gradients.norm_gain, i);
    if (config.norm == Norm::kLayerNorm) Add(grad_y, i, 1.0, gradients.norm_shift, i);
  }
}

Result EmptyResult(size_t n, size_t d) {
  Result result;
  for (auto* values : {&result.loss, &result.z_loss, &result.lse, &result.entropy, &result.target_logprob,
                       &result.max_abs_logit, &result.top_gap, &result.loss_sensitivity, &result.dropped_mass,
                       &result.sample_scale, &result.sampling_variance, &result.squared_gradient,
                       &result.divergence_slope}) {
    values->assign(n, 0.0);
  }
  result.argmax.assign(n, -1);
  result.grad_hidden = Zeros(n * d);
  return result;
}

}  // namespace

ParamGradients ZeroGradients(const HeadConfig& config) {
  const size_t d = static_cast<size_t>(config.hidden_size);
  const size_t v = static_cast<size_t>(config.vocab_size);
  ParamGradients gradients;
  gradients.weight = Zeros(v * d);
  if (config.has_bias) gradients.bias = Zeros(v);
  if (config.norm != Norm::kNone) gradients.norm_gain = Zeros(d);
  if (config.norm == Norm::kLayerNorm) gradients.norm_shift = Zeros(d);
  return gradients;
}

Result Compute(const Head& head, const LossOptions& options, const Rows& rows, ParamGradients* gradients) {
  const size_t n_count = rows.targets.size();
  const size_t d = static_cast<size_t>(head.config.hidden_size);
  const ClassWeights u{head, options.use_class_weights};
  Result result = EmptyResult(n_count, d);
  for (size_t n = 0; n < n_count; ++n) {
    if (rows.targets[n] == kIgnoredTarget) continue;
    const size_t target = static_cast<size_t>(rows.targets[n]);
    const double row_weight = At(rows.row_weights, n, 1.0);
    const NormedRow row = ApplyNorm(head, &rows.hidden[n * d]);
    const Softmax soft = ComputeSoftmax(head, options, row.y);
    const RowDivergence divergence = DivergenceOf(head, options, rows, soft, n, result);
    const Upstream upstream = WithDivergence(options, UpstreamOf(options, soft, target, rows, n), divergence);
    RecordRow(options, u, soft, target, row_weight, upstream, divergence, n, result);
    if (row_weight == 0.0 && upstream.lse == 0.0 && upstream.entropy == 0.0) continue;  // absent
    if (options.objective.active()) {
      const ObjectiveRow& row_objective = upstream.objective;
      result.sums.objective +=
          {1, row_objective.clipped ? 1 : 0, row_objective.ratio, row_objective.old_kl, row_objective.ref_kl};
    }
    result.dropped_mass[n] = DroppedMass(options, soft, target, upstream.targets);
    result.sums.dropped_mass += result.dropped_mass[n];

    const LogitGradient ds = ComputeLogitGradient(options, u, soft, target, upstream, rows, n);
    result.sample_scale[n] = ds.sample_scale;
    result.sampling_variance[n] = ds.sampling_variance;
    result.squared_gradient[n] = ds.squared_gradient;
    result.sums.sampling_variance += ds.sampling_variance;
    result.sums.squared_gradient += ds.squared_gradient;
    Gradient grad_y = Zeros(d);
    for (size_t v = 0; v < soft.z.size(); ++v) {
      Add(ds.gradient, v, absl::MakeConstSpan(&head.weight[v * d], d), grad_y, 0);
    }
    NormBackward(head, row, grad_y, n * d, result.grad_hidden);
    const bool accumulate = rows.accumulate.empty() || rows.accumulate[n] != 0;
    if (gradients != nullptr && accumulate) {
      AccumulateParams(head.config, row, ds.gradient, grad_y, *gradients);
    }
  }
  return result;
}

SampledClasses ComputeSampledClasses(const Head& head, const LossOptions& options, const Rows& rows) {
  const size_t v_count = static_cast<size_t>(head.config.vocab_size);
  const size_t d_count = static_cast<size_t>(head.config.hidden_size);
  const ClassWeights u{head, options.use_class_weights};
  SampledClasses classes;
  // DivergenceOf also records into a Result, which is not used here.
  Result of_rows = EmptyResult(rows.targets.size(), d_count);
  for (size_t n = 0; n < rows.targets.size(); ++n) {
    RowClasses row;
    row.size.assign(v_count, 0.0);
    row.error = row.size;
    if (rows.targets[n] != kIgnoredTarget) {
      const Softmax soft = ComputeSoftmax(head, options, ApplyNorm(head, &rows.hidden[n * d_count]).y);
      const size_t target = static_cast<size_t>(rows.targets[n]);
      const RowDivergence divergence = DivergenceOf(head, options, rows, soft, n, of_rows);
      const Upstream upstream =
          WithDivergence(options, UpstreamOf(options, soft, target, rows, n), divergence);
      row = ComputeRowClasses(options, u, soft, target, upstream, rows);
    }
    classes.size.insert(classes.size.end(), row.size.begin(), row.size.end());
    classes.error.insert(classes.error.end(), row.error.begin(), row.error.end());
  }
  return classes;
}

std::vector<double> LogProbabilities(const Head& head, const LossOptions& options, const Rows& rows) {
  const size_t d = static_cast<size_t>(head.config.hidden_size);
  std::vector<double> all;
  for (size_t n = 0; n < rows.targets.size(); ++n) {
    const Softmax soft = ComputeSoftmax(head, options, ApplyNorm(head, &rows.hidden[n * d]).y);
    all.insert(all.end(), soft.log_p.begin(), soft.log_p.end());
  }
  return all;
}

std::vector<double> Probabilities(const Head& head, const LossOptions& options, const Rows& rows) {
  std::vector<double> probabilities = LogProbabilities(head, options, rows);
  for (double& p : probabilities) p = std::exp(p);
  return probabilities;
}

namespace {

// 1 - p_v without cancellation when p_v is close to 1.
double OneMinusP(const Softmax& soft, size_t v) { return -std::expm1(soft.log_p[v]); }

bool IsDropped(const LossOptions& options, const Softmax& soft, size_t v, size_t target,
               const SoftTargets& targets) {
  const bool named = targets.used() && targets.named[v] != 0;
  return options.gradients == Gradients::kFiltered && v != target && !named &&
         std::exp(soft.log_p[v]) < static_cast<double>(options.filter_epsilon);
}

// dL/ds of class v, as the sum of the terms of docs/math.md. u_sum: the sum of all class weights. A class
// that filtered gradients drop gets only the terms without p.
ClassGradient ComputeClassGradient(const LossOptions& options, const ClassWeights& u, double u_sum,
                                   const Softmax& soft, size_t target, const Upstream& upstream, size_t v) {
  const double alpha = static_cast<double>(options.label_smoothing);
  const double lambda = static_cast<double>(options.z_loss);
  const double share = alpha / static_cast<double>(soft.z.size());
  const SoftTargets& targets = upstream.targets;
  const bool dropped = IsDropped(options, soft, v, target, targets);
  const double p = dropped ? 0.0 : std::exp(soft.log_p[v]);
  // p_v - [v is the target]: minus the derivative of log p_y with respect to z_v.
  const double hard = v == target ? -OneMinusP(soft, v) : p;
  const ObjectiveRow& objective = upstream.objective;
  const bool active = options.objective.active();
  // In this order: the target, soft targets or objective; the divergence from the reference policy; the part
  // of label smoothing that depends on p; the z-loss; the upstream gradients of lse and, in two terms, of the
  // entropy.
  const double terms[] = {
      targets.used() ? (dropped ? 0.0 : upstream.loss * targets.Slope(soft, v))
      : active       ? -upstream.loss * objective.policy_slope * hard
                     : upstream.loss * u[target] * (1.0 - alpha) * hard,
      active ? -upstream.loss * objective.kl_slope * hard : 0.0,
      upstream.loss * share * u_sum * p,
      upstream.loss * 2.0 * lambda * soft.lse * p,
      upstream.lse * p,
      p > 0.0 ? -upstream.entropy * p * soft.log_p[v] : 0.0,
      -upstream.entropy * p * soft.entropy,
  };
  ClassGradient result;
  for (double term : terms) {
    result.value += soft.cap_slope[v] * term;
    result.magnitude += std::fabs(soft.cap_slope[v] * term);
    result.uncapped += std::fabs(term);
  }
  // `more`: terms that cancel within the slopes still cause rounding errors, so their sizes count, too.
  if (active) {
    const double slopes = std::fabs(objective.policy_slope) + std::fabs(objective.kl_slope);
    const double more = std::fabs(upstream.loss * hard) * (objective.slope_magnitude - slopes);
    result.magnitude += std::max(0.0, std::fabs(soft.cap_slope[v]) * more);
  }
  if (targets.used() && !dropped) {
    const double more =
        std::fabs(upstream.loss) * (targets.Magnitude(soft, v) - std::fabs(targets.Slope(soft, v)));
    result.magnitude += std::fabs(soft.cap_slope[v]) * more;
    result.uncapped += more;
  }
  result.uniform = -soft.cap_slope[v] * upstream.loss * share * u[v];
  if (upstream.divergence.gradient.empty()) return result;
  const RowDivergence& divergence = upstream.divergence;
  result.value += upstream.by_divergence * soft.cap_slope[v] * divergence.gradient[v];
  result.magnitude += std::fabs(upstream.by_divergence) * soft.cap_slope[v] * divergence.magnitude[v];
  result.uncapped += std::fabs(upstream.by_divergence) * divergence.magnitude[v];
  return result;
}

// kappa in docs/math.md.
double SampleScale(const LossOptions& options, const ClassWeights& u, double u_sum, const Softmax& soft,
                   size_t target, const Upstream& upstream) {
  const double alpha = static_cast<double>(options.label_smoothing);
  const double lambda = static_cast<double>(options.z_loss);
  const double share = alpha / static_cast<double>(soft.z.size());
  const double hard = upstream.targets.used() ? upstream.targets.total
                      : options.objective.active()
                          ? -(upstream.objective.policy_slope + upstream.objective.kl_slope)
                          : u[target] * (1.0 - alpha);
  const double k = upstream.loss * (hard + share * u_sum + 2.0 * lambda * soft.lse);
  const double of_divergence =
      options.distillation.used() ? upstream.by_divergence / double{options.distillation.temperature} : 0.0;
  return std::fabs(k + upstream.lse) + std::fabs(upstream.entropy) + std::fabs(of_divergence);
}

// Replaces the gradient of each sampled class by its sampled value. `undecided`: out, the squared difference
// that undecided classes may make.
void SampleRow(const LossOptions& options, const std::vector<SampledPart>& parts, size_t target,
               RowClasses& row, std::vector<double>& undecided) {
  const std::vector<uint8_t> taken = TakenClasses(row.size, parts);
  const double least = static_cast<double>(options.sample_threshold) * row.sample_scale;
  for (size_t v = 0; v < row.gradient.size(); ++v) {
    ClassGradient& d = row.gradient[v];
    if (v == target || std::fabs(d.value) >= least) continue;
    d.value = taken[v] != 0 ? std::copysign(least, d.value) : 0.0;
    d.magnitude = std::fabs(d.value);
  }
  undecided = UndecidedClasses(row.size, row.error, parts);
  // A sampled class has the gradient `least` or 0.
  for (double& square : undecided) square *= least * least;
}

}  // namespace

double MaxAbs(const std::vector<double>& values) {
  double largest = 0.0;
  for (const double value : values) {
    if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
  }
  return largest;
}

double At(const std::vector<double>& values, size_t i, double missing) {
  return values.empty() ? missing : values[i];
}

Gradient Zeros(size_t n) {
  const std::vector<double> zeros(n, 0.0);
  return {zeros, zeros, zeros, zeros};
}

namespace {

// The dot product of b.size() elements. It has four independent sums, so that additions do not wait for each
// other.
double Dot(const double* a, const std::vector<double>& b) {
  double sums[4] = {};
  size_t i = 0;
  for (; i + 4 <= b.size(); i += 4) {
    for (size_t k = 0; k < 4; ++k) sums[k] += a[i + k] * b[i + k];
  }
  for (; i < b.size(); ++i) sums[0] += a[i] * b[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace

Softmax ComputeSoftmax(const Head& head, const LossOptions& options, const std::vector<double>& y) {
  const size_t v_count = static_cast<size_t>(head.config.vocab_size);
  Softmax soft;
  soft.z.resize(v_count);
  soft.cap_slope.assign(v_count, 1.0);
  soft.log_p.resize(v_count);
  for (size_t v = 0; v < v_count; ++v) {
    double s = head.config.has_bias ? head.bias[v] : 0.0;
    s += Dot(&head.weight[v * y.size()], y);
    s *= static_cast<double>(options.logit_scale);
    soft.z[v] = s;
    if (options.softcap > 0.0f) {
      const double cap = static_cast<double>(options.softcap);
      soft.z[v] = cap * std::tanh(s / cap);
      soft.cap_slope[v] = 1.0 / (std::cosh(s / cap) * std::cosh(s / cap));
    }
  }
  const double top = *std::max_element(soft.z.begin(), soft.z.end());
  double sum = 0.0;
  for (double z : soft.z) sum += std::exp(z - top);
  soft.lse = top + std::log(sum);
  for (size_t v = 0; v < v_count; ++v) {
    soft.log_p[v] = (soft.z[v] - top) - std::log(sum);
    const double p = std::exp(soft.log_p[v]);
    if (p > 0.0) soft.entropy -= p * soft.log_p[v];
  }
  return soft;
}

ObjectiveRow ObjectiveOf(const LossOptions& options, const Softmax& soft, size_t target, const Rows& rows,
                         size_t n) {
  if (!options.objective.active()) return {};
  const double l = soft.log_p[target];
  return ComputeObjective(options.objective, l, At(rows.stopped_logprobs, n, l), At(rows.advantages, n, 0.0),
                          At(rows.old_logprobs, n, 0.0), At(rows.ref_logprobs, n, 0.0));
}

RowLoss ComputeRowLoss(const LossOptions& options, const ClassWeights& u, const Softmax& soft, size_t target,
                       const ObjectiveRow& objective, const SoftTargets& targets) {
  const size_t v_count = soft.z.size();
  const double alpha = static_cast<double>(options.label_smoothing);
  double smooth = 0.0;
  for (size_t v = 0; v < v_count && alpha > 0.0; ++v) {
    smooth -= u[v] * soft.log_p[v] / static_cast<double>(v_count);
  }
  const double z_loss = static_cast<double>(options.z_loss) * soft.lse * soft.lse;
  if (targets.used()) return {.loss = targets.Loss(soft) + z_loss, .z_loss = z_loss};
  if (options.objective.active()) {
    const double bonus = double{options.objective.entropy_bonus};
    return {.loss = objective.loss - (bonus == 0.0 ? 0.0 : bonus * soft.entropy) + z_loss, .z_loss = z_loss};
  }
  const double hard = -u[target] * soft.log_p[target];
  return {.loss = (1.0 - alpha) * hard + alpha * smooth + z_loss, .z_loss = z_loss};
}

Upstream UpstreamOf(const LossOptions& options, const Softmax& soft, size_t target, const Rows& rows,
                    size_t n) {
  const double loss = rows.grad_scale * At(rows.row_weights, n, 1.0) * At(rows.grad_loss, n, 1.0);
  return {loss, At(rows.grad_lse, n, 0.0),
          At(rows.grad_entropy, n, 0.0) - double{options.objective.entropy_bonus} * loss,
          ObjectiveOf(options, soft, target, rows, n), SoftTargetsOf(options, soft, rows, n)};
}

double DroppedMass(const LossOptions& options, const Softmax& soft, size_t target,
                   const SoftTargets& targets) {
  double mass = 0.0;
  for (size_t v = 0; v < soft.log_p.size(); ++v) {
    if (IsDropped(options, soft, v, target, targets)) mass += std::exp(soft.log_p[v]);
  }
  return mass;
}

RowClasses ComputeRowClasses(const LossOptions& options, const ClassWeights& u, const Softmax& soft,
                             size_t target, const Upstream& upstream, const Rows& rows) {
  const size_t v_count = soft.z.size();
  double u_sum = 0.0;
  for (size_t v = 0; v < v_count; ++v) u_sum += u[v];
  RowClasses row;
  row.size.assign(v_count, 0.0);
  row.error = row.variance = row.size;
  row.sample_scale = SampleScale(options, u, u_sum, soft, target, upstream);
  const double least = static_cast<double>(options.sample_threshold) * row.sample_scale;
  // With a teacher, the errors of the logits of both heads count. max_abs_logit has these logits divided by
  // the temperature.
  const double largest = std::max(MaxAbs(soft.z), upstream.divergence.max_abs_logit);
  const double logit_error = rows.logit_error * (1.0 + largest);
  for (size_t v = 0; v < v_count; ++v) {
    ClassGradient d = ComputeClassGradient(options, u, u_sum, soft, target, upstream, v);
    // Here the uniform part is sampled or computed with the other terms. Otherwise ComputeLogitGradient adds
    // it exactly, in closed form.
    if (options.softcap > 0.0f || v == target || rows.sample_uniform || options.distillation.used()) {
      d.value += d.uniform;
      d.magnitude += std::fabs(d.uniform);
      d.uncapped += std::fabs(d.uniform);
      d.uniform = 0.0;
    }
    row.gradient.push_back(d);
    if (v == target || row.sample_scale == 0.0) continue;
    const double size = std::fabs(d.value);
    row.size[v] = size / least;
    row.error[v] = logit_error * (d.magnitude + d.uncapped) / least;
    // kappa^2 size_v (tau - size_v) of docs/math.md; here `size` is kappa size_v, and `least` is kappa tau.
    if (size < least) row.variance[v] = size * (least - size);
  }
  return row;
}

LogitGradient ComputeLogitGradient(const LossOptions& options, const ClassWeights& u, const Softmax& soft,
                                   size_t target, const Upstream& upstream, const Rows& rows, size_t n) {
  const size_t v_count = soft.z.size();
  const double scale = static_cast<double>(options.logit_scale);
  RowClasses classes = ComputeRowClasses(options, u, soft, target, upstream, rows);
  LogitGradient row;
  row.gradient = Zeros(v_count);
  if (MaySample(options.gradients)) {
    const auto number = static_cast<uint64_t>(rows.first_row) + n;
    const std::vector<SampledPart> parts =
        SampledPartsOf(v_count, rows.class_parts, rows.class_shares, rows.sample_seed, number);
    row.sample_scale = classes.sample_scale;
    for (const ClassGradient& d : classes.gradient) row.squared_gradient += d.value * d.value;
    for (const double variance : classes.variance) row.sampling_variance += variance;
    row.gradient.variance = classes.variance;
    SampleRow(options, parts, target, classes, row.gradient.undecided);
  }
  for (size_t v = 0; v < v_count; ++v) {
    const ClassGradient& d = classes.gradient[v];
    row.gradient.value[v] = scale * (d.value + d.uniform);
    row.gradient.magnitude[v] = std::fabs(scale) * (d.magnitude + std::fabs(d.uniform));
    row.gradient.variance[v] *= scale * scale;
    row.gradient.undecided[v] *= scale * scale;
  }
  return row;
}

}  // namespace lossd::kernels::reference
