// SPDX-License-Identifier: Apache-2.0
// The memory that launches need beside their operands and results. Pure functions; also of programs without
// CUDA.
//
// The file is shorter than 60 lines because plans without CUDA include it, and the launches that it is about
// need CUDA.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_SCRATCH_SIZES_H_
#define LOSSD_KERNELS_CUDA_KERNELS_SCRATCH_SIZES_H_

#include <cstddef>
#include <cstdint>

namespace lossd::kernels::cuda {

// Most row groups that a column sum is divided into (rows.h).
inline constexpr int64_t kColumnSplits = 64;
// Floats of LaunchColumnSum's partials.
constexpr int64_t ColumnSumScratch(int64_t cols) { return kColumnSplits * cols; }

// Doubles of LaunchSquareSum's partials (tensor_ops.h).
inline constexpr int kSquareSumPartials = 1024;

// How many floats LaunchNormBackward needs for its first stage (norm/norm.h).
constexpr int64_t NormPartialFloats(int64_t hidden_size, int multiprocessors) {
  return 2 * int64_t{multiprocessors} * hidden_size;
}

// Bytes of SortParams::scratch (filtered/filtered.h): an upper bound of what CUB asks for (it can only be
// asked with a device at hand), counters of every tile of a few thousand entries, for each of up to eight
// passes.
constexpr size_t SortScratchBytes(int64_t count) {
  return (size_t{512} << 10) + 2 * static_cast<size_t>(count);
}

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_SCRATCH_SIZES_H_
