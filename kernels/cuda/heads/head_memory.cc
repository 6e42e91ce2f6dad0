// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/heads/head_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/heads/param_blocks.h"
#include "kernels/cuda/kernels/hopper/tiles.h"
#include "kernels/cuda/kernels/scratch_sizes.h"
#include "kernels/cuda/paths/chunk_layout.h"
#include "kernels/cuda/paths/filter_plan.h"
#include "kernels/cuda/paths/path_claims.h"
#include "kernels/cuda/paths/recomputed_plan.h"
#include "kernels/errors/field_error.h"
#include "kernels/shard_rows.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int64_t kPad = 8;  // elements: 16 bytes of a 16-bit type
constexpr int64_t kTransferBytes = int64_t{8} << 20;
// A transfer buffer of a head that recomputes logits is this part of the head's limit at most.
constexpr int64_t kTransferParts = 32;

bool Recomputes(const HeadConfig& config) { return config.logits == Logits::kRecomputed; }

HeadSizes WithRows(HeadSizes sizes, int64_t rows) {
  sizes.chunk_rows = PadRows(rows);
  const int64_t row_bytes = sizes.hidden * static_cast<int64_t>(sizeof(float));
  sizes.transfer_bytes = std::max(std::min(kTransferBytes, sizes.chunk_rows * row_bytes), row_bytes);
  return sizes;
}

// The regions: what the paths of the head claim, and what the head does itself.
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

// What counts against the limit.
int64_t LimitedBytes(const HeadConfig& config, const HeadSizes& sizes, int multiprocessors) {
  const Workspace w = Workspace::Carve(config, sizes, multiprocessors, nullptr, nullptr);
  return Recomputes(config) ? w.bytes : w.bytes + w.slot_bytes;
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
  for (int64_t rows = std::min(max_chunk_rows, kRecomputedChunkRows);; rows /= 2) {
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
  sizes.fused = fused && config.compute_dtype != DType::kFloat32;
  sizes.hidden = config.hidden_size;
  sizes.vocab = sizes.most_classes;  // so that all parts have the same sizes
  sizes.padded_hidden = RoundUp(sizes.hidden, kPad);
  sizes.padded_vocab = RoundUp(sizes.vocab, kPad);
  sizes.element = static_cast<int64_t>(SizeOf(config.compute_dtype));
  const int64_t limit = WorkspaceLimit(config, workspace_bytes);
  sizes = Recomputes(config) ? WithArena(config, sizes, limit, max_chunk_rows, multiprocessors)
                             : WithLogits(config, sizes, limit, max_chunk_rows, multiprocessors);
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
  plan[MemoryKind::kWeights] = RoundUp(ValueBuffer::Carve(config, sizes, nullptr).bytes, kDevicePage);
  plan[MemoryKind::kGradients] = config.trainable ? RoundUp(block, kDevicePage) : 0;
  plan[MemoryKind::kOptimizer] = RoundUp(moments, kDevicePage);
  const Workspace workspace = Workspace::Carve(config, sizes, multiprocessors, nullptr, nullptr);
  plan[MemoryKind::kWorkspace] = RoundUp(workspace.bytes, kDevicePage);
  plan[MemoryKind::kSlots] = RoundUp(workspace.slot_bytes, kDevicePage);
  plan[MemoryKind::kStaging] =
      kChunkSlots * (InputBlockBytes(sizes.chunk_rows) + OutputBlockBytes(sizes.chunk_rows));
  return plan;
}

}  // namespace lossd::kernels::cuda
