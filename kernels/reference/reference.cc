#include "kernels/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/backend.h"
#include "kernels/sampling.h"

namespace lossd::kernels::reference {
namespace {

double At(const std::vector<double>& values, size_t i, double missing) {
  return values.empty() ? missing : values[i];
}

Gradient Zeros(size_t n) {
  return {std::vector<double>(n, 0.0), std::vector<double>(n, 0.0), std::vector<double>(n, 0.0)};
}

// One row after the norm.
struct NormedRow {
  std::vector<double> unit;  // before gain and shift
  std::vector<double> y;     // what the classifier sees
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

// The gradient of the row before the norm from that after it (Jacobian applied term by term), written to
// `grad_x` from element `begin` on. Errors of the elements of one row may all point the same way, so standard
// deviations add up.
void NormBackward(const Head& head, const NormedRow& row, const Gradient& grad_y, size_t begin,
                  Gradient& grad_x) {
  const size_t d = row.y.size();
  for (size_t i = 0; i < d; ++i) {
    if (head.config.norm == Norm::kNone) {
      grad_x.value[begin + i] = grad_y.value[i];
      grad_x.magnitude[begin + i] = grad_y.magnitude[i];
      grad_x.variance[begin + i] = grad_y.variance[i];
      continue;
    }
    const double mean_part = head.config.norm == Norm::kLayerNorm ? 1.0 / static_cast<double>(d) : 0.0;
    double value = 0.0;
    double magnitude = 0.0;
    double deviation = 0.0;
    for (size_t j = 0; j < d; ++j) {
      // d unit_j / d x_i, without the factor inverse_deviation.
      const double identity = i == j ? 1.0 : 0.0;
      const double scale_part = row.unit[i] * row.unit[j] / static_cast<double>(d);
      const double slope = head.norm_gain[j] * (identity - mean_part - scale_part);
      value += grad_y.value[j] * slope;
      deviation += std::sqrt(grad_y.variance[j]) * std::fabs(slope);
      magnitude +=
          grad_y.magnitude[j] * std::fabs(head.norm_gain[j]) * (identity + mean_part + std::fabs(scale_part));
    }
    grad_x.value[begin + i] = value * row.inverse_deviation;
    grad_x.magnitude[begin + i] = magnitude * row.inverse_deviation;
    grad_x.variance[begin + i] = std::pow(deviation * row.inverse_deviation, 2);
  }
}

// The logits of one row and everything that follows from them alone.
struct Softmax {
  std::vector<double> z;
  std::vector<double> cap_slope;  // dz/ds
  std::vector<double> log_p;
  double lse = 0.0;
  double entropy = 0.0;
};

Softmax ComputeSoftmax(const Head& head, const LossOptions& options, const std::vector<double>& y) {
  const size_t v_count = static_cast<size_t>(head.config.vocab_size);
  Softmax soft;
  soft.z.resize(v_count);
  soft.cap_slope.assign(v_count, 1.0);
  soft.log_p.resize(v_count);
  for (size_t v = 0; v < v_count; ++v) {
    double s = head.config.has_bias ? head.bias[v] : 0.0;
    for (size_t i = 0; i < y.size(); ++i) s += head.weight[v * y.size() + i] * y[i];
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
    soft.entropy -= std::exp(soft.log_p[v]) * soft.log_p[v];
  }
  return soft;
}

// Class weights as the loss sees them.
struct ClassWeights {
  const Head& head;
  bool used;
  double operator[](size_t v) const { return used ? head.class_weights[v] : 1.0; }
};

// What a row's loss is multiplied with on its way into the gradients.
struct Upstream {
  double loss;  // grad_scale * row weight * grad_loss
  double lse;
  double entropy;
};

Upstream UpstreamOf(const Rows& rows, size_t n) {
  return {rows.grad_scale * At(rows.row_weights, n, 1.0) * At(rows.grad_loss, n, 1.0),
          At(rows.grad_lse, n, 0.0), At(rows.grad_entropy, n, 0.0)};
}

// dL/d(dot product) of one row, and what sampling made of it.
struct LogitGradient {
  Gradient gradient;  // [V]
  double sample_scale = 0.0;
  double sampling_variance = 0.0;  // of dL/d(logit scale * dot product), like the two below
  double squared_gradient = 0.0;
};

// 1 - p_v without cancellation when p_v is close to 1.
double OneMinusP(const Softmax& soft, size_t v) { return -std::expm1(soft.log_p[v]); }

bool IsDropped(const LossOptions& options, const Softmax& soft, size_t v, size_t target) {
  return options.gradients == Gradients::kFiltered && v != target &&
         std::exp(soft.log_p[v]) < static_cast<double>(options.filter_epsilon);
}

double DroppedMass(const LossOptions& options, const Softmax& soft, size_t target) {
  double mass = 0.0;
  for (size_t v = 0; v < soft.log_p.size(); ++v) {
    if (IsDropped(options, soft, v, target)) mass += std::exp(soft.log_p[v]);
  }
  return mass;
}

// A class's part of dL/ds in pieces, without the logit scale.
struct ClassGradient {
  double value = 0.0;      // but for `uniform`
  double magnitude = 0.0;  // of the terms of `value`
  double uncapped = 0.0;   // likewise, without the factor dz/ds
  double uniform = 0.0;    // of label smoothing: the same for all rows but for a factor
};

ClassGradient ComputeClassGradient(const LossOptions& options, const ClassWeights& u, double u_sum,
                                   const Softmax& soft, size_t target, const Upstream& upstream, size_t v) {
  const double alpha = static_cast<double>(options.label_smoothing);
  const double lambda = static_cast<double>(options.z_loss);
  const double share = alpha / static_cast<double>(soft.z.size());
  const double p = IsDropped(options, soft, v, target) ? 0.0 : std::exp(soft.log_p[v]);
  const double hard = v == target ? -OneMinusP(soft, v) : p;
  const double terms[] = {
      upstream.loss * u[target] * (1.0 - alpha) * hard,
      upstream.loss * share * u_sum * p,
      upstream.loss * 2.0 * lambda * soft.lse * p,
      upstream.lse * p,
      -upstream.entropy * p * soft.log_p[v],
      -upstream.entropy * p * soft.entropy,
  };
  ClassGradient result;
  for (double term : terms) {
    result.value += soft.cap_slope[v] * term;
    result.magnitude += std::fabs(soft.cap_slope[v] * term);
    result.uncapped += std::fabs(term);
  }
  result.uniform = -soft.cap_slope[v] * upstream.loss * share * u[v];
  return result;
}

// kappa of docs/math.md.
double SampleScale(const LossOptions& options, const ClassWeights& u, double u_sum, const Softmax& soft,
                   size_t target, const Upstream& upstream) {
  const double alpha = static_cast<double>(options.label_smoothing);
  const double lambda = static_cast<double>(options.z_loss);
  const double share = alpha / static_cast<double>(soft.z.size());
  const double k = upstream.loss * (u[target] * (1.0 - alpha) + share * u_sum + 2.0 * lambda * soft.lse);
  return std::fabs(k + upstream.lse) + std::fabs(upstream.entropy);
}

// The next class of the row is taken or not: `d` becomes what counts instead. Returns its variance. A class
// of size `least` is as wide as the points are apart.
double SampleClass(double least, SystematicSampler<double>& sampler, ClassGradient& d) {
  const double size = std::fabs(d.value);
  const bool taken = sampler.Take(least > 0.0 ? size / least : 1.0);
  if (size >= least) return 0.0;
  d.value = taken ? std::copysign(least, d.value) : 0.0;
  d.magnitude = std::fabs(d.value);
  return size * (least - size);
}

LogitGradient ComputeLogitGradient(const LossOptions& options, const ClassWeights& u, const Softmax& soft,
                                   size_t target, const Upstream& upstream, float omega) {
  const size_t v_count = soft.z.size();
  const bool sampled = options.gradients == Gradients::kSampled || options.gradients == Gradients::kAuto;
  const double scale = static_cast<double>(options.logit_scale);
  double u_sum = 0.0;
  for (size_t v = 0; v < v_count; ++v) u_sum += u[v];
  LogitGradient row;
  row.gradient = Zeros(v_count);
  if (sampled) row.sample_scale = SampleScale(options, u, u_sum, soft, target, upstream);
  const double least = static_cast<double>(options.sample_threshold) * row.sample_scale;
  SystematicSampler<double> sampler(static_cast<double>(omega));
  for (size_t v = 0; v < v_count; ++v) {
    ClassGradient d = ComputeClassGradient(options, u, u_sum, soft, target, upstream, v);
    if (options.softcap > 0.0f || v == target) {
      d.value += d.uniform;
      d.magnitude += std::fabs(d.uniform);
      d.uniform = 0.0;
    }
    double variance = 0.0;
    if (sampled) row.squared_gradient += d.value * d.value;
    if (sampled && v != target) variance = SampleClass(least, sampler, d);
    row.sampling_variance += variance;
    row.gradient.value[v] = scale * (d.value + d.uniform);
    row.gradient.magnitude[v] = std::fabs(scale) * (d.magnitude + std::fabs(d.uniform));
    row.gradient.variance[v] = scale * scale * variance;
  }
  return row;
}

void RecordRow(const LossOptions& options, const ClassWeights& u, const Softmax& soft, size_t target,
               double row_weight, size_t n, Result& result) {
  const size_t v_count = soft.z.size();
  const double alpha = static_cast<double>(options.label_smoothing);
  double smooth = 0.0;
  for (size_t v = 0; v < v_count; ++v) smooth -= u[v] * soft.log_p[v] / static_cast<double>(v_count);
  const double z_loss = static_cast<double>(options.z_loss) * soft.lse * soft.lse;
  const double hard = -u[target] * soft.log_p[target];
  result.loss[n] = row_weight * ((1.0 - alpha) * hard + alpha * smooth + z_loss);
  result.z_loss[n] = row_weight * z_loss;
  result.lse[n] = soft.lse;
  result.entropy[n] = soft.entropy;
  result.target_logprob[n] = soft.log_p[target];
  const auto top = std::max_element(soft.z.begin(), soft.z.end());
  result.argmax[n] = static_cast<int32_t>(top - soft.z.begin());
  result.top_gap[n] = std::numeric_limits<double>::infinity();
  for (size_t v = 0; v < v_count; ++v) {
    result.max_abs_logit[n] = std::max(result.max_abs_logit[n], std::fabs(soft.z[v]));
    if (static_cast<int32_t>(v) == result.argmax[n]) continue;
    result.top_gap[n] = std::min(result.top_gap[n], *top - soft.z[v]);
  }
  result.loss_sum += result.loss[n];
  result.z_loss_sum += result.z_loss[n];
  result.entropy_sum += soft.entropy;
  result.valid_rows += 1;
  result.correct_rows += result.argmax[n] == static_cast<int32_t>(target) ? 1 : 0;
}

// gradient[i] += factor * from[j].
void Add(const Gradient& from, size_t j, double factor, Gradient& gradient, size_t i) {
  gradient.value[i] += factor * from.value[j];
  gradient.magnitude[i] += std::fabs(factor) * from.magnitude[j];
  gradient.variance[i] += factor * factor * from.variance[j];
}

void AccumulateParams(const HeadConfig& config, const NormedRow& row, const Gradient& ds,
                      const Gradient& grad_y, ParamGradients& gradients) {
  const size_t d = row.y.size();
  for (size_t v = 0; v < ds.value.size(); ++v) {
    for (size_t i = 0; i < d; ++i) Add(ds, v, row.y[i], gradients.weight, v * d + i);
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
                       &result.max_abs_logit, &result.top_gap, &result.dropped_mass, &result.sample_scale,
                       &result.sampling_variance, &result.squared_gradient}) {
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
    RecordRow(options, u, soft, target, row_weight, n, result);
    result.dropped_mass[n] = DroppedMass(options, soft, target);

    const Upstream upstream = UpstreamOf(rows, n);
    const float omega = SampleOf(rows.sample_seed, static_cast<uint64_t>(rows.first_row) + n);
    const LogitGradient ds = ComputeLogitGradient(options, u, soft, target, upstream, omega);
    result.sample_scale[n] = ds.sample_scale;
    result.sampling_variance[n] = ds.sampling_variance;
    result.squared_gradient[n] = ds.squared_gradient;
    Gradient grad_y = Zeros(d);
    for (size_t v = 0; v < soft.z.size(); ++v) {
      for (size_t i = 0; i < d; ++i) Add(ds.gradient, v, head.weight[v * d + i], grad_y, i);
    }
    NormBackward(head, row, grad_y, n * d, result.grad_hidden);
    const bool accumulate = rows.accumulate.empty() || rows.accumulate[n] != 0;
    if (gradients != nullptr && accumulate) {
      AccumulateParams(head.config, row, ds.gradient, grad_y, *gradients);
    }
  }
  return result;
}

std::vector<double> SampleClearances(const Head& head, const LossOptions& options, const Rows& rows) {
  const size_t v_count = static_cast<size_t>(head.config.vocab_size);
  const size_t d_count = static_cast<size_t>(head.config.hidden_size);
  const ClassWeights u{head, options.use_class_weights};
  double u_sum = 0.0;
  for (size_t v = 0; v < v_count; ++v) u_sum += u[v];
  std::vector<double> clearances(rows.targets.size(), std::numeric_limits<double>::infinity());
  for (size_t n = 0; n < rows.targets.size(); ++n) {
    if (rows.targets[n] == kIgnoredTarget) continue;
    const size_t target = static_cast<size_t>(rows.targets[n]);
    const Softmax soft = ComputeSoftmax(head, options, ApplyNorm(head, &rows.hidden[n * d_count]).y);
    const Upstream upstream = UpstreamOf(rows, n);
    const double least = static_cast<double>(options.sample_threshold) *
                         SampleScale(options, u, u_sum, soft, target, upstream);
    const float omega = SampleOf(rows.sample_seed, static_cast<uint64_t>(rows.first_row) + n);
    double end = 1.0 - static_cast<double>(omega);  // of the class, relative to the points
    double error = 0.0;                             // of `end`
    for (size_t v = 0; v < v_count && least > 0.0; ++v) {
      if (v == target) continue;
      const ClassGradient d = ComputeClassGradient(options, u, u_sum, soft, target, upstream, v);
      const double uniform = options.softcap > 0.0f ? d.uniform : 0.0;
      const double width = std::fabs(d.value + uniform) / least;
      end += std::min(width, 1.0);
      if (width < 1.01) error += (d.magnitude + d.uncapped + 2.0 * std::fabs(uniform)) / least;
      if (error > 0.0) clearances[n] = std::min(clearances[n], std::fabs(end - std::round(end)) / error);
    }
  }
  return clearances;
}

std::vector<double> Probabilities(const Head& head, const LossOptions& options, const Rows& rows) {
  const size_t d = static_cast<size_t>(head.config.hidden_size);
  std::vector<double> probabilities;
  for (size_t n = 0; n < rows.targets.size(); ++n) {
    const Softmax soft = ComputeSoftmax(head, options, ApplyNorm(head, &rows.hidden[n * d]).y);
    for (double log_p : soft.log_p) probabilities.push_back(std::exp(log_p));
  }
  return probabilities;
}

}  // namespace lossd::kernels::reference
