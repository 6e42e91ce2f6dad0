// SPDX-License-Identifier: Apache-2.0
// What a backend computed for a problem, compared with the double-precision reference. Differences fail the
// running test. Not thread-safe.
#ifndef LOSSD_TESTS_KERNELS_COMPARISON_H_
#define LOSSD_TESTS_KERNELS_COMPARISON_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"
#include "kernels/reference/reference.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing {

reference::Head ReferenceHead(const Problem& problem);
reference::Rows ReferenceRows(const SliceData& slice);
// Of a problem with a teacher: the least difference, over rows and classes, of the logarithms of the two
// softmaxes at the temperature.
double LeastGapToTeacher(const Problem& problem);
// The problem with its epsilon, if it filters, in the widest gap between probabilities of its rows that there
// is near it, so that rounding moves none of them over it. Of a problem that this returned: the same.
Problem WithClearEpsilon(Problem problem);
// The problem with what the backend has decided about the gradients of the chunk as a whole in place of what
// was asked for. Fails the test if the backend may not decide so.
Problem AsComputed(Problem problem, const ChunkRun& run);
// The problem with this objective, and numbers for its rows that are drawn around the log-probabilities of
// its targets so that rounding decides of no row whether it is clipped.
Problem WithObjective(Problem problem, const Objective& objective, Rng& rng);
// Results of all slices in order; adds to *gradients unless null or the problem does not accumulate.
std::vector<reference::Result> ComputeReference(const Problem& problem, reference::ParamGradients* gradients);

// gtest expectations, with the tolerances below.
void ExpectSliceMatches(DType compute, const Problem& problem, const SliceData& slice,
                        const reference::Result& want, const SliceOutputs& got);
// rounded: hidden states were, to the compute dtype, before they were multiplied.
void ExpectGradientsMatch(HeadKernels& head, const reference::ParamGradients& want, double max_abs_logit,
                          bool rounded = true);
double MaxAbsLogit(absl::Span<const reference::Result> results);

// Runs `problems` (chunks for the same head: the tensors are the first one's) and compares everything.
void RunAndCompare(Backend& backend, const std::vector<Problem>& chunks, const RunOptions& options = {});

// ---- Sampled gradients ----
// Classes of sampled problems about which rounding decides: as few as possible, and what they may change.

bool MayBeSampled(const Problem& problem);
// A slice's rows for the reference of sampled gradients: with the errors of logits and of their log-sum-exp
// from which it is known which classes are undecided (kernels/reference/reference.h).
reference::Rows SampledRows(const Problem& problem, const SliceData& slice);
// The problem, if it is or may be sampled, with random numbers of which rounding moves as few decisions about
// classes as is easily found. In fp32 those are few in any case, in 16-bit numbers most.
Problem WithClearSamples(Problem problem);
// What undecided classes may add to the norm of a gradient's error.
double UndecidedError(const reference::Gradient& want);

// ---- Tolerances ----
// How far a backend may be from the double-precision reference, in one place.
//
// The error of a logit is proportional to the largest logit of its row; losses, lse and entropy inherit it
// as an absolute error. The error of a gradient tensor is judged by its norm:
//   |got - want| <= gradient * |want| + magnitude * |sum of |terms|| + rounding to the output dtype,
// the second part being what remains where terms cancel (reference::Gradient).
//
// Logits are sums in fp32 of what is multiplied, in an order that is the library's and differs between CPUs:
// with V = 1 and D = 200 OpenBLAS has been seen 2.3e-6 off where the logit was 0.4. Where hidden states are
// rounded to a 16-bit compute dtype first, because a norm or a conversion has made them, a logit is off by as
// much, and its p relatively: both parts then grow with the logits.

struct Tolerance {
  double logit;      // absolute error of lse and -log p, per 1 + max |z|
  double gradient;   // relative error in norm, for logits near 0
  double magnitude;  // error in norm relative to the norm of the absolute terms, likewise
  double growth;     // of these two, per |z|

  constexpr double Gradient(double max_abs_logit) const { return gradient * (1.0 + growth * max_abs_logit); }
  constexpr double Magnitude(double max_abs_logit) const {
    return magnitude * (1.0 + growth * max_abs_logit);
  }
};

// By what the GEMMs multiply (HeadKernels::compute_dtype()), and whether hidden states were rounded to that.
constexpr Tolerance ToleranceFor(DType compute, bool rounded = true) {
  switch (compute) {
    case DType::kFloat32:
      return {.logit = 3e-6, .gradient = 5e-6, .magnitude = 4e-7, .growth = 0x1p-4};
    case DType::kFloat16:
      return rounded ? Tolerance{.logit = 3e-3, .gradient = 4e-3, .magnitude = 1e-3, .growth = 0x1p-4}
                     : Tolerance{.logit = 3e-6, .gradient = 2e-3, .magnitude = 1e-3, .growth = 0.0};
    case DType::kBFloat16:
      return rounded ? Tolerance{.logit = 2.4e-2, .gradient = 2e-2, .magnitude = 4e-3, .growth = 0x1p-4}
                     : Tolerance{.logit = 3e-6, .gradient = 1e-2, .magnitude = 4e-3, .growth = 0.0};
  }
  return {};
}

// Of hidden gradients, which are sums over `classes` terms. A product in fp32 may add them up one after the
// other, as OpenBLAS does with small matrices on some processors: then roundings of sums add up, too, at
// worst to `classes` times half a unit, and where all terms are alike to about an eighth of that.
constexpr Tolerance OverClasses(Tolerance tolerance, DType compute, int64_t classes) {
  if (compute == DType::kFloat32) tolerance.magnitude += static_cast<double>(classes) * 0x1p-24 / 8.0;
  return tolerance;
}

// What a result of a row may be off at most where hidden states are not rounded, logits are up to 100 in
// size, and D is up to 512.
inline constexpr double kRowTolerance = 1e-4;

// For any D: tensor cores truncate the sum in fp32 at every step of 16 products, by up to a unit in the last
// place. So a logit may be too small by 2^-23 D / 16 of itself. Measured on an H200 were 6.1e-9 D at most, of
// terms that all have one sign in a kernel without wgmma, and 1.1e-9 D to 1.6e-9 D of terms of both signs.
constexpr double RowTolerance(int64_t hidden_size, double max_abs_logit) {
  return std::max(kRowTolerance, (3e-7 + 0x1p-27 * static_cast<double>(hidden_size)) * max_abs_logit);
}

// By how much of itself an element of ds may be off that sampling compares with its threshold, per 1 + max
// |z|.
constexpr double SampledElementError(DType compute) {
  return compute == DType::kFloat32 ? 2e-6 : compute == DType::kFloat16 ? 4e-3 : 3.2e-2;
}

// Half a unit in the last place, relative.
constexpr double UnitRoundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0x1p-24;
    case DType::kFloat16:
      return 0x1p-11;
    case DType::kBFloat16:
      return 0x1p-8;
  }
  return 0.0;
}

// Half the distance between the smallest numbers: the absolute error of rounding what underflows.
constexpr double UnderflowError(DType dtype) { return dtype == DType::kFloat16 ? 0x1p-25 : 0x1p-133; }

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_COMPARISON_H_
