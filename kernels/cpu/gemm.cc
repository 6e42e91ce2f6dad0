// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/gemm.h"

#include <cblas.h>

#include <algorithm>

namespace lossd::kernels {
namespace {

// A range of at least this many multiplications is worth waking a thread for.
constexpr int64_t kLeastWork = int64_t{1} << 18;

const float* Row(const GemmOperand& a, int64_t row) { return a.data + (a.transposed ? row : row * a.stride); }

const float* Column(const GemmOperand& b, int64_t column) {
  return b.data + (b.transposed ? column * b.stride : column);
}

void SingleGemm(int64_t m, int64_t n, int64_t k, float alpha, const GemmOperand& a, const GemmOperand& b,
                float beta, float* c, int64_t stride) {
  cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
              b.transposed ? CblasTrans : CblasNoTrans, static_cast<blasint>(m), static_cast<blasint>(n),
              static_cast<blasint>(k), alpha, a.data, static_cast<blasint>(a.stride), b.data,
              static_cast<blasint>(b.stride), beta, c, static_cast<blasint>(stride));
}

// Columns [begin, end) of sums, at most kColumns of them.
constexpr int64_t kColumns = 512;
void AddSomeColumnSums(const float* a, const float* b, int64_t rows, int64_t cols, int64_t begin, int64_t end,
                       float* sums) {
  double block[kColumns] = {};
  const int64_t width = end - begin;
  for (int64_t row = 0; row < rows; ++row) {
    const float* a_row = a + row * cols + begin;
    if (b == nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) block[i] += double{a_row[i]};
    } else {
      const float* b_row = b + row * cols + begin;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) block[i] += double{a_row[i]} * double{b_row[i]};
    }
  }
  for (int64_t i = 0; i < width; ++i) sums[begin + i] += static_cast<float>(block[i]);
}

}  // namespace

void UseSingleThreadedBlas() { openblas_set_num_threads(1); }

void Gemm(ThreadPool& pool, int64_t m, int64_t n, int64_t k, float alpha, GemmOperand a, GemmOperand b,
          float beta, float* c, int64_t stride) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    for (int64_t row = 0; row < m; ++row) {
      for (float* value = c + row * stride; value != c + row * stride + n; ++value) {
        *value = beta == 0.0f ? 0.0f : *value * beta;
      }
    }
    return;
  }
  if (n >= m) {
    const int64_t grain = std::max<int64_t>(16, kLeastWork / (m * k));
    pool.ParallelFor(n, grain, [&](int64_t begin, int64_t end) {
      SingleGemm(m, end - begin, k, alpha, a, {Column(b, begin), b.stride, b.transposed}, beta, c + begin,
                 stride);
    });
  } else {
    const int64_t grain = std::max<int64_t>(16, kLeastWork / (n * k));
    pool.ParallelFor(m, grain, [&](int64_t begin, int64_t end) {
      SingleGemm(end - begin, n, k, alpha, {Row(a, begin), a.stride, a.transposed}, b, beta,
                 c + begin * stride, stride);
    });
  }
}

void AddColumnSums(ThreadPool& pool, const float* a, const float* b, int64_t rows, int64_t cols,
                   float* sums) {
  if (rows == 0) return;
  const int64_t grain = std::max<int64_t>(64, kLeastWork / rows);
  pool.ParallelFor(cols, grain, [&](int64_t begin, int64_t end) {
    for (int64_t from = begin; from < end; from += kColumns) {
      AddSomeColumnSums(a, b, rows, cols, from, std::min(end, from + kColumns), sums);
    }
  });
}

}  // namespace lossd::kernels
