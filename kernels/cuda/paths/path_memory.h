// SPDX-License-Identifier: Apache-2.0
// How much memory each path needs, how it is laid out, and which chunks fit into it. For a new path, add its
// memory to ClaimsOf.
//
// Gradients may come from a list of elements of ds instead of the whole matrix: filtered gradients
// (WhyNotFilteredOnDevice, FilterBuffers) and sampled gradients (WhyNotSampledOnDevice, SampleBuffers). A
// head that recomputes logits divides a chunk into blocks of rows and classes (RecomputedBlocks). A head that
// stores logits computes fp32 logits for one block of rows after the other, in memory that is free at that
// time (PlanStaging).
//
// Pure functions; thread-safe. The header needs no CUDA.
#ifndef LOSSD_KERNELS_CUDA_PATHS_PATH_MEMORY_H_
#define LOSSD_KERNELS_CUDA_PATHS_PATH_MEMORY_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/hopper/plan.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// ---- filtered gradients (sampled gradients use FilterShape and KeptBuffers too) ----

// The bits of the row in a list entry's key, and all bits of the key that a sort has to compare.
int RowBits(int64_t rows);
int KeyBits(int64_t rows, int64_t vocab);

// The memory of a list of elements of ds from which the weight gradient is computed (AddEntries in
// path_steps.h). Arrays are [capacity], unless said otherwise.
struct KeptBuffers {
  uint64_t* keys = nullptr;  // as in KeptList
  float* coefs = nullptr;
  float* weight_sum = nullptr;  // [padded_hidden], for label smoothing

  // Used after all entries have been written.
  uint64_t* spare_keys = nullptr;
  float* spare_coefs = nullptr;
  int32_t* runs = nullptr;  // [2 * capacity]
  uint8_t* sort_scratch = nullptr;
  float* hidden_sum = nullptr;  // [padded_hidden]
  float* partials = nullptr;    // ColumnSumScratch(padded_hidden); also for weight_sum

  // Takes the first group of arrays from `lists` and the second from `scratch`; both may be the same carver.
  static KeptBuffers Carve(int64_t capacity, int64_t padded_hidden, Carver& lists, Carver& scratch);
};

// How many candidates a chunk has room for, per row on average; a chunk with few rows has room for
// kLeastPool. If there are more candidates, the chunk is exact.
inline constexpr int64_t kPooledCandidates = 128;
// The same for a head that recomputes logits. Its sampled entries have the same room.
inline constexpr int64_t kPooledRecomputed = 192;
inline constexpr int64_t kLeastPool = int64_t{16} * kMaxRowCandidates;

// What the memory of filtered and sampled gradients depends on: sizes of a head, or of one chunk of it.
struct FilterShape {
  int64_t chunk_rows = 0;  // for one chunk: its rows
  int64_t vocab = 0;
  int64_t padded_vocab = 0;
  int64_t padded_hidden = 0;
  DType dtype = DType::kBFloat16;
  int64_t pooled = kPooledCandidates;  // room for candidates, per row on average

  int64_t capacity() const { return std::min(chunk_rows * vocab, std::max(chunk_rows * pooled, kLeastPool)); }
  // The most elements that are kept: the candidates, and one target a row.
  int64_t entries() const { return capacity() + chunk_rows; }
};

FilterShape FilterShapeOf(const HeadConfig& config, const HeadSizes& sizes);
// The shape by which all parts of a split head plan, although some have one class less. For other heads,
// FilterShapeOf.
FilterShape PlannedShapeOf(const HeadConfig& config, const HeadSizes& sizes);

// "" if this GPU can compute a chunk of such a head with filtered gradients, else the reason why not.
absl::string_view WhyNotFilteredOnDevice(const FilterShape& shape, const DeviceLimits& limits);

// Counters that kernels hand to each other, zeroed before each chunk.
struct FilterCounters {
  int32_t used = 0;  // entries of the pool
  int32_t kept = 0;  // entries of the list
  RunCounters runs;
};

// The lists of a filtered chunk, in three groups: `own` (pool, rows, counters), and the two groups of `kept`.
struct FilterBuffers {
  int32_t* pool = nullptr;      // [capacity]
  SelectedRow* rows = nullptr;  // [chunk_rows]
  FilterCounters* counters = nullptr;

  // Written row by row. Where logits are stored, both groups of `kept` lie in the memory of the logits,
  // because a chunk that is known to be filtered does not read its logits any more. Where logits are
  // recomputed, they lie beside the logits, because the logits of other rows are still to come.
  KeptBuffers kept;

  // Takes the first group from `own`, and the two groups of `kept` from `lists` and `scratch`.
  static FilterBuffers Carve(const FilterShape& shape, Carver& own, Carver& lists, Carver& scratch);
  // Bytes of the two groups of `kept`.
  static int64_t LogitsBytes(const FilterShape& shape);
};

// ---- sampled gradients ----

// How many entries a chunk with this threshold has room for, per row on average. Rows with the softmax of a
// trained model take 136 at 2^-10, 212 at 2^-11 and 328 at 2^-12. A chunk that would take more gets a larger
// threshold.
int64_t PooledSamples(float threshold);
inline constexpr int64_t kMostPooledSamples = 416;
// The room for entries that a chunk has even if its rows or classes are few. Other chunks have no more
// entries than the memory of the matrix of ds can hold: fewer than 416 a row below 9,000 classes.
inline constexpr int64_t kLeastSamples = int64_t{8} * kMaxRowSamples;

// The room for entries of a chunk with `rows` rows. `shape`: of the head.
int64_t SampleCapacity(const FilterShape& shape, int64_t rows, float threshold);

// The lists of a sampled chunk whose logits are stored.
struct SampleBuffers {
  SampledRow* rows = nullptr;  // [chunk_rows]
  SampleCounters* counters = nullptr;
  RunCounters* runs = nullptr;
  // In the memory of dx, because the matrix is still read and dx is not written yet.
  SampleEntry* listed = nullptr;  // [capacity]
  void* hot_listed = nullptr;     // [chunk_rows, kHotClasses] compute dtype
  // In the memory of the matrix of ds, which a chunk that is known to be sampled does not read any more.
  SampleEntry* entries = nullptr;  // [capacity], copied from `listed`
  KeptBuffers kept;
  // For hot classes, which get dense products of their own; null unless HasHotClasses().
  float* hot_widths = nullptr;           // [chunk_rows]
  void* hot_elements = nullptr;          // [chunk_rows, kHotClasses], copied from hot_listed
  void* hot_weight = nullptr;            // [kHotClasses, padded_hidden] compute dtype
  float* hot_hidden = nullptr;           // [chunk_rows, padded_hidden]
  float* hot_weight_gradient = nullptr;  // [kHotClasses, padded_hidden]
  float* hot_bias_gradient = nullptr;    // [kHotClasses]
  float* hot_partials = nullptr;         // ColumnSumScratch(kHotClasses)

  static SampleBuffers Carve(const FilterShape& shape, Carver& own, Carver& hidden, Carver& logits);
};

// The lists of a sampled chunk whose logits are recomputed, one block of rows after the other.
struct RecomputedSampleBuffers {
  SampledRow* rows = nullptr;  // [chunk_rows]
  SampleCounters* counters = nullptr;
  RunCounters* runs = nullptr;
  // In the memory of dx, until the last block is done.
  SampleEntry* listed = nullptr;  // [FilterShape::entries()]
  // In the arena, after the last block.
  SampleEntry* entries = nullptr;  // copied from `listed`
  KeptBuffers kept;

  static RecomputedSampleBuffers Carve(const FilterShape& shape, Carver& own, Carver& hidden, Carver& arena);
};

// The part of the arena that a block of `rows` rows takes.
struct SampledBlockArena {
  void* elements = nullptr;    // [rows, padded_vocab]
  hopper::TilePartials tiles;  // for a logit pass
  int64_t bytes = 0;

  static SampledBlockArena Carve(const FilterShape& shape, DType elements, int64_t rows, uint8_t* base);
};

// The rows of a block, a multiple of 8 and at least 8: as many as fit the arena, in blocks of about the same
// size. `rows`: of the chunk; > 0 and a multiple of 8.
int64_t ChooseSampledRows(const FilterShape& shape, DType elements, int64_t rows, int64_t arena_bytes);
// The arena that holds blocks of 8 rows, in any element type, and the lists of a chunk.
int64_t LeastSampledArenaBytes(const FilterShape& shape);

// "" if this GPU can compute a chunk of such a head with sampled gradients, else the reason why not.
absl::string_view WhyNotSampledOnDevice(const FilterShape& shape, const DeviceLimits& limits);

// Whether the head is large enough that a dense product for its most frequent ("hot") classes pays, and the
// memory of the matrix has room for it.
bool HasHotClasses(const FilterShape& shape);
// The fewest rows of a chunk for which that pays.
inline constexpr int64_t kLeastHotRows = 1024;
// How often a chunk of `rows` rows has to take a class for the class to be hot. Gathering one entry takes as
// long as the dense products of about 90 of 8192 rows (H200).
float LeastTaken(int64_t rows);

HotClasses CarveHotClasses(const FilterShape& shape, Carver& carver);

// ---- heads that recompute logits ----

// A chunk is divided into blocks of rows and classes, so that the buffers of one block fit an arena of a
// given size (RecomputedArena, FilterArena). docs/kernels/recomputed.md describes these buffers.

// Workspace of a head that recomputes logits, unless the head has its own limit or the server's is lower.
inline constexpr int64_t kRecomputedWorkspaceBytes = int64_t{64} << 20;
// The most rows of a chunk of such a head: more would only make its slots larger.
inline constexpr int64_t kRecomputedChunkRows = 4096;
// The fewest rows of a block.
inline constexpr int64_t kLeastBlockRows = 8;

// What the blocks of a head depend on.
struct RecomputedShape {
  int64_t padded_hidden = 0;
  int64_t vocab = 0;
  int64_t padded_vocab = 0;
  int64_t element = 2;  // bytes of the compute dtype
  bool fused = false;   // the logit pass may compute statistics and gradients
  bool bias = false;    // the bias has a gradient
  int multiprocessors = 1;

  // The shape for a chunk that the logit pass computes (`chunk_fused`) or does not compute.
  RecomputedShape For(bool chunk_fused) const {
    RecomputedShape shape = *this;
    shape.fused = chunk_fused;
    return shape;
  }
};
RecomputedShape RecomputedShapeOf(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors);

// The size of blocks; the last ones are smaller. PadRows(rows) == rows. `classes`: a multiple of 256, or all
// padded_vocab.
struct RecomputedBlocks {
  int64_t rows = 0;
  int64_t classes = 0;
};

// The buffers for the gradient of a block: its logits, then their gradient; its part of dx in fp32; and the
// partial sums of the bias gradient.
struct RecomputedArena {
  // [rows, classes]: fp32 logits, then their gradient in the compute dtype in the same place. If fused: only
  // the gradient, whose rows follow each other without gaps.
  void* logits = nullptr;
  float* hidden_gradient = nullptr;  // [rows, padded_hidden]
  float* partials = nullptr;         // ColumnSumScratch(classes); only with a bias
  // For the statistics of a block of rows, before any gradient is computed; null unless fused.
  hopper::TilePartials tiles;
  int64_t bytes = 0;

  static RecomputedArena Carve(const RecomputedShape& shape, const RecomputedBlocks& blocks, uint8_t* base);
};

// The smallest blocks of such a head.
RecomputedBlocks SmallestRecomputedBlocks(const RecomputedShape& shape);

// The blocks into which `rows` rows are divided (PadRows(rows) == rows): the fastest that fit the arena, by
// the model of docs/kernels/recomputed.md. The smallest blocks if none fits.
RecomputedBlocks ChooseRecomputedBlocks(const RecomputedShape& shape, int64_t rows, int64_t arena_bytes);

// Describes the blocks for people.
Choice DescribeBlocks(const RecomputedBlocks& blocks, int64_t arena_bytes);

// Seconds that the gradients of `rows` rows take by that model, in blocks of this size.
double PredictRecomputedSeconds(const RecomputedShape& shape, const RecomputedBlocks& blocks, int64_t rows);

// How filtered gradients find the candidates of a block of rows.
enum class Selection {
  kFromLogits,  // selected from the logits of all classes
  kInPass,      // listed by the logit pass
};

// A block of rows whose candidates are found together.
struct FilterBlock {
  int64_t rows = 0;
  int64_t listed = hopper::kLeastListed;  // kInPass: candidates that a row has room for
};

// The part of the arena that such a block takes. It comes behind the lists of the chunk (the first group of
// FilterBuffers::kept), where the scratch (the second group) will be later.
struct FilterArena {
  void* logits = nullptr;        // kFromLogits: [rows, padded_vocab], fp32
  hopper::TilePartials tiles;    // for a logit pass
  hopper::CandidateLists lists;  // kInPass
  int64_t bytes = 0;

  static FilterArena Carve(const FilterShape& chunk, Selection selection, const FilterBlock& block,
                           uint8_t* base);
};

// The block to use: it fits the arena beside the lists of the chunk, and the blocks of a chunk have about the
// same size and at least 8 rows. It has the most rows that fit with the least room for candidates (whole
// panels if they fit too), and then more room for candidates if that fits. `rows` > 0, a multiple of 8.
FilterBlock ChooseFilterBlock(const FilterShape& chunk, Selection selection, int64_t rows,
                              int64_t arena_bytes);

// The range of useful arena sizes of a head, for fused chunks and others. With less than LeastArenaBytes no
// block fits; of more than LargestArenaBytes a part is never used.
int64_t LeastArenaBytes(const RecomputedShape& shape, const FilterShape& chunk);
int64_t LargestArenaBytes(const RecomputedShape& shape, const FilterShape& chunk);

// ---- where the fp32 logits of a chunk lie ----

// What is kept of a row's logits.
enum class Kept {
  kNothing,
  kGradient,  // padded_vocab elements of the compute dtype a row, at the beginning of Region::kLogits
};

// Some rows of a chunk, and where their fp32 logits lie while they are turned into results: in memory that is
// free at that time. What is kept of a row has 16 bits an element. So the memory for the rows that are still
// to come holds the fp32 logits of the next third of these rows. The last rows take the memory of dx.
struct StagedBlock {
  int64_t begin = 0;      // row
  int64_t rows = 0;       // padded
  bool in_spare = false;  // logits at the start of Region::kHiddenGradient, else in kLogits
  int64_t offset = 0;     // bytes from the beginning of the region
};

// Bytes of Region::kHiddenGradient that hold logits. They limit the rows of a block there.
int64_t SpareBytes(const HeadConfig& config, const HeadSizes& sizes);

// The blocks that cover [0, padded_rows), in order; PadRows(padded_rows) == padded_rows. For fp32 compute
// there is one block, whose gradient takes the place of the logits.
std::vector<StagedBlock> PlanStaging(const HeadConfig& config, const HeadSizes& sizes, Kept kept,
                                     int64_t padded_rows);

// ---- claims ----

// Buffers for the rows of a chunk of a head that is split by vocabulary (kernels/split_rows.h), in
// Region::kSplitRows.
struct SplitRows {
  int32_t* columns = nullptr;      // [chunk_rows], RowInputs::targets
  RowRecord* own = nullptr;        // [chunk_rows]
  RowRecord* all = nullptr;        // [parts, chunk_rows]
  float* sum_reference = nullptr;  // [chunk_rows], FusedRows::sum_reference
  float* norm_sums = nullptr;      // [2, padded_hidden]
  // For gradients that are not exact.
  int32_t* levels = nullptr;  // [parts], SampleCounters::level of each part
  // Variances and squares, or dropped masses: own_sums [2, chunk_rows] for the classes here, all_sums [parts,
  // 2, chunk_rows] for all parts.
  float* own_sums = nullptr;
  float* all_sums = nullptr;

  static SplitRows Carve(const HeadSizes& sizes, uint8_t* base, int64_t* bytes = nullptr);
  static void Claim(const HeadSizes& sizes, PathClaims& claims);
};

// The statistics and rules of rows, [chunk_rows] each, for a head that stores logits, while a block of rows
// is summed up and then becomes a gradient in two steps. If the head is not split, only rows with soft
// targets take these steps, and the arrays lie in Region::kFilter, which is free until the loss is computed.
struct StoredRows {
  RunningRow* running = nullptr;
  GradientRule* rules = nullptr;

  static StoredRows Of(const HeadSizes& sizes, const PathMemory& memory);
  static void Claim(const HeadSizes& sizes, PathClaims& claims);
};

// ---- single classes of rows ----

// The most entries that parts exchange at a time; at least as many as a row can have.
inline constexpr int64_t kTopScratchEntries = 32768;
static_assert(kTopScratchEntries >= kMostTopClasses && kTopScratchEntries >= kMostGivenClasses);

// Lists of single classes that the parts of a split head exchange, from the classes here and from all parts:
// up to kTopScratchEntries floats, and for top classes as many int32 behind them.
struct TopScratch {
  float* own = nullptr;  // [2, kTopScratchEntries]
  float* all = nullptr;  // [parts, 2, kTopScratchEntries]

  static TopScratch Carve(const HeadSizes& sizes, uint8_t* base, int64_t* bytes = nullptr);
  static void Claim(const HeadSizes& sizes, PathClaims& claims);
};

// Bytes of the top classes of `rows` rows, while logits are computed one block of classes after the other.
constexpr int64_t RunningTopBytes(int64_t rows) {
  return rows * kMostTopClasses * static_cast<int64_t>(sizeof(float) + sizeof(int32_t));
}

// The claims of all paths of a head, and the buffers for the rows of a split head.
PathClaims ClaimsOf(const HeadConfig& config, const HeadSizes& sizes);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_PATH_MEMORY_H_
