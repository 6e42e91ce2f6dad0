// The kinds of data, each with its kernels (gpu_data.cu); callers use MakeData (gpu_data.h).
#ifndef LOSSD_BENCH_GPU_DATA_KINDS_H_
#define LOSSD_BENCH_GPU_DATA_KINDS_H_

#include <cstdint>
#include <vector>

#include "bench/gpu_data.h"

namespace lossd::bench {

// Rows like a real model's (kernels/data/real_rows.h) as arrays. R rows, V classes, K = most candidates a
// row.
struct RealArrays {
  int64_t most = 0;                   // K
  std::vector<int32_t> classes;       // [R, K], the first counts[r] of row r
  std::vector<float> logits;          // [R, K], wanted of them
  std::vector<int32_t> counts;        // [R]
  std::vector<float> noise;           // [R], the length of the noise
  std::vector<int32_t> targets;       // [R]
  std::vector<float> first_elements;  // [V], of the weight's rows
  float hidden_first_element = 0.0f;  // of all hidden states
};

LossData MakePeaked(const DataShape& shape, uint64_t seed);
LossData MakeFlat(const DataShape& shape, uint64_t seed);
LossData MakeReal(const DataShape& shape, const RealArrays& arrays, uint64_t seed);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_GPU_DATA_KINDS_H_
