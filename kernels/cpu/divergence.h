// SPDX-License-Identifier: Apache-2.0
// The divergence of one row between the softmax of a teacher and that of the student, with its gradient.
// Formulas in docs/math.md, "Distillation".
//
// Stateless; thread-safe on different rows.
#ifndef LOSSD_KERNELS_CPU_DIVERGENCE_H_
#define LOSSD_KERNELS_CPU_DIVERGENCE_H_

#include <cstdint>

#include "kernels/distillation.h"

namespace lossd::kernels {

// student [n] and teacher [n]: the logits of both, after scale, bias and softcap; an element of -infinity
// masks its class. Returns the divergence before its weight: NaN if either has no finite log-sum-exp,
// infinite where only the other softmax has a class. With `want_gradient` the teacher's logits become the
// gradient with respect to the student's logits, else they stay. softcap: of the student, 0 for none; the
// gradient is then that with respect to the logits before it.
double DivergenceOfRow(const Distillation& distillation, const float* student, float softcap, int64_t n,
                       bool want_gradient, float* teacher);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_DIVERGENCE_H_
