#include "kernels/cuda/head_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/norm/norm.h"
#include "kernels/cuda/rows.h"
#include "kernels/cuda/tensor_ops.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int64_t kPad = 8;  // elements: 16 bytes of a 16-bit type
constexpr int64_t kPieceBytes = int64_t{8} << 20;
constexpr int64_t kCutPieces =
    32;  // of a head for Algorithm::kCut, a piece is this part of its limit at most

HeadSizes WithRows(HeadSizes sizes, int64_t rows) {
  sizes.chunk_rows = PadRows(rows);
  const int64_t row_bytes = sizes.hidden * static_cast<int64_t>(sizeof(float));
  sizes.piece_bytes = std::max(std::min(kPieceBytes, sizes.chunk_rows * row_bytes), row_bytes);
  return sizes;
}

// The partials of a fused loss lie where dx will be: they are done with before it is written.
void CarveHiddenGradient(const HeadConfig& config, const HeadSizes& sizes, Carver& carver, Workspace& w) {
  const int64_t rows = sizes.chunk_rows;
  const bool shared = sizes.fused && config.algorithm != Algorithm::kCut;
  int64_t bytes =
      rows * sizes.padded_hidden * static_cast<int64_t>(SizeOf(HiddenGradientDType(config.compute_dtype)));
  if (shared) {
    Carver partials(nullptr);
    hopper::TilePartials::Carve(partials, rows, sizes.vocab);
    bytes = std::max(bytes, partials.used());
  }
  auto* memory = carver.Take<uint8_t>(bytes);
  w.hidden_gradient = memory;
  Carver partials(memory);
  if (shared) w.fused.partials = hopper::TilePartials::Carve(partials, rows, sizes.vocab);
}

void CarveSlots(const HeadConfig& config, const HeadSizes& sizes, Carver& carver, Workspace& w) {
  const int64_t rows = sizes.chunk_rows;
  const int64_t hidden_bytes = rows * sizes.padded_hidden * sizes.element;
  const bool has_norm = config.norm != Norm::kNone;
  CarveHiddenGradient(config, sizes, carver, w);
  void* normed = has_norm ? carver.Take<uint8_t>(hidden_bytes) : nullptr;
  for (SlotMemory& slot : w.slots) {
    slot.hidden = has_norm ? normed : carver.Take<uint8_t>(hidden_bytes);
    if (has_norm) slot.raw = carver.Take<float>(rows * sizes.hidden);
    slot.inputs = carver.Take<uint8_t>(InputBlockBytes(rows));
    slot.outputs = carver.Take<uint8_t>(OutputBlockBytes(rows));
  }
  w.slot_bytes = carver.used();
}

// Where the logits of a chunk lie, or of its blocks, and what filtering takes.
void CarveLogits(const HeadConfig& config, const HeadSizes& sizes, Carver& carver, Workspace& w) {
  const int64_t rows = sizes.chunk_rows;
  const FilterShape filter = FilterShapeOf(config, sizes);
  if (config.algorithm == Algorithm::kCut) {
    w.arena = carver.Take<uint8_t>(sizes.arena_bytes);
    w.rules = carver.Take<GradientRule>(rows);
    w.running = carver.Take<RunningRow>(rows);
    Carver arena(w.arena);
    w.filter = FilterBuffers::Carve(filter, carver, arena, arena);
    return;
  }
  const int64_t bytes = rows * sizes.padded_vocab * sizes.element;
  auto* logits = carver.Take<uint8_t>(std::max(bytes, FilterBuffers::LogitsBytes(filter)));
  w.logits = logits;
  Carver in_logits(logits);
  w.filter = FilterBuffers::Carve(filter, carver, in_logits, in_logits);
}

int64_t WorkspaceLimit(const HeadConfig& config, int64_t workspace_bytes) {
  if (config.workspace_bytes > 0) return config.workspace_bytes;
  return config.algorithm == Algorithm::kCut ? std::min(workspace_bytes, kCutWorkspaceBytes)
                                             : workspace_bytes;
}

// What counts against the limit.
int64_t LimitedBytes(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors) {
  const Workspace w = Workspace::Carve(config, sizes, multiprocessors, nullptr, nullptr);
  return config.algorithm == Algorithm::kCut ? w.bytes : w.bytes + w.slot_bytes;
}

// Of a row in a chunk of so many, in units of one of the three products. Logits and hidden gradients are
// computed in panels of whole rows; adding to the weight gradient costs each chunk what some 350 rows of its
// product do (8 V D bytes beside 2 V D operations a row, measured on an H200; V and D make no difference).
double RowCost(int64_t rows) {
  constexpr int64_t kAddRows = 350;
  const int64_t in_panels = hopper::Panels(rows) * hopper::kPanelRows;
  return static_cast<double>(2 * in_panels + rows + kAddRows) / static_cast<double>(rows);
}

// All rows that fit, or as many as fill panels.
int64_t CheapestRows(int64_t fit) {
  const int64_t full = fit - fit % hopper::kPanelRows;
  return full > 0 && RowCost(full) < RowCost(fit) ? full : fit;
}

// Bisection over chunk rows in units of 8; the workspace grows with them.
HeadSizes WithLogits(const HeadConfig& config, const HeadSizes& sizes, int64_t limit, int64_t max_chunk_rows,
                     int multiprocessors) {
  int64_t fits = 1;
  int64_t fails = std::max<int64_t>(RoundUp(max_chunk_rows, kPad) / kPad, 1) + 1;
  while (fails - fits > 1) {
    const int64_t middle = fits + (fails - fits) / 2;
    const bool ok = LimitedBytes(config, WithRows(sizes, middle * kPad), multiprocessors) <= limit;
    (ok ? fits : fails) = middle;
  }
  return WithRows(sizes, sizes.fused ? CheapestRows(fits * kPad) : fits * kPad);
}

// The arena gets what the rest leaves of the limit; fewer rows leave more.
HeadSizes WithArena(const HeadConfig& config, HeadSizes sizes, int64_t limit, int64_t max_chunk_rows,
                    int multiprocessors) {
  if (limit >= kDevicePage) limit -= limit % kDevicePage;  // what is allocated is whole pages
  for (int64_t rows = std::min(max_chunk_rows, kCutChunkRows);; rows /= 2) {
    sizes = WithRows(sizes, rows);
    sizes.piece_bytes =
        std::max(std::min(sizes.piece_bytes, limit / kCutPieces), sizes.hidden * int64_t{sizeof(float)});
    sizes.arena_bytes = 0;
    const int64_t room = limit - LimitedBytes(config, sizes, multiprocessors);
    const CutShape shape = CutShapeOf(config, sizes, multiprocessors);
    const FilterShape filter = FilterShapeOf(config, sizes);
    const int64_t least = LeastCutArena(shape, filter);
    if (room < least && rows > kPad) continue;
    sizes.arena_bytes = std::clamp(room / 256 * 256, least, std::max(least, LargestCutArena(shape, filter)));
    return sizes;
  }
}

}  // namespace

HeadSizes SizesFor(const HeadConfig& config, int64_t workspace_bytes, int64_t max_chunk_rows,
                   int multiprocessors, bool fused) {
  HeadSizes sizes;
  sizes.fused = fused && config.compute_dtype != DType::kFloat32;
  sizes.hidden = config.hidden_size;
  sizes.vocab = config.vocab_size;
  sizes.padded_hidden = RoundUp(sizes.hidden, kPad);
  sizes.padded_vocab = RoundUp(sizes.vocab, kPad);
  sizes.element = static_cast<int64_t>(SizeOf(config.compute_dtype));
  const int64_t limit = WorkspaceLimit(config, workspace_bytes);
  return config.algorithm == Algorithm::kCut
             ? WithArena(config, sizes, limit, max_chunk_rows, multiprocessors)
             : WithLogits(config, sizes, limit, max_chunk_rows, multiprocessors);
}

absl::Status CheckWorkspace(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors) {
  const int64_t bytes = LimitedBytes(config, sizes, multiprocessors);
  if (config.workspace_bytes == 0 || bytes <= config.workspace_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("workspace_bytes must be at least ", bytes,
                                                 " for this head, got ", config.workspace_bytes));
}

ParamBlock ParamBlock::Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base) {
  Carver carver(base);
  ParamBlock block;
  block.weight = carver.Take<float>(sizes.padded_vocab * sizes.padded_hidden);
  if (config.has_bias) block.bias = carver.Take<float>(sizes.padded_vocab);
  if (config.norm != Norm::kNone) block.norm_gain = carver.Take<float>(sizes.padded_hidden);
  if (config.norm == Norm::kLayerNorm) block.norm_shift = carver.Take<float>(sizes.padded_hidden);
  block.bytes = carver.used();
  return block;
}

ValueBuffer ValueBuffer::Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base) {
  ValueBuffer values;
  values.params = ParamBlock::Carve(config, sizes, base);
  Carver carver(base == nullptr ? nullptr : base + values.params.bytes);
  if (config.has_class_weights) values.class_weights = carver.Take<float>(sizes.padded_vocab);
  if (config.compute_dtype == DType::kFloat32) {
    values.compute_weight = values.params.weight;
  } else {
    values.compute_weight = carver.Take<uint16_t>(sizes.padded_vocab * sizes.padded_hidden);
  }
  values.bytes = values.params.bytes + carver.used();
  return values;
}

int64_t InputBlockBytes(int64_t chunk_rows) {
  Carver carver(nullptr);
  RowInputBlock::Carve(carver, chunk_rows);
  return carver.used();
}

int64_t OutputBlockBytes(int64_t chunk_rows) {
  Carver carver(nullptr);
  RowOutputBlock::Carve(carver, chunk_rows);
  return carver.used();
}

FilterShape FilterShapeOf(const HeadConfig& config, const HeadSizes& sizes) {
  return {.chunk_rows = sizes.chunk_rows,
          .vocab = sizes.vocab,
          .padded_vocab = sizes.padded_vocab,
          .padded_hidden = sizes.padded_hidden,
          .dtype = config.compute_dtype};
}

CutShape CutShapeOf(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors) {
  return {.padded_hidden = sizes.padded_hidden,
          .vocab = sizes.vocab,
          .padded_vocab = sizes.padded_vocab,
          .element = sizes.element,
          .fused = sizes.fused,
          .bias = config.has_bias && config.trainable,
          .multiprocessors = multiprocessors};
}

Workspace Workspace::Carve(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors,
                           uint8_t* base, uint8_t* slot_base) {
  Carver carver(base), slots(slot_base);
  Workspace w;
  const int64_t rows = sizes.chunk_rows;
  const bool cut = config.algorithm == Algorithm::kCut;
  CarveSlots(config, sizes, slots, w);
  CarveLogits(config, sizes, carver, w);
  if (sizes.fused) {
    const hopper::TilePartials partials = w.fused.partials;
    w.fused = hopper::FusedRows::Carve(carver, rows);
    w.fused.partials = partials;
  }
  if (cut || config.compute_dtype != DType::kFloat32) w.target_dots = carver.Take<float>(rows);
  w.upload_piece = carver.Take<uint8_t>(sizes.piece_bytes);
  w.download_piece = carver.Take<uint8_t>(sizes.piece_bytes);
  w.keep = carver.Take<int32_t>(rows);
  // With kCut the bias has its part in the arena.
  int64_t partials = config.has_bias && config.trainable && !cut ? ColumnSumScratch(sizes.padded_vocab) : 0;
  if (config.norm != Norm::kNone) {
    w.mean = carver.Take<float>(rows);
    w.inverse_deviation = carver.Take<float>(rows);
    if (config.trainable) partials = std::max(partials, NormPartialFloats(sizes.hidden, multiprocessors));
  }
  w.partials = carver.Take<float>(partials);
  w.square_sums = carver.Take<double>(kSquareSumPartials + 1);
  w.bytes = carver.used();
  return w;
}

int MomentCount(const HeadConfig& config) {
  if (!config.trainable) return 0;
  switch (config.optimizer_state) {
    case OptimizerState::kNone:
      return 0;
    case OptimizerState::kMomentum:
      return 1;
    case OptimizerState::kAdam:
      return 2;
  }
  return 0;
}

MemoryBytes PlanMemory(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors) {
  const int64_t block = ParamBlock::Carve(config, sizes, nullptr).bytes;
  MemoryBytes plan;
  plan[MemoryKind::kWeights] = RoundUp(ValueBuffer::Carve(config, sizes, nullptr).bytes, kDevicePage);
  plan[MemoryKind::kGradients] = config.trainable ? RoundUp(block, kDevicePage) : 0;
  plan[MemoryKind::kOptimizer] = RoundUp(MomentCount(config) * block, kDevicePage);
  const Workspace workspace = Workspace::Carve(config, sizes, multiprocessors, nullptr, nullptr);
  plan[MemoryKind::kWorkspace] = RoundUp(workspace.bytes, kDevicePage);
  plan[MemoryKind::kSlots] = RoundUp(workspace.slot_bytes, kDevicePage);
  plan[MemoryKind::kStaging] =
      kChunkSlots * (InputBlockBytes(sizes.chunk_rows) + OutputBlockBytes(sizes.chunk_rows));
  return plan;
}

}  // namespace lossd::kernels::cuda
