// SPDX-License-Identifier: Apache-2.0
// The sizes, the memory and the plan of a head (head_memory.h). SizesFor computes how many rows a chunk has;
// PlanHead makes the whole plan.
#include "kernels/cuda/heads/head_memory.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/hopper/plan.h"
#include "kernels/cuda/kernels/launch_plan.h"
#include "kernels/cuda/paths/chunk_plan.h"
#include "kernels/cuda/paths/path_memory.h"
#include "kernels/decision.h"
#include "kernels/errors/field_error.h"
#include "kernels/validation.h"

#ifdef CUDART_VERSION
#error "a header of lossd_cuda_plan includes CUDA, which machines that only plan do not have"
#endif

namespace lossd::kernels::cuda {
namespace {

constexpr int64_t kPad = 8;  // elements: 16 bytes of a 16-bit type
constexpr int64_t kTransferBytes = int64_t{8} << 20;
// The transfer buffer of a head that recomputes logits takes at most 1 / kTransferParts of the head's limit.
constexpr int64_t kTransferParts = 32;
// The most rows of a chunk of a head without logits (Logits::kNone): a microbatch of the usual size. More
// rows would not be faster.
constexpr int64_t kEmbeddingChunkRows = 8192;

bool Recomputes(const HeadConfig& config) { return config.logits == Logits::kRecomputed; }

// The most rows of a chunk, for any amount of memory.
int64_t MostRows(const HeadConfig& config, int64_t max_chunk_rows) {
  switch (config.logits) {
    case Logits::kStored:
      break;
    case Logits::kRecomputed:
      return std::min(max_chunk_rows, kRecomputedChunkRows);
    case Logits::kNone:
      return std::min(max_chunk_rows, kEmbeddingChunkRows);
  }
  return max_chunk_rows;
}

HeadSizes WithRows(HeadSizes sizes, int64_t rows) {
  sizes.chunk_rows = PadRows(rows);
  const int64_t row_bytes = sizes.hidden * static_cast<int64_t>(sizeof(float));
  sizes.transfer_bytes = std::max(std::min(kTransferBytes, sizes.chunk_rows * row_bytes), row_bytes);
  return sizes;
}

// The bytes of each region that the paths of the head claim, and that the head itself uses.
PathClaims AllClaims(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors) {
  PathClaims claims = ClaimsOf(config, sizes);
  claims.Claim(Region::kHiddenGradient,
               sizes.hidden_gradient_rows() * sizes.padded_hidden *
                   static_cast<int64_t>(SizeOf(HiddenGradientDType(sizes, config.compute_dtype))));
  if (config.norm != Norm::kNone && config.trainable) {
    claims.Claim(Region::kColumnSums,
                 NormPartialFloats(sizes.hidden, multiprocessors) * static_cast<int64_t>(sizeof(float)));
  }
  return claims;
}

void TakeRegion(Region region, const PathClaims& claims, Carver& carver, Workspace& w) {
  if (claims[region] > 0) w.paths[region] = carver.Take<uint8_t>(claims[region]);
}

void CarveSlots(const HeadConfig& config, const HeadSizes& sizes, const PathClaims& claims, Carver& carver,
                Workspace& w) {
  const int64_t rows = sizes.chunk_rows;
  const int64_t hidden_bytes = rows * sizes.padded_hidden * sizes.element;
  const bool has_norm = config.norm != Norm::kNone;
  TakeRegion(Region::kHiddenGradient, claims, carver, w);
  void* normed = has_norm ? carver.Take<uint8_t>(hidden_bytes) : nullptr;
  for (SlotMemory& slot : w.slots) {
    slot.hidden = has_norm ? normed : carver.Take<uint8_t>(hidden_bytes);
    if (has_norm) slot.raw = carver.Take<float>(rows * sizes.hidden);
    slot.inputs = carver.Take<uint8_t>(InputBlockBytes(rows));
    slot.outputs = carver.Take<uint8_t>(OutputBlockBytes(rows));
  }
  w.slot_bytes = carver.used();
}

int64_t WorkspaceLimit(const HeadConfig& config, int64_t workspace_bytes) {
  if (config.workspace_bytes > 0) return config.workspace_bytes;
  return Recomputes(config) ? std::min(workspace_bytes, kRecomputedWorkspaceBytes) : workspace_bytes;
}

// The bytes that count against the workspace limit.
int64_t LimitedBytes(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors) {
  const Workspace w = Workspace::Carve(config, sizes, multiprocessors, nullptr, nullptr);
  return Recomputes(config) ? w.bytes : w.bytes + w.slot_bytes;
}

// The time of one row in a chunk of `rows` rows. The unit is the time that one of the three products takes
// for a row, 2 V D operations. The products of the logits and of the hidden gradient are computed in whole
// panels of rows. Each chunk also reads and writes the whole weight gradient, 8 V D bytes. On an H200 this
// takes as long as about 350 rows of a product, for any V and D.
double RowCost(int64_t rows) {
  constexpr int64_t kAddRows = 350;
  const int64_t in_panels = hopper::Panels(rows) * hopper::kPanelRows;
  return static_cast<double>(2 * in_panels + rows + kAddRows) / static_cast<double>(rows);
}

// `fit`, the number of rows that fit, or the largest number of whole panels below it if one row then takes
// less time.
int64_t CheapestRows(int64_t fit) {
  const int64_t full = fit - fit % hopper::kPanelRows;
  return full > 0 && RowCost(full) < RowCost(fit) ? full : fit;
}

// Finds the largest number of rows of a chunk that stays within `limit`, by bisection in units of 8, because
// more rows need more workspace. One unit is taken even if it does not fit; then CheckWorkspace reports the
// error.
HeadSizes WithRowsThatFit(const HeadConfig& config, const HeadSizes& sizes, int64_t limit,
                          int64_t max_chunk_rows, int multiprocessors) {
  int64_t fits = 1;
  int64_t fails = std::max<int64_t>(RoundUp(max_chunk_rows, kPad) / kPad, 1) + 1;
  while (fails - fits > 1) {
    const int64_t middle = fits + (fails - fits) / 2;
    const bool ok = LimitedBytes(config, WithRows(sizes, middle * kPad), multiprocessors) <= limit;
    (ok ? fits : fails) = middle;
  }
  return WithRows(sizes, sizes.fused ? CheapestRows(fits * kPad) : fits * kPad);
}

// The sizes of a head that recomputes logits. The arena is the memory for blocks of logits (RecomputedArena
// in paths/path_memory.h). It gets the part of the limit that nothing else takes. If too little is left for
// the arena, chunks get fewer rows, which need less of the other memory. With 8 rows or fewer the search
// ends: the arena then has the least size even beyond the limit, and CheckWorkspace reports the error.
HeadSizes WithArena(const HeadConfig& config, HeadSizes sizes, int64_t limit, int64_t max_chunk_rows,
                    int multiprocessors) {
  if (limit >= kDevicePage) limit -= limit % kDevicePage;  // whole pages are allocated
  for (int64_t rows = max_chunk_rows;; rows /= 2) {
    sizes = WithRows(sizes, rows);
    sizes.transfer_bytes = std::max(std::min(sizes.transfer_bytes, limit / kTransferParts),
                                    sizes.hidden * int64_t{sizeof(float)});
    sizes.arena_bytes = 0;
    const int64_t room = limit - LimitedBytes(config, sizes, multiprocessors);
    const RecomputedShape shape = RecomputedShapeOf(config, sizes, multiprocessors);
    const FilterShape filter = FilterShapeOf(config, sizes);
    const int64_t least = LeastArenaBytes(shape, filter);
    if (room < least && rows > kPad) continue;
    sizes.arena_bytes =
        std::clamp(room / 256 * 256, least, std::max(least, LargestArenaBytes(shape, filter)));
    return sizes;
  }
}

}  // namespace

HeadSizes SizesFor(const HeadConfig& config, int64_t workspace_bytes, int64_t max_chunk_rows,
                   int multiprocessors, bool fused, Replica replica) {
  HeadSizes sizes;
  const ShardRows own = ClassesOf(config, replica);
  if (IsSplitByVocabulary(config, replica)) {
    const Replica place = PlaceOf(config, replica);
    sizes.part = place.index;
    sizes.parts = place.count;
  }
  sizes.all_classes = config.vocab_size;
  sizes.first_class = own.first;
  sizes.most_classes = MostClassesOf(config, replica.count);
  sizes.fused = fused && config.compute_dtype != DType::kFloat32 && config.logits != Logits::kNone;
  sizes.hidden = config.hidden_size;
  // While rows and arena are chosen, `vocab` is that of the largest part. So all parts get the same rows and
  // arena. At the end `vocab` becomes the number of the classes here.
  sizes.vocab = sizes.most_classes;
  sizes.padded_hidden = RoundUp(sizes.hidden, kPad);
  sizes.padded_vocab = RoundUp(sizes.vocab, kPad);
  sizes.element = static_cast<int64_t>(SizeOf(config.compute_dtype));
  const int64_t limit = WorkspaceLimit(config, workspace_bytes);
  max_chunk_rows = MostRows(config, max_chunk_rows);
  sizes = Recomputes(config) ? WithArena(config, sizes, limit, max_chunk_rows, multiprocessors)
                             : WithRowsThatFit(config, sizes, limit, max_chunk_rows, multiprocessors);
  sizes.most_padded_vocab = sizes.padded_vocab;
  sizes.vocab = own.rows;
  sizes.padded_vocab = std::max(RoundUp(sizes.vocab, kPad), kPad);
  return sizes;
}

absl::Status CheckWorkspace(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors) {
  const int64_t bytes = LimitedBytes(config, sizes, multiprocessors);
  if (config.workspace_bytes == 0 || bytes <= config.workspace_bytes) return absl::OkStatus();
  return errors::FieldError("workspace_bytes", absl::StrCat("be at least ", bytes, " for this head"),
                            config.workspace_bytes);
}

Workspace Workspace::Carve(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors,
                           uint8_t* base, uint8_t* slot_base) {
  Carver carver(base), slots(slot_base);
  Workspace w;
  const int64_t rows = sizes.chunk_rows;
  const PathClaims claims = AllClaims(config, sizes, multiprocessors);
  CarveSlots(config, sizes, claims, slots, w);
  for (size_t i = 0; i < kRegions; ++i) {
    const auto region = static_cast<Region>(i);
    if (region != Region::kHiddenGradient) TakeRegion(region, claims, carver, w);
  }
  w.upload_buffer = carver.Take<uint8_t>(sizes.transfer_bytes);
  w.download_buffer = carver.Take<uint8_t>(sizes.transfer_bytes);
  w.keep = carver.Take<int32_t>(rows);
  if (config.norm != Norm::kNone) {
    w.mean = carver.Take<float>(rows);
    w.inverse_deviation = carver.Take<float>(rows);
  }
  w.square_sums = carver.Take<double>(kSquareSumPartials + 1);
  w.bytes = carver.used();
  return w;
}

MemoryBytes PlanMemory(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors,
                       Replica replica) {
  const ShardRanges ranges = ShardRanges::Of(sizes, OwnShard(config, sizes, replica));
  const int64_t moments = MomentCount(config) * ParamBlock::CarveRanges(config, ranges, nullptr).bytes;
  const int64_t block = ParamBlock::Carve(config, sizes, nullptr).bytes;
  MemoryBytes plan;
  plan[MemoryKind::kStaging] =
      kChunkSlots * (InputBlockBytes(sizes.chunk_rows) + OutputBlockBytes(sizes.chunk_rows) +
                     ClassBlockBytes(sizes.chunk_rows));
  if (config.residency == Residency::kHost) {
    plan[MemoryKind::kHostValues] = ValueBuffer::Carve(config, sizes, nullptr).bytes;
    return plan;
  }
  plan[MemoryKind::kWeights] = RoundUp(ValueBuffer::Carve(config, sizes, nullptr).bytes, kDevicePage);
  plan[MemoryKind::kGradients] = config.trainable ? RoundUp(block, kDevicePage) : 0;
  plan[MemoryKind::kOptimizer] = RoundUp(moments, kDevicePage);
  const Workspace workspace = Workspace::Carve(config, sizes, multiprocessors, nullptr, nullptr);
  plan[MemoryKind::kWorkspace] = RoundUp(workspace.bytes, kDevicePage);
  plan[MemoryKind::kSlots] = RoundUp(workspace.slot_bytes, kDevicePage);
  return plan;
}

HostedBytes HostedBytes::Of(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors) {
  const Workspace workspace = Workspace::Carve(config, sizes, multiprocessors, nullptr, nullptr);
  return {ValueBuffer::Carve(config, sizes, nullptr).bytes, workspace.bytes, workspace.slot_bytes};
}

namespace {

absl::string_view WhyNoMoreRows(const HeadSizes& sizes, int64_t most_rows) {
  if (sizes.chunk_rows >= most_rows) return "more are not allowed";
  const bool in_panels = sizes.fused && sizes.chunk_rows % hopper::kPanelRows == 0;
  return in_panels ? "the workspace holds no more whole panels" : "the workspace holds no more";
}

Choice BlocksChoice(const HeadConfig& config, const HeadSizes& sizes, const ChunkPlan& plan,
                    int multiprocessors) {
  const RecomputedShape shape = RecomputedShapeOf(config, sizes, multiprocessors).For(plan.fused());
  return DescribeBlocks(ChooseRecomputedBlocks(shape, sizes.chunk_rows, sizes.arena_bytes),
                        sizes.arena_bytes);
}

}  // namespace

Choice ChunkChoice(const HeadConfig& config, const HeadSizes& sizes, const MemoryBytes& memory,
                   int64_t max_chunk_rows) {
  return {.what = "chunk",
          .choice = absl::StrCat("up to ", sizes.chunk_rows, " rows"),
          .reason = std::string(WhyNoMoreRows(sizes, MostRows(config, max_chunk_rows))),
          .workspace_bytes = memory[MemoryKind::kWorkspace]};
}

absl::StatusOr<HeadPlan> PlanHead(const HeadConfig& config, const PlanDevice& device) {
  if (absl::Status status = ValidateOn(config, device.replica.count); !status.ok()) return status;
  const int sms = device.limits.multiprocessors;
  HeadPlan plan;
  plan.sizes = SizesFor(config, device.workspace_bytes, device.max_chunk_rows, sms,
                        device.limits.fused_clusters > 0, device.replica);
  if (absl::Status status = CheckWorkspace(config, plan.sizes, sms); !status.ok()) return status;
  plan.memory = PlanMemory(config, plan.sizes, sms, device.replica);

  ChunkFacts full;
  full.terms.vocab = plan.sizes.vocab;
  full.terms.elsewhere = plan.sizes.all_classes - plan.sizes.vocab;
  full.rows = full.padded_rows = plan.sizes.chunk_rows;
  full.wants_gradient = true;
  const PlanLimits limits = {config.logits, PlannedShapeOf(config, plan.sizes), device.limits,
                             device.fused_loss, plan.sizes.is_split()};
  const ChunkPlan chunk = PlanChunk({.gradients = config.gradients}, full, limits);
  plan.choices = {ChunkChoice(config, plan.sizes, plan.memory, device.max_chunk_rows)};
  if (config.logits == Logits::kNone) {
    plan.choices.push_back(NoLogitsChoice());
    return plan;
  }
  if (config.logits == Logits::kRecomputed) {
    plan.choices.push_back(BlocksChoice(config, plan.sizes, chunk, sms));
  }
  std::vector<Choice> kernels = Describe(chunk);
  std::move(kernels.begin(), kernels.end(), std::back_inserter(plan.choices));
  return plan;
}

ShardRanges ShardRanges::Of(const HeadSizes& sizes, const Shard& shard) {
  // The last shard also has the padding rows.
  const int64_t end = shard.end_class() == sizes.vocab ? sizes.padded_vocab : shard.end_class();
  // A replica without classes updates no rows. But if a part of a split head has no classes, its padding rows
  // are updated.
  const int64_t rows = shard.classes > 0 || sizes.vocab == 0 ? end - shard.first_class : 0;
  return {.weight = {shard.first_class * sizes.padded_hidden, rows * sizes.padded_hidden},
          .bias = {shard.first_class, rows},
          .norm = {0, shard.norm ? sizes.padded_hidden : 0}};
}

Shard OwnShard(const HeadConfig& config, const HeadSizes& sizes, Replica replica) {
  return ShardOf(sizes.vocab, CopyOf(config, replica));
}

ParamBlock ParamBlock::Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base,
                             bool with_weight) {
  ShardRanges ranges = ShardRanges::Of(sizes, ShardOf(sizes.vocab, {}));
  if (!with_weight) ranges.weight.count = 0;
  return CarveRanges(config, ranges, base);
}

ParamBlock ParamBlock::CarveRanges(const HeadConfig& config, const ShardRanges& ranges, uint8_t* base) {
  Carver carver(base);
  const auto take = [&](bool has, const ShardRange& range) {
    return has && range.count > 0 ? carver.Take<float>(range.count) : nullptr;
  };
  ParamBlock block;
  block.weight = take(true, ranges.weight);
  block.bias = take(config.has_bias, ranges.bias);
  block.norm_gain = take(config.norm != Norm::kNone, ranges.norm);
  block.norm_shift = take(config.norm == Norm::kLayerNorm, ranges.norm);
  block.bytes = carver.used();
  return block;
}

ValueBuffer ValueBuffer::Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base) {
  ValueBuffer values;
  const bool with_weight = config.residency == Residency::kDevice || config.compute_dtype == DType::kFloat32;
  values.params = ParamBlock::Carve(config, sizes, base, with_weight);
  Carver carver(base == nullptr ? nullptr : base + values.params.bytes);
  if (config.has_class_weights) values.class_weights = carver.Take<float>(RoundUp(sizes.all_classes, 8));
  if (config.compute_dtype == DType::kFloat32) {
    values.compute_weight = values.params.weight;
  } else {
    values.compute_weight = carver.Take<uint16_t>(sizes.padded_vocab * sizes.padded_hidden);
  }
  values.bytes = values.params.bytes + carver.used();
  return values;
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

}  // namespace lossd::kernels::cuda
