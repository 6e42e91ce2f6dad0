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

// In place, each of classes [begin, end) of `gradient` [V] with a size below `threshold` by chance becomes 0
// or the threshold, with its sign. `threshold` is finite and >= 0; 0 leaves all as they are.
SamplingSums SampleClasses(SampleKey key, float threshold, int64_t begin, int64_t end, float* gradient);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ROW_SAMPLING_H_
