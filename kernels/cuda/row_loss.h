// Launcher of the fused loss kernel: a chunk of logits in, row results and (in place) their gradient out.
//
// Enqueues on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_ROW_LOSS_H_
#define LOSSD_KERNELS_CUDA_ROW_LOSS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/dtype.h"

namespace lossd::kernels::cuda {

// What the launch needs to know of the device.
struct DeviceLimits {
  int multiprocessors = 1;
  int shared_bytes_per_block = 48 << 10;  // most dynamic shared memory a block may ask for
  int shared_bytes_per_sm = 64 << 10;
  bool has_clusters = false;  // compute capability 9.0 or later
  bool has_branches = false;  // the driver runs DeviceBranch
};

// The candidates that one thread block found in its part of a row.
struct SelectedPart {
  int32_t begin = 0;  // in the pool
  int32_t count = 0;
  float sum = 0.0f;     // of 2^d over them, as stored
  float spread = 0.0f;  // of 2^d d
  float kept = 0.0f;    // the part of `sum` that, as stored, reaches epsilon
};

// What a row's results were made of; sums are over all classes but the target, relative to M = max f.
struct RowSums {
  float max = 0.0f;  // of all z
  float sum = 0.0f;
  float spread = 0.0f;
  float weighted = 0.0f;
  float target_dot = 0.0f;
  float total = 0.0f;  // with the target
  int32_t finite = 0;
};

// Lists the classes of each row whose probability may reach epsilon, rounding of the stored logits allowed
// for. `used` may end above `capacity`; then the lists are incomplete.
struct RowSelection {
  float epsilon = 0.0f;
  int32_t* pool = nullptr;  // [capacity] classes; null: no selection
  int32_t capacity = 0;
  int32_t* used = nullptr;        // [1], 0 on entry
  SelectedPart* parts = nullptr;  // [rows, parts_per_row]
  int32_t parts_per_row = 0;      // SelectionParts()
  RowSums* sums = nullptr;        // [rows]
};

struct RowLossParams {
  // [padded_rows, ld]: W x on entry; with write_gradient, dL/ds over (scale * gradient unit) on return,
  // 0 in padding rows and columns and in rows whose loss is not finite.
  void* logits = nullptr;
  DType dtype = DType::kBFloat16;
  int64_t ld = 0;  // a multiple of 8
  int64_t vocab = 0;
  int64_t rows = 0;
  int64_t padded_rows = 0;
  bool write_gradient = false;

  const float* bias = nullptr;           // [vocab] or null
  const float* class_weights = nullptr;  // [vocab] or null (all 1)
  float class_weight_sum = 0.0f;         // sum of class weights; vocab without them
  float scale = 1.0f;                    // t
  float softcap = 0.0f;                  // c; 0: none
  float smoothing = 0.0f;                // alpha
  float z_loss = 0.0f;                   // lambda
  bool want_entropy = false;

  // [rows] each.
  const int32_t* targets = nullptr;
  const float* target_dots = nullptr;   // W x at the target, in fp32; null: as stored in `logits`
  const float* weights = nullptr;       // row weight
  const float* coef_loss = nullptr;     // dL/d(loss) with weight and scale, over the gradient unit
  const float* coef_lse = nullptr;      // dL/dlse over the gradient unit
  const float* coef_entropy = nullptr;  // dL/dentropy over the gradient unit
  bool any_coef_entropy = false;

  // [rows] each; see RowOutputs for their meaning.
  float* loss = nullptr;
  float* z_loss_part = nullptr;
  float* lse = nullptr;
  float* entropy = nullptr;
  float* target_logprob = nullptr;
  int32_t* argmax = nullptr;

  RowSelection selection;  // instead of write_gradient

  // Whether the kernels need the general form of the formulas.
  bool IsGeneral() const {
    return bias != nullptr || class_weights != nullptr || softcap > 0.0f || smoothing > 0.0f ||
           want_entropy || any_coef_entropy || scale < 0.0f;
  }
};

// dots[r] = hidden[r] . weight[targets[r]] in fp32 for r in [0, rows); both matrices have `ld` columns, a
// multiple of 8, and the same 16-bit dtype.
struct TargetDotParams {
  const void* hidden = nullptr;  // [rows, ld]
  const void* weight = nullptr;  // [vocab, ld]
  DType dtype = DType::kBFloat16;
  int64_t ld = 0;
  int64_t rows = 0;
  const int32_t* targets = nullptr;  // [rows]
  float* dots = nullptr;             // [rows]
};
cudaError_t LaunchTargetDots(const TargetDotParams& params, cudaStream_t stream);

// The parts into which a selection divides a row of `ld` elements; 0 if rows are too long to be selected
// from.
int SelectionParts(int64_t ld, DType dtype, const DeviceLimits& limits);
// The same, at most, on any device.
int MaxSelectionParts(int64_t ld, DType dtype);

cudaError_t LaunchRowLoss(const RowLossParams& params, const DeviceLimits& limits, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROW_LOSS_H_
