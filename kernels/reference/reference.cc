// SPDX-License-Identifier: Apache-2.0
#include "kernels/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/backend.h"
#include "kernels/reference/row_formulas.h"

namespace lossd::kernels::reference {
namespace {

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

void RecordRow(const LossOptions& options, const ClassWeights& u, const Softmax& soft, size_t target,
               double row_weight, size_t n, Result& result) {
  const bool absent = row_weight == 0.0;
  const RowLoss row = absent ? RowLoss() : ComputeRowLoss(options, u, soft, target);
  result.loss[n] = row_weight * row.loss;
  result.z_loss[n] = row_weight * row.z_loss;
  result.lse[n] = soft.lse;
  result.entropy[n] = soft.entropy;
  result.target_logprob[n] = soft.log_p[target];
  const auto top = std::max_element(soft.z.begin(), soft.z.end());
  result.argmax[n] = static_cast<int32_t>(top - soft.z.begin());
  result.top_gap[n] = std::numeric_limits<double>::infinity();
  result.max_abs_logit[n] = MaxAbs(soft.z);
  for (size_t v = 0; v < soft.z.size(); ++v) {
    if (static_cast<int32_t>(v) == result.argmax[n]) continue;
    result.top_gap[n] = std::min(result.top_gap[n], *top - soft.z[v]);
  }
  result.loss_sum += result.loss[n];
  result.z_loss_sum += result.z_loss[n];
  if (std::isfinite(soft.entropy)) result.entropy_sum += soft.entropy;
  result.valid_rows += 1;
  result.correct_rows += result.argmax[n] == static_cast<int32_t>(target) ? 1 : 0;
}

// gradient[i] += factor * from[j].
void Add(const Gradient& from, size_t j, double factor, Gradient& gradient, size_t i) {
  gradient.value[i] += factor * from.value[j];
  gradient.magnitude[i] += std::fabs(factor) * from.magnitude[j];
  gradient.variance[i] += factor * factor * from.variance[j];
  gradient.undecided[i] += factor * factor * from.undecided[j];
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
    const Upstream upstream = UpstreamOf(rows, n);
    if (row_weight == 0.0 && upstream.lse == 0.0 && upstream.entropy == 0.0) continue;  // absent
    result.dropped_mass[n] = DroppedMass(options, soft, target);

    const LogitGradient ds = ComputeLogitGradient(options, u, soft, target, upstream, rows, n);
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

SampledClasses ComputeSampledClasses(const Head& head, const LossOptions& options, const Rows& rows) {
  const size_t v_count = static_cast<size_t>(head.config.vocab_size);
  const size_t d_count = static_cast<size_t>(head.config.hidden_size);
  const ClassWeights u{head, options.use_class_weights};
  SampledClasses classes;
  for (size_t n = 0; n < rows.targets.size(); ++n) {
    RowClasses row;
    row.size.assign(v_count, 0.0);
    row.error = row.size;
    if (rows.targets[n] != kIgnoredTarget) {
      const Softmax soft = ComputeSoftmax(head, options, ApplyNorm(head, &rows.hidden[n * d_count]).y);
      const size_t target = static_cast<size_t>(rows.targets[n]);
      row = ComputeRowClasses(options, u, soft, target, UpstreamOf(rows, n), rows);
    }
    classes.size.insert(classes.size.end(), row.size.begin(), row.size.end());
    classes.error.insert(classes.error.end(), row.error.begin(), row.error.end());
  }
  return classes;
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
