// SPDX-License-Identifier: Apache-2.0
// Matrix products over the pool's threads, and column sums.
//
// OpenBLAS runs inside the pool's threads, one call each: one set of threads bounded by one option, and a
// split that depends on the shape alone. That needs OpenBLAS's own threads off (UseSingleThreadedBlas).
#ifndef LOSSD_KERNELS_CPU_GEMM_H_
#define LOSSD_KERNELS_CPU_GEMM_H_

#include <cstdint>

#include "kernels/cpu/parallel_for.h"

namespace lossd::kernels {

// Turns OpenBLAS's own threads off for the whole process.
void UseSingleThreadedBlas();

// A row-major matrix, or its transpose.
struct GemmOperand {
  const float* data;
  int64_t stride;  // elements from one stored row to the next
  bool transposed = false;
};

// c [m, n] (row-major, `stride` apart) = alpha * a [m, k] * b [k, n] + beta * c. m, n, k < 2^31, and may be
// 0: a product over no k is 0.
void Gemm(ThreadPool& pool, int64_t m, int64_t n, int64_t k, float alpha, GemmOperand a, GemmOperand b,
          float beta, float* c, int64_t stride);

// sums [cols] += sum over rows of a, or of a * b elementwise if b is not null; [rows, cols] each. In double
// within a call.
void AddColumnSums(ThreadPool& pool, const float* a, const float* b, int64_t rows, int64_t cols, float* sums);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_CPU_GEMM_H_
