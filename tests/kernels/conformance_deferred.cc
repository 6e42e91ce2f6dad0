// SPDX-License-Identifier: Apache-2.0
// Deferred rows: kept by one chunk, computed again by a later one from what was kept, whatever comes in
// between and whatever rows share a chunk with them.
#include "tests/kernels/backend_conformance.h"
#include "tests/kernels/deferred_rows.h"

namespace lossd::kernels::testing {

TEST_P(BackendConformance, DeferredAndDirectRowsInAnyOrder) {
  for (const Norm norm : {Norm::kNone, Norm::kRmsNorm}) {
    ProblemSpec spec = Plain({1}, 24, 101);
    spec.config.norm = norm;
    spec.config.has_bias = true;
    DeferredRows rows(backend(), spec, rng());
    for (int repeat = 0; repeat < 12; ++repeat) {
      rows.Forward();
      if (Chance(rng(), 0.7)) rows.Backward();
      if (Chance(rng(), 0.4)) rows.Release();
      if (Chance(rng(), 0.1)) rows.ZeroGradients();
    }
    rows.Backward();
    rows.ExpectGradients();
  }
}

}  // namespace lossd::kernels::testing
