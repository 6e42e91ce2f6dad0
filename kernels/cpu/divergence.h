// SPDX-License-Identifier: Apache-2.0
// The divergence of one row between the softmax of a teacher and that of the student, with its gradient.
// Formulas in docs/math.md, "Distillation".
//
// A row is computed in three steps, so that its classes may lie on several devices: what the classes that are
// here say of either softmax (Soften), the sums of the divergence over them once the softmaxes of all classes
// are known (SumDivergence), and, once these sums are, the gradient (WriteDivergenceGradient).
//
// Stateless; thread-safe on different rows.
#ifndef LOSSD_KERNELS_CPU_DIVERGENCE_H_
#define LOSSD_KERNELS_CPU_DIVERGENCE_H_

#include <cstdint>
#include <limits>

#include "absl/types/span.h"
#include "kernels/distillation.h"

namespace lossd::kernels {

// What some classes of a row say of one softmax at the temperature T.
struct SoftenedRow {
  float top = -std::numeric_limits<float>::infinity();  // the largest z; -infinity if all are
  double sum = 0.0;  // of exp((z - top) / T), or of exp(z / T) without a top
};

// The sums of a divergence over some classes of a row, or over all.
struct DivergenceSums {
  double value = 0.0;  // the divergence before its weight
  double slope = 0.0;  // of f (docs/math.md)
};

// What some classes of a row say of it and of its teacher.
struct TaughtRow {
  SoftenedRow student;
  SoftenedRow teacher;
  bool teacher_finite = true;  // the dot products that a softcap would hide
  DivergenceSums sums;
};

// z [n]: logits after scale, bias and softcap; -infinity masks a class.
SoftenedRow Soften(const float* z, int64_t n, float temperature);
// A row over the classes of all parts, added up in their order: all but the sums, and these.
TaughtRow MergeSoftened(absl::Span<const TaughtRow* const> parts, float temperature);
DivergenceSums AddDivergences(absl::Span<const TaughtRow* const> parts);

// The logits [n] of both heads for the same classes of a row, whose softmaxes over all classes `row` has.
struct TaughtLogits {
  const float* student = nullptr;
  const float* teacher = nullptr;
  int64_t n = 0;
};

// Over these classes. The divergence is infinite where one softmax lacks a class that the other has and it
// needs, and NaN if either has no finite log-sum-exp.
DivergenceSums SumDivergence(const Distillation& distillation, const TaughtLogits& logits,
                             const TaughtRow& row);

// gradient [n], which may be logits.teacher: that of the divergence with respect to the student's logits of
// these classes; row.sums are of all classes. softcap: of the student, 0 for none; the gradient is then that
// with respect to the logits before it.
void WriteDivergenceGradient(const Distillation& distillation, const TaughtLogits& logits,
                             const TaughtRow& row, float softcap, float* gradient);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_DIVERGENCE_H_
