// SPDX-License-Identifier: Apache-2.0
// Decisions and memory layouts for the products on Hopper that need no GPU:
// - the tiles in which products are computed, and the order in which a grid takes them,
// - when the loss is fused into the logits product (WhyNotFused),
// - how the work of a gradient's product is divided (PlanGradientGemm),
// - the memory of rows and tiles around the logit pass (FusedRows).
//
// Plain data and pure functions; thread-safe. The header needs no CUDA.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PLAN_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PLAN_H_

#include <algorithm>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/cuda/device/device_limits.h"
#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda::hopper {

// ---- tiles ----

// The tiles in which every product of this folder is computed, and their panels. A panel is the rows of one
// cluster's tile, over all columns.
//
// | choice | why not another |
// | 128 x 256 a block, two consumer warpgroups | the widest product instruction reads least shared memory |
// | two blocks in a cluster, the same columns | a quarter less L2 traffic than alone; power is the limit |
inline constexpr int kRowTile = 128;      // rows a block
inline constexpr int kColumnTile = 256;   // columns a block
inline constexpr int kInnerTile = 64;     // of the inner dimension, for one stage of the ring
inline constexpr int kClusterBlocks = 2;  // adjacent in rows
inline constexpr int kPanelRows = kRowTile * kClusterBlocks;  // rows that a cluster works on at a time

constexpr int64_t Panels(int64_t rows) { return CeilDiv(rows, kPanelRows); }

// ---- the order in which a persistent grid takes the tiles of the logit pass ----

// | choice | why not another |
// | groups of panels of about 20 MB | hidden states stay in L2, weights are read once a group |
inline constexpr int kVocabTile = kColumnTile;  // classes of a block

// Without classes there is one tile of padding, so that sums and exponentials are written.
constexpr int64_t VocabTiles(int64_t vocab) { return std::max<int64_t>(CeilDiv(vocab, kVocabTile), 1); }

// How many panels are worked on together: as many as stay in L2, in groups of about the same size.
constexpr int64_t PanelsPerGroup(int64_t panels, int64_t inner) {
  constexpr int64_t kGroupBytes = 20 << 20;
  const int64_t most = std::max<int64_t>(kGroupBytes / (kPanelRows * inner * 2), 1);
  return CeilDiv(panels, CeilDiv(panels, most));
}

// ---- candidates ----

// Lists of the classes of a row whose probability may reach an epsilon. The logit pass fills them while it
// computes the tiles (docs/kernels/recomputed.md).

// Limits of the room for the candidates of a row. For the default epsilon, 1 / epsilon is four times the
// smaller one.
inline constexpr int64_t kLeastListed = 1024;
inline constexpr int64_t kMostListed = 2048;

// A listed class and its logit.
struct Candidate {
  int32_t column;
  float z;
};

// z, f, d and the reference are as in TilePartials. A class is listed if its 2^d reaches epsilon times the
// lower bound that the row's sum had when the class's tile was done. So the list has all classes that reach
// epsilon times the complete sum, and some that do not.
struct CandidateLists {
  Candidate* entries = nullptr;  // [rows, capacity], in any order, without the target
  int32_t capacity = 0;          // entries of a row
  int32_t* counts = nullptr;     // [rows]; above capacity: the list is incomplete
  float* sum_bound = nullptr;    // [rows], lower bound of the sum of 2^d over all classes, with the target
  float log2_epsilon = 0.0f;

  // For `rows` rows, with room for `listed` candidates each (at most kMostListed). Does not set log2_epsilon.
  static CandidateLists Carve(Carver& carver, int64_t rows, int64_t vocab, int64_t listed) {
    CandidateLists lists;
    lists.capacity = static_cast<int32_t>(std::min(vocab, listed));
    lists.entries = carver.Take<Candidate>(rows * lists.capacity);
    lists.counts = carver.Take<int32_t>(rows);
    lists.sum_bound = carver.Take<float>(rows);
    return lists;
  }
};

// The first tile whose candidates are listed during the pass. Before this tile the lower bounds are too low
// to be useful. A second pass lists the candidates of these first tiles when the sums are complete.
constexpr int64_t FirstListedTile(int64_t vocab_tiles) { return CeilDiv(vocab_tiles, 16); }

// ---- what the logit pass (logit_pass.h) and the kernels around it keep of rows and tiles ----

// The statistics of a row over one tile of classes, at [tile * ld + row], without the row's target. z is the
// logit, z f its value in units of log 2, and d = z f - reference.
struct TilePartials {
  int64_t ld = 0;           // at least the rows
  float* max = nullptr;     // of z; -inf if all are below the row's threshold
  float* sum = nullptr;     // of 2^d
  float* spread = nullptr;  // of 2^d d; general form only; may be null
  uint8_t* arg = nullptr;   // the first column of the tile that has `max`
  float* target = nullptr;  // [ld], by row: z of the target, computed like the others

  // For `capacity` rows.
  static TilePartials Carve(Carver& carver, int64_t capacity, int64_t vocab);
};

// For a row with an upstream gradient of its entropy: turns its exponentials into dL/ds over (scale *
// gradient unit) when its sums are known, as (factor + tilt d) 2^d times the slope of the softcap. d as in
// TilePartials.
struct EntropyRow {
  float factor;
  float tilt;
  // For the class with the largest logit, without the target: its d is known more precisely than 16 bits.
  float top_gradient;  // its gradient, without the slope of the softcap
  int32_t top;         // that class; -1: not known, because the target's logit is larger, or it is elsewhere
};

// The memory of a chunk between these kernels, `capacity` rows each.
struct FusedRows {
  TilePartials partials;  // free when the results are computed
  float* reference = nullptr;
  float* threshold = nullptr;
  // Over all tiles, and later also over the classes elsewhere. d as in TilePartials, but relative to
  // sum_reference.
  float* sum_reference = nullptr;  // `reference`, unless some classes are elsewhere
  float* max = nullptr;
  float* sum = nullptr;
  float* spread = nullptr;
  int32_t* arg = nullptr;
  // dL/ds over (scale * gradient unit) is factor[r] times row r of the exponentials.
  float* factor = nullptr;
  EntropyRow* entropy = nullptr;          // for rows of exponentials whose coef_entropy is not 0
  int32_t* marked_panels = nullptr;       // [1 + Panels(capacity)], MarkedPanels
  uint32_t* claimed_positions = nullptr;  // [kMostClusters], AllPanels

  // Everything but `partials`.
  static FusedRows Carve(Carver& carver, int64_t capacity);
};

// ---- when the loss is fused into the first product of a chunk (fused_loss.h) ----

// "" if the loss can be fused, else the reason why not. exponentials: the loss has to leave exponentials for
// its gradients. clusters: LogitPassClusters().
absl::string_view WhyNotFused(const LossTerms& terms, DType compute, bool exponentials, int clusters);
// "" if a loss that can be fused is faster fused, else the reason why not.
absl::string_view WhyNotFaster(int64_t padded_rows, int64_t vocab);

// ---- the order in which a persistent grid of clusters takes the work of a gradient's product ----

// Clusters compute whole tiles as long as there are enough for all clusters. The remaining tiles are divided
// along the inner dimension into segments, so that they occupy all clusters too. The segments of a tile are
// added up in order.
//
// | choice | why not another |
// | groups of row tiles, rows innermost | the grid works on about 8 x 8 tiles, which takes fewest bytes |
// | segments for the last tiles only | partial sums are 256 KB a tile; whole tiles share what is in L2 |
struct GradientGemmPlan {
  int clusters = 0;
  int panels = 0;     // of kPanelRows columns of C
  int row_tiles = 0;  // of kColumnTile rows of C
  int inner_tiles = 0;
  int group = 1;      // row tiles that are worked on together
  int whole = 0;      // tiles computed as a whole
  int segmented = 0;  // tiles after these, computed in segments
  int segments = 1;   // of each segmented tile
  // whole + segmented * segments, in the order in which they are begun: whole tiles, the first segments of
  // the other tiles, their second segments, and so on.
  int units = 0;
};

// A tile's partial sums, while its segments are computed.
inline constexpr int64_t kPartialBytes = int64_t{kPanelRows} * kColumnTile * 4;
inline constexpr int kMostPartials = 126;

// How many of `row_tiles` are worked on together, in groups of about the same size.
int64_t RowTilesPerGroup(int64_t row_tiles);

// The stages of the main loop until the last cluster is done, for `tiles` tiles divided into `segments` each.
int64_t StagesFor(int64_t tiles, int64_t segments, int64_t inner_tiles, int64_t clusters);

// For C [rows, columns] with an inner dimension of `inner`, all above 0.
GradientGemmPlan PlanGradientGemm(int64_t rows, int64_t columns, int64_t inner, int clusters);

// "" if the gradients of a chunk can be products of this folder, else the reason why not.
absl::string_view WhyNoGradientGemms(DType compute, const DeviceLimits& limits);
// "" if such products are faster than cuBLASLt's for the gradients of `rows` rows, else the reason why not.
absl::string_view WhyNoFasterGradientGemms(int64_t rows);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PLAN_H_
