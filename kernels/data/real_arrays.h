// SPDX-License-Identifier: Apache-2.0
// All rows of RealRows as arrays: what a GPU, or a program in another language, makes the data of.
#ifndef LOSSD_KERNELS_DATA_REAL_ARRAYS_H_
#define LOSSD_KERNELS_DATA_REAL_ARRAYS_H_

#include <cstdint>
#include <vector>

#include "kernels/data/real_rows.h"

namespace lossd::data {

// N rows, V classes, K = the most candidates of a row. real_rows.h says how to make data of it.
struct RealArrays {
  int64_t most = 0;              // K
  std::vector<int32_t> classes;  // [N, K], the first counts[i] of row i; 0 behind them
  std::vector<float> logits;     // [N, K], wanted of them; 0 behind them
  std::vector<int32_t> counts;   // [N]
  std::vector<float> noise;      // [N], the length of the noise
  std::vector<int32_t> targets;  // [N]
  std::vector<float>
      first_elements;  // [V], of the weight's rows; that of all hidden states is RealRows::kShared
};

RealArrays ToArrays(const RealRows& rows);

}  // namespace lossd::data

#endif  // LOSSD_KERNELS_DATA_REAL_ARRAYS_H_
