// SPDX-License-Identifier: Apache-2.0
// Where the fp32 logits of a chunk lie while its rows are turned into results: a block of rows at a time, in
// memory that is free anyway. What is kept of a chunk has 16 bits an element, so that the memory of the rows
// that are still to come holds the logits of the next third of them; the last rows take the memory of dx.
//
// Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_PATHS_STAGING_PLAN_H_
#define LOSSD_KERNELS_CUDA_PATHS_STAGING_PLAN_H_

#include <cstdint>
#include <vector>

#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// What becomes of the logits of a row.
enum class Kept {
  kNothing,
  kGradient,  // padded_vocab elements of the compute dtype a row, from the beginning of Region::kLogits
};

struct StagedBlock {
  int64_t begin = 0;      // row
  int64_t rows = 0;       // padded
  bool in_spare = false;  // the logits lie at the beginning of Region::kHiddenGradient, else in kLogits
  int64_t offset = 0;     // bytes from the beginning of the region
};

// Bytes of Region::kHiddenGradient that hold logits, and so the most rows of a block there.
int64_t SpareBytes(const HeadConfig& config, const HeadSizes& sizes);

// Blocks that cover [0, padded_rows), a fixed point of PadRows, in order. Of fp32 compute one block, whose
// gradient takes the place of the logits.
std::vector<StagedBlock> PlanStaging(const HeadConfig& config, const HeadSizes& sizes, Kept kept,
                                     int64_t padded_rows);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_STAGING_PLAN_H_
