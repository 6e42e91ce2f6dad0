// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/divergence.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lossd::kernels {
namespace {

// One softmax at the temperature: log p_v = (z_v - top) inverse - log_total.
struct LogSoftmax {
  double top = 0.0;
  double inverse = 1.0;  // of the temperature
  double log_total = 0.0;

  double operator()(float z) const { return (double{z} - top) * inverse - log_total; }
};

LogSoftmax LogSoftmaxOf(const float* z, int64_t n, double inverse) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t v = 0; v < n; ++v) top = z[v] > top ? z[v] : top;
  LogSoftmax softmax{.top = double{top}, .inverse = inverse};
  double total = 0.0;
  for (int64_t v = 0; v < n; ++v) total += std::exp((double{z[v]} - softmax.top) * inverse);
  softmax.log_total = std::log(total);
  return softmax;
}

// What one class adds to a divergence, and q times its derivative by q.
struct ClassTerm {
  double value = 0.0;
  double slope = 0.0;
};

// p log(p / other) of a probability that is not 0.
double Relative(double p, double log_p, double log_other) { return p == 0.0 ? 0.0 : p * (log_p - log_other); }

template <Divergence kDivergence>
ClassTerm TermOf(double p, double log_p, double q, double log_q, double beta) {
  if constexpr (kDivergence == Divergence::kForwardKl) {
    return {.value = Relative(p, log_p, log_q), .slope = -p};
  } else if constexpr (kDivergence == Divergence::kReverseKl) {
    const double value = Relative(q, log_q, log_p);
    return {.value = value, .slope = value};
  } else if constexpr (kDivergence == Divergence::kJensenShannon) {
    const double log_m = std::log(beta * p + (1.0 - beta) * q);  // not used where both are 0
    const double of_student = (1.0 - beta) * Relative(q, log_q, log_m);
    return {.value = beta * Relative(p, log_p, log_m) + of_student, .slope = of_student};
  } else {
    const double half = q > p ? 0.5 : q < p ? -0.5 : 0.0;
    return {.value = half * (q - p), .slope = half * q};
  }
}

template <Divergence kDivergence>
double RowOf(const Distillation& distillation, const float* student, float softcap, int64_t n,
             bool want_gradient, float* teacher) {
  const double inverse = 1.0 / double{distillation.temperature};
  const double beta = double{distillation.beta};
  const LogSoftmax of_student = LogSoftmaxOf(student, n, inverse);
  const LogSoftmax of_teacher = LogSoftmaxOf(teacher, n, inverse);
  double value = 0.0;
  double mean = 0.0;  // sum of the slopes
  for (int64_t v = 0; v < n; ++v) {
    const double log_p = of_teacher(teacher[v]);
    const double log_q = of_student(student[v]);
    const ClassTerm term = TermOf<kDivergence>(std::exp(log_p), log_p, std::exp(log_q), log_q, beta);
    value += term.value;
    mean += term.slope;
  }
  if (!want_gradient || !std::isfinite(value)) return value;
  const double inverse_softcap = softcap > 0.0f ? 1.0 / double{softcap} : 0.0;
  for (int64_t v = 0; v < n; ++v) {
    const double log_p = of_teacher(teacher[v]);
    const double log_q = of_student(student[v]);
    const double q = std::exp(log_q);
    const ClassTerm term = TermOf<kDivergence>(std::exp(log_p), log_p, q, log_q, beta);
    const double capped = softcap > 0.0f ? double{student[v]} * inverse_softcap : 0.0;
    teacher[v] = static_cast<float>((term.slope - q * mean) * inverse * (1.0 - capped * capped));
  }
  return value;
}

}  // namespace

double DivergenceOfRow(const Distillation& distillation, const float* student, float softcap, int64_t n,
                       bool want_gradient, float* teacher) {
  switch (distillation.divergence) {
    case Divergence::kNone:
      return 0.0;
    case Divergence::kForwardKl:
      return RowOf<Divergence::kForwardKl>(distillation, student, softcap, n, want_gradient, teacher);
    case Divergence::kReverseKl:
      return RowOf<Divergence::kReverseKl>(distillation, student, softcap, n, want_gradient, teacher);
    case Divergence::kJensenShannon:
      return RowOf<Divergence::kJensenShannon>(distillation, student, softcap, n, want_gradient, teacher);
    case Divergence::kTotalVariation:
      return RowOf<Divergence::kTotalVariation>(distillation, student, softcap, n, want_gradient, teacher);
  }
  return 0.0;
}

}  // namespace lossd::kernels
