// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels for chunks of embedding rows, whose rows are rows of the weight
// (LossOptions::embedding). The kernels either gather rows of the weight, or they take gradients of such
// rows: they check them, guard them (rows.h), and add them to the gradient of the weight.
//
// All launchers enqueue on `stream`; all pointers are device memory. Stateless and thread-safe. "Raw" and
// "compact" rows are defined in rows.h.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_EMBEDDING_H_
#define LOSSD_KERNELS_CUDA_KERNELS_EMBEDDING_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/rows.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// out[i] = weight[targets[map[i]]] for i in [0, rows), rounded to the dtype of `out`. 0 where map[i] < 0, and
// where the class is not in [0, classes).
struct GatherClassesParams {
  DeviceMatrix weight;  // [classes, out.cols]; ld a multiple of 8, data 16-byte aligned
  int64_t classes = 0;
  const int32_t* map = nullptr;  // [rows]; null: map[i] is i
  const int32_t* targets = nullptr;
  int64_t rows = 0;
  DeviceMatrix out;  // [rows, cols]
};
cudaError_t LaunchGatherClasses(const GatherClassesParams& params, cudaStream_t stream);

// Raw rows [cols] in one contiguous piece, or in two if the slot is too small for all rows
// (EmbeddingRows::PlaceOf): `first_rows` rows at `first`, the other rows at `second`.
struct RawRows {
  const void* first = nullptr;
  const void* second = nullptr;
  int64_t first_rows = INT64_MAX;
  DType dtype = DType::kFloat32;
  int64_t cols = 0;
};

// bad[r] = 1 if a value of compact row r is not finite, before or after it is multiplied by factors[r]; else
// 0.
struct CheckRowGradientsParams {
  RawRows gradients;
  const int32_t* raw_of_compact = nullptr;  // [rows]
  const float* factors = nullptr;           // [rows]
  int64_t rows = 0;
  float* bad = nullptr;  // [rows]
};
cudaError_t LaunchCheckRowGradients(const CheckRowGradientsParams& params, cudaStream_t stream);

// keep[r] = accumulate[r], unless the slice of r has a bad row (bad[...] != 0); then 0. first_bad[s]: the
// first bad compact row of slice s, or -1. Slice s has the compact rows [slice_begin[s], slice_begin[s + 1]).
struct GuardRowGradientsParams {
  int64_t slices = 0;
  const int32_t* slice_begin = nullptr;  // [slices + 1]
  const float* bad = nullptr;            // [rows]
  const int32_t* accumulate = nullptr;   // [rows]
  int32_t* first_bad = nullptr;          // [slices]
  int32_t* keep = nullptr;               // [rows]
};
cudaError_t LaunchGuardRowGradients(const GuardRowGradientsParams& params, cudaStream_t stream);

// A run is the rows of one class v. For each run: weight_gradient[v] += the sum of factors[r] * gradients[r]
// over the kept rows r of the run. The sum is first computed in fp32, in an order that depends only on the
// length of the run, and then added.
struct AddClassRunsParams {
  RawRows gradients;
  const int32_t* raw_of_compact = nullptr;  // [rows]
  const float* factors = nullptr;           // [rows]
  const int32_t* keep = nullptr;            // [rows]
  const int32_t* targets = nullptr;         // [rows]
  // The runs (ClassRuns in paths/chunk_plan.h), long ones first: run i has the run_rows[i] compact rows in
  // row_order from index run_begin[i] on.
  const int32_t* row_order = nullptr;
  const int32_t* run_begin = nullptr;
  const int32_t* run_rows = nullptr;
  int64_t runs = 0;
  int64_t long_runs = 0;
  float* weight_gradient = nullptr;  // rows are 16-byte aligned
  int64_t ld = 0;                    // of weight_gradient; a multiple of 8
};
cudaError_t LaunchAddClassRuns(const AddClassRunsParams& params, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_EMBEDDING_H_
