// SPDX-License-Identifier: Apache-2.0
// The sizes and layouts of the memory that paths need (path_memory.h). ClaimsOf, at the end, collects the
// claims of all paths.
#include "kernels/cuda/paths/path_memory.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/hopper/plan.h"
#include "kernels/cuda/kernels/launch_plan.h"
#include "kernels/cuda/kernels/loss_rows.h"

namespace lossd::kernels::cuda {

int RowBits(int64_t rows) { return std::bit_width(static_cast<uint64_t>(rows - 1)); }

// The key has room for one class more than there are, because an empty entry, with all bits set, must sort
// behind all others. A sort compares at least one bit.
int KeyBits(int64_t rows, int64_t vocab) {
  return RowBits(rows) + std::bit_width(static_cast<uint64_t>(std::max<int64_t>(vocab, 1)));
}

KeptBuffers KeptBuffers::Carve(int64_t capacity, int64_t padded_hidden, Carver& lists, Carver& scratch) {
  KeptBuffers b;
  b.keys = lists.Take<uint64_t>(capacity);
  b.coefs = lists.Take<float>(capacity);
  b.weight_sum = lists.Take<float>(padded_hidden);
  b.spare_keys = scratch.Take<uint64_t>(capacity);
  b.spare_coefs = scratch.Take<float>(capacity);
  b.runs = scratch.Take<int32_t>(2 * capacity);
  b.sort_scratch = scratch.Take<uint8_t>(static_cast<int64_t>(SortScratchBytes(capacity)));
  b.hidden_sum = scratch.Take<float>(padded_hidden);
  b.partials = scratch.Take<float>(ColumnSumScratch(padded_hidden));
  return b;
}

FilterShape FilterShapeOf(const HeadConfig& config, const HeadSizes& sizes) {
  return {.chunk_rows = sizes.chunk_rows,
          .vocab = sizes.vocab,
          .padded_vocab = sizes.padded_vocab,
          .padded_hidden = sizes.padded_hidden,
          .dtype = config.compute_dtype,
          .pooled = config.logits == Logits::kRecomputed ? kPooledRecomputed : kPooledCandidates};
}

FilterShape PlannedShapeOf(const HeadConfig& config, const HeadSizes& sizes) {
  FilterShape shape = FilterShapeOf(config, sizes);
  if (sizes.is_split()) shape.vocab = sizes.most_classes;
  shape.padded_vocab = sizes.planned_vocab();
  return shape;
}

absl::string_view WhyNotFilteredOnDevice(const FilterShape& shape, const DeviceLimits& limits) {
  if (!limits.has_branches) return "the driver is too old for branches on the device";
  if (!CanFilterRows(shape.padded_hidden, shape.dtype)) return "the hidden size is too large for one block";
  return "";
}

FilterBuffers FilterBuffers::Carve(const FilterShape& shape, Carver& own, Carver& lists, Carver& scratch) {
  FilterBuffers b;
  b.pool = own.Take<int32_t>(shape.capacity());
  b.rows = own.Take<SelectedRow>(shape.chunk_rows);
  b.counters = own.Take<FilterCounters>(1);
  b.kept = KeptBuffers::Carve(shape.entries(), shape.padded_hidden, lists, scratch);
  return b;
}

int64_t FilterBuffers::LogitsBytes(const FilterShape& shape) {
  Carver own(nullptr), logits(nullptr);
  Carve(shape, own, logits, logits);
  return logits.used();
}

namespace {

// Bytes that one entry takes in all arrays of SampleBuffers together, without `listed`: 8 in `entries`, 32 in
// the arrays of `kept`, and the rest in its scratch for sorting.
constexpr int64_t kEntryBytes = 44;
// Bytes for the other arrays, and for rounding.
constexpr int64_t kMatrixSlack = int64_t{4} << 20;

int64_t MatrixRowBytes(const FilterShape& shape) {
  return shape.padded_vocab * static_cast<int64_t>(SizeOf(shape.dtype));
}

// Takes the buffers of hot classes.
void CarveHot(const FilterShape& shape, Carver& own, Carver& hidden, Carver& logits, SampleBuffers& b) {
  const int64_t elements = shape.chunk_rows * kHotClasses * static_cast<int64_t>(SizeOf(shape.dtype));
  b.hot_widths = own.Take<float>(shape.chunk_rows);
  b.hot_listed = hidden.Take<uint8_t>(elements);
  b.hot_elements = logits.Take<uint8_t>(elements);
  b.hot_weight =
      logits.Take<uint8_t>(kHotClasses * shape.padded_hidden * static_cast<int64_t>(SizeOf(shape.dtype)));
  b.hot_hidden = logits.Take<float>(shape.chunk_rows * shape.padded_hidden);
  b.hot_weight_gradient = logits.Take<float>(kHotClasses * shape.padded_hidden);
  b.hot_bias_gradient = logits.Take<float>(kHotClasses);
  b.hot_partials = logits.Take<float>(ColumnSumScratch(kHotClasses));
}

}  // namespace

int64_t PooledSamples(float threshold) {
  if (threshold >= 0x1p-10f) return 192;
  return threshold >= 0x1p-11f ? 288 : kMostPooledSamples;
}

int64_t SampleCapacity(const FilterShape& shape, int64_t rows, float threshold) {
  const int64_t in_matrix = rows * MatrixRowBytes(shape) / kEntryBytes;
  const int64_t wanted = std::min(rows * PooledSamples(threshold), in_matrix);
  const int64_t least = std::max(kLeastSamples, rows * (kSpareEntries + 1));
  return std::min(rows * (shape.vocab + kSpareEntries), std::max(wanted, least));
}

SampleBuffers SampleBuffers::Carve(const FilterShape& shape, Carver& own, Carver& hidden, Carver& logits) {
  // The lowest threshold, 0, needs the most room.
  const int64_t capacity = SampleCapacity(shape, shape.chunk_rows, 0.0f);
  SampleBuffers b;
  b.rows = own.Take<SampledRow>(shape.chunk_rows);
  b.counters = own.Take<SampleCounters>(1);
  b.runs = own.Take<RunCounters>(1);
  b.listed = hidden.Take<SampleEntry>(capacity);
  b.entries = logits.Take<SampleEntry>(capacity);
  b.kept = KeptBuffers::Carve(capacity, shape.padded_hidden, logits, logits);
  if (HasHotClasses(shape)) CarveHot(shape, own, hidden, logits, b);
  return b;
}

RecomputedSampleBuffers RecomputedSampleBuffers::Carve(const FilterShape& shape, Carver& own, Carver& hidden,
                                                       Carver& arena) {
  RecomputedSampleBuffers b;
  b.rows = own.Take<SampledRow>(shape.chunk_rows);
  b.counters = own.Take<SampleCounters>(1);
  b.runs = own.Take<RunCounters>(1);
  b.listed = hidden.Take<SampleEntry>(shape.entries());
  b.entries = arena.Take<SampleEntry>(shape.entries());
  b.kept = KeptBuffers::Carve(shape.entries(), shape.padded_hidden, arena, arena);
  return b;
}

SampledBlockArena SampledBlockArena::Carve(const FilterShape& shape, DType elements, int64_t rows,
                                           uint8_t* base) {
  SampledBlockArena arena;
  Carver carver(base);
  arena.elements = carver.Take<uint8_t>(rows * shape.padded_vocab * static_cast<int64_t>(SizeOf(elements)));
  arena.tiles = hopper::TilePartials::Carve(carver, rows, shape.vocab);
  arena.bytes = carver.used();
  return arena;
}

int64_t ChooseSampledRows(const FilterShape& shape, DType elements, int64_t rows, int64_t arena_bytes) {
  // Bisection, in units of 8 rows: `most` units fit (one unit always does), and `fails` units do not, or are
  // more than there are.
  int64_t most = 1;
  for (int64_t fails = rows / kLeastBlockRows + 1; fails - most > 1;) {
    const int64_t middle = most + (fails - most) / 2;
    const int64_t bytes = SampledBlockArena::Carve(shape, elements, middle * kLeastBlockRows, nullptr).bytes;
    (bytes <= arena_bytes ? most : fails) = middle;
  }
  return RoundUp(CeilDiv(rows, CeilDiv(rows, most * kLeastBlockRows)), kLeastBlockRows);
}

int64_t LeastSampledArenaBytes(const FilterShape& shape) {
  Carver own(nullptr), hidden(nullptr), arena(nullptr);
  RecomputedSampleBuffers::Carve(shape, own, hidden, arena);
  return std::max(arena.used(),
                  SampledBlockArena::Carve(shape, DType::kFloat32, kLeastBlockRows, nullptr).bytes);
}

absl::string_view WhyNotSampledOnDevice(const FilterShape& shape, const DeviceLimits& limits) {
  if (shape.vocab > kMostSampledClasses) return "too many classes for the memory of one block";
  return WhyNotFilteredOnDevice(shape, limits);
}

bool HasHotClasses(const FilterShape& shape) {
  if (shape.vocab < 12 * kHotClasses || shape.chunk_rows < kLeastHotRows) return false;
  Carver own(nullptr), hidden(nullptr), logits(nullptr);
  SampleBuffers b;
  CarveHot(shape, own, hidden, logits, b);
  const int64_t lists = SampleCapacity(shape, shape.chunk_rows, 0.0f) * kEntryBytes;
  return lists + logits.used() + kMatrixSlack <= shape.chunk_rows * MatrixRowBytes(shape);
}

float LeastTaken(int64_t rows) {
  // If this share of the rows takes a class, gathering its entries takes as long as its dense products.
  constexpr float kShare = 90.0f / 8192.0f;
  constexpr float kSteady = 2.0f;  // the popularity of a class that every chunk takes once
  return kSteady * kShare * static_cast<float>(rows);
}

HotClasses CarveHotClasses(const FilterShape& shape, Carver& carver) {
  HotClasses hot;
  if (!HasHotClasses(shape)) return hot;
  hot.vocab = shape.vocab;
  hot.bits = carver.Take<uint32_t>(hot.groups());
  hot.bases = carver.Take<int32_t>(hot.groups());
  hot.ids = carver.Take<int32_t>(kHotClasses);
  hot.count = carver.Take<int32_t>(1);
  hot.taken = carver.Take<int32_t>(hot.vocab);
  hot.popularity = carver.Take<float>(hot.vocab);
  hot.histogram = carver.Take<int32_t>(kHotBins);
  return hot;
}

namespace {

constexpr int64_t kClassUnit = 256;

// Times for the model of block sizes, measured on one H200 with bf16. They only rank sizes of blocks, so
// their error on another GPU costs little.
constexpr double kTileSeconds = 12.2e-9;    // a tile of 128 x 256, one step of the inner dimension
constexpr double kIdleShare = 2.0 / 3.0;    // the share of an idle cluster's time that the logit pass loses
constexpr double kBytesPerSecond = 3.9e12;  // of device memory
constexpr double kBlockSeconds = 30e-6;     // three launches, and reading and writing dx in fp32 in L2

// The time of a product in rounds: its number of tiles per multiprocessor. If some multiprocessors are idle,
// the others run faster, because of the power limit; this holds until half of them are idle. So the result is
// at least 0.5.
double Rounds(int64_t rows, int64_t cols, int multiprocessors) {
  const int64_t tiles = CeilDiv(rows, 128) * CeilDiv(cols, 256);
  return std::max(0.5, static_cast<double>(tiles) / multiprocessors);
}

// The rounds of the logit pass. Its clusters work on whole panels, so in the last round some clusters are
// idle, and most of their time is lost.
double PassRounds(int64_t rows, int64_t classes, int multiprocessors) {
  const int64_t tiles = hopper::Panels(rows) * CeilDiv(classes, hopper::kColumnTile);
  const double rounds = static_cast<double>(tiles) / std::max(multiprocessors / hopper::kClusterBlocks, 1);
  return rounds + kIdleShare * (std::ceil(rounds) - rounds);
}

// The time of a block's gradient and its three products.
double BlockSeconds(const RecomputedShape& shape, int64_t rows, int64_t classes) {
  const int sms = shape.multiprocessors;
  const auto d = static_cast<double>(shape.padded_hidden);
  const double logits = shape.fused ? PassRounds(rows, classes, sms) : Rounds(rows, classes, sms);
  const double steps = logits * d + Rounds(rows, shape.padded_hidden, sms) * static_cast<double>(classes) +
                       Rounds(classes, shape.padded_hidden, sms) * static_cast<double>(rows);
  return steps * kTileSeconds + kBlockSeconds;
}

// `block_rows` rounded up to whole panels, because the logit pass works on whole panels; at most `rows`.
int64_t InPanels(int64_t block_rows, int64_t rows) {
  return std::min(RoundUp(block_rows, hopper::kPanelRows), rows);
}

// The rows of a block if `rows` rows are divided into `blocks` blocks.
int64_t BlockRows(const RecomputedShape& shape, int64_t rows, int64_t blocks) {
  const int64_t padded = PadRows(CeilDiv(rows, blocks));
  return shape.fused && padded > hopper::kPanelRows ? InPanels(padded, rows) : padded;
}

int64_t BlockClasses(const RecomputedShape& shape, int64_t blocks) {
  return std::min(RoundUp(CeilDiv(shape.padded_vocab, blocks), kClassUnit), shape.padded_vocab);
}

bool BlocksFit(const RecomputedShape& shape, const RecomputedBlocks& blocks, int64_t bytes) {
  return RecomputedArena::Carve(shape, blocks, nullptr).bytes <= bytes;
}

// Bytes that are enough for both kinds of Selection.
int64_t FilterBytes(const RecomputedShape& shape, const FilterShape& chunk, const FilterBlock& block) {
  const int64_t bytes = FilterArena::Carve(chunk, Selection::kFromLogits, block, nullptr).bytes;
  if (!shape.fused) return bytes;
  return std::max(bytes, FilterArena::Carve(chunk, Selection::kInPass, block, nullptr).bytes);
}

// Bytes that are enough for fused chunks and for other chunks.
int64_t BlockBytes(const RecomputedShape& shape, const RecomputedBlocks& blocks) {
  const int64_t bytes = RecomputedArena::Carve(shape.For(false), blocks, nullptr).bytes;
  return std::max(bytes, RecomputedArena::Carve(shape, blocks, nullptr).bytes);
}

// Compares `best` with the blocks of `block_rows` rows that fit, beginning with the fewest blocks of classes.
// The comparison ends after kCandidates numbers of blocks, which bounds the time of the search.
void Consider(const RecomputedShape& shape, int64_t block_rows, int64_t rows, int64_t bytes,
              RecomputedBlocks& best, double& best_seconds) {
  constexpr int kCandidates = 48;
  const int64_t most = CeilDiv(shape.padded_vocab, kClassUnit);
  int64_t fewest = 1;  // blocks of classes that fit, by bisection
  for (int64_t fits = most; fewest < fits;) {
    const int64_t middle = fewest + (fits - fewest) / 2;
    const bool ok = BlocksFit(shape, {block_rows, BlockClasses(shape, middle)}, bytes);
    (ok ? fits : fewest) = ok ? middle : middle + 1;
  }
  for (int64_t n = fewest; n <= std::min(most, fewest + kCandidates); ++n) {
    const RecomputedBlocks blocks = {block_rows, BlockClasses(shape, n)};
    const double seconds = PredictRecomputedSeconds(shape, blocks, rows);
    if (seconds >= best_seconds || !BlocksFit(shape, blocks, bytes)) continue;
    best = blocks;
    best_seconds = seconds;
  }
}

}  // namespace

RecomputedShape RecomputedShapeOf(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors) {
  return {.padded_hidden = sizes.padded_hidden,
          .vocab = sizes.most_classes,
          .padded_vocab = sizes.planned_vocab(),
          .element = sizes.element,
          .fused = sizes.fused,
          .bias = config.has_bias && config.trainable,
          .multiprocessors = multiprocessors};
}

RecomputedArena RecomputedArena::Carve(const RecomputedShape& shape, const RecomputedBlocks& blocks,
                                       uint8_t* base) {
  RecomputedArena arena;
  Carver carver(base);
  const int64_t element = shape.fused ? shape.element : static_cast<int64_t>(sizeof(float));
  arena.logits = carver.Take<uint8_t>(blocks.rows * blocks.classes * element);
  arena.hidden_gradient = carver.Take<float>(blocks.rows * shape.padded_hidden);
  if (shape.bias) arena.partials = carver.Take<float>(ColumnSumScratch(blocks.classes));
  Carver tiles(base);
  if (shape.fused) arena.tiles = hopper::TilePartials::Carve(tiles, blocks.rows, shape.vocab);
  arena.bytes = std::max(carver.used(), tiles.used());
  return arena;
}

double PredictRecomputedSeconds(const RecomputedShape& shape, const RecomputedBlocks& blocks, int64_t rows) {
  const double dw_bytes = 8.0 * static_cast<double>(shape.padded_vocab * shape.padded_hidden);
  // Divides `total` into parts of size `size` (the last part may be smaller) and returns the sum of
  // seconds_of over the parts.
  const auto sum = [](int64_t total, int64_t size, const auto& seconds_of) {
    const int64_t whole = total / size, rest = total % size;
    return static_cast<double>(whole) * seconds_of(size) + (rest > 0 ? seconds_of(rest) : 0.0);
  };
  return sum(rows, blocks.rows, [&](int64_t block_rows) {
    return dw_bytes / kBytesPerSecond + sum(shape.padded_vocab, blocks.classes, [&](int64_t classes) {
             return BlockSeconds(shape, block_rows, classes);
           });
  });
}

RecomputedBlocks SmallestRecomputedBlocks(const RecomputedShape& shape) {
  return {kLeastBlockRows, std::min(shape.padded_vocab, kClassUnit)};
}

RecomputedBlocks ChooseRecomputedBlocks(const RecomputedShape& shape, int64_t rows, int64_t arena_bytes) {
  RecomputedBlocks best = SmallestRecomputedBlocks(shape);
  double seconds = 1e300;
  int64_t last = 0;
  for (int64_t n = 1; n <= rows / kLeastBlockRows; ++n) {
    const int64_t block_rows = BlockRows(shape, rows, n);
    if (block_rows != last) Consider(shape, block_rows, rows, arena_bytes, best, seconds);
    last = block_rows;
  }
  return best;
}

Choice DescribeBlocks(const RecomputedBlocks& blocks, int64_t arena_bytes) {
  return {.what = "blocks",
          .choice = absl::StrCat(blocks.rows, " rows, ", blocks.classes, " classes"),
          .reason = "the fastest that fit, by calculation",
          .workspace_bytes = arena_bytes};
}

FilterArena FilterArena::Carve(const FilterShape& chunk, Selection selection, const FilterBlock& block,
                               uint8_t* base) {
  Carver own(nullptr), lists(nullptr), scratch(nullptr);
  FilterBuffers::Carve(chunk, own, lists, scratch);
  FilterArena arena;
  Carver carver(base == nullptr ? nullptr : base + lists.used());
  if (selection == Selection::kInPass) {
    arena.tiles = hopper::TilePartials::Carve(carver, block.rows, chunk.vocab);
    arena.lists = hopper::CandidateLists::Carve(carver, block.rows, chunk.vocab, block.listed);
  } else {
    arena.logits = carver.Take<float>(block.rows * chunk.padded_vocab);
    arena.tiles = hopper::TilePartials::Carve(carver, block.rows, chunk.vocab);
  }
  arena.bytes = lists.used() + RoundUp(std::max(carver.used(), scratch.used()), 256);
  return arena;
}

FilterBlock ChooseFilterBlock(const FilterShape& chunk, Selection selection, int64_t rows,
                              int64_t arena_bytes) {
  const auto fits = [&](const FilterBlock& block) {
    return FilterArena::Carve(chunk, selection, block, nullptr).bytes <= arena_bytes;
  };
  int64_t most = 1;  // in units of 8, as in ChooseSampledRows
  int64_t fails = rows / kLeastBlockRows + 1;
  while (fails - most > 1) {
    const int64_t middle = most + (fails - most) / 2;
    (fits({middle * kLeastBlockRows}) ? most : fails) = middle;
  }
  const int64_t block_rows = CeilDiv(rows, CeilDiv(rows, most * kLeastBlockRows));
  const int64_t in_panels = InPanels(block_rows, rows);
  FilterBlock block = {RoundUp(block_rows, kLeastBlockRows)};
  if (selection == Selection::kInPass && fits({in_panels})) block.rows = in_panels;
  const FilterBlock roomy = {block.rows, hopper::kMostListed};
  return fits(roomy) ? roomy : block;
}

int64_t LeastArenaBytes(const RecomputedShape& shape, const FilterShape& chunk) {
  return std::max({BlockBytes(shape, SmallestRecomputedBlocks(shape)),
                   FilterBytes(shape, chunk, {kLeastBlockRows}), LeastSampledArenaBytes(chunk)});
}

int64_t LargestArenaBytes(const RecomputedShape& shape, const FilterShape& chunk) {
  const RecomputedBlocks all = {chunk.chunk_rows, shape.padded_vocab};
  return std::max({BlockBytes(shape, all), FilterBytes(shape, chunk, {chunk.chunk_rows, hopper::kMostListed}),
                   LeastSampledArenaBytes(chunk)});
}

// ---- where the fp32 logits of a chunk lie, and claims ----

namespace {

constexpr int64_t kAlignment = 256;
// A block in the spare memory has at least one row for each kSpareShare rows of the chunk. So a full chunk
// has about a dozen blocks.
constexpr int64_t kSpareShare = 96;

int64_t StagedBytes(const HeadSizes& sizes, int64_t rows) {
  return rows * sizes.planned_vocab() * static_cast<int64_t>(sizeof(float));
}

// Whole panels of the products, or whole units of 8 rows below one panel.
int64_t WholePanels(int64_t rows) { return rows >= 128 ? rows / 128 * 128 : rows / 8 * 8; }

// The offset in Region::kLogits from which logits may lie: behind the elements that are kept of the rows
// before `end`.
int64_t OffsetBehind(const HeadSizes& sizes, Kept kept, int64_t end) {
  return kept == Kept::kNothing ? 0 : RoundUp(end * sizes.planned_vocab() * sizes.element, kAlignment);
}

bool StagedFits(const HeadSizes& sizes, Kept kept, int64_t begin, int64_t rows) {
  return OffsetBehind(sizes, kept, begin + rows) + StagedBytes(sizes, rows) <=
         sizes.chunk_rows * sizes.planned_vocab() * sizes.element;
}

// The most rows from `begin` on whose logits fit Region::kLogits.
int64_t RowsThatFit(const HeadSizes& sizes, Kept kept, int64_t begin, int64_t left) {
  if (StagedFits(sizes, kept, begin, left)) return left;
  int64_t fits = 0, fails = left / 8;  // in units of 8
  while (fails - fits > 1) {
    const int64_t middle = fits + (fails - fits) / 2;
    (StagedFits(sizes, kept, begin, 8 * middle) ? fits : fails) = middle;
  }
  return WholePanels(8 * fits);
}

}  // namespace

int64_t SpareBytes(const HeadConfig& config, const HeadSizes& sizes) {
  if (config.compute_dtype == DType::kFloat32) return 0;
  const int64_t gradient = sizes.chunk_rows * sizes.padded_hidden *
                           static_cast<int64_t>(SizeOf(HiddenGradientDType(sizes, config.compute_dtype)));
  const int64_t least = RoundUp(CeilDiv(sizes.chunk_rows, kSpareShare), 8);
  return std::max(gradient, StagedBytes(sizes, least));
}

// A block lies in Region::kLogits as long as it gets at least as many rows there as the spare memory holds.
std::vector<StagedBlock> PlanStaging(const HeadConfig& config, const HeadSizes& sizes, Kept kept,
                                     int64_t padded_rows) {
  if (config.compute_dtype == DType::kFloat32) return {{.begin = 0, .rows = padded_rows}};
  const int64_t spare = WholePanels(SpareBytes(config, sizes) / StagedBytes(sizes, 1));
  std::vector<StagedBlock> blocks;
  for (int64_t begin = 0; begin < padded_rows;) {
    const int64_t left = padded_rows - begin;
    const int64_t behind = RowsThatFit(sizes, kept, begin, left);
    StagedBlock block = {.begin = begin, .rows = behind};
    if (behind < std::min(spare, left)) {
      block.rows = std::min(spare, left);
      block.in_spare = true;
    } else {
      block.offset = OffsetBehind(sizes, kept, begin + behind);
    }
    blocks.push_back(block);
    begin += block.rows;
  }
  return blocks;
}

SplitRows SplitRows::Carve(const HeadSizes& sizes, uint8_t* base, int64_t* bytes) {
  Carver carver(base);
  SplitRows rows;
  rows.columns = carver.Take<int32_t>(sizes.chunk_rows);
  rows.own = carver.Take<RowRecord>(sizes.chunk_rows);
  rows.all = carver.Take<RowRecord>(sizes.parts * sizes.chunk_rows);
  rows.sum_reference = carver.Take<float>(sizes.chunk_rows);
  rows.norm_sums = carver.Take<float>(2 * sizes.padded_hidden);
  rows.levels = carver.Take<int32_t>(sizes.parts);
  rows.own_sums = carver.Take<float>(2 * sizes.chunk_rows);
  rows.all_sums = carver.Take<float>(2 * sizes.parts * sizes.chunk_rows);
  if (bytes != nullptr) *bytes = carver.used();
  return rows;
}

void SplitRows::Claim(const HeadSizes& sizes, PathClaims& claims) {
  if (!sizes.is_split()) return;
  int64_t bytes = 0;
  Carve(sizes, nullptr, &bytes);
  claims.Claim(Region::kSplitRows, bytes);
}

StoredRows StoredRows::Of(const HeadSizes& sizes, const PathMemory& memory) {
  if (sizes.is_split()) {
    return {memory.At<RunningRow>(Region::kRunningRows), memory.At<GradientRule>(Region::kRules)};
  }
  Carver carver(memory[Region::kFilter]);
  StoredRows rows;
  rows.running = carver.Take<RunningRow>(sizes.chunk_rows);
  rows.rules = carver.Take<GradientRule>(sizes.chunk_rows);
  return rows;
}

void StoredRows::Claim(const HeadSizes& sizes, PathClaims& claims) {
  const int64_t rows = sizes.chunk_rows;
  if (sizes.is_split()) {
    claims.Claim(Region::kRules, rows * static_cast<int64_t>(sizeof(GradientRule)));
    claims.Claim(Region::kRunningRows, rows * static_cast<int64_t>(sizeof(RunningRow)));
    return;
  }
  Carver carver(nullptr);
  carver.Take<RunningRow>(rows);
  carver.Take<GradientRule>(rows);
  claims.Claim(Region::kFilter, carver.used());
}

TopScratch TopScratch::Carve(const HeadSizes& sizes, uint8_t* base, int64_t* bytes) {
  Carver carver(base);
  TopScratch scratch;
  scratch.own = carver.Take<float>(2 * kTopScratchEntries);
  scratch.all = carver.Take<float>(2 * kTopScratchEntries * sizes.parts);
  if (bytes != nullptr) *bytes = carver.used();
  return scratch;
}

void TopScratch::Claim(const HeadSizes& sizes, PathClaims& claims) {
  if (!sizes.is_split()) return;
  int64_t bytes = 0;
  Carve(sizes, nullptr, &bytes);
  claims.Claim(Region::kTopClasses, bytes);
}

namespace {

// Claims the matrix of ds, and the partial sums over its columns.
void ClaimGradients(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  claims.Claim(Region::kLogits, sizes.chunk_rows * sizes.planned_vocab() * sizes.element);
  if (config.has_bias && config.trainable) {
    claims.Claim(Region::kColumnSums,
                 ColumnSumScratch(sizes.padded_vocab) * static_cast<int64_t>(sizeof(float)));
  }
}

// Claims room for fp32 logits, one block of rows after the other.
void ClaimStaging(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  claims.Claim(Region::kHiddenGradient, SpareBytes(config, sizes));
}

void ClaimStored(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  ClaimGradients(config, sizes, claims);
  ClaimStaging(config, sizes, claims);
  StoredRows::Claim(sizes, claims);
  if (config.compute_dtype != DType::kFloat32 || sizes.is_split()) {
    claims.Claim(Region::kTargetDots, sizes.chunk_rows * static_cast<int64_t>(sizeof(float)));
  }
}

void ClaimFused(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  if (!sizes.fused) return;
  ClaimGradients(config, sizes, claims);
  Carver rows(nullptr), partials(nullptr);
  hopper::FusedRows::Carve(rows, sizes.chunk_rows);
  hopper::TilePartials::Carve(partials, sizes.chunk_rows, sizes.most_classes);
  claims.Claim(Region::kFusedRows, rows.used());
  claims.Claim(Region::kHiddenGradient, partials.used());
  claims.Claim(Region::kTargetDots, sizes.chunk_rows * static_cast<int64_t>(sizeof(float)));
}

void ClaimFilteredStored(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  ClaimStored(config, sizes, claims);
  Carver own(nullptr), logits(nullptr);
  FilterBuffers::Carve(FilterShapeOf(config, sizes), own, logits, logits);
  claims.Claim(Region::kFilter, own.used());
  claims.Claim(Region::kLogits, logits.used());
}

void ClaimSampledStored(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  ClaimFused(config, sizes, claims);
  ClaimStored(config, sizes, claims);
  Carver own(nullptr), hidden(nullptr), logits(nullptr);
  SampleBuffers::Carve(FilterShapeOf(config, sizes), own, hidden, logits);
  Carver hot(nullptr);
  CarveHotClasses(FilterShapeOf(config, sizes), hot);
  claims.Claim(Region::kPopularity, hot.used());
  claims.Claim(Region::kFilter, own.used());
  claims.Claim(Region::kHiddenGradient, hidden.used());
  claims.Claim(Region::kLogits, logits.used());
}

void ClaimRecomputed(const HeadSizes& sizes, PathClaims& claims) {
  const int64_t rows = sizes.chunk_rows;
  claims.Claim(Region::kLogits, sizes.arena_bytes);
  claims.Claim(Region::kRules, rows * static_cast<int64_t>(sizeof(GradientRule)));
  claims.Claim(Region::kRunningRows, rows * static_cast<int64_t>(sizeof(RunningRow)));
  claims.Claim(Region::kTargetDots, rows * static_cast<int64_t>(sizeof(float)));
  claims.Claim(Region::kHiddenGradient, RunningTopBytes(rows));  // dx is not there yet
  if (!sizes.fused) return;
  Carver fused(nullptr);
  hopper::FusedRows::Carve(fused, rows);
  claims.Claim(Region::kFusedRows, fused.used());
}

void ClaimFilteredRecomputed(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  ClaimRecomputed(sizes, claims);
  Carver own(nullptr), arena(nullptr);
  FilterBuffers::Carve(FilterShapeOf(config, sizes), own, arena, arena);
  claims.Claim(Region::kFilter, own.used());
}

void ClaimSampledRecomputed(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  ClaimRecomputed(sizes, claims);
  Carver own(nullptr), hidden(nullptr), arena(nullptr);
  RecomputedSampleBuffers::Carve(FilterShapeOf(config, sizes), own, hidden, arena);
  claims.Claim(Region::kFilter, own.used());
  claims.Claim(Region::kHiddenGradient, hidden.used());
}

}  // namespace

PathClaims ClaimsOf(const HeadConfig& config, const HeadSizes& sizes) {
  PathClaims claims;
  switch (config.logits) {
    case Logits::kStored:
      ClaimStored(config, sizes, claims);
      ClaimFused(config, sizes, claims);
      ClaimFilteredStored(config, sizes, claims);
      ClaimSampledStored(config, sizes, claims);
      break;
    case Logits::kRecomputed:
      ClaimRecomputed(sizes, claims);
      ClaimFilteredRecomputed(config, sizes, claims);
      ClaimSampledRecomputed(config, sizes, claims);
      break;
    case Logits::kNone:  // the head's own regions are enough (EmbeddingRows)
      return claims;
  }
  SplitRows::Claim(sizes, claims);
  TopScratch::Claim(sizes, claims);
  return claims;
}

}  // namespace lossd::kernels::cuda
