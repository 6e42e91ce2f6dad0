// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/norm.h"

#include <cmath>

namespace lossd::kernels {
namespace {

double Mean(const float* x, int64_t n) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += double{x[i]};
  return sum / static_cast<double>(n);
}

double MeanSquareAbout(const float* x, double centre, int64_t n) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += (double{x[i]} - centre) * (double{x[i]} - centre);
  return sum / static_cast<double>(n);
}

}  // namespace

float NormForward(const NormParams& params, float* unit, float* y) {
  const int64_t n = params.size;
  const double mean = params.norm == Norm::kLayerNorm ? Mean(unit, n) : 0.0;
  const double inverse = 1.0 / std::sqrt(MeanSquareAbout(unit, mean, n) + double{params.epsilon});
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    unit[i] = static_cast<float>((double{unit[i]} - mean) * inverse);
    y[i] = unit[i] * params.gain[i];
  }
  if (params.norm == Norm::kLayerNorm) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] += params.shift[i];
  }
  return static_cast<float>(inverse);
}

// dx = inverse * (h - mean(h) - unit * mean(h * unit)) with h = dy * gain; RMSNorm without mean(h).
void NormBackward(const NormParams& params, const float* unit, float inverse_deviation, float* grad) {
  const int64_t n = params.size;
  double sum = 0.0;
  double sum_unit = 0.0;
#pragma omp simd reduction(+ : sum, sum_unit)
  for (int64_t i = 0; i < n; ++i) {
    const double h = double{grad[i]} * double{params.gain[i]};
    sum += h;
    sum_unit += h * double{unit[i]};
  }
  const double mean = params.norm == Norm::kLayerNorm ? sum / static_cast<double>(n) : 0.0;
  const double mean_unit = sum_unit / static_cast<double>(n);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const double h = double{grad[i]} * double{params.gain[i]};
    grad[i] = static_cast<float>(double{inverse_deviation} * (h - mean - double{unit[i]} * mean_unit));
  }
}

}  // namespace lossd::kernels
