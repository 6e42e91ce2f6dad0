// SPDX-License-Identifier: Apache-2.0
// The divergence of one row between the softmax of a teacher and that of the student, with its gradient.
// Formulas in docs/math.md, "Distillation".
//
// A row is computed in three steps, so that its classes may be divided over several devices:
// 1. Soften: the sums of both softmaxes over the classes here. Merge them over all devices.
// 2. SumDivergence: the sums of the divergence over the classes here. Add them over all devices.
// 3. WriteDivergenceGradient: the gradient of the classes here.
//
// Stateless; thread-safe on different rows.
#ifndef LOSSD_KERNELS_CPU_DIVERGENCE_H_
#define LOSSD_KERNELS_CPU_DIVERGENCE_H_

#include <cstdint>
#include <limits>

#include "absl/types/span.h"
#include "kernels/distillation.h"

namespace lossd::kernels {

// The sums of one softmax at the temperature T, over some classes of a row.
struct SoftenedRow {
  float top = -std::numeric_limits<float>::infinity();  // the largest z; -infinity if all z are
  double sum = 0.0;  // sum of exp((z - top) / T), or of exp(z / T) if top is -infinity
};

// The sums of a divergence over some classes of a row, or over all classes.
struct DivergenceSums {
  double value = 0.0;  // the divergence before its weight
  double slope = 0.0;  // the slope of f (docs/math.md)
};

// The sums of a row for student and teacher, over some classes or over all.
struct TaughtRow {
  SoftenedRow student;
  SoftenedRow teacher;
  bool teacher_finite = true;  // the teacher's dot products are finite, before a softcap
  DivergenceSums sums;
};

// z [n]: logits after scale, bias and softcap; -infinity masks a class.
SoftenedRow Soften(const float* z, int64_t n, float temperature);
// Merge a row over the classes of all parts, in the order of the parts. MergeSoftened merges everything
// except `sums`, which AddDivergences adds.
TaughtRow MergeSoftened(absl::Span<const TaughtRow* const> parts, float temperature);
DivergenceSums AddDivergences(absl::Span<const TaughtRow* const> parts);

// The logits [n] of both heads for the same classes of a row.
struct TaughtLogits {
  const float* student = nullptr;
  const float* teacher = nullptr;
  int64_t n = 0;
};

// The sums over these classes. `row` has the softmaxes over all classes. The divergence is infinite if it
// needs the logarithm of a probability that is 0, and NaN if a softmax has no finite log-sum-exp.
DivergenceSums SumDivergence(const Distillation& distillation, const TaughtLogits& logits,
                             const TaughtRow& row);

// Writes gradient [n], the gradient of the divergence with respect to the student's logits of these classes.
// `gradient` may be logits.teacher. row.sums are over all classes. softcap: the student's, 0 for none; with a
// softcap, the gradient is with respect to the logits before it.
void WriteDivergenceGradient(const Distillation& distillation, const TaughtLogits& logits,
                             const TaughtRow& row, float softcap, float* gradient);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_DIVERGENCE_H_
