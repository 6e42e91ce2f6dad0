// SPDX-License-Identifier: Apache-2.0
// How a chunk of a head that recomputes logits is divided into blocks of rows and classes, so that a block
// and what belongs to it fit an arena of a given size. docs/kernels/recomputed.md says what is in it.
//
// Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_PATHS_RECOMPUTED_PLAN_H_
#define LOSSD_KERNELS_CUDA_PATHS_RECOMPUTED_PLAN_H_

#include <cstdint>

#include "kernels/choice.h"
#include "kernels/cuda/kernels/hopper/candidates.h"
#include "kernels/cuda/kernels/hopper/pass_memory.h"
#include "kernels/cuda/paths/filter_plan.h"
#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// Workspace of such a head unless it has a limit of its own or the server's is lower.
inline constexpr int64_t kRecomputedWorkspaceBytes = int64_t{64} << 20;
// Rows of its chunks at most: more would only lengthen its slots.
inline constexpr int64_t kRecomputedChunkRows = 4096;
// Rows of a block at least.
inline constexpr int64_t kLeastBlockRows = 8;

// What the plan needs to know of a head.
struct RecomputedShape {
  int64_t padded_hidden = 0;
  int64_t vocab = 0;
  int64_t padded_vocab = 0;
  int64_t element = 2;  // bytes of the compute dtype
  bool fused = false;   // the logit pass may compute statistics and gradients
  bool bias = false;    // has a gradient
  int multiprocessors = 1;

  // Of a chunk that the logit pass computes or does not.
  RecomputedShape For(bool chunk_fused) const {
    RecomputedShape shape = *this;
    shape.fused = chunk_fused;
    return shape;
  }
};
RecomputedShape RecomputedShapeOf(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors);

// Blocks of this size, the last ones smaller. rows: a fixed point of PadRows; classes: a multiple of 256, or
// all padded_vocab.
struct RecomputedBlocks {
  int64_t rows = 0;
  int64_t classes = 0;
};

// What the gradient of a block needs: its logits, then their gradient, its part of dx in fp32, and the first
// stage of the bias's column sums.
struct RecomputedArena {
  // [rows, classes] fp32, then in their place the gradient in the compute dtype; fused: only the gradient, of
  // which no row has gaps.
  void* logits = nullptr;
  float* hidden_gradient = nullptr;  // [rows, padded_hidden]
  float* partials = nullptr;         // ColumnSumScratch(classes); with bias only
  // Of the statistics of a block of rows, before any gradient; null unless fused.
  hopper::TilePartials tiles;
  int64_t bytes = 0;

  static RecomputedArena Carve(const RecomputedShape& shape, const RecomputedBlocks& blocks, uint8_t* base);
};

// The smallest there are.
RecomputedBlocks SmallestRecomputedBlocks(const RecomputedShape& shape);

// The blocks that `rows` rows, a fixed point of PadRows, are divided into: of those that fit the arena the
// fastest by the model of docs/kernels/recomputed.md. The smallest if none fits.
RecomputedBlocks ChooseRecomputedBlocks(const RecomputedShape& shape, int64_t rows, int64_t arena_bytes);

// How many rows and classes these are, for people.
Choice DescribeBlocks(const RecomputedBlocks& blocks, int64_t arena_bytes);

// Seconds that the gradients of `rows` rows take by those numbers, in blocks of this size.
double PredictRecomputedSeconds(const RecomputedShape& shape, const RecomputedBlocks& blocks, int64_t rows);

// How the candidates of a block of rows are found when small probabilities are left out.
enum class Selection {
  kFromLogits,  // of all classes
  kInPass,      // listed by the logit pass
};

// A block of rows whose candidates are found together.
struct FilterBlock {
  int64_t rows = 0;
  int64_t listed = hopper::kLeastListed;  // kInPass: candidates that a row has room for
};

// What that takes: behind the lists of the chunk (the second group of FilterBuffers), and where its scratch
// (the third) will be.
struct FilterArena {
  void* logits = nullptr;        // kFromLogits: [rows, padded_vocab], fp32
  hopper::TilePartials tiles;    // of a logit pass
  hopper::CandidateLists lists;  // kInPass
  int64_t bytes = 0;

  static FilterArena Carve(const FilterShape& chunk, Selection selection, const FilterBlock& block,
                           uint8_t* base);
};

// A block that fits the arena beside the lists of the chunk, of blocks of about the same size and at least 8
// rows: the most rows with the least room for candidates, in whole panels if these fit too, then more room if
// there is. rows > 0, a multiple of 8.
FilterBlock ChooseFilterBlock(const FilterShape& chunk, Selection selection, int64_t rows,
                              int64_t arena_bytes);

// The arena of a head, whether its chunks are fused or not: at least this, or no block fits, and not more
// than that, or some of it is never used.
int64_t LeastArenaBytes(const RecomputedShape& shape, const FilterShape& chunk);
int64_t LargestArenaBytes(const RecomputedShape& shape, const FilterShape& chunk);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_RECOMPUTED_PLAN_H_
