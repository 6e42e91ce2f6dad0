// SPDX-License-Identifier: Apache-2.0
// The sums and the gradient of a divergence (divergence.h). p are the probabilities of the teacher, and q
// those of the student, at the temperature T. z is the student's logit.
//
// A divergence is a sum of one term a class. `slope` is q times the term's derivative with respect to q. The
// gradient with respect to z_v is (slope_v - q_v * the sum of all slopes) / T. A constant times q in all
// slopes cancels there, so it is left out (the reverse KL).
#include "kernels/cpu/divergence.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

namespace lossd::kernels {
namespace {

constexpr float kInfinite = std::numeric_limits<float>::infinity();

// log p_v = (z_v - top) / T - log(sum).
class LogSoftmax {
 public:
  LogSoftmax(const SoftenedRow& row, double inverse_temperature)
      : top_(std::isinf(row.top) ? 0.0 : double{row.top}),
        inverse_(inverse_temperature),
        log_sum_(std::log(row.sum)) {}
  double operator()(float z) const { return (double{z} - top_) * inverse_ - log_sum_; }

 private:
  const double top_;
  const double inverse_;
  const double log_sum_;
};

// The term of one class in a divergence, and its slope (head of this file).
struct ClassTerm {
  double value = 0.0;
  double slope = 0.0;
};

// p log(p / other); 0 if p is 0.
double Relative(double p, double log_p, double log_other) { return p == 0.0 ? 0.0 : p * (log_p - log_other); }

template <Divergence kDivergence>
ClassTerm TermOf(double p, double log_p, double q, double log_q, double beta) {
  if constexpr (kDivergence == Divergence::kForwardKl) {
    return {.value = Relative(p, log_p, log_q), .slope = -p};
  } else if constexpr (kDivergence == Divergence::kReverseKl) {
    const double value = Relative(q, log_q, log_p);
    return {.value = value, .slope = value};
  } else if constexpr (kDivergence == Divergence::kJensenShannon) {
    const double log_m = std::log(beta * p + (1.0 - beta) * q);  // not used if p and q are 0
    const double of_student = (1.0 - beta) * Relative(q, log_q, log_m);
    return {.value = beta * Relative(p, log_p, log_m) + of_student, .slope = of_student};
  } else {
    const double half = q > p ? 0.5 : q < p ? -0.5 : 0.0;
    return {.value = half * (q - p), .slope = half * q};
  }
}

template <Divergence kDivergence>
DivergenceSums SumDivergenceOf(const Distillation& distillation, const TaughtLogits& logits,
                               const TaughtRow& row) {
  const double inverse = 1.0 / double{distillation.temperature};
  const double beta = double{distillation.beta};
  const LogSoftmax teacher(row.teacher, inverse), student(row.student, inverse);
  DivergenceSums sums;
  for (int64_t v = 0; v < logits.n; ++v) {
    const double log_p = teacher(logits.teacher[v]);
    const double log_q = student(logits.student[v]);
    const ClassTerm term = TermOf<kDivergence>(std::exp(log_p), log_p, std::exp(log_q), log_q, beta);
    sums.value += term.value;
    sums.slope += term.slope;
  }
  return sums;
}

template <Divergence kDivergence>
void WriteGradientOf(const Distillation& distillation, const TaughtLogits& logits, const TaughtRow& row,
                     float softcap, float* gradient) {
  const double inverse = 1.0 / double{distillation.temperature};
  const double beta = double{distillation.beta};
  const LogSoftmax teacher(row.teacher, inverse), student(row.student, inverse);
  const double inverse_softcap = softcap > 0.0f ? 1.0 / double{softcap} : 0.0;
  for (int64_t v = 0; v < logits.n; ++v) {
    const double log_p = teacher(logits.teacher[v]);
    const double log_q = student(logits.student[v]);
    const double q = std::exp(log_q);
    const ClassTerm term = TermOf<kDivergence>(std::exp(log_p), log_p, q, log_q, beta);
    const double capped = softcap > 0.0f ? double{logits.student[v]} * inverse_softcap : 0.0;
    gradient[v] = static_cast<float>((term.slope - q * row.sums.slope) * inverse * (1.0 - capped * capped));
  }
}

// Calls body(std::integral_constant) with the divergence as a constant. It is not kNone.
template <typename Body>
auto WithDivergence(Divergence divergence, Body body) {
  switch (divergence) {
    case Divergence::kNone:
    case Divergence::kForwardKl:
      break;
    case Divergence::kReverseKl:
      return body(std::integral_constant<Divergence, Divergence::kReverseKl>());
    case Divergence::kJensenShannon:
      return body(std::integral_constant<Divergence, Divergence::kJensenShannon>());
    case Divergence::kTotalVariation:
      return body(std::integral_constant<Divergence, Divergence::kTotalVariation>());
  }
  return body(std::integral_constant<Divergence, Divergence::kForwardKl>());
}

}  // namespace

SoftenedRow Soften(const float* z, int64_t n, float temperature) {
  const double inverse = 1.0 / double{temperature};
  SoftenedRow row;
  for (int64_t v = 0; v < n; ++v) row.top = z[v] > row.top ? z[v] : row.top;
  const double from = row.top == -kInfinite ? 0.0 : double{row.top};
  for (int64_t v = 0; v < n; ++v) row.sum += std::exp((double{z[v]} - from) * inverse);
  return row;
}

TaughtRow MergeSoftened(absl::Span<const TaughtRow* const> parts, float temperature) {
  TaughtRow all = *parts.front();
  if (parts.size() == 1) return all;
  const double inverse = 1.0 / double{temperature};
  for (SoftenedRow TaughtRow::*const softmax : {&TaughtRow::student, &TaughtRow::teacher}) {
    SoftenedRow merged;
    for (const TaughtRow* part : parts) merged.top = std::max(merged.top, (part->*softmax).top);
    for (const TaughtRow* part : parts) {
      const SoftenedRow& own = part->*softmax;
      // Without a top the sum is 0 or NaN.
      const double shift = own.top == -kInfinite ? 0.0 : (double{own.top} - double{merged.top}) * inverse;
      merged.sum += own.sum * std::exp(shift);
    }
    all.*softmax = merged;
  }
  for (const TaughtRow* part : parts) all.teacher_finite = all.teacher_finite && part->teacher_finite;
  return all;
}

DivergenceSums AddDivergences(absl::Span<const TaughtRow* const> parts) {
  DivergenceSums all;
  for (const TaughtRow* part : parts) {
    all.value += part->sums.value;
    all.slope += part->sums.slope;
  }
  return all;
}

DivergenceSums SumDivergence(const Distillation& distillation, const TaughtLogits& logits,
                             const TaughtRow& row) {
  return WithDivergence(distillation.divergence, [&](auto divergence) {
    return SumDivergenceOf<divergence.value>(distillation, logits, row);
  });
}

void WriteDivergenceGradient(const Distillation& distillation, const TaughtLogits& logits,
                             const TaughtRow& row, float softcap, float* gradient) {
  WithDivergence(distillation.divergence, [&](auto divergence) {
    WriteGradientOf<divergence.value>(distillation, logits, row, softcap, gradient);
  });
}

}  // namespace lossd::kernels
