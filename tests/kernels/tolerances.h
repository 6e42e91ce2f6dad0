// SPDX-License-Identifier: Apache-2.0
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
#ifndef LOSSD_TESTS_KERNELS_TOLERANCES_H_
#define LOSSD_TESTS_KERNELS_TOLERANCES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/head_config.h"

namespace lossd::kernels::testing {

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
      return {.logit = 3e-6, .gradient = 5e-6, .magnitude = 3e-7, .growth = 0x1p-4};
    case DType::kFloat16:
      return rounded ? Tolerance{.logit = 3e-3, .gradient = 4e-3, .magnitude = 1e-3, .growth = 0x1p-4}
                     : Tolerance{.logit = 3e-6, .gradient = 2e-3, .magnitude = 1e-3, .growth = 0.0};
    case DType::kBFloat16:
      return rounded ? Tolerance{.logit = 2.4e-2, .gradient = 2e-2, .magnitude = 4e-3, .growth = 0x1p-4}
                     : Tolerance{.logit = 3e-6, .gradient = 1e-2, .magnitude = 4e-3, .growth = 0.0};
  }
  return {};
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

#endif  // LOSSD_TESTS_KERNELS_TOLERANCES_H_
