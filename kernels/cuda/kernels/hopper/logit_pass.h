// SPDX-License-Identifier: Apache-2.0
// Launchers of the logit pass, the first product of a chunk on Hopper: dot products of hidden states and
// classes. The dot products stay in registers but for one purpose. What a pass writes depends on its purpose,
// which is a type: statistics of the rows, exponentials (of two kinds) or lists of candidates besides, lists
// alone, gradients, or the dot products themselves with softmaxes of the tiles.
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

// Sums of 2^d beyond this are not relied on: the panels of their rows are computed again with another
// reference.
inline constexpr float kLargestSum = 0x1p60f;

// ---- what every pass takes ----

// Plain form: z is the dot product, f = scale log2(e), scale > 0. General form: z = softcap tanh(s / softcap)
// or, without a softcap, s = scale (dot product + bias); f = log2(e).
struct LogitForm {
  bool general = false;
  float scale = 1.0f;
  const float* bias = nullptr;  // [padded_classes] or null: none
  float softcap = 0.0f;         // 0: none
};

// Rows, and all classes or a block of them.
struct LogitOperands {
  const void* hidden = nullptr;    // [rows, inner]
  const void* weight = nullptr;    // [padded_classes, inner], from first_class on
  DType dtype = DType::kBFloat16;  // of both; a 16-bit type
  int64_t inner = 0;               // a multiple of 8
  int64_t rows = 0;
  int64_t classes = 0;
  int64_t padded_classes = 0;  // a multiple of 8
  int64_t first_class = 0;     // a multiple of 8
  LogitForm form;
  const int32_t* targets = nullptr;  // [rows], classes counted from 0; -1: none
};

// ---- which rows it goes over ----

// All rows. The order is of the device, in host memory, with `claimed_positions` [kMostClusters], 0 on entry;
// or null: clusters as they come.
struct AllPanels {
  const ClusterOrder* order = nullptr;
  uint32_t* claimed_positions = nullptr;
};

// Marks of the panels of kPanelRows rows: nothing happens if marks[0] is 0, and else only to the panels whose
// marks[1 + panel] is not 0.
struct MarkedPanels {
  const int32_t* marks = nullptr;
};

// ---- what it is for ----

// What is known of each row before the pass, [rows] each.
struct RowReferences {
  const float* reference = nullptr;  // in units of log 2
  const float* threshold = nullptr;  // of z before the softcap: maxima below it need not be found
};

struct StatisticsPass {
  RowReferences references;
  TilePartials partials;
  std::variant<AllPanels, MarkedPanels> panels;
};

// Statistics, and 2^d times the slope of the softcap at z; 0 at the target and in padding columns. For bf16
// operands only.
struct ExponentialsPass {
  StatisticsPass statistics;
  void* exponentials = nullptr;  // [rows, padded_classes] bf16, out
};

// The same, but rows with an upstream gradient of their entropy have recoverable exponentials
// (recoverable.cuh): without the slope under a softcap.
struct RecoverablePass {
  StatisticsPass statistics;
  const float* coef_entropy = nullptr;  // [rows]; 0: as ExponentialsPass says
  void* exponentials = nullptr;         // [rows, padded_classes] bf16, out
};

// Statistics, and the candidates among the classes of tiles from FirstListedTile() on, while the lower bound
// of each row's sum grows with each tile.
struct ListingPass {
  RowReferences references;
  TilePartials partials;
  CandidateLists lists;
  AllPanels panels;
};

// What a pass over the tiles needs that lists candidates when the sums are complete. Of the statistics it
// writes none but `target`, as it was.
struct CompleteSums {
  const float* reference = nullptr;  // [rows]
  float* target = nullptr;           // TilePartials::target
  CandidateLists lists;              // sum_bound: the sums themselves
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

// dL/ds over (scale * gradient unit), the target's entry too, 0 in padding columns. Of a rule all but the
// uniform part counts, its entropy in the general form only. A row whose softmax and entropy are 0 is 0 but
// for the target.
struct GradientPass {
  const GradientRule* rules = nullptr;  // [rows]
  void* gradient = nullptr;             // [rows, padded_classes] of the operands' dtype, out
};

// The dot products in fp32, and of each tile its part of the row's softmax at a temperature. Targets are not
// read. For operands of the general form.
struct SoftmaxPass {
  float temperature = 1.0f;
  float* dots = nullptr;         // [rows, padded_classes], out
  SoftmaxPart* parts = nullptr;  // [rows, VocabTiles(classes)], out
  AllPanels panels;
};

// ---- launch ----

// The clusters that the current device runs at once; 0 if it cannot run the pass.
int LogitPassClusters();

// cudaErrorNotSupported if the driver cannot describe the operands to the copy engine; cudaErrorInvalidValue
// for operands that the pass is not for.
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
