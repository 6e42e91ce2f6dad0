// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels behind filtered gradients: from the candidates of each row to the gradient of the
// hidden states and to that of the weight, without any logit below epsilon.
// docs/kernels/filtered.md says why and what it costs.
//
// All enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_FILTERED_FILTERED_H_
#define LOSSD_KERNELS_CUDA_KERNELS_FILTERED_FILTERED_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/launch_plan.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/decision.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// ---- selection ----

struct RowSelection {
  float epsilon = 0.0f;
  int32_t* pool = nullptr;  // [capacity] classes
  int32_t capacity = 0;
  int32_t* used = nullptr;      // [1], 0 on entry; above `capacity` on return: lists are incomplete
  SelectedRow* rows = nullptr;  // [rows]
};

// Row results and candidates. A row that lists more than kMaxRowCandidates, or half as many if it has at most
// 65,536 classes, leaves `used` above capacity.
struct SelectRowsParams {
  LogitMatrix logits;  // fp32, of the whole vocabulary; only read
  LossTerms terms;
  RowInputs in;
  RowResults out;
  RowSelection selection;
};
cudaError_t LaunchSelectRows(const SelectRowsParams& params, cudaStream_t stream);

// ---- decision ----

// kTooManyCandidates if the candidates overflowed the pool, else kAsPlanned.
struct DecideParams {
  RowSelection selection;
  Decision* decision = nullptr;  // [1]
};
cudaError_t LaunchDecide(const DecideParams& params, cudaStream_t stream);

// ---- rows ----

// Kept elements, in any order: the class and the row in the key, (class << row_bits) | row, each pair once.
struct KeptList {
  uint64_t* keys = nullptr;
  float* coefs = nullptr;    // dL/ds of the element over (scale * gradient unit)
  int32_t* count = nullptr;  // [1], 0 on entry; at most the candidates and one target a row
  int row_bits = 0;
  int64_t first_row = 0;  // what rows are counted from
};

// Row results from logits in fp32, the hidden gradient, the dropped mass, and the list of what is kept.
// Nothing if the candidates overflowed the pool.
struct FilterRowsParams {
  // These four as for the selection. The argmax of a row stays what the selection has found.
  LossTerms terms;
  RowInputs in;
  RowResults out;
  RowSelection selection;
  DType dtype = DType::kBFloat16;          // of hidden and weight
  const void* hidden = nullptr;            // [rows, ld]
  const void* weight = nullptr;            // [vocab, ld]
  int64_t ld = 0;                          // a multiple of 8; CanFilterRows()
  const float* weight_sum = nullptr;       // [ld], sum of u_v w_v; only with smoothing
  void* hidden_gradient = nullptr;         // [rows, ld], or null: not wanted
  DType gradient_dtype = DType::kFloat32;  // `dtype` or fp32
  float gradient_scale = 1.0f;
  const int32_t* with_gradient = nullptr;  // [rows]; the others get 0 and keep the results they have
  const int32_t* accumulate = nullptr;     // [rows]; whose elements are listed
  float* dropped_mass = nullptr;           // [rows]
  KeptList kept;                           // keys null: none wanted
};
cudaError_t LaunchFilterRows(const FilterRowsParams& params, cudaStream_t stream);

// ---- weight gradient ----

// Sorts `count` entries by key; those without an element have all bits set and stay behind. Only key_bits
// bits are compared. Uses both pairs of arrays; on return [0] are the sorted ones. `scratch` has
// SortScratchBytes(count) bytes.
struct SortParams {
  uint64_t* keys[2] = {};  // [count] each; the entries are in [0]
  float* coefs[2] = {};
  int64_t count = 0;
  int key_bits = 64;
  void* scratch = nullptr;
};
cudaError_t LaunchSortKept(SortParams& params, cudaStream_t stream);

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
  RunCounters* counters = nullptr;   // 0 on entry
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

#endif  // LOSSD_KERNELS_CUDA_KERNELS_FILTERED_FILTERED_H_
