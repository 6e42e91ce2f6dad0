// Launcher of the fused loss kernel: a chunk of logits in, row results and (in place) their gradient out.
//
// Enqueues on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_ROW_LOSS_H_
#define LOSSD_KERNELS_CUDA_ROW_LOSS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "kernels/cuda/device_limits.h"
#include "kernels/dtype.h"

namespace lossd::kernels::cuda {

// dL/dz of a row over the gradient unit, as factors of 2^(z f - reference); see row_loss.cu.
struct GradientRule {
  float softmax;
  float entropy;  // c_H / S
  float uniform;  // c alpha / V
  float reference;
  float log2_sum;
  float row_entropy;
  float target;  // dL/ds of the target itself, but for the uniform part
  bool valid;    // false: the loss is not finite and the gradient zero
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

// How LaunchRowLoss() would go about it, for people.
std::string DescribeRowLoss(const RowLossParams& params, const DeviceLimits& limits);
cudaError_t LaunchRowLoss(const RowLossParams& params, const DeviceLimits& limits, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_ROW_LOSS_H_
