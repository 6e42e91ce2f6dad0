#include "kernels/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/backend.h"

namespace lossd::kernels::reference {
namespace {

double At(const std::vector<double>& values, size_t i, double missing) {
  return values.empty() ? missing : values[i];
}

Gradient Zeros(size_t n) { return {std::vector<double>(n, 0.0), std::vector<double>(n, 0.0)}; }

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

// The gradient of the row before the norm from that after it (Jacobian applied term by term).
void NormBackward(const Head& head, const NormedRow& row, const std::vector<double>& grad_y,
                  const std::vector<double>& magnitude_y, double* grad_x, double* magnitude_x) {
  const size_t d = row.y.size();
  if (head.config.norm == Norm::kNone) {
    std::copy(grad_y.begin(), grad_y.end(), grad_x);
    std::copy(magnitude_y.begin(), magnitude_y.end(), magnitude_x);
    return;
  }
  const bool centred = head.config.norm == Norm::kLayerNorm;
  for (size_t i = 0; i < d; ++i) {
    double grad = 0.0;
    double magnitude = 0.0;
    for (size_t j = 0; j < d; ++j) {
      // d unit_j / d x_i, without the factor inverse_deviation.
      const double identity = i == j ? 1.0 : 0.0;
      const double mean_part = centred ? 1.0 / static_cast<double>(d) : 0.0;
      const double scale_part = row.unit[i] * row.unit[j] / static_cast<double>(d);
      grad += grad_y[j] * head.norm_gain[j] * (identity - mean_part - scale_part);
      magnitude +=
          magnitude_y[j] * std::fabs(head.norm_gain[j]) * (identity + mean_part + std::fabs(scale_part));
    }
    grad_x[i] = grad * row.inverse_deviation;
    magnitude_x[i] = magnitude * row.inverse_deviation;
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

struct LogitGradient {
  std::vector<double> value;      // dL/ds, [V]
  std::vector<double> magnitude;  // [V]
};

// 1 - p_v without cancellation when p_v is close to 1.
double OneMinusP(const Softmax& soft, size_t v) { return -std::expm1(soft.log_p[v]); }

bool IsDropped(const LossOptions& options, const Softmax& soft, size_t v, size_t target) {
  return options.gradients != Gradients::kExact && v != target &&
         std::exp(soft.log_p[v]) < static_cast<double>(options.filter_epsilon);
}

double DroppedMass(const LossOptions& options, const Softmax& soft, size_t target) {
  double mass = 0.0;
  for (size_t v = 0; v < soft.log_p.size(); ++v) {
    if (IsDropped(options, soft, v, target)) mass += std::exp(soft.log_p[v]);
  }
  return mass;
}

LogitGradient ComputeLogitGradient(const LossOptions& options, const ClassWeights& u, const Softmax& soft,
                                   size_t target, const Upstream& upstream) {
  const size_t v_count = soft.z.size();
  const double alpha = static_cast<double>(options.label_smoothing);
  const double lambda = static_cast<double>(options.z_loss);
  double u_sum = 0.0;
  for (size_t v = 0; v < v_count; ++v) u_sum += u[v];
  LogitGradient gradient{std::vector<double>(v_count), std::vector<double>(v_count)};
  for (size_t v = 0; v < v_count; ++v) {
    const bool dropped = IsDropped(options, soft, v, target);
    const double p = dropped ? 0.0 : std::exp(soft.log_p[v]);
    const double hard = v == target ? -OneMinusP(soft, v) : p;
    const double share = alpha / static_cast<double>(v_count);
    const double terms[] = {
        upstream.loss * u[target] * (1.0 - alpha) * hard,
        upstream.loss * share * u_sum * p,
        -upstream.loss * share * u[v],
        upstream.loss * 2.0 * lambda * soft.lse * p,
        upstream.lse * p,
        -upstream.entropy * p * soft.log_p[v],
        -upstream.entropy * p * soft.entropy,
    };
    const double slope = static_cast<double>(options.logit_scale) * soft.cap_slope[v];
    for (double term : terms) {
      gradient.value[v] += slope * term;
      gradient.magnitude[v] += std::fabs(slope * term);
    }
  }
  return gradient;
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

void Add(Gradient& gradient, size_t i, double value, double magnitude) {
  gradient.value[i] += value;
  gradient.magnitude[i] += magnitude;
}

void AccumulateParams(const HeadConfig& config, const NormedRow& row, const LogitGradient& ds,
                      const std::vector<double>& grad_y, const std::vector<double>& magnitude_y,
                      ParamGradients& gradients) {
  const size_t d = row.y.size();
  for (size_t v = 0; v < ds.value.size(); ++v) {
    for (size_t i = 0; i < d; ++i) {
      Add(gradients.weight, v * d + i, ds.value[v] * row.y[i], ds.magnitude[v] * std::fabs(row.y[i]));
    }
    if (config.has_bias) Add(gradients.bias, v, ds.value[v], ds.magnitude[v]);
  }
  for (size_t i = 0; i < d; ++i) {
    if (config.norm != Norm::kNone) {
      Add(gradients.norm_gain, i, grad_y[i] * row.unit[i], magnitude_y[i] * std::fabs(row.unit[i]));
    }
    if (config.norm == Norm::kLayerNorm) Add(gradients.norm_shift, i, grad_y[i], magnitude_y[i]);
  }
}

Result EmptyResult(size_t n, size_t d) {
  Result result;
  for (auto* values : {&result.loss, &result.z_loss, &result.lse, &result.entropy, &result.target_logprob,
                       &result.max_abs_logit, &result.top_gap, &result.dropped_mass}) {
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

    const Upstream upstream{rows.grad_scale * row_weight * At(rows.grad_loss, n, 1.0),
                            At(rows.grad_lse, n, 0.0), At(rows.grad_entropy, n, 0.0)};
    const LogitGradient ds = ComputeLogitGradient(options, u, soft, target, upstream);
    std::vector<double> grad_y(d, 0.0);
    std::vector<double> magnitude_y(d, 0.0);
    for (size_t v = 0; v < soft.z.size(); ++v) {
      for (size_t i = 0; i < d; ++i) {
        grad_y[i] += ds.value[v] * head.weight[v * d + i];
        magnitude_y[i] += ds.magnitude[v] * std::fabs(head.weight[v * d + i]);
      }
    }
    NormBackward(head, row, grad_y, magnitude_y, &result.grad_hidden.value[n * d],
                 &result.grad_hidden.magnitude[n * d]);
    const bool accumulate = rows.accumulate.empty() || rows.accumulate[n] != 0;
    if (gradients != nullptr && accumulate) {
      AccumulateParams(head.config, row, ds, grad_y, magnitude_y, *gradients);
    }
  }
  return result;
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
