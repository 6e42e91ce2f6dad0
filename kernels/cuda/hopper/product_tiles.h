// The order in which a persistent grid of clusters takes the work of a product. Pure functions.
//
// Every cluster works on whole tiles as long as there are enough for all. What is left is cut along the inner
// dimension into segments, so that it takes all clusters too; the segments of a tile are added up in order.
//
// | choice | why not another |
// | groups of columns, panels within, columns innermost | a grid works on about 8 x 8 tiles: fewest bytes to
// L2 | | only the last tiles in segments | partial sums are 256 KB a tile; whole tiles keep the grid in step
// in L2 |
#ifndef LOSSD_KERNELS_CUDA_HOPPER_PRODUCT_TILES_H_
#define LOSSD_KERNELS_CUDA_HOPPER_PRODUCT_TILES_H_

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/hopper/tiles.h"

namespace lossd::kernels::cuda::hopper {

struct ProductPlan {
  int clusters = 0;
  int panels = 0;
  int column_tiles = 0;
  int inner_tiles = 0;
  int group = 1;     // column tiles that are worked on together
  int whole = 0;     // tiles computed in one go
  int rest = 0;      // tiles after them, computed in segments
  int segments = 1;  // of each of the rest
  // whole + rest * segments, in the order in which they are begun: whole tiles, first segments of the rest,
  // second ones and so on.
  int units = 0;
};

// A tile's partial sums while its segments are computed.
inline constexpr int64_t kPartialBytes = int64_t{kPanelRows} * kColumnTile * 4;
inline constexpr int kMostPartials = 126;

// How many of `column_tiles` are worked on together, in groups of about the same size: few enough that a grid
// spans several panels, and where B allows it few enough that a group of it stays in L2.
constexpr int64_t ColumnsPerGroup(int64_t column_tiles, int64_t inner) {
  constexpr int64_t kGroupBytes = 20 << 20;
  constexpr int64_t kMost = 10, kFewest = 4;
  const int64_t fit = kGroupBytes / (kColumnTile * inner * 2);
  const int64_t most = fit >= kFewest ? std::min(fit, kMost) : kMost;
  return CeilDiv(column_tiles, CeilDiv(column_tiles, most));
}

// The cost of a tile in stages of the main loop, and of one more segment of it.
inline constexpr int64_t kTileStages = 4;
inline constexpr int64_t kSegmentStages = 8;
inline constexpr int64_t kMostSegments = 12;

// Stages until the last cluster is done with `tiles` tiles cut into `segments`.
constexpr int64_t StagesFor(int64_t tiles, int64_t segments, int64_t inner_tiles, int64_t clusters) {
  const int64_t stages = CeilDiv(inner_tiles, segments) + kTileStages + (segments > 1 ? kSegmentStages : 0);
  return CeilDiv(tiles * segments, clusters) * stages;
}

constexpr ProductPlan PlanProduct(int64_t rows, int64_t columns, int64_t inner, int clusters) {
  ProductPlan plan;
  plan.clusters = clusters;
  plan.panels = static_cast<int>(Panels(rows));
  plan.column_tiles = static_cast<int>(CeilDiv(columns, kColumnTile));
  plan.inner_tiles = static_cast<int>(CeilDiv(inner, kInnerTile));
  plan.group = static_cast<int>(ColumnsPerGroup(plan.column_tiles, inner));
  plan.whole = plan.panels * plan.column_tiles;
  const int rest = plan.whole % clusters;
  int64_t fewest = StagesFor(rest, 1, plan.inner_tiles, clusters);
  const int64_t most_segments = rest > kMostPartials ? 1 : std::min<int64_t>(kMostSegments, plan.inner_tiles);
  for (int64_t s = 2; s <= most_segments; ++s) {
    const int64_t stages = StagesFor(rest, s, plan.inner_tiles, clusters);
    if (stages >= fewest) continue;
    fewest = stages;
    plan.segments = static_cast<int>(s);
  }
  if (plan.segments > 1) {
    plan.rest = rest;
    plan.whole -= rest;
  }
  plan.units = plan.whole + plan.rest * plan.segments;
  return plan;
}

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_PRODUCT_TILES_H_
