// SPDX-License-Identifier: Apache-2.0
// The memory of the paths of a head (chunk_path.h): how much each path needs, how the memory is laid out, and
// which chunks fit. For a new path, add its memory to ClaimsOf.
//
// ds is the matrix dL/ds [rows, classes] of a chunk. Filtered gradients (WhyNotFilteredOnDevice,
// FilterBuffers) and sampled gradients (WhyNotSampledOnDevice, SampleBuffers) are computed from a list of
// some elements of ds. A head that recomputes logits divides a chunk into blocks of rows and classes
// (RecomputedBlocks). A head that stores logits computes fp32 logits for one block of rows after the other,
// in memory that is free at that time (PlanStaging).
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

// The key of a list entry has the class in the upper bits and the row in the lower bits. RowBits: the number
// of bits of the row. KeyBits: the number of all bits, which a sort has to compare.
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

  // Takes the first group of arrays (keys to weight_sum) from `lists`, and the second group (from spare_keys
  // on) from `scratch`. `lists` and `scratch` may be the same carver.
  static KeptBuffers Carve(int64_t capacity, int64_t padded_hidden, Carver& lists, Carver& scratch);
};

// The room for candidates of a chunk, per row on average. A chunk with few rows has room for kLeastPool
// candidates. If a chunk has more candidates than room, it is exact.
inline constexpr int64_t kPooledCandidates = 128;
// The same for a head that recomputes logits, whose sampled entries also have this room.
inline constexpr int64_t kPooledRecomputed = 192;
inline constexpr int64_t kLeastPool = int64_t{16} * kMaxRowCandidates;

// The sizes that determine the memory of filtered and sampled gradients: the sizes of a head, or of one
// chunk.
struct FilterShape {
  int64_t chunk_rows = 0;  // for one chunk: its rows
  int64_t vocab = 0;
  int64_t padded_vocab = 0;
  int64_t padded_hidden = 0;
  DType dtype = DType::kBFloat16;
  int64_t pooled = kPooledCandidates;  // room for candidates, per row on average

  int64_t capacity() const { return std::min(chunk_rows * vocab, std::max(chunk_rows * pooled, kLeastPool)); }
  // The most elements that are kept: all candidates, and one target for each row.
  int64_t entries() const { return capacity() + chunk_rows; }
};

FilterShape FilterShapeOf(const HeadConfig& config, const HeadSizes& sizes);
// For a split head: the shape from which all parts plan, although some parts have fewer classes. For other
// heads: FilterShapeOf.
FilterShape PlannedShapeOf(const HeadConfig& config, const HeadSizes& sizes);

// "" if this GPU can compute a chunk of such a head with filtered gradients, else the reason why not.
absl::string_view WhyNotFilteredOnDevice(const FilterShape& shape, const DeviceLimits& limits);

// Counters that one kernel writes and the next kernels read. They are zeroed before each chunk.
struct FilterCounters {
  int32_t used = 0;  // candidates in the pool; more than its capacity if they do not fit
  int32_t kept = 0;  // elements in the list of kept elements
  RunCounters runs;
};

// The lists of a filtered chunk, in three groups: `own` (pool, rows, counters), and the two groups of `kept`.
struct FilterBuffers {
  int32_t* pool = nullptr;      // [capacity]
  SelectedRow* rows = nullptr;  // [chunk_rows]
  FilterCounters* counters = nullptr;

  // The kept elements, written row by row. If the head stores logits, both groups of `kept` lie in the memory
  // of the logits, because the logits are no longer read once the chunk is known to be filtered. If the head
  // recomputes logits, both groups lie beside the logits, because the logits of other rows are still to be
  // computed.
  KeptBuffers kept;

  // Takes the first group from `own`, and the two groups of `kept` from `lists` and `scratch`.
  static FilterBuffers Carve(const FilterShape& shape, Carver& own, Carver& lists, Carver& scratch);
  // Bytes of the two groups of `kept`.
  static int64_t LogitsBytes(const FilterShape& shape);
};

// ---- sampled gradients ----

// The room for entries of a chunk with this threshold, per row on average. A row with the softmax of a
// trained model takes 136 entries at 2^-10, 212 at 2^-11 and 328 at 2^-12. If a chunk would take more entries
// than it has room for, it gets a larger threshold.
int64_t PooledSamples(float threshold);
inline constexpr int64_t kMostPooledSamples = 416;
// The least room for entries of a chunk, even if it has few rows or classes. Other chunks have at most as
// many entries as fit into the memory of the matrix of ds: below 9,000 classes this is less than 416 entries
// a row.
inline constexpr int64_t kLeastSamples = int64_t{8} * kMaxRowSamples;

// The room for entries of a chunk with `rows` rows. `shape`: of the head.
int64_t SampleCapacity(const FilterShape& shape, int64_t rows, float threshold);

// The lists of a sampled chunk whose logits are stored.
struct SampleBuffers {
  SampledRow* rows = nullptr;  // [chunk_rows]
  SampleCounters* counters = nullptr;
  RunCounters* runs = nullptr;
  // These lie in the memory of dx: at that time the matrix of ds is still read, and dx is not yet written.
  SampleEntry* listed = nullptr;  // [capacity]
  void* hot_listed = nullptr;     // [chunk_rows, kHotClasses] compute dtype
  // These lie in the memory of the matrix of ds, which is no longer read once the chunk is known to be
  // sampled.
  SampleEntry* entries = nullptr;  // [capacity], copied from `listed`
  KeptBuffers kept;
  // For the hot classes (the most frequent classes), which get dense products of their own. Null unless
  // HasHotClasses().
  float* hot_widths = nullptr;           // [chunk_rows], HotPart::widths
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
  // Lies in the memory of dx until the last block is done.
  SampleEntry* listed = nullptr;  // [FilterShape::entries()]
  // These lie in the arena after the last block.
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

// The number of rows of a block, a multiple of 8 and at least 8: as many as fit the arena, so that all blocks
// of a chunk have about the same size. `rows`: the rows of the chunk; > 0 and a multiple of 8.
int64_t ChooseSampledRows(const FilterShape& shape, DType elements, int64_t rows, int64_t arena_bytes);
// The arena that holds blocks of 8 rows, in any element type, and the lists of a chunk.
int64_t LeastSampledArenaBytes(const FilterShape& shape);

// "" if this GPU can compute a chunk of such a head with sampled gradients, else the reason why not.
absl::string_view WhyNotSampledOnDevice(const FilterShape& shape, const DeviceLimits& limits);

// Whether the head has hot classes: it is so large that a dense product for its most frequent classes saves
// time, and the memory of the matrix of ds has room for this product.
bool HasHotClasses(const FilterShape& shape);
// The fewest rows of a chunk for which the dense product saves time.
inline constexpr int64_t kLeastHotRows = 1024;
// The least popularity of a hot class (HotClasses::popularity), for chunks of `rows` rows. A class that every
// chunk takes n times has popularity 2 n. Gathering one entry of a class takes as long as the dense products
// of the class with about 90 rows (H200).
float LeastTaken(int64_t rows);

HotClasses CarveHotClasses(const FilterShape& shape, Carver& carver);

// ---- heads that recompute logits ----

// A chunk is divided into blocks of rows and classes, so that the buffers of one block fit an arena of a
// given size (RecomputedArena, FilterArena). docs/kernels/recomputed.md describes these buffers.

// The workspace of a head that recomputes logits, unless the head has a limit of its own or the server's
// limit is lower.
inline constexpr int64_t kRecomputedWorkspaceBytes = int64_t{64} << 20;
// The most rows of a chunk of such a head. More rows would only make the head's slots larger.
inline constexpr int64_t kRecomputedChunkRows = 4096;
// The fewest rows of a block.
inline constexpr int64_t kLeastBlockRows = 8;

// The properties of a head that determine its blocks.
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

// The size of blocks; the last blocks may be smaller. PadRows(rows) == rows. `classes`: a multiple of 256, or
// all padded_vocab.
struct RecomputedBlocks {
  int64_t rows = 0;
  int64_t classes = 0;
};

// The arena: the buffers for one block. They hold the logits of the block and then their gradient, the
// block's part of dx in fp32, and the partial sums of the bias gradient.
struct RecomputedArena {
  // [rows, classes]: fp32 logits, then, in the same memory, their gradient in the compute dtype. If fused:
  // only the gradient, with its rows packed without gaps.
  void* logits = nullptr;
  float* hidden_gradient = nullptr;  // [rows, padded_hidden]
  float* partials = nullptr;         // ColumnSumScratch(classes); only with a bias
  // For the statistics of a block of rows, before gradients are computed. Null unless fused.
  hopper::TilePartials tiles;
  int64_t bytes = 0;

  static RecomputedArena Carve(const RecomputedShape& shape, const RecomputedBlocks& blocks, uint8_t* base);
};

// The smallest blocks of such a head.
RecomputedBlocks SmallestRecomputedBlocks(const RecomputedShape& shape);

// The blocks into which `rows` rows are divided (PadRows(rows) == rows): of the blocks that fit the arena,
// the fastest by the model of docs/kernels/recomputed.md. If none fits, the smallest blocks.
RecomputedBlocks ChooseRecomputedBlocks(const RecomputedShape& shape, int64_t rows, int64_t arena_bytes);

// Describes the blocks for people.
Choice DescribeBlocks(const RecomputedBlocks& blocks, int64_t arena_bytes);

// The seconds that the gradients of `rows` rows take in blocks of this size, by the same model.
double PredictRecomputedSeconds(const RecomputedShape& shape, const RecomputedBlocks& blocks, int64_t rows);

// How filtered gradients find the candidates of a block of rows.
enum class Selection {
  kFromLogits,  // selected from the logits of all classes
  kInPass,      // listed by the logit pass
};

// A block of rows whose candidates are found together, for filtered gradients.
struct FilterBlock {
  int64_t rows = 0;
  int64_t listed = hopper::kLeastListed;  // kInPass: candidates that a row has room for
};

// The part of the arena that a FilterBlock takes. It lies behind the lists of the chunk (the first group of
// FilterBuffers::kept). Later the scratch (the second group) takes this memory.
struct FilterArena {
  void* logits = nullptr;        // kFromLogits: [rows, padded_vocab], fp32
  hopper::TilePartials tiles;    // for a logit pass
  hopper::CandidateLists lists;  // kInPass
  int64_t bytes = 0;

  static FilterArena Carve(const FilterShape& chunk, Selection selection, const FilterBlock& block,
                           uint8_t* base);
};

// Chooses the block of a chunk with `rows` rows (> 0, a multiple of 8), so that it fits the arena beside the
// lists of the chunk. First it chooses the most rows that fit with the least room for candidates, in whole
// panels if they fit; then it increases the room for candidates as far as it fits. The blocks of a chunk have
// about the same size, and at least 8 rows.
FilterBlock ChooseFilterBlock(const FilterShape& chunk, Selection selection, int64_t rows,
                              int64_t arena_bytes);

// The range of useful arena sizes of a head. With less than LeastArenaBytes no block fits. Memory beyond
// LargestArenaBytes is never used. Both hold for fused and for other chunks.
int64_t LeastArenaBytes(const RecomputedShape& shape, const FilterShape& chunk);
int64_t LargestArenaBytes(const RecomputedShape& shape, const FilterShape& chunk);

// ---- where the fp32 logits of a chunk lie ----

// What remains in Region::kLogits of a row's fp32 logits, after they have been turned into results.
enum class Kept {
  kNothing,
  kGradient,  // padded_vocab elements of the compute dtype a row, at the beginning of Region::kLogits
};

// A block of rows of a chunk, and where their fp32 logits lie while they are turned into results. They lie in
// memory that is free at that time. In Region::kLogits each element has 16 bits, for the gradient that is
// kept. If R rows are still to be computed, their part of the region has 2 R bytes for each class. The next n
// rows need 2 n bytes for their gradients and, behind them, 4 n bytes for their fp32 logits. So a third of
// the R rows fits. The logits of the last rows lie in the "spare" memory, Region::kHiddenGradient, because dx
// is not written yet.
struct StagedBlock {
  int64_t begin = 0;      // row
  int64_t rows = 0;       // padded
  bool in_spare = false;  // logits at the start of Region::kHiddenGradient; else in Region::kLogits
  int64_t offset = 0;     // bytes from the beginning of the region
};

// The bytes of Region::kHiddenGradient that may hold logits. They limit the rows of a block in that region.
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
  // Sums of each row: variance and square of sampled gradients, or the dropped mass of filtered ones.
  // own_sums [2, chunk_rows] has the sums over the classes here, all_sums [parts, 2, chunk_rows] has the sums
  // of every part.
  float* own_sums = nullptr;
  float* all_sums = nullptr;

  static SplitRows Carve(const HeadSizes& sizes, uint8_t* base, int64_t* bytes = nullptr);
  static void Claim(const HeadSizes& sizes, PathClaims& claims);
};

// For a head that stores logits: the statistics and rules of rows, [chunk_rows] each, if one step computes
// the statistics of a block of rows and a second step its gradient. If the head is not split, only rows with
// soft targets take these two steps; the arrays then lie in Region::kFilter, which is free until the loss is
// computed.
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

// Lists of single classes that the parts of a split head exchange: `own` is the list of this part, and `all`
// has the lists of all parts. A list has up to kTopScratchEntries floats; for top classes, as many int32
// follow them.
struct TopScratch {
  float* own = nullptr;  // [2, kTopScratchEntries]
  float* all = nullptr;  // [parts, 2, kTopScratchEntries]

  static TopScratch Carve(const HeadSizes& sizes, uint8_t* base, int64_t* bytes = nullptr);
  static void Claim(const HeadSizes& sizes, PathClaims& claims);
};

// Bytes of the lists of top classes of `rows` rows. The lists are needed while logits are computed one block
// of classes after the other.
constexpr int64_t RunningTopBytes(int64_t rows) {
  return rows * kMostTopClasses * static_cast<int64_t>(sizeof(float) + sizeof(int32_t));
}

// The claims of all paths of a head, and the buffers for the rows of a split head.
PathClaims ClaimsOf(const HeadConfig& config, const HeadSizes& sizes);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_PATH_MEMORY_H_
