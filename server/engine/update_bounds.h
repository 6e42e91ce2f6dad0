// SPDX-License-Identifier: Apache-2.0
// What an update may do to the weights, before it is made: options that no fp32 arithmetic can take are
// refused, and updates that only strange options make possible are looked at afterwards.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_ENGINE_UPDATE_BOUNDS_H_
#define LOSSD_SERVER_ENGINE_UPDATE_BOUNDS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/optimizer_options.h"
#include "server/engine/magnitudes.h"

namespace lossd::engine {

// INVALID_ARGUMENT naming the field and its value if an option, or the factor of an update that follows from
// some, is no fp32 number.
absl::Status CheckOptionsFit(const kernels::OptimizerOptions& options, int64_t update);

enum class UpdateReach : uint8_t {
  kBounded,  // weights and moments that are finite stay so, whatever the gradients are
  kUnknown,  // they may not: what the head holds is not known, or it or the options are unusual
};
struct Reach {
  UpdateReach reach = UpdateReach::kUnknown;
  Magnitudes after;  // of what is bounded
};
// For an update of what is at most `before`, with gradients of the 2-norm `norm`, finite. INVALID_ARGUMENT
// naming the field if it would change a weight by more than kMostChange, or if fp32 has no moment for such a
// gradient.
absl::StatusOr<Reach> CheckReach(const kernels::OptimizerOptions& options, int64_t update, double norm,
                                 const Magnitudes& before);
// INVALID_ARGUMENT naming the field if the update decays values of which some are infinite or NaN, as
// `measured` says, so that they would become NaN or another infinity.
absl::Status CheckDecay(const kernels::OptimizerOptions& options, const Magnitudes& measured);

// Added to any finite fp32 number it leaves a finite one: it is less than half of the last place of the
// largest.
inline constexpr double kMostChange = 1e30;

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_UPDATE_BOUNDS_H_
