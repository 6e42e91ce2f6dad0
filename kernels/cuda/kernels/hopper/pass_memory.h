// SPDX-License-Identifier: Apache-2.0
// What the logit pass (logit_pass.h) leaves of rows and tiles, and what the kernels around it (fused_rows.h)
// keep of rows: where it lies. Plain data and pure functions; also of programs without CUDA.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PASS_MEMORY_H_
#define LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PASS_MEMORY_H_

#include <cstdint>

#include "kernels/cuda/device/device_memory.h"

namespace lossd::kernels::cuda::hopper {

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

// How the exponentials of a row with an upstream gradient of its entropy become dL/ds over (scale * gradient
// unit), once its sums are known: (factor + tilt d) 2^d times the slope of the softcap, d as in TilePartials.
struct EntropyRow {
  float factor;
  float tilt;
  // Of the class with the largest logit, the target left out, whose d is known better than 16 bits say.
  float top_gradient;  // without the slope
  int32_t top;         // -1: not known, because the target's logit is larger, or elsewhere
};

// Memory of a chunk between these kernels, `capacity` rows each.
struct FusedRows {
  TilePartials partials;  // free once the results are there
  float* reference = nullptr;
  float* threshold = nullptr;
  // Of all tiles, and then of the classes elsewhere too; d as in TilePartials, but relative to this.
  float* sum_reference = nullptr;  // `reference`, unless there are classes elsewhere
  float* max = nullptr;
  float* sum = nullptr;
  float* spread = nullptr;
  int32_t* arg = nullptr;
  // dL/ds over (scale * gradient unit) is factor[r] times row r of the exponentials.
  float* factor = nullptr;
  EntropyRow* entropy = nullptr;          // of rows of exponentials whose coef_entropy is not 0
  int32_t* marked_panels = nullptr;       // [1 + Panels(capacity)], see MarkedPanels
  uint32_t* claimed_positions = nullptr;  // [kMostClusters], see AllPanels

  // All but partials.
  static FusedRows Carve(Carver& carver, int64_t capacity);
};

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_KERNELS_HOPPER_PASS_MEMORY_H_
