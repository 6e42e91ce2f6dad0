// Launchers of the kernels around the logit pass: what it has to know of a row beforehand, and from what it
// left of a row to the row's results and the factors of its gradient.
//
// All enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_HOPPER_FUSED_ROWS_H_
#define LOSSD_KERNELS_CUDA_HOPPER_FUSED_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/hopper/logit_pass.h"
#include "kernels/cuda/row_loss.h"

namespace lossd::kernels::cuda::hopper {

// Memory of a chunk between these kernels, `capacity` rows each.
struct FusedRows {
  TilePartials partials;  // done with when the results are
  CandidateLists lists;   // entries null: none are wanted
  float* reference = nullptr;
  float* threshold = nullptr;
  // Of all tiles; d as in TilePartials.
  float* max = nullptr;
  float* sum = nullptr;
  float* spread = nullptr;
  int32_t* arg = nullptr;
  // dL/ds over (scale * gradient unit) is factor[r] times row r of the exponentials.
  float* factor = nullptr;
  int32_t* redo = nullptr;    // [1 + Panels(capacity)], see LogitPassParams
  uint32_t* taken = nullptr;  // [kMostClusters], see there

  // All but partials and lists.
  static FusedRows Carve(Carver& carver, int64_t capacity);
};

// reference, threshold (also of padding rows), redo = 0, taken = 0 and empty lists, from loss.target_dots.
cudaError_t LaunchPrepareRows(const RowLossParams& loss, const FusedRows& rows, cudaStream_t stream);

// max, sum, spread, arg from the partials, and which panels have a row whose sum is too large for 16-bit
// exponentials: these get a reference that is right for them, and are marked in redo. again: only the marked
// panels, nothing is marked.
cudaError_t LaunchMergeTiles(const RowLossParams& loss, const FusedRows& rows, bool again,
                             cudaStream_t stream);

// Row results; with loss.write_gradient, factor, the target's entry in loss.logits (the exponentials), and
// zeros in the rows whose loss is not finite. rules: [rows], what their gradients are made of, or null.
cudaError_t LaunchFinishRows(const RowLossParams& loss, const FusedRows& rows, GradientRule* rules,
                             cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_FUSED_ROWS_H_
