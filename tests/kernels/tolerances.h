// How far a backend may be from the double-precision reference, in one place.
//
// The error of a logit is proportional to the largest logit of its row; losses, lse and entropy inherit it
// as an absolute error. The error of a gradient tensor is judged by its norm:
//   |got - want| <= gradient * |want| + magnitude * |sum of |terms|| + rounding to the output dtype,
// the second part being what remains where terms cancel (reference::Gradient). Both grow with the logits:
// what rounds a logit (to bf16, where a pass over stored logits forms the gradient) is proportional to it,
// and is then the relative error of its p.
#ifndef LOSSD_TESTS_KERNELS_TOLERANCES_H_
#define LOSSD_TESTS_KERNELS_TOLERANCES_H_

#include <cmath>

#include "kernels/dtype.h"

namespace lossd::kernels::testing {

struct Tolerance {
  double logit;      // absolute error of lse and -log p, per 1 + max |z|
  double gradient;   // relative error in norm, for logits near 0; doubled at |z| = 16
  double magnitude;  // error in norm relative to the norm of the absolute terms, likewise
};

// By what the GEMMs multiply (HeadKernels::compute_dtype()).
constexpr Tolerance ToleranceFor(DType compute) {
  switch (compute) {
    case DType::kFloat32:
      return {.logit = 1e-6, .gradient = 5e-6, .magnitude = 3e-7};
    case DType::kFloat16:
      return {.logit = 2e-3, .gradient = 4e-3, .magnitude = 1e-3};
    case DType::kBFloat16:
      return {.logit = 1.6e-2, .gradient = 2e-2, .magnitude = 4e-3};
  }
  return {};
}

constexpr double GradientTolerance(DType compute, double max_abs_logit) {
  return ToleranceFor(compute).gradient * (1.0 + max_abs_logit / 16.0);
}

constexpr double MagnitudeTolerance(DType compute, double max_abs_logit) {
  return ToleranceFor(compute).magnitude * (1.0 + max_abs_logit / 16.0);
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
