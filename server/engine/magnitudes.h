// SPDX-License-Identifier: Apache-2.0
// Magnitudes holds upper bounds of |x| for the values and moments of a head. From these bounds, operations.h
// computes whether an update can make a value infinite.
//
// A session keeps the magnitudes from step to step. A write into the head makes them unknown. The next step
// that needs them then reads the tensors (Measure).
//
// Threads. Used on the device thread only.
#ifndef LOSSD_SERVER_ENGINE_MAGNITUDES_H_
#define LOSSD_SERVER_ENGINE_MAGNITUDES_H_

#include <cstdint>
#include <limits>

#include "absl/status/statusor.h"
#include "kernels/head_config.h"
#include "server/head/head.h"

namespace lossd::engine {

// Each field is an upper bound of |x|. kUnknown (infinity): the bound is not known, or some x is not finite.
struct Magnitudes {
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();

  double matrix = kUnknown;   // the weight
  double vectors = kUnknown;  // bias, norm gain and norm shift
  double moment1 = 0.0;
  double moment2 = 0.0;
};

// How many values and moments are not finite, by kind. A bias of -infinity is legal: it excludes a class.
struct NotFinite {
  int64_t nan = 0;
  int64_t infinite = 0;
  int64_t minus_infinite = 0;

  // The sum over the kinds of how many more there are than `before`. It also counts a -infinity that became
  // NaN.
  int64_t MoreThan(const NotFinite& before) const;
};

struct Measurement {
  Magnitudes most;
  NotFinite not_finite;
};
// Reads all values and moments. Errors as Head::ReadRows.
absl::StatusOr<Measurement> Measure(head::Head& head);

// Sets the magnitudes of what was written since the last call to kUnknown.
void ForgetWritten(head::Head& head, Magnitudes* magnitudes);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_MAGNITUDES_H_
