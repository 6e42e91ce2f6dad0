// SPDX-License-Identifier: Apache-2.0
// What the kernels of sampled gradients (sampled.h, hot_classes.h) keep of rows and classes. Plain data; also
// of programs without CUDA.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_SAMPLED_MEMORY_H_
#define LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_SAMPLED_MEMORY_H_

#include <cstdint>

namespace lossd::kernels::cuda {

// Classes of a row at most, the target included.
inline constexpr int kMaxRowSamples = 4096;
// Entries that a row needs room for beside those it may have.
inline constexpr int kSpareEntries = 3;
// More do not fit the shared memory of a block.
inline constexpr int64_t kMostSampledClasses = int64_t{1} << 20;
// A chunk takes tau, or 2 tau, 4 tau, ..., or what is more, 2^-23, 2^-22, ... At the last level hardly
// anything but targets is taken.
inline constexpr int kSampleLevels = 32;

struct SampleEntry {
  int32_t column;
  float value;  // dL/ds over (scale * gradient unit)
};

struct SampledRow {
  int32_t begin;  // of its entries in the list
  int32_t count;
};

// What the rows of a chunk tell each other; zero on entry.
struct SampleCounters {
  int32_t used;   // entries of the list
  int32_t level;  // of the threshold
  // Entries at each level, or more: of all rows, and of the row that has most. First only those of level 0.
  unsigned long long totals[kSampleLevels];
  int32_t most[kSampleLevels];
  int32_t highest;  // level of the rows that have been sampled so far
};

// Columns of the dense matrix; fewer classes may be hot, and the other columns are 0.
inline constexpr int kHotClasses = 2048;
inline constexpr int kHotGroup = 32;  // classes of a word of `bits`
inline constexpr int kHotBins = 256;  // of a histogram of popularity

// Which classes are hot, and how that is found out. All zero: none is, and nothing is known.
struct HotClasses {
  int64_t vocab = 0;
  uint32_t* bits = nullptr;      // [groups], a bit a class
  int32_t* bases = nullptr;      // [groups], hot classes before the group
  int32_t* ids = nullptr;        // [kHotClasses], ascending, of which `count` are valid
  int32_t* count = nullptr;      // [1], of ids
  int32_t* taken = nullptr;      // [vocab], how often classes were taken, in 1/16, since the last choice
  float* popularity = nullptr;   // [vocab], that of earlier times, fading
  int32_t* histogram = nullptr;  // [kHotBins], 0 between the launches

  int64_t groups() const { return (vocab + kHotGroup - 1) / kHotGroup; }
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_SAMPLED_MEMORY_H_
