// SPDX-License-Identifier: Apache-2.0
// What a backend computed for a problem, compared with the double-precision reference. Differences fail the
// running test. Not thread-safe.
#ifndef LOSSD_TESTS_KERNELS_COMPARISON_H_
#define LOSSD_TESTS_KERNELS_COMPARISON_H_

#include <vector>

#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/reference/reference.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing {

reference::Head ReferenceHead(const Problem& problem);
reference::Rows ReferenceRows(const SliceData& slice);
// The problem with its epsilon, if it filters, in the widest gap between probabilities of its rows that there
// is near it, so that rounding moves none of them over it. Of a problem that this returned: the same.
Problem WithClearEpsilon(Problem problem);
// The problem with what the backend has decided about the gradients of the chunk as a whole in place of what
// was asked for. Fails the test if the backend may not decide so.
Problem AsComputed(Problem problem, const ChunkRun& run);
// Results of all slices in order; adds to *gradients unless null or the problem does not accumulate.
std::vector<reference::Result> ComputeReference(const Problem& problem, reference::ParamGradients* gradients);

// gtest expectations, with the tolerances of tolerances.h.
void ExpectSliceMatches(DType compute, const Problem& problem, const SliceData& slice,
                        const reference::Result& want, const SliceOutputs& got);
// rounded: hidden states were, to the compute dtype, before they were multiplied.
void ExpectGradientsMatch(HeadKernels& head, const reference::ParamGradients& want, double max_abs_logit,
                          bool rounded = true);
double MaxAbsLogit(absl::Span<const reference::Result> results);

// Runs `problems` (chunks for the same head: the tensors are the first one's) and compares everything.
void RunAndCompare(Backend& backend, const std::vector<Problem>& chunks, const RunOptions& options = {});

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_COMPARISON_H_
