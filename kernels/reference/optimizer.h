// SPDX-License-Identifier: Apache-2.0
// Optimizer updates in double precision, as torch.optim defines them; for tests.
//
// Pure functions of their arguments; thread-safe.
#ifndef LOSSD_KERNELS_REFERENCE_OPTIMIZER_H_
#define LOSSD_KERNELS_REFERENCE_OPTIMIZER_H_

#include <cstdint>
#include <vector>

#include "kernels/optimizer_options.h"

namespace lossd::kernels::reference {

// One parameter's optimizer state; `moment1` doubles as SGD's momentum buffer. Empty means zero.
struct OptimizerMoments {
  std::vector<double> moment1;
  std::vector<double> moment2;
};

// Update number `update` (1-based) of `values` with `gradient`. `is_vector`: bias or norm parameter,
// which decays only with options.decay_vectors.
void ApplyUpdate(const OptimizerOptions& options, int64_t update, bool is_vector,
                 const std::vector<double>& gradient, std::vector<double>& values, OptimizerMoments& moments);

}  // namespace lossd::kernels::reference

#endif  // LOSSD_KERNELS_REFERENCE_OPTIMIZER_H_
