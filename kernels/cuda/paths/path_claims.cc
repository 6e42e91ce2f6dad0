// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/path_claims.h"

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/hopper/pass_memory.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/kernels/row_sums.h"
#include "kernels/cuda/kernels/scratch_sizes.h"
#include "kernels/cuda/paths/filter_plan.h"
#include "kernels/cuda/paths/sample_plan.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int64_t kAlignment = 256;
// A spare block has a row of so many of the chunk at least, which makes a dozen blocks of a full one.
constexpr int64_t kSpareShare = 96;

int64_t StagedBytes(const HeadSizes& sizes, int64_t rows) {
  return rows * sizes.planned_vocab() * static_cast<int64_t>(sizeof(float));
}

// Whole panels of the products, or what there is below one.
int64_t WholePanels(int64_t rows) { return rows >= 128 ? rows / 128 * 128 : rows / 8 * 8; }

// Where the logits of a block may lie in Region::kLogits behind what is kept of it and of the rows before.
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

namespace {

// The matrix of ds, and the sums over its columns.
void ClaimGradients(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  claims.Claim(Region::kLogits, sizes.chunk_rows * sizes.planned_vocab() * sizes.element);
  if (config.has_bias && config.trainable) {
    claims.Claim(Region::kColumnSums,
                 ColumnSumScratch(sizes.padded_vocab) * static_cast<int64_t>(sizeof(float)));
  }
}

// Room for fp32 logits, a block of rows at a time.
void ClaimStaging(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  claims.Claim(Region::kHiddenGradient, SpareBytes(config, sizes));
}

void ClaimStored(const HeadConfig& config, const HeadSizes& sizes, PathClaims& claims) {
  ClaimGradients(config, sizes, claims);
  ClaimStaging(config, sizes, claims);
  if (sizes.is_split()) {
    claims.Claim(Region::kRules, sizes.chunk_rows * static_cast<int64_t>(sizeof(GradientRule)));
    claims.Claim(Region::kRunningRows, sizes.chunk_rows * static_cast<int64_t>(sizeof(RunningRow)));
  }
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
  }
  SplitRows::Claim(sizes, claims);
  return claims;
}

}  // namespace lossd::kernels::cuda
