// Sampled problems whose result rounding cannot change by more than it changes an exact one. Not thread-safe.
#ifndef LOSSD_TESTS_KERNELS_CLEAR_SAMPLES_H_
#define LOSSD_TESTS_KERNELS_CLEAR_SAMPLES_H_

#include "tests/kernels/problem.h"

namespace lossd::kernels::testing {

// The problem, if it is or may be sampled, without targets for the rows in which rounding may take another
// class; as it is if those are most rows.
Problem WithClearSamples(Problem problem);
// Whether rounding takes no other class in any row of the slice.
bool HasClearSamples(const Problem& problem, const SliceData& slice);

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_CLEAR_SAMPLES_H_
