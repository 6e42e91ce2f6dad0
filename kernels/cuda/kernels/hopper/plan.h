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

// Every product of this folder is computed in these tiles. A panel is the rows of one cluster's tile, over
// all columns.
//
// | choice | why not another |
// | 128 x 256 a block, two consumer warpgroups | the widest product instruction reads least shared memory |
// | two blocks in a cluster, the same columns | a quarter less L2 traffic than alone; power is the limit |
inline constexpr int kRowTile = 128;      // rows a block
inline constexpr int kColumnTile = 256;   // columns a block
inline constexpr int kInnerTile = 64;     // elements of the inner dimension in one stage of the ring
inline constexpr int kClusterBlocks = 2;  // adjacent in rows
inline constexpr int kPanelRows = kRowTile * kClusterBlocks;  // rows that a cluster works on at a time

constexpr int64_t Panels(int64_t rows) { return CeilDiv(rows, kPanelRows); }

// ---- the order in which a persistent grid takes the tiles of the logit pass ----

// | choice | why not another |
// | groups of panels of about 20 MB | hidden states stay in L2, weights are read once a group |
inline constexpr int kVocabTile = kColumnTile;  // classes of a block

// Without classes there is one tile of padding, so that sums and exponentials are written.
constexpr int64_t VocabTiles(int64_t vocab) { return std::max<int64_t>(CeilDiv(vocab, kVocabTile), 1); }

// The number of panels in a group. The panels of a group are worked on together, as many as stay in L2; all
// groups have about the same size.
constexpr int64_t PanelsPerGroup(int64_t panels, int64_t inner) {
  constexpr int64_t kGroupBytes = 20 << 20;
  const int64_t most = std::max<int64_t>(kGroupBytes / (kPanelRows * inner * 2), 1);
  return CeilDiv(panels, CeilDiv(panels, most));
}

// ---- candidates ----

// Filtered gradients leave out the classes whose probability is below a limit, epsilon. The candidates of a
// row are the classes whose probability may reach epsilon. The logit pass fills the lists of candidates while
// it computes the tiles (docs/kernels/recomputed.md).

// The least and the most room for the candidates of a row. For the default epsilon, 1 / epsilon is four times
// kLeastListed.
inline constexpr int64_t kLeastListed = 1024;
inline constexpr int64_t kMostListed = 2048;

// A listed class and its logit.
struct Candidate {
  int32_t column;
  float z;
};

// The lists of candidates of rows. z, f, d and the reference are as in TilePartials. A class is listed if its
// 2^d reaches epsilon times the lower bound of the row's sum at the time of the class's tile. The lower bound
// is at most the complete sum. So the list has all classes whose 2^d reaches epsilon times the complete sum,
// and some other classes.
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
// logit, z f its value in units of log 2, and d = z f - reference. The reference of a row is chosen before
// the pass, so that 2^d neither overflows nor vanishes (fused_rows.cu).
struct TilePartials {
  int64_t ld = 0;           // at least the rows
  float* max = nullptr;     // of z; -inf if all are below the row's threshold
  float* sum = nullptr;     // of 2^d
  float* spread = nullptr;  // of 2^d d; general form only; may be null
  uint8_t* arg = nullptr;   // the first column of the tile that has `max`
  float* target = nullptr;  // [ld], by row: z of the target, computed like the other logits

  // For `capacity` rows.
  static TilePartials Carve(Carver& carver, int64_t capacity, int64_t vocab);
};

// For a row with an upstream gradient of its entropy: how its exponentials become its gradient when its sums
// are known. dL/ds divided by (scale * gradient unit) is (factor + tilt d) 2^d times the slope of the
// softcap, with d as in TilePartials.
struct EntropyRow {
  float factor;
  float tilt;
  // The class with the largest logit, except the target, has a gradient of its own, because its d is known
  // more precisely than 16 bits.
  float top_gradient;  // its gradient, without the slope of the softcap
  // This class; -1: not known, because the target's logit is larger, or the class is on another device.
  int32_t top;
};

// The memory in which the logit pass and the kernels around it keep values of a chunk's rows. Arrays have
// `capacity` rows.
struct FusedRows {
  // Free when the results are computed and, with lists of candidates, the last lists have been written.
  TilePartials partials;
  float* reference = nullptr;  // RowReferences in logit_pass.h, like `threshold`
  float* threshold = nullptr;
  // Statistics over all tiles, and later also over the classes on other devices. d is as in TilePartials, but
  // relative to sum_reference.
  float* sum_reference = nullptr;  // equal to `reference`, unless some classes are on other devices
  float* max = nullptr;
  float* sum = nullptr;
  float* spread = nullptr;
  int32_t* arg = nullptr;
  // dL/ds divided by (scale * gradient unit) is factor[r] times row r of the exponentials.
  float* factor = nullptr;
  EntropyRow* entropy = nullptr;          // for rows of exponentials whose coef_entropy is not 0
  int32_t* marked_panels = nullptr;       // [1 + Panels(capacity)], MarkedPanels
  uint32_t* claimed_positions = nullptr;  // [kMostClusters], AllPanels

  // Everything but `partials`.
  static FusedRows Carve(Carver& carver, int64_t capacity);
};

// ---- when the loss is fused into the first product of a chunk (fused_loss.h) ----

// "" if the loss can be fused, else the reason why not. exponentials: whether the loss has to store
// exponentials for its gradients. clusters: LogitPassClusters().
absl::string_view WhyNotFused(const LossTerms& terms, DType compute, bool exponentials, int clusters);
// "" if a loss that can be fused is faster fused, else the reason why not.
absl::string_view WhyNotFaster(int64_t padded_rows, int64_t vocab);

// ---- the order in which a persistent grid of clusters takes the work of a gradient's product ----

// The product is C = A B. Clusters compute whole tiles of C as long as there are enough tiles for all
// clusters. The remaining tiles are divided along the inner dimension into segments, so that they also occupy
// all clusters. The segments of a tile are added up in order.
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
  // The number of units of work, whole + segmented * segments. Clusters begin them in this order: whole
  // tiles, the first segments of the other tiles, the second segments of these tiles, and so on.
  int units = 0;
};

// The memory of a tile's partial sums while its segments are computed.
inline constexpr int64_t kPartialBytes = int64_t{kPanelRows} * kColumnTile * 4;
inline constexpr int kMostPartials = 126;  // the most tiles that are computed in segments

// The number of row tiles in a group, which is worked on together. All groups of the `row_tiles` have about
// the same size.
int64_t RowTilesPerGroup(int64_t row_tiles);

// An estimate of the time until the last cluster is done, in stages of the main loop, if each of `tiles`
// tiles is divided into `segments` segments.
int64_t StagesFor(int64_t tiles, int64_t segments, int64_t inner_tiles, int64_t clusters);

// The plan for C [rows, columns] with an inner dimension of `inner`; all sizes are above 0.
GradientGemmPlan PlanGradientGemm(int64_t rows, int64_t columns, int64_t inner, int clusters);

// "" if the gradients of a chunk can be products of this folder, else the reason why not.
absl::string_view WhyNoGradientGemms(DType compute, const DeviceLimits& limits);
// "" if such products are faster than cuBLASLt's for the gradients of `rows` rows, else the reason why not.
absl::string_view WhyNoFasterGradientGemms(int64_t rows);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PLAN_H_
