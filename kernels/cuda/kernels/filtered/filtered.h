// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels of filtered gradients. The candidates of a row are the classes whose probability
// may reach epsilon. From the candidates and the targets, the kernels compute the gradients of the hidden
// states and of the weight; classes whose probability is below epsilon are left out. docs/kernels/filtered.md
// says why, and what this costs. Order of the launches: LaunchSelectRows, LaunchDecide, LaunchFilterRows,
// LaunchSortKept, LaunchFilteredWeight and, with label smoothing, LaunchUniformWeight.
//
// Three lists occur: the pool has the candidates of all rows. Kept elements are those candidates that reach
// epsilon with the final sum, and the targets; KeptList has the elements of the gradient for them, as the
// entries from which the weight gradient is computed. A run is the entries of one class, after the sort.
//
// All launchers enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
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

// The candidates of rows. `pool` is a list of classes that all rows share; `rows` says which part of the pool
// belongs to each row.
struct RowSelection {
  float epsilon = 0.0f;
  int32_t* pool = nullptr;  // [capacity] classes
  int32_t capacity = 0;
  // [1]: the number of classes in the pool; 0 on entry; above `capacity` on return if the pool is too small.
  int32_t* used = nullptr;
  SelectedRow* rows = nullptr;  // [rows]
};

// Computes row results and candidates. A row may have kMaxRowCandidates candidates, or half as many if there
// are at most 65,536 classes. If a row has more, `used` is above capacity on return.
struct SelectRowsParams {
  LogitMatrix logits;  // fp32, of all classes; only read
  LossTerms terms;
  RowInputs in;
  RowResults out;
  RowSelection selection;
};
cudaError_t LaunchSelectRows(const SelectRowsParams& params, cudaStream_t stream);

// ---- decision ----

// Decides kTooManyCandidates if the candidates overflowed the pool, else kAsPlanned.
struct DecideParams {
  RowSelection selection;
  Decision* decision = nullptr;  // [1]
};
cudaError_t LaunchDecide(const DecideParams& params, cudaStream_t stream);

// ---- rows ----

// Elements of the gradient that are kept, in any order; each is an entry. A key holds class and row, (class
// << row_bits) | row; each pair occurs once.
struct KeptList {
  uint64_t* keys = nullptr;
  float* coefs = nullptr;    // dL/ds of the element divided by (scale * gradient unit)
  int32_t* count = nullptr;  // [1], 0 on entry; at most all candidates and one target a row
  int row_bits = 0;
  int64_t first_row = 0;  // the row of the chunk that is row 0 of the launch
};

// Computes, from the candidates of each row: row results with logits in fp32, the hidden gradient, the
// dropped mass, and the list of kept elements. The dropped mass of a row is the probability of all classes
// that are left out. Does nothing if the candidates overflowed the pool.
struct FilterRowsParams {
  // The next four members have the values that LaunchSelectRows got in SelectRowsParams. The kernel does not
  // change the argmax that the selection has written.
  LossTerms terms;
  RowInputs in;
  RowResults out;
  RowSelection selection;
  DType dtype = DType::kBFloat16;          // of hidden and weight
  const void* hidden = nullptr;            // [rows, ld]
  const void* weight = nullptr;            // [vocab, ld]
  int64_t ld = 0;                          // a multiple of 8; CanFilterRows()
  const float* weight_sum = nullptr;       // [ld], the sum of u_v * row v of the weight; only with smoothing
  void* hidden_gradient = nullptr;         // [rows, ld], or null: not wanted
  DType gradient_dtype = DType::kFloat32;  // `dtype` or fp32
  float gradient_scale = 1.0f;
  // [rows]; rows where it is 0 get a gradient of 0 and keep their results.
  const int32_t* with_gradient = nullptr;
  const int32_t* accumulate = nullptr;  // [rows]; the rows whose elements are listed
  float* dropped_mass = nullptr;        // [rows]
  KeptList kept;                        // keys null: not wanted
};
cudaError_t LaunchFilterRows(const FilterRowsParams& params, cudaStream_t stream);

// ---- weight gradient ----

// Sorts `count` entries by key. Empty entries have all bits of the key set and come last. Only the lowest
// key_bits bits are compared. Uses both pairs of arrays, [0] and [1]; on return the sorted entries are in
// [0]. `scratch` has SortScratchBytes(count) bytes.
struct SortParams {
  uint64_t* keys[2] = {};  // [count] each; the entries are in [0]
  float* coefs[2] = {};
  int64_t count = 0;
  int key_bits = 64;
  void* scratch = nullptr;
};
cudaError_t LaunchSortKept(SortParams& params, cudaStream_t stream);

// weight_gradient[v] += scale * the sum of coef * hidden[row] over the entries of class v, in the order of
// rows. bias_gradient[v] += scale * the sum of coef over the same entries.
struct FilteredWeightParams {
  const uint64_t* keys = nullptr;  // [count], sorted
  const float* coefs = nullptr;
  int64_t count = 0;
  int row_bits = 0;
  const int32_t* keep = nullptr;  // [rows]; entries of rows that are not kept add nothing
  const void* hidden = nullptr;   // [rows, ld], finite
  DType dtype = DType::kBFloat16;
  int64_t ld = 0;
  float scale = 1.0f;
  float* weight_gradient = nullptr;  // [vocab, ld]
  float* bias_gradient = nullptr;    // [vocab] or null
  int32_t* runs = nullptr;           // [2 * count]: where the entries of each class begin
  RunCounters* counters = nullptr;   // 0 on entry
};
cudaError_t LaunchFilteredWeight(const FilteredWeightParams& params, int multiprocessors,
                                 cudaStream_t stream);

// Adds the uniform part of label smoothing, where u_v is class_weights[v], or 1 if class_weights is null:
//   weight_gradient[v] += scale * u_v * hidden_sum
//   bias_gradient[v] += scale * u_v * the sum of coefs[row] over kept rows
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
