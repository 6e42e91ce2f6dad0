// SPDX-License-Identifier: Apache-2.0
// Compares the results of a backend for a problem with the double-precision reference. Differences fail the
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
// For a problem with a teacher: the smallest difference, over rows and classes, of the logarithms of the two
// softmaxes at the temperature.
double LeastGapToTeacher(const Problem& problem);
// If the problem filters, moves its epsilon into the widest nearby gap between the probabilities of its rows,
// so that rounding moves no probability to the other side. Applied again, it changes nothing.
Problem WithClearEpsilon(Problem problem);
// Replaces the gradients that the problem asks for by those that the backend has decided to compute for the
// chunk. Fails the test if the backend may not decide so.
Problem AsComputed(Problem problem, const ChunkRun& run);
// Sets this objective, and random values for its rows near the log-probabilities of the targets, such that
// rounding does not decide for any row whether it is clipped.
Problem WithObjective(Problem problem, const Objective& objective, Rng& rng);
// The reference results of all slices in order. Also adds to *gradients, unless it is null or the problem
// does not accumulate.
std::vector<reference::Result> ComputeReference(const Problem& problem, reference::ParamGradients* gradients);

// gtest expectations with the tolerances below.
void ExpectSliceMatches(DType compute, const Problem& problem, const SliceData& slice,
                        const reference::Result& want, const SliceOutputs& got);
// rounded: hidden states were rounded to the compute dtype before they were multiplied.
void ExpectGradientsMatch(HeadKernels& head, const reference::ParamGradients& want, double max_abs_logit,
                          bool rounded = true);
double MaxAbsLogit(absl::Span<const reference::Result> results);

// Runs the problems, which are chunks for the same head (with the first problem's tensors), and compares all
// results.
void RunAndCompare(Backend& backend, const std::vector<Problem>& chunks, const RunOptions& options = {});

// ---- Sampled gradients ----
// Rounding decides about some classes of sampled problems. These functions make them few, and bound their
// effect.

bool MayBeSampled(const Problem& problem);
// A slice's rows for the reference of sampled gradients. They have the errors of logits and of their
// log-sum-exp, which determine the undecided classes (kernels/reference/reference.h).
reference::Rows SampledRows(const Problem& problem, const SliceData& slice);
// If the problem may be sampled, gives it random numbers with which rounding decides about as few classes as
// is easily found. In fp32 those are always few; in 16-bit types they are most classes.
Problem WithClearSamples(Problem problem);
// The most that undecided classes may add to the norm of a gradient's error.
double UndecidedError(const reference::Gradient& want);

// ---- Tolerances ----
// How far a backend may be from the double-precision reference, in one place.
//
// The error of a logit is proportional to the largest logit of its row; losses, lse and entropy inherit it
// as an absolute error. The error of a gradient tensor is judged by its norm:
//   |got - want| <= gradient * |want| + magnitude * |sum of |terms|| + rounding to the output dtype,
// The second term is what remains where terms cancel (reference::Gradient).
//
// Logits are sums in fp32, in an order that the library chooses and that differs between CPUs: with V = 1 and
// D = 200 OpenBLAS has been seen 2.3e-6 off where the logit was 0.4. If hidden states are first rounded to a
// 16-bit compute dtype, because a norm or a conversion has produced them, a logit has an error of that size,
// and its p the same relative error: then both parts grow with the logits.

struct Tolerance {
  double logit;      // absolute error of lse and -log p, per 1 + max |z|
  double gradient;   // relative error in norm, for logits near 0
  double magnitude;  // error in norm relative to the norm of the absolute terms, for logits near 0
  double growth;     // relative growth of these two, per |z|

  constexpr double Gradient(double max_abs_logit) const { return gradient * (1.0 + growth * max_abs_logit); }
  constexpr double Magnitude(double max_abs_logit) const {
    return magnitude * (1.0 + growth * max_abs_logit);
  }
};

// The tolerance for the type that the GEMMs multiply (HeadKernels::compute_dtype()). rounded: hidden states
// were rounded to it.
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

// The tolerance for hidden gradients, which are sums over `classes` terms. A product in fp32 may add the
// terms up one after the other, as OpenBLAS does with small matrices on some processors. Then the rounding
// errors of sums add up, too: at worst to `classes` times half a unit, and to about an eighth of that if all
// terms are alike.
constexpr Tolerance OverClasses(Tolerance tolerance, DType compute, int64_t classes) {
  if (compute == DType::kFloat32) tolerance.magnitude += static_cast<double>(classes) * 0x1p-24 / 8.0;
  return tolerance;
}

// The largest error of a result of a row, if hidden states are not rounded, logits are at most 100 in size,
// and D is at most 512.
inline constexpr double kRowTolerance = 1e-4;

// The same for any D. Tensor cores truncate the sum in fp32 at every step of 16 products, by at most a unit
// in the last place. So a logit may be too small by 2^-23 D / 16 of itself. Measured on an H200 were at most
// 6.1e-9 D for terms of one sign in a kernel without wgmma, and 1.1e-9 D to 1.6e-9 D for terms of both signs.
constexpr double RowTolerance(int64_t hidden_size, double max_abs_logit) {
  return std::max(kRowTolerance, (3e-7 + 0x1p-27 * static_cast<double>(hidden_size)) * max_abs_logit);
}

// The relative error of an element of ds that sampling compares with its threshold, per 1 + max |z|.
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

// Half the distance between the smallest numbers: the absolute error of rounding a number that underflows.
constexpr double UnderflowError(DType dtype) { return dtype == DType::kFloat16 ? 0x1p-25 : 0x1p-133; }

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_COMPARISON_H_
