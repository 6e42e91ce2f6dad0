// Launchers of the kernels around hot classes: those that sampled gradients take most often. Their part of ds
// is multiplied as a dense matrix of few columns, and only the others are sampled (docs/kernels/sampled.md).
//
// All enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_HOT_CLASSES_H_
#define LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_HOT_CLASSES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/dtype.h"

namespace lossd::kernels::cuda {

// Columns of the dense matrix; fewer classes may be hot, and the other columns are 0.
inline constexpr int kHotClasses = 2048;
inline constexpr int kHotGroup = 32;  // classes of a word of `bits`
inline constexpr int kHotBins = 256;  // of a histogram of popularity

// Which classes are hot, and how that is found out. All zero: none is, and nothing is known.
struct HotClasses {
  int64_t vocab = 0;
  uint32_t* bits = nullptr;      // [groups], a bit a class
  int32_t* bases = nullptr;      // [groups], hot classes before the group
  int32_t* ids = nullptr;        // [kHotClasses], ascending, of which `count` are valid
  int32_t* count = nullptr;      // [1], of ids
  int32_t* taken = nullptr;      // [vocab], how often classes were taken, in 1/16, since the last choice
  float* popularity = nullptr;   // [vocab], that of earlier times, fading
  int32_t* histogram = nullptr;  // [kHotBins], 0 between the launches

  int64_t groups() const { return (vocab + kHotGroup - 1) / kHotGroup; }
};

// The most popular classes become hot, of those that are taken at least `least` times between two choices.
cudaError_t LaunchChooseHot(const HotClasses& hot, float least, cudaStream_t stream);

// Adds to hot.taken how often the rows would have taken each hot class: the sum over rows of min(width *
// |element|, 1).
struct CountHotParams {
  HotClasses hot;
  const void* elements = nullptr;  // [rows, kHotClasses]
  DType dtype = DType::kBFloat16;
  const float* widths = nullptr;  // [rows]
  int64_t rows = 0;
};
cudaError_t LaunchCountHot(const CountHotParams& params, cudaStream_t stream);

// to[i] = weight[ids[i]], [kHotClasses, ld]; rows of `to` that are no class are 0.
cudaError_t LaunchGatherHot(const HotClasses& hot, const void* weight, DType dtype, int64_t ld, void* to,
                            cudaStream_t stream);
// weight_gradient[ids[i]] += scale * from[i], [kHotClasses, ld], and likewise the bias's unless it is null.
struct ScatterHotParams {
  HotClasses hot;
  const float* from = nullptr;
  const float* bias_from = nullptr;  // [kHotClasses]; already scaled
  int64_t ld = 0;
  float scale = 1.0f;
  float* weight_gradient = nullptr;  // [vocab, ld]
  float* bias_gradient = nullptr;    // [vocab] or null
};
cudaError_t LaunchScatterHot(const ScatterHotParams& params, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_HOT_CLASSES_H_
