// Launcher of the first product of a chunk on Hopper: dot products of hidden states and classes, of which
// only statistics, and on request a matrix of exponentials, reach device memory.
//
// Enqueues on `stream`; all pointers are device memory. Stateless and thread-safe. Compute capability 9.0.
#ifndef LOSSD_KERNELS_CUDA_HOPPER_LOGIT_PASS_H_
#define LOSSD_KERNELS_CUDA_HOPPER_LOGIT_PASS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/hopper/candidates.h"
#include "kernels/cuda/hopper/cluster_order.h"
#include "kernels/cuda/hopper/logit_tiles.h"
#include "kernels/cuda/row_loss.h"
#include "kernels/dtype.h"

namespace lossd::kernels::cuda::hopper {

// Sums of 2^d beyond this are not relied on: their rows are done again with another reference.
inline constexpr float kLargestSum = 0x1p60f;

// With z the logit, f the factor that makes it a power of two, d = z f - reference: what a tile of classes
// says of a row, at [tile * ld + row], the row's target left out.
struct TilePartials {
  int64_t ld = 0;           // at least the rows
  float* max = nullptr;     // of z; or -inf if all are below the row's threshold
  float* sum = nullptr;     // of 2^d
  float* spread = nullptr;  // of 2^d d; general form only, and may be null
  uint8_t* arg = nullptr;   // the first column of the tile that has `max`
  float* target = nullptr;  // [ld], by row: z of the target, summed up as the others are

  // For `capacity` rows.
  static TilePartials Carve(Carver& carver, int64_t capacity, int64_t vocab);
};

struct LogitPassParams {
  const void* hidden = nullptr;    // [rows, inner]
  const void* weight = nullptr;    // [padded_vocab, inner]
  DType dtype = DType::kBFloat16;  // of both; a 16-bit type
  int64_t inner = 0;               // a multiple of 8
  int64_t rows = 0;
  int64_t vocab = 0;
  int64_t padded_vocab = 0;  // a multiple of 8

  // Plain form: z is the dot product, f = scale log2(e), scale > 0. General form: z = softcap tanh(s /
  // softcap) or, without a softcap, s = scale (dot product + bias); f = log2(e).
  bool general = false;
  float scale = 1.0f;
  const float* bias = nullptr;  // [padded_vocab] or null
  float softcap = 0.0f;         // 0: none

  const int32_t* targets = nullptr;  // [rows]; -1: none
  // A block of classes: what weight, bias and the columns of exponentials begin with; a multiple of 8.
  int64_t first_class = 0;
  const float* reference = nullptr;  // [rows], in units of log 2
  const float* threshold = nullptr;  // [rows]; of z before the softcap
  TilePartials partials;
  // [rows, padded_vocab] bf16 or null, for bf16 operands only: out, 2^d times the slope of the softcap at z;
  // 0 at the target and in padding columns.
  void* exponentials = nullptr;
  // [rows] or null. With rules, what is written to `exponentials`, then in dtype, is dL/ds over (scale *
  // gradient unit), the target's entry too; reference, threshold and partials are not used. Of a rule
  // softmax, reference and target count; a row with softmax 0 is 0 but for the target.
  const GradientRule* rules = nullptr;
  // entries null: no lists. Otherwise, without exponentials, the classes of tiles from FirstListedTile() on
  // are listed and `known` grows with each tile. relist: nothing else happens than that the tiles before it
  // are listed, and in the panels of kPanelRows rows whose relist[1 + panel] is not 0 all tiles.
  CandidateLists lists;
  const int32_t* relist = nullptr;
  // Null: all rows. Otherwise nothing happens if redo[0] is 0, and else only to the panels of kPanelRows rows
  // whose redo[1 + panel] is not 0.
  const int32_t* redo = nullptr;
  // Of the device, in host memory, with `taken` [kMostClusters], 0 on entry; or null: clusters as they come.
  const ClusterOrder* order = nullptr;
  uint32_t* taken = nullptr;
};

// The clusters that the current device runs at once; 0 if it cannot run the pass.
int LogitPassClusters();

// cudaErrorNotSupported if the driver cannot describe the operands to the copy engine.
cudaError_t LaunchLogitPass(const LogitPassParams& params, int clusters, cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_LOGIT_PASS_H_
