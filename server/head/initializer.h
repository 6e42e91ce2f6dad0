// SPDX-License-Identifier: Apache-2.0
// Initial values of a head's tensors, drawn so that any part can be generated alone, in any order, and
// comes out bit for bit the same on every machine.
//
// Element i of a parameter is a function of (seed, parameter, i) alone: SplitMix64's output function
// (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) over a counter, whose stream
// is chosen by seed and parameter. Thread-safe.
#ifndef LOSSD_SERVER_HEAD_INITIALIZER_H_
#define LOSSD_SERVER_HEAD_INITIALIZER_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/head_config.h"

namespace lossd::head {

// The bound 1 / sqrt(D) of torch.nn.Linear's weights and bias: Kaiming's uniform initialisation with
// a = sqrt(5), sqrt(6 / ((1 + 5) D)).
float KaimingBound(int64_t hidden_size);

// Fills `out` with elements [first_element, first_element + out.size()) of `param`, uniform in
// [-bound, bound] in 2^24 equal steps, symmetric around 0.
void FillUniform(uint64_t seed, kernels::Param param, int64_t first_element, float bound,
                 absl::Span<float> out);

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_INITIALIZER_H_
