// SPDX-License-Identifier: Apache-2.0
#include "kernels/reference/row_formulas.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/reference/sampled_row.h"
#include "kernels/sampling.h"

namespace lossd::kernels::reference {
namespace {

// 1 - p_v without cancellation when p_v is close to 1.
double OneMinusP(const Softmax& soft, size_t v) { return -std::expm1(soft.log_p[v]); }

bool IsDropped(const LossOptions& options, const Softmax& soft, size_t v, size_t target) {
  return options.gradients == Gradients::kFiltered && v != target &&
         std::exp(soft.log_p[v]) < static_cast<double>(options.filter_epsilon);
}

ClassGradient ComputeClassGradient(const LossOptions& options, const ClassWeights& u, double u_sum,
                                   const Softmax& soft, size_t target, const Upstream& upstream, size_t v) {
  const double alpha = static_cast<double>(options.label_smoothing);
  const double lambda = static_cast<double>(options.z_loss);
  const double share = alpha / static_cast<double>(soft.z.size());
  const double p = IsDropped(options, soft, v, target) ? 0.0 : std::exp(soft.log_p[v]);
  const double hard = v == target ? -OneMinusP(soft, v) : p;
  const double terms[] = {
      upstream.loss * u[target] * (1.0 - alpha) * hard,      upstream.loss * share * u_sum * p,
      upstream.loss * 2.0 * lambda * soft.lse * p,           upstream.lse * p,
      p > 0.0 ? -upstream.entropy * p * soft.log_p[v] : 0.0, -upstream.entropy * p * soft.entropy,
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

// Puts what counts in the place of each sampled gradient.
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
    const double p = std::exp(soft.log_p[v]);
    if (p > 0.0) soft.entropy -= p * soft.log_p[v];
  }
  return soft;
}

RowLoss ComputeRowLoss(const LossOptions& options, const ClassWeights& u, const Softmax& soft,
                       size_t target) {
  const size_t v_count = soft.z.size();
  const double alpha = static_cast<double>(options.label_smoothing);
  double smooth = 0.0;
  for (size_t v = 0; v < v_count && alpha > 0.0; ++v) {
    smooth -= u[v] * soft.log_p[v] / static_cast<double>(v_count);
  }
  const double z_loss = static_cast<double>(options.z_loss) * soft.lse * soft.lse;
  const double hard = -u[target] * soft.log_p[target];
  return {.loss = (1.0 - alpha) * hard + alpha * smooth + z_loss, .z_loss = z_loss};
}

Upstream UpstreamOf(const Rows& rows, size_t n) {
  return {rows.grad_scale * At(rows.row_weights, n, 1.0) * At(rows.grad_loss, n, 1.0),
          At(rows.grad_lse, n, 0.0), At(rows.grad_entropy, n, 0.0)};
}

double DroppedMass(const LossOptions& options, const Softmax& soft, size_t target) {
  double mass = 0.0;
  for (size_t v = 0; v < soft.log_p.size(); ++v) {
    if (IsDropped(options, soft, v, target)) mass += std::exp(soft.log_p[v]);
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
  const double logit_error = rows.logit_error * (1.0 + MaxAbs(soft.z));
  for (size_t v = 0; v < v_count; ++v) {
    ClassGradient d = ComputeClassGradient(options, u, u_sum, soft, target, upstream, v);
    if (options.softcap > 0.0f || v == target || rows.sample_uniform) {
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
