// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels that work on a head's parameters: conversion, addition, optimizer step, gradient
// norm.
//
// Launchers enqueue on `stream`; pointers are device memory. Thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_TENSOR_OPS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_TENSOR_OPS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/rows.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// to[r, c] = from[r, c] for c < from.cols, r < rows. Other elements of `to` do not change.
cudaError_t LaunchConvert(const DeviceMatrix& from, const DeviceMatrix& to, int64_t rows,
                          cudaStream_t stream);

// to[r, c] += scale * from[r, c] for c < from.cols, r < rows; `to` is fp32. The product and the sum are each
// rounded to fp32.
cudaError_t LaunchAddScaled(const DeviceMatrix& from, const DeviceMatrix& to, int64_t rows, float scale,
                            cudaStream_t stream);

// values[i] = value for i in [0, count).
cudaError_t LaunchFill(float* values, int64_t count, float value, cudaStream_t stream);

// values[i] = pseudo-random numbers in (-1, 1), always the same, for i in [0, count). They are operands for
// timing products.
cudaError_t LaunchFillPattern(void* values, DType dtype, int64_t count, cudaStream_t stream);

// One optimizer update of `count` (a multiple of 4) consecutive parameters. The first `matrix_count` belong
// to the weight matrix, the others to vectors. Zeroes the gradients. With options.lazy_rows, either all
// parameters must belong to the matrix, or all to vectors (else cudaErrorInvalidValue); if the gradient of a
// row is 0, the kernel only reads this gradient.
struct OptimizerStepParams {
  OptimizerOptions options;
  int64_t update = 1;  // 1-based
  int64_t count = 0;
  int64_t matrix_count = 0;
  int64_t matrix_cols = 0;  // columns of a row: a multiple of 4 that divides matrix_count; for lazy rows
  float* values = nullptr;
  float* gradients = nullptr;
  float* moment1 = nullptr;  // null if the options need no moments
  float* moment2 = nullptr;
  void* compute_copy = nullptr;  // [matrix_count] 16-bit copy of the matrix, or null
  DType compute_dtype = DType::kFloat32;
};
cudaError_t LaunchOptimizerStep(const OptimizerStepParams& params, cudaStream_t stream);

// *result (device) = sum of squares of values[0, count), in double, in a fixed order. partials:
// kSquareSumPartials doubles.
cudaError_t LaunchSquareSum(const float* values, int64_t count, double* partials, double* result,
                            cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_TENSOR_OPS_H_
