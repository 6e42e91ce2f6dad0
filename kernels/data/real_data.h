// SPDX-License-Identifier: Apache-2.0
// Data like a real model's in the memory of the host, for tests, small benchmarks and demos; see real_rows.h.
#ifndef LOSSD_KERNELS_DATA_REAL_DATA_H_
#define LOSSD_KERNELS_DATA_REAL_DATA_H_

#include <cstdint>
#include <vector>

#include "kernels/data/real_rows.h"

namespace lossd::data {

// Fills rows [begin, end) of W [V, D] into `out` [end - begin, D]. Thread-safe.
void FillWeight(const RealRows& rows, int64_t begin, int64_t end, float* out);

// Fills rows [begin, end) of the hidden states [N, D] into `out`, and their targets. Thread-safe.
void FillHidden(const RealRows& rows, int64_t begin, int64_t end, float* out, int32_t* targets);

// Both as a whole, with as many threads as the host has processors.
struct RealData {
  std::vector<float> hidden;     // [N, D]
  std::vector<float> weight;     // [V, D]
  std::vector<int32_t> targets;  // [N]
};
RealData MakeRealData(const RealRows& rows);

}  // namespace lossd::data

#endif  // LOSSD_KERNELS_DATA_REAL_DATA_H_
