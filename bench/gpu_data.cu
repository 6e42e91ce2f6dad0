#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

#include "bench/gpu_data.h"

namespace lossd::bench {
namespace {

constexpr int kThreads = 256;
constexpr int kCandidates = 100;
constexpr double kFirstLogit = 17.0;
constexpr double kSlope = 1.92;
constexpr double kPopularityOffset = 50.0;
constexpr int kRowTile = 8;  // sampled rows a thread of the reference works on at once
constexpr int kVocabSplits = 128;
constexpr int64_t kRowsAtOnce = 1024;  // of the reference's log-sum-exp

void Check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(error));
  std::abort();
}

template <typename T>
T* Allocate(int64_t count) {
  void* data = nullptr;
  Check(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)), "cudaMalloc");
  return static_cast<T*>(data);
}

template <typename T>
T* Upload(const std::vector<T>& values) {
  T* data = Allocate<T>(static_cast<int64_t>(values.size()));
  Check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return data;
}

template <typename T>
std::vector<T> Download(const T* data, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  Check(cudaMemcpy(values.data(), data, values.size() * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return values;
}

__device__ uint32_t Hash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<uint32_t>(x >> 16);
}

__device__ float Normal(uint64_t seed, uint64_t index) {
  const float u = (static_cast<float>(Hash(seed * 0x9e3779b97f4a7c15ull + 2 * index)) + 0.5f) * 0x1p-32f;
  const float v = static_cast<float>(Hash(seed * 0x9e3779b97f4a7c15ull + 2 * index + 1)) * 0x1p-32f;
  return sqrtf(-2.0f * logf(fminf(u, 0.99999994f))) * cospif(2.0f * v);
}

__global__ void NormalKernel(__nv_bfloat16* out, int64_t count, float deviation, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count; i += step) {
    out[i] = __float2bfloat16_rn(deviation * Normal(seed, i));
  }
}

__device__ float BlockTotal(float value) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    __syncthreads();
  }
  return shared[0];
}

// One block a row: normal noise scaled to length 1.
__global__ void UnitRowsKernel(float* weight, int64_t hidden, uint64_t seed) {
  float* row = weight + blockIdx.x * hidden;
  float squares = 0.0f;
  for (int64_t c = threadIdx.x; c < hidden; c += kThreads) {
    const float w = Normal(seed, blockIdx.x * static_cast<uint64_t>(hidden) + c);
    row[c] = w;
    squares += w * w;
  }
  const float inverse = rsqrtf(BlockTotal(squares));
  for (int64_t c = threadIdx.x; c < hidden; c += kThreads) row[c] *= inverse;
}

// One block a row: the sum of its candidates' weight rows times their logits.
__global__ void MixKernel(const float* weight, const int32_t* candidates, const float* logits, int64_t hidden,
                          __nv_bfloat16* out) {
  const int32_t* own = candidates + static_cast<int64_t>(blockIdx.x) * kCandidates;
  for (int64_t c = threadIdx.x; c < hidden; c += kThreads) {
    float sum = 0.0f;
    for (int i = 0; i < kCandidates; ++i) sum += logits[i] * weight[own[i] * hidden + c];
    out[blockIdx.x * hidden + c] = __float2bfloat16_rn(sum);
  }
}

__global__ void RoundKernel(const float* from, __nv_bfloat16* to, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count; i += step) {
    to[i] = __float2bfloat16_rn(from[i]);
  }
}

// Candidates of all rows, [rows, kCandidates]: the i-th is to get the (i + 1)-th largest logit.
std::vector<int32_t> DrawCandidates(const DataShape& shape, std::mt19937_64& rng) {
  std::vector<int32_t> popularity(static_cast<size_t>(shape.vocab));
  std::iota(popularity.begin(), popularity.end(), 0);
  std::shuffle(popularity.begin(), popularity.end(), rng);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  const double vocab = static_cast<double>(shape.vocab);
  const double ratio = (vocab + kPopularityOffset) / kPopularityOffset;
  std::vector<int32_t> candidates;
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int j = 0; j < kCandidates; ++j) {
      const double rank =
          kPopularityOffset * std::pow(ratio, (j + uniform(rng)) / kCandidates) - kPopularityOffset;
      candidates.push_back(popularity[static_cast<size_t>(std::clamp(std::floor(rank), 0.0, vocab - 1.0))]);
    }
    std::shuffle(candidates.end() - kCandidates, candidates.end(), rng);
  }
  return candidates;
}

LossData MakePeaked(const DataShape& shape, uint64_t seed) {
  std::mt19937_64 rng(seed);
  const std::vector<int32_t> candidates = DrawCandidates(shape, rng);
  std::vector<float> logits;
  std::vector<double> weights;
  for (int i = 1; i <= kCandidates; ++i) {
    logits.push_back(static_cast<float>(kFirstLogit - kSlope * std::log(i)));
    weights.push_back(std::pow(i, -kSlope));
  }
  LossData data;
  std::discrete_distribution<int> draw(weights.begin(), weights.end());
  for (int64_t row = 0; row < shape.rows; ++row) {
    data.targets.push_back(candidates[static_cast<size_t>(row * kCandidates + draw(rng))]);
  }
  float* weight = Allocate<float>(shape.vocab * shape.hidden);
  int32_t* device_candidates = Upload(candidates);
  float* device_logits = Upload(logits);
  data.weight = Allocate<__nv_bfloat16>(shape.vocab * shape.hidden);
  data.hidden = Allocate<__nv_bfloat16>(shape.rows * shape.hidden);
  UnitRowsKernel<<<static_cast<unsigned>(shape.vocab), kThreads>>>(weight, shape.hidden, seed);
  MixKernel<<<static_cast<unsigned>(shape.rows), kThreads>>>(
      weight, device_candidates, device_logits, shape.hidden, static_cast<__nv_bfloat16*>(data.hidden));
  RoundKernel<<<4096, kThreads>>>(weight, static_cast<__nv_bfloat16*>(data.weight),
                                  shape.vocab * shape.hidden);
  Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  cudaFree(weight);
  cudaFree(device_candidates);
  cudaFree(device_logits);
  return data;
}

LossData MakeFlat(const DataShape& shape, uint64_t seed) {
  LossData data;
  data.weight = Allocate<__nv_bfloat16>(shape.vocab * shape.hidden);
  data.hidden = Allocate<__nv_bfloat16>(shape.rows * shape.hidden);
  const float deviation = static_cast<float>(std::pow(static_cast<double>(shape.hidden), -0.25));
  NormalKernel<<<4096, kThreads>>>(static_cast<__nv_bfloat16*>(data.weight), shape.vocab * shape.hidden,
                                   deviation, seed);
  NormalKernel<<<4096, kThreads>>>(static_cast<__nv_bfloat16*>(data.hidden), shape.rows * shape.hidden,
                                   deviation, seed + 1);
  Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::mt19937_64 rng(seed);
  std::uniform_int_distribution<int32_t> any(0, static_cast<int32_t>(shape.vocab - 1));
  for (int64_t row = 0; row < shape.rows; ++row) data.targets.push_back(any(rng));
  return data;
}

// ---- reference ----

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

// lse[i] of z[i, 0 ... count); a block per row.
__global__ void LseKernel(const double* z, int64_t count, double* lse) {
  __shared__ double shared[kThreads];
  const double* row = z + blockIdx.x * count;
  double top = row[0];
  for (int64_t j = threadIdx.x; j < count; j += kThreads) top = max(top, row[j]);
  shared[threadIdx.x] = top;
  __syncthreads();
  for (int i = 0; i < kThreads; ++i) top = max(top, shared[i]);
  __syncthreads();
  double sum = 0.0;
  for (int64_t j = threadIdx.x; j < count; j += kThreads) sum += exp(row[j] - top);
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kThreads; ++i) sum += shared[i];
  lse[blockIdx.x] = top + log(sum);
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

// The log-sum-exp of all rows.
std::vector<double> AllLse(const DataShape& shape, const LossData& data) {
  std::vector<double> all;
  for (int64_t begin = 0; begin < shape.rows; begin += kRowsAtOnce) {
    const int64_t count = std::min(kRowsAtOnce, shape.rows - begin);
    std::vector<int32_t> list(static_cast<size_t>(count));
    std::iota(list.begin(), list.end(), static_cast<int32_t>(begin));
    int32_t* rows = Upload(list);
    double* z = Logits(shape, data, rows, count, nullptr, shape.vocab);
    double* lse = Allocate<double>(count);
    LseKernel<<<static_cast<unsigned>(count), kThreads>>>(z, shape.vocab, lse);
    const std::vector<double> part = Download(lse, count);
    all.insert(all.end(), part.begin(), part.end());
    cudaFree(rows);
    cudaFree(z);
    cudaFree(lse);
  }
  return all;
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
    double sum = 0.0;
    for (int64_t v = 0; v < shape.vocab; ++v) sum += std::exp(row[v] - top);
    const double lse = top + std::log(sum);
    const int32_t target = data.targets[static_cast<size_t>(query.rows[static_cast<size_t>(i)])];
    answer.lse.push_back(lse);
    answer.loss.push_back(lse - row[target]);
    const double others = -std::expm1(row[target] - lse);
    for (int64_t v = 0; v < shape.vocab; ++v) row[v] = query.scale * std::exp(row[v] - lse);
    row[target] = -query.scale * others;
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
  const std::vector<double> lse = AllLse(shape, data);
  const int64_t count = static_cast<int64_t>(query.classes.size());
  int32_t* classes = Upload(query.classes);
  double* z = Logits(shape, data, nullptr, shape.rows, classes, count);
  std::vector<double> g = Download(z, shape.rows * count);
  for (int64_t r = 0; r < shape.rows; ++r) {
    for (int64_t j = 0; j < count; ++j) {
      double& value = g[static_cast<size_t>(r * count + j)];
      const double log_p = value - lse[static_cast<size_t>(r)];
      const bool is_target = data.targets[static_cast<size_t>(r)] == query.classes[static_cast<size_t>(j)];
      value = query.scale * (is_target ? std::expm1(log_p) : std::exp(log_p));
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

LossData MakeData(DataKind kind, const DataShape& shape, uint64_t seed) {
  return kind == DataKind::kPeaked ? MakePeaked(shape, seed) : MakeFlat(shape, seed);
}

void Free(LossData& data) {
  cudaFree(data.hidden);
  cudaFree(data.weight);
  data = LossData();
}

ReferenceAnswer ComputeReference(const DataShape& shape, const LossData& data, const ReferenceQuery& query) {
  ReferenceAnswer answer;
  RowsReference(shape, data, query, answer);
  ClassesReference(shape, data, query, answer);
  return answer;
}

}  // namespace lossd::bench
