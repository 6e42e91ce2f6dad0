// SPDX-License-Identifier: Apache-2.0
// The kinds of data, each with its kernels (gpu_data.cu); callers use MakeData (gpu_data.h).
#ifndef LOSSD_BENCH_GPU_DATA_KINDS_H_
#define LOSSD_BENCH_GPU_DATA_KINDS_H_

#include <cstdint>

#include "bench/gpu_data.h"
#include "kernels/data/real_rows.h"

namespace lossd::bench {

LossData MakePeaked(const DataShape& shape, uint64_t seed);
LossData MakeFlat(const DataShape& shape, uint64_t seed);
LossData MakeReal(const DataShape& shape, const data::RealArrays& arrays, uint64_t seed);

}  // namespace lossd::bench

#endif  // LOSSD_BENCH_GPU_DATA_KINDS_H_
