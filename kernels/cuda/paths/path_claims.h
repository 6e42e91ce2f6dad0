// SPDX-License-Identifier: Apache-2.0
// What the paths (head_paths.h) need of a head's memory, all in one place (ClaimsOf): a new path adds what it
// needs to path_claims.cc. Two layouts stand here too: where the fp32 logits of a chunk lie (PlanStaging),
// and what a head that is split by vocabulary keeps of rows (SplitRows). Pure functions; thread-safe; also of
// programs without CUDA.
#ifndef LOSSD_KERNELS_CUDA_PATHS_PATH_CLAIMS_H_
#define LOSSD_KERNELS_CUDA_PATHS_PATH_CLAIMS_H_

#include <cstdint>
#include <vector>

#include "kernels/cuda/kernels/row_sums.h"
#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// What becomes of the logits of a row.
enum class Kept {
  kNothing,
  kGradient,  // padded_vocab elements of the compute dtype a row, from the beginning of Region::kLogits
};

// Some rows of a chunk, and where their fp32 logits lie while they are turned into results: in memory that is
// free anyway. What is kept of a chunk has 16 bits an element, so that the memory of the rows that are still
// to come holds the logits of the next third of them; the last rows take the memory of dx.
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

// What a head that is split by vocabulary keeps of the rows of a chunk (kernels/split_rows.h), in
// Region::kSplitRows.
struct SplitRows {
  int32_t* columns = nullptr;      // [chunk_rows], RowInputs::targets
  RowRecord* own = nullptr;        // [chunk_rows]
  RowRecord* all = nullptr;        // [parts, chunk_rows]
  float* sum_reference = nullptr;  // [chunk_rows], FusedRows::sum_reference
  float* norm_sums = nullptr;      // [2, padded_hidden]
  // Of gradients that are not exact.
  int32_t* levels = nullptr;  // [parts], SampleCounters::level
  // Variances and squares, or dropped masses: [2, chunk_rows] of the classes here, and of all parts.
  float* own_sums = nullptr;
  float* all_sums = nullptr;

  static SplitRows Carve(const HeadSizes& sizes, uint8_t* base, int64_t* bytes = nullptr);
  static void Claim(const HeadSizes& sizes, PathClaims& claims);
};

// What all paths of such a head claim, and the rows of one that is split.
PathClaims ClaimsOf(const HeadConfig& config, const HeadSizes& sizes);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_PATH_CLAIMS_H_
