// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench/gpu_data.h"
#include "bench/gpu_memory.h"

namespace lossd::bench {
namespace {

using memory::Allocate;
using memory::Check;
using memory::Download;
using memory::Upload;

constexpr int kThreads = 256;
constexpr int kRowTile = 8;  // sampled rows a thread of the reference works on at once
constexpr int kVocabSplits = 128;
constexpr int64_t kRowsAtOnce = 1024;  // of the reference's log-sum-exp

// z[i, j] = x[rows[i]] . w[classes[j]] in double; a warp per class and kRowTile rows, null lists mean all.
__global__ void LogitsKernel(const __nv_bfloat16* x, const __nv_bfloat16* w, const int32_t* rows,
                             int64_t row_count, const int32_t* classes, int64_t class_count, int64_t hidden,
                             double* z) {
  const int64_t j = blockIdx.x * static_cast<int64_t>(kThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x & 31;
  if (j >= class_count) return;
  const __nv_bfloat16* w_row = w + (classes != nullptr ? classes[j] : j) * hidden;
  for (int64_t first = blockIdx.y * kRowTile; first < row_count; first += gridDim.y * kRowTile) {
    const __nv_bfloat16* x_rows[kRowTile];
    for (int t = 0; t < kRowTile; ++t) {
      const int64_t i = min(first + t, row_count - 1);
      x_rows[t] = x + (rows != nullptr ? rows[i] : i) * hidden;
    }
    double sums[kRowTile] = {};
    for (int64_t c = lane; c < hidden; c += 32) {
      const double value = __bfloat162float(w_row[c]);
#pragma unroll
      for (int t = 0; t < kRowTile; ++t)
        sums[t] += static_cast<double>(__bfloat162float(x_rows[t][c])) * value;
    }
#pragma unroll
    for (int t = 0; t < kRowTile; ++t) {
      for (int offset = 16; offset > 0; offset >>= 1)
        sums[t] += __shfl_xor_sync(0xffffffffu, sums[t], offset);
      if (lane == 0 && first + t < row_count) z[(first + t) * class_count + j] = sums[t];
    }
  }
}

// lse[i] of z[i, 0 ... count), and the entropy of its softmax; a block per row.
__global__ void LseKernel(const double* z, int64_t count, double* lse, double* entropy) {
  __shared__ double shared[kThreads];
  const double* row = z + blockIdx.x * count;
  double top = row[0];
  for (int64_t j = threadIdx.x; j < count; j += kThreads) top = max(top, row[j]);
  shared[threadIdx.x] = top;
  __syncthreads();
  for (int i = 0; i < kThreads; ++i) top = max(top, shared[i]);
  __syncthreads();
  double sum = 0.0, spread = 0.0;
  for (int64_t j = threadIdx.x; j < count; j += kThreads) {
    const double e = exp(row[j] - top);
    sum += e;
    spread += e * (row[j] - top);
  }
  __shared__ double shared_spread[kThreads];
  shared[threadIdx.x] = sum;
  shared_spread[threadIdx.x] = spread;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads; ++i) {
    sum += shared[i];
    spread += shared_spread[i];
  }
  lse[blockIdx.x] = top + log(sum);
  entropy[blockIdx.x] = log(sum) - spread / sum;
}

// out[i, c] += sum over a split of j of g[i, j] * m[index[j], c]; g is transposed if g_stride_i == 1.
__global__ void WeightedSumKernel(const double* g, int64_t g_stride_i, int64_t g_stride_j, int64_t count_i,
                                  int64_t count_j, const __nv_bfloat16* m, int64_t hidden, double* out) {
  const int64_t c = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.z) * kRowTile;
  const int64_t per_split = (count_j + gridDim.y - 1) / gridDim.y;
  const int64_t end = min((blockIdx.y + 1) * per_split, count_j);
  if (c >= hidden) return;
  double sums[kRowTile] = {};
  for (int64_t j = blockIdx.y * per_split; j < end; ++j) {
    const double value = __bfloat162float(m[j * hidden + c]);
    for (int t = 0; t < kRowTile; ++t) {
      if (first + t < count_i) sums[t] += g[(first + t) * g_stride_i + j * g_stride_j] * value;
    }
  }
  for (int t = 0; t < kRowTile; ++t) {
    if (first + t < count_i) atomicAdd(&out[(first + t) * hidden + c], sums[t]);
  }
}

double* WeightedSum(const double* g, int64_t stride_i, int64_t stride_j, int64_t count_i, int64_t count_j,
                    const void* m, int64_t hidden) {
  double* out = Allocate<double>(count_i * hidden);
  Check(cudaMemset(out, 0, static_cast<size_t>(count_i * hidden) * sizeof(double)), "cudaMemset");
  const dim3 grid(static_cast<unsigned>((hidden + kThreads - 1) / kThreads), kVocabSplits,
                  static_cast<unsigned>((count_i + kRowTile - 1) / kRowTile));
  WeightedSumKernel<<<grid, kThreads>>>(g, stride_i, stride_j, count_i, count_j,
                                        static_cast<const __nv_bfloat16*>(m), hidden, out);
  return out;
}

double* Logits(const DataShape& shape, const LossData& data, const int32_t* rows, int64_t row_count,
               const int32_t* classes, int64_t class_count) {
  double* z = Allocate<double>(row_count * class_count);
  const dim3 grid(static_cast<unsigned>((class_count + kThreads / 32 - 1) / (kThreads / 32)),
                  static_cast<unsigned>(std::min<int64_t>(row_count, 256)));
  LogitsKernel<<<grid, kThreads>>>(static_cast<const __nv_bfloat16*>(data.hidden),
                                   static_cast<const __nv_bfloat16*>(data.weight), rows, row_count, classes,
                                   class_count, shape.hidden, z);
  Check(cudaDeviceSynchronize(), "reference logits");
  return z;
}

// Of rows.
struct RowSums {
  std::vector<double> lse, entropy;
};

// Of all rows.
RowSums AllSums(const DataShape& shape, const LossData& data) {
  RowSums all;
  for (int64_t begin = 0; begin < shape.rows; begin += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, shape.rows - begin);
    std::vector<int32_t> list(static_cast<size_t>(count));
    std::iota(list.begin(), list.end(), static_cast<int32_t>(begin));
    int32_t* rows = Upload(list);
    double* z = Logits(shape, data, rows, count, nullptr, shape.vocab);
    double* lse = Allocate<double>(count);
    double* entropy = Allocate<double>(count);
    LseKernel<<<static_cast<unsigned>(count), kThreads>>>(z, shape.vocab, lse, entropy);
    const std::vector<double> lse_part = Download(lse, count), entropy_part = Download(entropy, count);
    all.lse.insert(all.lse.end(), lse_part.begin(), lse_part.end());
    all.entropy.insert(all.entropy.end(), entropy_part.begin(), entropy_part.end());
    cudaFree(rows);
    cudaFree(z);
    cudaFree(lse);
    cudaFree(entropy);
  }
  return all;
}

// dL/dz of a class of a row (docs/math.md).
double LogitGradient(const ReferenceQuery& query, size_t row, bool is_target, double log_p, double entropy) {
  const double p = std::exp(log_p), hard = is_target ? std::expm1(log_p) : p;
  if (query.gradients == nullptr) return query.scale * hard;
  const RowGradients& g = *query.gradients;
  return query.scale * static_cast<double>(g.loss[row]) * hard + static_cast<double>(g.lse[row]) * p -
         static_cast<double>(g.entropy[row]) * p * (log_p + entropy);
}

void RowsReference(const DataShape& shape, const LossData& data, const ReferenceQuery& query,
                   ReferenceAnswer& answer) {
  const int64_t count = static_cast<int64_t>(query.rows.size());
  int32_t* rows = Upload(query.rows);
  double* z = Logits(shape, data, rows, count, nullptr, shape.vocab);
  std::vector<double> g = Download(z, count * shape.vocab);
  for (int64_t i = 0; i < count; ++i) {
    double* row = &g[static_cast<size_t>(i * shape.vocab)];
    const double top = *std::max_element(row, row + shape.vocab);
    double sum = 0.0, spread = 0.0;
    for (int64_t v = 0; v < shape.vocab; ++v) {
      const double e = std::exp(row[v] - top);
      sum += e;
      spread += e * (row[v] - top);
    }
    const double lse = top + std::log(sum), entropy = std::log(sum) - spread / sum;
    const auto index = static_cast<size_t>(query.rows[static_cast<size_t>(i)]);
    const int32_t target = data.targets[index];
    answer.lse.push_back(lse);
    answer.loss.push_back(lse - row[target]);
    for (int64_t v = 0; v < shape.vocab; ++v) {
      row[v] = LogitGradient(query, index, v == target, row[v] - lse, entropy);
    }
  }
  Check(cudaMemcpy(z, g.data(), g.size() * sizeof(double), cudaMemcpyHostToDevice), "cudaMemcpy");
  double* dx = WeightedSum(z, shape.vocab, 1, count, shape.vocab, data.weight, shape.hidden);
  answer.hidden_gradient = Download(dx, count * shape.hidden);
  cudaFree(rows);
  cudaFree(z);
  cudaFree(dx);
}

void ClassesReference(const DataShape& shape, const LossData& data, const ReferenceQuery& query,
                      ReferenceAnswer& answer) {
  const RowSums sums = AllSums(shape, data);
  const int64_t count = static_cast<int64_t>(query.classes.size());
  int32_t* classes = Upload(query.classes);
  double* z = Logits(shape, data, nullptr, shape.rows, classes, count);
  std::vector<double> g = Download(z, shape.rows * count);
  for (int64_t r = 0; r < shape.rows; ++r) {
    for (int64_t j = 0; j < count; ++j) {
      double& value = g[static_cast<size_t>(r * count + j)];
      const auto row = static_cast<size_t>(r);
      const bool is_target = data.targets[row] == query.classes[static_cast<size_t>(j)];
      value = LogitGradient(query, row, is_target, value - sums.lse[row], sums.entropy[row]);
    }
  }
  Check(cudaMemcpy(z, g.data(), g.size() * sizeof(double), cudaMemcpyHostToDevice), "cudaMemcpy");
  double* dw = WeightedSum(z, 1, count, count, shape.rows, data.hidden, shape.hidden);
  answer.weight_gradient = Download(dw, count * shape.hidden);
  cudaFree(classes);
  cudaFree(z);
  cudaFree(dw);
}

}  // namespace

std::vector<double> ComputeLogits(const DataShape& shape, const LossData& data,
                                  const std::vector<int32_t>& rows) {
  const int64_t count = static_cast<int64_t>(rows.size());
  int32_t* device_rows = Upload(rows);
  double* z = Logits(shape, data, device_rows, count, nullptr, shape.vocab);
  std::vector<double> logits = Download(z, count * shape.vocab);
  cudaFree(device_rows);
  cudaFree(z);
  return logits;
}

ReferenceAnswer ComputeReference(const DataShape& shape, const LossData& data, const ReferenceQuery& query) {
  ReferenceAnswer answer;
  RowsReference(shape, data, query, answer);
  ClassesReference(shape, data, query, answer);
  return answer;
}

}  // namespace lossd::bench
