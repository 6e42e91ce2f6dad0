// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/paths/path_claims.h"

#include <cstdint>

#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/hopper/pass_memory.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/cuda/kernels/row_sums.h"
#include "kernels/cuda/kernels/scratch_sizes.h"
#include "kernels/cuda/paths/filter_plan.h"
#include "kernels/cuda/paths/sample_plan.h"
#include "kernels/cuda/paths/split_row_memory.h"
#include "kernels/cuda/paths/staging_plan.h"

namespace lossd::kernels::cuda {
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
