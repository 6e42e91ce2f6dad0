// Sampled problems whose result rounding cannot change by more than it changes an exact one. Not thread-safe.
#ifndef LOSSD_TESTS_KERNELS_CLEAR_SAMPLES_H_
#define LOSSD_TESTS_KERNELS_CLEAR_SAMPLES_H_

#include "tests/kernels/problem.h"

namespace lossd::kernels::testing {

// The problem, if it is or may be sampled, with random numbers so far from what decides about a class that
// rounding moves no decision; or, in 16 bits, as far as is easily found. Fails the test if fp32 finds none.
Problem WithClearSamples(Problem problem);
// Whether the problem's random numbers are so far from what decides already.
bool HasClearSamples(const Problem& problem);

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_CLEAR_SAMPLES_H_
