// SPDX-License-Identifier: Apache-2.0
// Sampled gradients of one row (docs/math.md, "Sampled gradients").
#ifndef LOSSD_KERNELS_CPU_ROW_SAMPLING_H_
#define LOSSD_KERNELS_CPU_ROW_SAMPLING_H_

#include <cstdint>

#include "kernels/sampling.h"

namespace lossd::kernels {

// Samples the classes of a row in their order. Thread-compatible.
class RowSampler {
 public:
  // `threshold`: of the size of an element, finite and >= 0; 0 leaves all elements as they are.
  RowSampler(float omega, float threshold) : sampler_(double{omega}), threshold_(threshold) {}

  // In place, the next `n` elements of the gradient: those below the threshold become the threshold, with
  // their sign, or 0.
  void Sample(float* gradient, int64_t n);

  // Of the elements so far, before sampling: what sampling is expected to add to the square of their
  // difference, if they were drawn independently, and the sum of their squares.
  double variance() const { return variance_; }
  double square() const { return square_; }

 private:
  SystematicSampler<double> sampler_;
  const float threshold_;
  double variance_ = 0.0;
  double square_ = 0.0;
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_ROW_SAMPLING_H_
