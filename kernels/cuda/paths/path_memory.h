// SPDX-License-Identifier: Apache-2.0
// The memory that paths need, path by path, and which chunks fit it. A new path adds what it needs to
// ClaimsOf.
//
// Gradients may come from a list of elements of ds instead of the whole matrix: filtered gradients
// (WhyNotFilteredOnDevice, FilterBuffers) and sampled gradients (WhyNotSampledOnDevice, SampleBuffers). A
// chunk of a head that recomputes logits is divided into blocks of rows and classes (RecomputedBlocks). Where
// logits are stored, their fp32 forms take turns in memory that is free anyway (PlanStaging).
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

// ---- filtered gradients; sampled gradients use FilterShape and KeptBuffers too ----

// Bits of an entry's key: those of the row, and all that a sort has to look at.
int RowBits(int64_t rows);
int KeyBits(int64_t rows, int64_t vocab);

// The memory of a list of elements of ds that becomes a weight gradient (AddEntries in path_steps.h): where
// the entries are, [capacity] each unless said otherwise.
struct KeptBuffers {
  uint64_t* keys = nullptr;  // as in KeptList
  float* coefs = nullptr;
  float* weight_sum = nullptr;  // [padded_hidden], of label smoothing

  // Used when all entries are there.
  uint64_t* spare_keys = nullptr;
  float* spare_coefs = nullptr;
  int32_t* runs = nullptr;  // [2 * capacity]
  uint8_t* sort_scratch = nullptr;
  float* hidden_sum = nullptr;  // [padded_hidden]
  float* partials = nullptr;    // ColumnSumScratch(padded_hidden); also of weight_sum

  // Takes the two groups from these, which may be the same.
  static KeptBuffers Carve(int64_t capacity, int64_t padded_hidden, Carver& lists, Carver& scratch);
};

// Candidates that a chunk has room for, per row on average, but kLeastPool if its rows are few; more make the
// chunk exact.
inline constexpr int64_t kPooledCandidates = 128;
// The same for a head that recomputes logits; its sampled entries have the same room.
inline constexpr int64_t kPooledRecomputed = 192;
inline constexpr int64_t kLeastPool = int64_t{16} * kMaxRowCandidates;

// What the plan needs to know of a head, or of one chunk of it.
struct FilterShape {
  int64_t chunk_rows = 0;  // of a chunk: those it has
  int64_t vocab = 0;
  int64_t padded_vocab = 0;
  int64_t padded_hidden = 0;
  DType dtype = DType::kBFloat16;
  int64_t pooled = kPooledCandidates;  // a row on average

  int64_t capacity() const { return std::min(chunk_rows * vocab, std::max(chunk_rows * pooled, kLeastPool)); }
  // Kept elements at most: the candidates and one target a row.
  int64_t entries() const { return capacity() + chunk_rows; }
};

FilterShape FilterShapeOf(const HeadConfig& config, const HeadSizes& sizes);
// What all parts of a head that is split plan with, though some have one class less. Of other heads the same.
FilterShape PlannedShapeOf(const HeadConfig& config, const HeadSizes& sizes);

// Why this GPU computes a chunk of such a head exactly although its options ask for a filter, or "".
absl::string_view WhyNotFilteredOnDevice(const FilterShape& shape, const DeviceLimits& limits);

// Numbers that kernels hand to each other, zeroed before each chunk.
struct FilterCounters {
  int32_t used = 0;  // of the pool
  int32_t kept = 0;  // entries
  RunCounters runs;
};

struct FilterBuffers {
  int32_t* pool = nullptr;      // [capacity]
  SelectedRow* rows = nullptr;  // [chunk_rows]
  FilterCounters* counters = nullptr;

  // Written row by row. Where logits are stored this group and the next lie in their memory, because a chunk
  // that is known to be filtered reads its logits no more; where they are recomputed they lie beside them,
  // because the logits of other rows are still to come.
  KeptBuffers kept;

  // Takes the three groups, one after the other, from these.
  static FilterBuffers Carve(const FilterShape& shape, Carver& own, Carver& lists, Carver& scratch);
  // Bytes of the second and third group.
  static int64_t LogitsBytes(const FilterShape& shape);
};

// ---- sampled gradients ----

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

// ---- heads that recompute logits ----

// A chunk is divided into blocks of rows and classes, so that a block and what belongs to it fit an arena of
// a given size (RecomputedArena, FilterArena); docs/kernels/recomputed.md says what is in it.

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

// ---- where the fp32 logits of a chunk lie ----

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

// ---- claims ----

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

// Where the rows of a head that stores its logits have statistics and rules, [chunk_rows] each, while a block
// of them is summed up and becomes a gradient in two steps. Without a split, where only rows with soft
// targets take these steps, they lie in Region::kFilter, which is free until the loss is there.
struct StoredRows {
  RunningRow* running = nullptr;
  GradientRule* rules = nullptr;

  static StoredRows Of(const HeadSizes& sizes, const PathMemory& memory);
  static void Claim(const HeadSizes& sizes, PathClaims& claims);
};

// ---- single classes of rows ----

// Entries that parts exchange at a time; at least the most that a row has.
inline constexpr int64_t kTopScratchEntries = 32768;
static_assert(kTopScratchEntries >= kMostTopClasses && kTopScratchEntries >= kMostGivenClasses);

// Of a head that is split by vocabulary: lists of single classes, [entries] floats and, of top classes, as
// many int32 behind them; of the classes here, and of all parts.
struct TopScratch {
  float* own = nullptr;  // [2, kTopScratchEntries]
  float* all = nullptr;  // [parts, 2, kTopScratchEntries]

  static TopScratch Carve(const HeadSizes& sizes, uint8_t* base, int64_t* bytes = nullptr);
  static void Claim(const HeadSizes& sizes, PathClaims& claims);
};

// Bytes of the top classes of `rows` rows while their logits come a block of classes at a time.
constexpr int64_t RunningTopBytes(int64_t rows) {
  return rows * kMostTopClasses * static_cast<int64_t>(sizeof(float) + sizeof(int32_t));
}

// What all paths of such a head claim, and the rows of one that is split.
PathClaims ClaimsOf(const HeadConfig& config, const HeadSizes& sizes);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_PATHS_PATH_MEMORY_H_
