// Launcher of the first product of a chunk on Hopper: logits = hidden weight^T, of which only per-row
// statistics, and on request a 16-bit matrix of exponentials, reach device memory.
//
// Enqueues on `stream`; all pointers are device memory. Stateless and thread-safe. Compute capability 9.0.
#ifndef LOSSD_KERNELS_CUDA_HOPPER_LOGIT_PASS_H_
#define LOSSD_KERNELS_CUDA_HOPPER_LOGIT_PASS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/hopper/logit_tiles.h"
#include "kernels/dtype.h"

namespace lossd::kernels::cuda::hopper {

// What a tile of classes says of a row, the row's target left out; index tile * ld + row. With z the logit,
// f = log2(e) and M = z's largest value in the tile times f, or the row's `reference` if there is one:
struct TilePartials {
  int64_t ld = 0;           // at least the rows, rounded up to kRowTile
  float* max = nullptr;     // of z; -inf if the tile holds nothing but the target and padding
  float* sum = nullptr;     // of 2^(z f - M)
  float* spread = nullptr;  // of 2^(z f - M) (z f - M); may be null
  uint8_t* arg = nullptr;   // the first column of the tile that has `max`
  float* target = nullptr;  // [ld], by row alone: the target's logit, summed up as the others are
};

struct LogitPassParams {
  const void* hidden = nullptr;    // [rows, inner]
  const void* weight = nullptr;    // [padded_vocab, inner]
  DType dtype = DType::kBFloat16;  // of both; a 16-bit type
  int64_t inner = 0;               // a multiple of 8
  int64_t rows = 0;
  int64_t vocab = 0;
  int64_t padded_vocab = 0;  // a multiple of 8

  const float* bias = nullptr;  // [padded_vocab] or null
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none

  const int32_t* targets = nullptr;  // [rows]
  TilePartials partials;

  // [rows, padded_vocab] bf16 or null: out, 2^(z f - reference) times the slope of the softcap at z; 0 at the
  // target and in padding columns. Needs `reference`.
  void* exponentials = nullptr;
  const float* reference = nullptr;  // [rows], in units of log 2
  const float* threshold = nullptr;  // [rows]
  // Null: all rows. Otherwise nothing happens if redo[0] is 0, and else to those kClusterRows rows whose
  // redo[1 + row / kClusterRows] is not 0.
  const int32_t* redo = nullptr;
};

// cudaErrorNotSupported if the driver cannot describe the operands to the copy engine.
cudaError_t LaunchLogitPass(const LogitPassParams& params, const TileOrder& order, cudaStream_t stream);

}  // namespace lossd::kernels::cuda::hopper

#endif  // LOSSD_KERNELS_CUDA_HOPPER_LOGIT_PASS_H_
