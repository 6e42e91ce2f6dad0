// SPDX-License-Identifier: Apache-2.0
// What an update may do to the weights, before it is made: options that no fp32 arithmetic can take are
// refused, and updates that only strange options make possible are looked at afterwards.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_ENGINE_UPDATE_BOUNDS_H_
#define LOSSD_SERVER_ENGINE_UPDATE_BOUNDS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/optimizer_options.h"

namespace lossd::engine {

// INVALID_ARGUMENT naming the field and its value if an option, or the factor of an update that follows from
// some, is no fp32 number.
absl::Status CheckOptionsFit(const kernels::OptimizerOptions& options, int64_t update);

enum class UpdateReach : uint8_t {
  kBounded,  // weights and moments that were moderate stay finite
  kUnknown,  // they may not: the options are unusual, e.g. decay that makes weights grow
};
// For an update with gradients of the 2-norm `norm`, finite. INVALID_ARGUMENT naming the field if it would
// change a weight by more than kMostChange, or if fp32 has no moment for such a gradient.
absl::Status CheckReach(const kernels::OptimizerOptions& options, int64_t update, double norm,
                        UpdateReach* reach);

inline constexpr double kMostChange = 1e30;

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_UPDATE_BOUNDS_H_
