// SPDX-License-Identifier: Apache-2.0
// The order in which a persistent grid of clusters takes the work of a product. Pure functions.
//
// Every cluster works on whole tiles as long as there are enough for all. What is left is divided along the
// inner dimension into segments, so that it takes all clusters too; the segments of a tile are added up in
// order.
//
// | choice | why not another |
// | groups of row tiles, rows innermost | the grid works on about 8 x 8 tiles, which takes fewest bytes |
// | segments for the last tiles only | partial sums are 256 KB a tile; whole tiles share what is in L2 |
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_GRADIENT_GEMM_PLAN_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_GRADIENT_GEMM_PLAN_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/kernels/hopper/tiles.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda::hopper {

struct GradientGemmPlan {
  int clusters = 0;
  int panels = 0;     // of kPanelRows columns of C
  int row_tiles = 0;  // of kColumnTile rows of C
  int inner_tiles = 0;
  int group = 1;      // row tiles that are worked on together
  int whole = 0;      // tiles computed in one go
  int segmented = 0;  // tiles after them, computed in segments
  int segments = 1;   // of each of these
  // whole + segmented * segments, in the order in which they are begun: whole tiles, first segments of the
  // others, second ones and so on.
  int units = 0;
};

// A tile's partial sums while its segments are computed.
inline constexpr int64_t kPartialBytes = int64_t{kPanelRows} * kColumnTile * 4;
inline constexpr int kMostPartials = 126;

// How many of `row_tiles` are worked on together, in groups of about the same size.
int64_t RowTilesPerGroup(int64_t row_tiles);

// Stages of the main loop until the last cluster is done with `tiles` tiles divided into `segments` each.
int64_t StagesFor(int64_t tiles, int64_t segments, int64_t inner_tiles, int64_t clusters);

// For C [rows, columns] with an inner dimension of `inner`, all above 0.
GradientGemmPlan PlanGradientGemm(int64_t rows, int64_t columns, int64_t inner, int clusters);

// Why the gradients of a chunk cannot be products of this folder, or "".
absl::string_view WhyNoGradientGemms(DType compute, const DeviceLimits& limits);
// Why such products take no less time than cuBLASLt's for the gradients of `rows` rows, or "".
absl::string_view WhyNoFasterGradientGemms(int64_t rows);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_GRADIENT_GEMM_PLAN_H_
