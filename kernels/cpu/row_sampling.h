// Sampled gradients of one row (docs/math.md, "Sampled gradients"). Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_CPU_ROW_SAMPLING_H_
#define LOSSD_KERNELS_CPU_ROW_SAMPLING_H_

#include <cstdint>

#include "kernels/sampling.h"

namespace lossd::kernels {

// Of the elements before sampling.
struct SamplingSums {
  double variance = 0.0;  // what sampling is expected to add to the square of their difference
  double square = 0.0;    // sum of their squares
};

// In place, each of classes [begin, end) of `gradient` [V] with a size below `threshold` becomes the
// threshold, with its sign, if `sampler` takes it, and else 0. `threshold` is finite and >= 0; 0 leaves all
// as they are. `sampler` has gone through the row's classes before `begin` and goes through these. It is in
// double: in a large vocabulary most classes are too narrow to move a float.
SamplingSums SampleClasses(SystematicSampler<double>& sampler, float threshold, int64_t begin, int64_t end,
                           float* gradient);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ROW_SAMPLING_H_
