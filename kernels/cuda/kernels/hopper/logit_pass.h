// SPDX-License-Identifier: Apache-2.0
// Launchers of the logit pass: the logits product of a chunk on Hopper, i.e. the dot products of hidden
// states and classes. The type of the pass says what the pass writes. For most types the dot products stay in
// registers:
// - StatisticsPass: statistics of the rows,
// - ExponentialsPass, RecoverablePass: also exponentials, of two kinds,
// - ListingPass: also lists of candidates; SecondListingPass, LastListingPass: only lists,
// - GradientPass: gradients,
// - SoftmaxPass: the dot products themselves, and softmaxes of the tiles.
//
// Enqueues on `stream`; all pointers are device memory unless said otherwise. Stateless and thread-safe.
// Compute capability 9.0.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_LOGIT_PASS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_LOGIT_PASS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <variant>

#include "kernels/cuda/device/device_memory.h"
#include "kernels/cuda/kernels/hopper/cluster_launch.h"
#include "kernels/cuda/kernels/hopper/plan.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda::hopper {

// Terms of this file (plan.h has more of them). A panel is kPanelRows (256) rows, over all classes. A tile is
// the part of a panel with 256 classes, which a cluster of two blocks computes at a time. Exponentials are
// 2^d, where d is the logit in units of log 2, minus the reference of the row. The reference is chosen before
// the pass, so that 2^d neither overflows nor vanishes. A candidate is a class whose probability may reach
// epsilon, the limit of filtered gradients.

// The largest sum of 2^d of a row that is used. If the sum of a row is larger, its panel is computed again
// with another reference.
inline constexpr float kLargestSum = 0x1p60f;

// ---- operands of every pass ----

// How the logit z is computed from a dot product. z f is the logit in units of log 2.
// - Plain form: z is the dot product, f = scale log2(e), scale > 0.
// - General form: s = scale (dot product + bias), z = softcap tanh(s / softcap), or z = s without a softcap;
//   f = log2(e).
struct LogitForm {
  bool general = false;
  float scale = 1.0f;
  const float* bias = nullptr;  // [padded_classes] or null: none
  float softcap = 0.0f;         // 0: none
};

// The operands of a pass: rows, and all classes or a block of classes.
struct LogitOperands {
  const void* hidden = nullptr;    // [rows, inner]
  const void* weight = nullptr;    // [padded_classes, inner], beginning at first_class
  DType dtype = DType::kBFloat16;  // of both; a 16-bit type
  int64_t inner = 0;               // a multiple of 8
  int64_t rows = 0;
  int64_t classes = 0;
  int64_t padded_classes = 0;  // a multiple of 8
  int64_t first_class = 0;     // a multiple of 8
  LogitForm form;
  const int32_t* targets = nullptr;  // [rows], classes counted from 0; -1: none
};

// ---- the rows of a pass ----

// All rows. `order`, in host memory: which position in the order of the grid a cluster prefers, by the
// multiprocessors on which it runs (ClusterOrder). Clusters mark the positions that are taken in
// `claimed_positions` [kMostClusters], which must be 0 on entry. If `order` is null, clusters take tiles in
// any order.
struct AllPanels {
  const ClusterOrder* order = nullptr;
  uint32_t* claimed_positions = nullptr;
};

// Only the marked panels of kPanelRows rows. If marks[0] is 0, the pass does nothing. Otherwise it processes
// the panels for which marks[1 + panel] is not 0.
struct MarkedPanels {
  const int32_t* marks = nullptr;
};

// ---- the purpose of a pass ----

// Values of each row that must be known before the pass, [rows] each. LaunchPrepareRows (fused_rows.h)
// computes them.
struct RowReferences {
  const float* reference = nullptr;  // subtracted from the logits, in units of log 2
  // A lower bound of the row's largest logit, before the softcap. If all logits of a tile are below it, the
  // pass does not look for the tile's maximum.
  const float* threshold = nullptr;
};

// Statistics of the rows alone.
struct StatisticsPass {
  RowReferences references;
  TilePartials partials;
  std::variant<AllPanels, MarkedPanels> panels;
};

// Statistics, and exponentials: 2^d times the slope of the softcap at z; 0 at the target and in padding
// columns. Only for bf16 operands.
struct ExponentialsPass {
  StatisticsPass statistics;
  void* exponentials = nullptr;  // [rows, padded_classes] bf16, out
};

// The same, but rows with an upstream gradient of their entropy get recoverable exponentials
// (recoverable.cuh). With a softcap, these exponentials are not multiplied by the slope.
struct RecoverablePass {
  StatisticsPass statistics;
  const float* coef_entropy = nullptr;  // [rows]; 0: as in ExponentialsPass
  void* exponentials = nullptr;         // [rows, padded_classes] bf16, out
};

// Statistics, and lists of the candidates among the classes of the tiles from FirstListedTile() on. A class
// is listed by comparing it with a lower bound of the row's sum (CandidateLists), which grows with each tile.
// In the first tiles the bound is too low to be useful, so SecondListingPass lists their candidates later.
struct ListingPass {
  RowReferences references;
  TilePartials partials;
  CandidateLists lists;
  AllPanels panels;
};

// For the two passes that list candidates when the sums are complete (fused_rows.h says when each is used).
// The only statistic that they write is `target`, with the value that it already has.
struct CompleteSums {
  const float* reference = nullptr;  // [rows]
  float* target = nullptr;           // TilePartials::target
  CandidateLists lists;              // sum_bound has the complete sums
};

// Lists the candidates of the tiles before FirstListedTile(), and of all tiles in the panels that `anew`
// marks.
struct SecondListingPass {
  CompleteSums sums;
  const int32_t* anew = nullptr;  // [1 + panels]; the first is not a mark
};

// Lists the candidates of all tiles in marked panels.
struct LastListingPass {
  CompleteSums sums;
  MarkedPanels panels;
};

// The gradient: dL/ds divided by (scale * gradient unit), including the target's element; 0 in padding
// columns. Uses all members of a rule except `uniform`, and `entropy` only in the general form. A row whose
// rule has softmax 0 and entropy 0 gets 0, except at the target.
struct GradientPass {
  const GradientRule* rules = nullptr;  // [rows]
  void* gradient = nullptr;             // [rows, padded_classes] of the operands' dtype, out
};

// The dot products in fp32, and each tile's part of the rows' softmaxes at a temperature. Only for operands
// of the general form; their targets are not read.
struct SoftmaxPass {
  float temperature = 1.0f;
  float* dots = nullptr;         // [rows, padded_classes], out
  SoftmaxPart* parts = nullptr;  // [rows, VocabTiles(classes)], out
  AllPanels panels;
};

// ---- launch ----

// The number of clusters that the current device runs at once; 0 if it cannot run the pass.
int LogitPassClusters();

// clusters: the number of clusters of the grid, at most LogitPassClusters(). Errors: cudaErrorNotSupported if
// the driver cannot describe the operands to the copy engine; cudaErrorInvalidValue for operands that the
// pass does not support.
cudaError_t LaunchLogitPass(const LogitOperands& operands, const StatisticsPass& pass, int clusters,
                            cudaStream_t stream);
cudaError_t LaunchLogitPass(const LogitOperands& operands, const ExponentialsPass& pass, int clusters,
                            cudaStream_t stream);
cudaError_t LaunchLogitPass(const LogitOperands& operands, const RecoverablePass& pass, int clusters,
                            cudaStream_t stream);
cudaError_t LaunchLogitPass(const LogitOperands& operands, const ListingPass& pass, int clusters,
                            cudaStream_t stream);
cudaError_t LaunchLogitPass(const LogitOperands& operands, const SecondListingPass& pass, int clusters,
                            cudaStream_t stream);
cudaError_t LaunchLogitPass(const LogitOperands& operands, const LastListingPass& pass, int clusters,
                            cudaStream_t stream);
cudaError_t LaunchLogitPass(const LogitOperands& operands, const GradientPass& pass, int clusters,
                            cudaStream_t stream);
cudaError_t LaunchLogitPass(const LogitOperands& operands, const SoftmaxPass& pass, int clusters,
                            cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_LOGIT_PASS_H_
