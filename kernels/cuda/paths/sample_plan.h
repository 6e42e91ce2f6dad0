// SPDX-License-Identifier: Apache-2.0
// How chunks with sampled gradients, and chunks whose logits are recomputed, fit the memory of a head. The
// first half is the memory of sampled gradients (SampleBuffers, RecomputedSampleBuffers). The second half
// divides a chunk of a head that recomputes logits into blocks of rows and classes, so that a block and what
// belongs to it fit an arena of a given size (RecomputedArena, FilterArena); docs/kernels/recomputed.md says
// what is in it.
//
// Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_PATHS_SAMPLE_PLAN_H_
#define LOSSD_KERNELS_CUDA_PATHS_SAMPLE_PLAN_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/hopper/candidates.h"
#include "kernels/cuda/kernels/hopper/pass_memory.h"
#include "kernels/cuda/kernels/sampled/sampled_memory.h"
#include "kernels/cuda/paths/filter_plan.h"
#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// Entries, per row on average, that a chunk with this threshold has room for. Rows with the softmax of a
// trained model take 136 at 2^-10, 212 at 2^-11 and 328 at 2^-12; what takes more gets a larger threshold.
int64_t PooledSamples(float threshold);
inline constexpr int64_t kMostPooledSamples = 416;
// Entries of a chunk whose rows or classes are few, at most. Otherwise there are no more than the memory of
// the matrix of ds can hold: fewer than 416 a row below 9,000 classes.
inline constexpr int64_t kLeastSamples = int64_t{8} * kMaxRowSamples;

// Room of a chunk with so many rows. `shape`: of the head.
int64_t SampleCapacity(const FilterShape& shape, int64_t rows, float threshold);

// The lists of a sampled chunk whose logits are stored.
struct SampleBuffers {
  SampledRow* rows = nullptr;  // [chunk_rows]
  SampleCounters* counters = nullptr;
  RunCounters* runs = nullptr;
  // In the memory of dx, while the matrix is still read and dx not yet written.
  SampleEntry* listed = nullptr;  // [capacity]
  void* hot_listed = nullptr;     // [chunk_rows, kHotClasses] compute dtype
  // In the memory of the matrix: a chunk that is known to be sampled reads it no more.
  SampleEntry* entries = nullptr;  // [capacity], the same again
  KeptBuffers kept;
  // Of hot classes; null unless HasHotClasses().
  float* hot_widths = nullptr;           // [chunk_rows]
  void* hot_elements = nullptr;          // [chunk_rows, kHotClasses], hot_listed again
  void* hot_weight = nullptr;            // [kHotClasses, padded_hidden] compute dtype
  float* hot_hidden = nullptr;           // [chunk_rows, padded_hidden]
  float* hot_weight_gradient = nullptr;  // [kHotClasses, padded_hidden]
  float* hot_bias_gradient = nullptr;    // [kHotClasses]
  float* hot_partials = nullptr;         // ColumnSumScratch(kHotClasses)

  static SampleBuffers Carve(const FilterShape& shape, Carver& own, Carver& hidden, Carver& logits);
};

// The lists of a sampled chunk whose logits are recomputed, a block of rows after the other.
struct RecomputedSampleBuffers {
  SampledRow* rows = nullptr;  // [chunk_rows]
  SampleCounters* counters = nullptr;
  RunCounters* runs = nullptr;
  // In the memory of dx, until the last block is done.
  SampleEntry* listed = nullptr;  // [FilterShape::entries()]
  // In the arena, when no block needs it any more.
  SampleEntry* entries = nullptr;  // the same again
  KeptBuffers kept;

  static RecomputedSampleBuffers Carve(const FilterShape& shape, Carver& own, Carver& hidden, Carver& arena);
};

// What a block of so many rows takes of the arena.
struct SampledBlockArena {
  void* elements = nullptr;    // [rows, padded_vocab]
  hopper::TilePartials tiles;  // of a logit pass
  int64_t bytes = 0;

  static SampledBlockArena Carve(const FilterShape& shape, DType elements, int64_t rows, uint8_t* base);
};

// Rows of a block, a multiple of 8 and at least 8: as many as fit the arena, in blocks of about the same
// size. rows > 0, a multiple of 8: of the chunk.
int64_t ChooseSampledRows(const FilterShape& shape, DType elements, int64_t rows, int64_t arena_bytes);
// The arena holds blocks of 8 rows whatever their elements, and the lists of a chunk.
int64_t LeastSampledArenaBytes(const FilterShape& shape);

// Why this GPU computes a chunk of such a head exactly although its options ask for samples, or "".
absl::string_view WhyNotSampledOnDevice(const FilterShape& shape, const DeviceLimits& limits);

// Whether the head is large enough for some classes to be worth a dense product of their own, in the memory
// of the matrix.
bool HasHotClasses(const FilterShape& shape);
// Rows of a chunk that are enough for that.
inline constexpr int64_t kLeastHotRows = 1024;
// How often a class has to be taken by a chunk of so many rows, to be hot: gathering an entry takes as long
// as the dense products of about 90 of 8192 rows (H200).
float LeastTaken(int64_t rows);

HotClasses CarveHotClasses(const FilterShape& shape, Carver& carver);

// Workspace of a head that recomputes logits, unless it has a limit of its own or the server's is lower.
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

#endif  // LOSSD_KERNELS_CUDA_PATHS_SAMPLE_PLAN_H_
