// SPDX-License-Identifier: Apache-2.0
// The divergences of docs/math.md, "Distillation", written down as they are defined.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "kernels/reference/reference.h"

namespace lossd::kernels::reference {
namespace {

// log softmax(z / temperature).
std::vector<double> LogSoftmax(const std::vector<double>& z, double temperature) {
  const double top = *std::max_element(z.begin(), z.end());
  double sum = 0.0;
  for (const double logit : z) sum += std::exp((logit - top) / temperature);
  std::vector<double> log_p;
  for (const double logit : z) log_p.push_back((logit - top) / temperature - std::log(sum));
  return log_p;
}

// p log(p / other), which is 0 where p is.
double Times(double log_p, double log_other) {
  const double p = std::exp(log_p);
  return std::isinf(log_p) ? 0.0 : p * (log_p - log_other);
}

double LogOfSum(double a, double b) {
  const double top = std::max(a, b);
  if (std::isinf(top)) return top;
  return top + std::log(std::exp(a - top) + std::exp(b - top));
}

// What one class adds to a divergence, and q times its derivatives by q and p.
struct ClassTerm {
  double value = 0.0;
  double by_student = 0.0;
  double by_teacher = 0.0;
};

ClassTerm TermOf(const Distillation& distillation, double log_p, double log_q) {
  const double p = std::exp(log_p);
  const double q = std::exp(log_q);
  switch (distillation.divergence) {
    case Divergence::kNone:
      return {};
    case Divergence::kForwardKl:
      return {.value = Times(log_p, log_q), .by_student = -p, .by_teacher = Times(log_p, log_q) + p};
    case Divergence::kReverseKl:
      return {.value = Times(log_q, log_p), .by_student = Times(log_q, log_p) + q, .by_teacher = -q};
    case Divergence::kJensenShannon: {
      const double beta = static_cast<double>(distillation.beta);
      const double log_m = LogOfSum(std::log(beta) + log_p, std::log(1.0 - beta) + log_q);
      return {.value = beta * Times(log_p, log_m) + (1.0 - beta) * Times(log_q, log_m),
              .by_student = (1.0 - beta) * Times(log_q, log_m),
              .by_teacher = beta * Times(log_p, log_m)};
    }
    case Divergence::kTotalVariation: {
      const double sign = q > p ? 0.5 : q < p ? -0.5 : 0.0;
      return {.value = 0.5 * std::fabs(p - q), .by_student = sign * q, .by_teacher = -sign * p};
    }
  }
  return {};
}

}  // namespace

// With y = z / temperature and D = sum_v f(p_v, q_v): dD/dy_k = q_k (f_k - sum_v q_v f_v), f_v being the
// derivative of f by q at class v. TermOf gives q f.
RowDivergence ComputeDivergence(const Distillation& distillation, const Softmax& student,
                                const Softmax& teacher) {
  const double temperature = static_cast<double>(distillation.temperature);
  const std::vector<double> log_q = LogSoftmax(student.z, temperature);
  const std::vector<double> log_p = LogSoftmax(teacher.z, temperature);
  std::vector<ClassTerm> terms;
  RowDivergence row;
  double mean = 0.0;
  double mean_teacher = 0.0;
  for (size_t v = 0; v < log_q.size(); ++v) {
    terms.push_back(TermOf(distillation, log_p[v], log_q[v]));
    row.value += terms[v].value;
    mean += terms[v].by_student;
    mean_teacher += terms[v].by_teacher;
  }
  for (size_t v = 0; v < log_q.size(); ++v) {
    const double q = std::exp(log_q[v]);
    const double p = std::exp(log_p[v]);
    row.gradient.push_back((terms[v].by_student - q * mean) / temperature);
    row.magnitude.push_back((std::fabs(terms[v].by_student) + q * (1.0 + std::fabs(mean)) + p) / temperature);
    row.slope +=
        std::fabs(terms[v].by_student - q * mean) + std::fabs(terms[v].by_teacher - p * mean_teacher);
  }
  return row;
}

}  // namespace lossd::kernels::reference
