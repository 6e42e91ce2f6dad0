// SPDX-License-Identifier: Apache-2.0
// Classes of sampled problems about which rounding decides: as few as possible, and what they may change. Not
// thread-safe.
#ifndef LOSSD_TESTS_KERNELS_CLEAR_SAMPLES_H_
#define LOSSD_TESTS_KERNELS_CLEAR_SAMPLES_H_

#include "kernels/reference/reference.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing {

bool MayBeSampled(const Problem& problem);
// A slice's rows for the reference of sampled gradients: with the errors of logits and of their log-sum-exp
// from which it is known which classes are undecided (kernels/reference/reference.h).
reference::Rows SampledRows(const Problem& problem, const SliceData& slice);
// The problem, if it is or may be sampled, with random numbers of which rounding moves as few decisions about
// classes as is easily found. In fp32 those are few in any case, in 16-bit numbers most.
Problem WithClearSamples(Problem problem);
// What undecided classes may add to the norm of a gradient's error.
double UndecidedError(const reference::Gradient& want);

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_CLEAR_SAMPLES_H_
