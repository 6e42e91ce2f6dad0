// SPDX-License-Identifier: Apache-2.0
// Limits and plans of the products on Hopper (plan.h).
#include "kernels/cuda/kernels/hopper/plan.h"

#include <algorithm>

namespace lossd::kernels::cuda::hopper {
namespace {

// With fewer rows or tiles, the tiles do not fill the device; cuBLAS splits the inner dimension and is
// faster.
constexpr int64_t kFewestFusedRows = 512;
constexpr int64_t kFewestFusedTiles = 512;

// The cost of a tile, and the cost of the partial sums of a segment, each in stages of the main loop.
constexpr int64_t kTileStages = 4;
constexpr int64_t kSegmentStages = 8;
constexpr int64_t kMostSegments = 12;

// From this number of rows on, these products are faster than cuBLASLt, if each product runs alone at the
// card's power limit (docs/lab/2026-11-21-hopper-products.md).
constexpr int64_t kFewestGemmRows = 768;

}  // namespace

TilePartials TilePartials::Carve(Carver& carver, int64_t capacity, int64_t vocab) {
  const int64_t count = VocabTiles(vocab) * capacity;
  TilePartials partials;
  partials.ld = capacity;
  partials.max = carver.Take<float>(count);
  partials.sum = carver.Take<float>(count);
  partials.spread = carver.Take<float>(count);
  partials.arg = carver.Take<uint8_t>(count);
  partials.target = carver.Take<float>(capacity);
  return partials;
}

FusedRows FusedRows::Carve(Carver& carver, int64_t capacity) {
  FusedRows w;
  w.reference = carver.Take<float>(capacity);
  w.sum_reference = w.reference;
  w.threshold = carver.Take<float>(capacity);
  w.max = carver.Take<float>(capacity);
  w.sum = carver.Take<float>(capacity);
  w.spread = carver.Take<float>(capacity);
  w.arg = carver.Take<int32_t>(capacity);
  w.factor = carver.Take<float>(capacity);
  w.entropy = carver.Take<EntropyRow>(capacity);
  w.marked_panels = carver.Take<int32_t>(1 + Panels(capacity));
  w.claimed_positions = carver.Take<uint32_t>(kMostClusters);
  return w;
}

absl::string_view WhyNotFused(const LossTerms& terms, DType compute, bool exponentials, int clusters) {
  if (clusters == 0) return "not a Hopper GPU";
  if (compute == DType::kFloat32) return "fp32 compute";
  if (compute == DType::kFloat16 && exponentials) return "fp16 has no room for exponentials";
  if (terms.smoothing > 0.0f) return "label smoothing has a gradient everywhere";
  return "";
}

absl::string_view WhyNotFaster(int64_t padded_rows, int64_t vocab) {
  if (padded_rows < kFewestFusedRows) return "few rows";
  if (CeilDiv(padded_rows, kRowTile) * VocabTiles(vocab) < kFewestFusedTiles) return "few tiles";
  return "";
}

int64_t RowTilesPerGroup(int64_t row_tiles) {
  // An H200 works on 66 tiles at a time, one for each cluster. They then come from ten row tiles and about
  // seven panels: nearly a square, which needs the fewest bytes.
  constexpr int64_t kMost = 10;
  return CeilDiv(row_tiles, CeilDiv(row_tiles, kMost));
}

int64_t StagesFor(int64_t tiles, int64_t segments, int64_t inner_tiles, int64_t clusters) {
  const int64_t stages = CeilDiv(inner_tiles, segments) + kTileStages + (segments > 1 ? kSegmentStages : 0);
  return CeilDiv(tiles * segments, clusters) * stages;
}

GradientGemmPlan PlanGradientGemm(int64_t rows, int64_t columns, int64_t inner, int clusters) {
  GradientGemmPlan plan;
  plan.clusters = clusters;
  plan.panels = static_cast<int>(Panels(columns));
  plan.row_tiles = static_cast<int>(CeilDiv(rows, kColumnTile));
  plan.inner_tiles = static_cast<int>(CeilDiv(inner, kInnerTile));
  plan.group = static_cast<int>(RowTilesPerGroup(plan.row_tiles));
  plan.whole = plan.panels * plan.row_tiles;
  // The clusters compute the tiles in rounds of `clusters` tiles. `left` tiles remain for the last round, in
  // which some clusters would have no tile. They are divided into segments if that ends sooner.
  const int left = plan.whole % clusters;
  int64_t fewest = StagesFor(left, 1, plan.inner_tiles, clusters);
  const int64_t most_segments = left > kMostPartials ? 1 : std::min<int64_t>(kMostSegments, plan.inner_tiles);
  for (int64_t s = 2; s <= most_segments; ++s) {
    const int64_t stages = StagesFor(left, s, plan.inner_tiles, clusters);
    if (stages >= fewest) continue;
    fewest = stages;
    plan.segments = static_cast<int>(s);
  }
  if (plan.segments > 1) {
    plan.segmented = left;
    plan.whole -= left;
  }
  plan.units = plan.whole + plan.segmented * plan.segments;
  return plan;
}

absl::string_view WhyNoGradientGemms(DType compute, const DeviceLimits& limits) {
  if (limits.fused_clusters == 0) return "not a Hopper GPU";
  if (compute == DType::kFloat32) return "fp32 compute";
  // Clusters that share a tile wait for each other. If kernels of two processes are on the device at the same
  // time, only some clusters of each kernel might run. They would wait forever for clusters that find no free
  // multiprocessor.
  if (limits.shared_by_mps) return "MPS is enabled";
  return "";
}

absl::string_view WhyNoFasterGradientGemms(int64_t rows) { return rows < kFewestGemmRows ? "few rows" : ""; }

}  // namespace lossd::kernels::cuda::hopper
