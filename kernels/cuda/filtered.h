// Launchers of the kernels behind Algorithm::kFiltered: from the candidates that the row loss kernel has
// listed to the gradient of the hidden states and to that of the weight, without any logit below epsilon.
// docs/kernels/filtered.md says why and what it costs.
//
// All enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_FILTERED_H_
#define LOSSD_KERNELS_CUDA_FILTERED_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/row_loss.h"
#include "kernels/dtype.h"

namespace lossd::kernels::cuda {

// Most candidates of one row; 1 / epsilon of the default.
inline constexpr int kMaxRowCandidates = 4096;

// Whether rows of `ld` elements are short enough for LaunchFilterRows.
bool CanFilterRows(int64_t ld, DType dtype);

// ---- decision ----

// *exact = 1 if the candidates overflowed the pool or a row has more than kMaxRowCandidates, or if the rows
// with a gradient would drop more than max_dropped_mass on average (by the logits as stored); else 0.
struct DecideParams {
  RowSelection selection;
  int64_t rows = 0;
  const int32_t* with_gradient = nullptr;  // [rows]
  float max_dropped_mass = 1.0f;
  int32_t* exact = nullptr;  // [1]
};
cudaError_t LaunchDecide(const DecideParams& params, cudaStream_t stream);

// ---- rows ----

// Kept elements, in any order: the class and the row in the key, (class << row_bits) | row, each pair once.
struct KeptList {
  uint64_t* keys = nullptr;
  float* coefs = nullptr;    // dL/ds of the element over (scale * gradient unit)
  int32_t* count = nullptr;  // [1], 0 on entry; at most the candidates and one target a row
  int row_bits = 0;
};

// Row results from logits in fp32, the hidden gradient, the dropped mass, and the list of what is kept.
struct FilterRowsParams {
  RowLossParams row;                       // as for the row loss kernel that selected; logits are not read
  const void* hidden = nullptr;            // [rows, ld] row.dtype
  const void* weight = nullptr;            // [vocab, ld]
  int64_t ld = 0;                          // a multiple of 8; CanFilterRows()
  const float* weight_sum = nullptr;       // [ld], sum of u_v w_v; only with smoothing
  void* hidden_gradient = nullptr;         // [rows, ld], or null: not wanted
  DType gradient_dtype = DType::kFloat32;  // row.dtype or fp32
  float gradient_scale = 1.0f;
  const int32_t* with_gradient = nullptr;  // [rows]; the others get 0 and keep the results they have
  const int32_t* accumulate = nullptr;     // [rows]; whose elements are listed
  float* dropped_mass = nullptr;           // [rows]
  KeptList kept;                           // keys null: none wanted
};
cudaError_t LaunchFilterRows(const FilterRowsParams& params, cudaStream_t stream);

// ---- weight gradient ----

// Sorts `count` entries by key; those without an element have all bits set and stay behind. Only key_bits
// bits are compared. `scratch` has SortScratchBytes(count) bytes.
struct SortParams {
  const uint64_t* keys = nullptr;  // [count]
  const float* coefs = nullptr;
  uint64_t* sorted_keys = nullptr;
  float* sorted_coefs = nullptr;
  int64_t count = 0;
  int key_bits = 64;
  void* scratch = nullptr;
};
size_t SortScratchBytes(int64_t count);
cudaError_t LaunchSortKept(const SortParams& params, cudaStream_t stream);

// weight_gradient[v] += scale * sum of coef * hidden[row] over v's entries, rows in order, and likewise the
// bias.
struct FilteredWeightParams {
  const uint64_t* keys = nullptr;  // [count], sorted
  const float* coefs = nullptr;
  int64_t count = 0;
  int row_bits = 0;
  const int32_t* keep = nullptr;  // [rows]; entries of other rows add nothing
  const void* hidden = nullptr;   // [rows, ld], finite
  DType dtype = DType::kBFloat16;
  int64_t ld = 0;
  float scale = 1.0f;
  float* weight_gradient = nullptr;  // [vocab, ld]
  float* bias_gradient = nullptr;    // [vocab] or null
  int32_t* runs = nullptr;           // [2 * count]: where the entries of a class begin
  int32_t* run_counts = nullptr;     // [2], 0 on entry
};
cudaError_t LaunchFilteredWeight(const FilteredWeightParams& params, int multiprocessors,
                                 cudaStream_t stream);

// The uniform part of label smoothing: weight_gradient[v] += scale * u_v * hidden_sum, bias_gradient[v] +=
// scale
// * u_v * sum of coefs[row] over kept rows; u null: 1.
struct UniformWeightParams {
  const float* hidden_sum = nullptr;  // [ld], sum of coefs[row] * hidden[row] over kept rows
  const float* coefs = nullptr;       // [rows]
  const int32_t* keep = nullptr;      // [rows]
  int64_t rows = 0;
  const float* class_weights = nullptr;  // [vocab] or null
  int64_t vocab = 0;
  int64_t ld = 0;
  float scale = 1.0f;
  float* weight_gradient = nullptr;
  float* bias_gradient = nullptr;  // or null
};
cudaError_t LaunchUniformWeight(const UniformWeightParams& params, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_FILTERED_H_
