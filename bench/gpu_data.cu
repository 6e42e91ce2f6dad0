// SPDX-License-Identifier: Apache-2.0
// Makes the data of the GPU benchmarks and computes their reference results on the GPU (gpu_data.h).
//
// Data. WeightRowsKernel makes a weight in float. MixKernel (peaked data) or RealRowsKernel (real data) then
// makes hidden states with given logits from that weight, and RoundKernel rounds the weight to bf16. Flat
// data are noise alone (NormalKernel).
//
// References, in double precision: LogitsKernel computes logits z. The host turns them into gradients dL/dz
// (LogitGradient). WeightedSum multiplies these by the weight (dx of some rows) or by the hidden states (dW
// of some classes).
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

#include "absl/types/span.h"
#include "bench/gpu_data.h"
#include "kernels/data/real_rows.h"

namespace lossd::bench {
namespace {

using data::kMovePart;
using data::kMoves;

// ---- Device memory ----

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

// ---- Data ----

constexpr int kThreads = 256;
// The numbers of peaked data: the k, z1 and s of gpu_data.h, and an offset that flattens the popularity of
// the most popular classes.
constexpr int kCandidates = 100;
constexpr double kFirstLogit = 17.0;
constexpr double kSlope = 1.92;
constexpr double kPopularityOffset = 50.0;

// Random bits that depend on x alone.
__device__ uint32_t Hash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<uint32_t>(x >> 16);
}

// A normal random number (Box-Muller) that depends on seed and index alone.
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

// The sum of `value` over the threads of the block; every thread gets it.
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

// Fills row[begin ... hidden) with normal noise and scales it to `length`. One block calls it for its row.
__device__ void FillNoise(float* row, int64_t begin, int64_t hidden, float length, uint64_t seed,
                          uint64_t index) {
  float squares = 0.0f;
  for (int64_t c = begin + threadIdx.x; c < hidden; c += kThreads) {
    const float w = Normal(seed, index * static_cast<uint64_t>(hidden) + c);
    row[c] = w;
    squares += w * w;
  }
  const float scale = length * rsqrtf(BlockTotal(squares));
  for (int64_t c = begin + threadIdx.x; c < hidden; c += kThreads) row[c] *= scale;
}

// weight [vocab, hidden] = noise of length 1; one block for each row. If first_elements [vocab] is given, it
// is copied into element 0 of the rows, and the noise begins at element 1.
__global__ void WeightRowsKernel(float* weight, const float* first_elements, int64_t hidden, uint64_t seed) {
  float* row = weight + blockIdx.x * hidden;
  if (first_elements != nullptr && threadIdx.x == 0) row[0] = first_elements[blockIdx.x];
  FillNoise(row, first_elements != nullptr ? 1 : 0, hidden, 1.0f, seed, blockIdx.x);
}

// out [rows, hidden]: hidden states with given logits; one block for each row. A row begins as noise. Then it
// is moved kMoves times within the span of its candidates' weight rows, toward the wanted logit of each
// candidate. Element 0 of all rows is first_element and does not move.
//
//   classes, logits [rows, most]: the candidates and their wanted logits
//   counts [rows]: how many candidates the row has; shared memory: [hidden + most] floats
__global__ void RealRowsKernel(const float* weight, const int32_t* classes, const float* logits,
                               const int32_t* counts, const float* noise, int64_t most, int64_t hidden,
                               float first_element, uint64_t seed, __nv_bfloat16* out) {
  extern __shared__ float shared[];
  float* const row = shared;
  float* const missing = shared + hidden;
  const int64_t index = blockIdx.x;
  const int count = counts[index];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  FillNoise(row, 1, hidden, noise[index], seed, index);
  if (threadIdx.x == 0) row[0] = first_element;
  __syncthreads();
  for (int move = 0; move < kMoves; ++move) {
    for (int i = warp; i < count; i += kThreads / 32) {
      const float* const w = weight + static_cast<int64_t>(classes[index * most + i]) * hidden;
      float dot = 0.0f;
      for (int64_t c = lane; c < hidden; c += 32) dot += w[c] * row[c];
      for (int offset = 16; offset > 0; offset >>= 1) dot += __shfl_xor_sync(0xffffffffu, dot, offset);
      if (lane == 0) missing[i] = kMovePart * (logits[index * most + i] - dot);
    }
    __syncthreads();
    for (int64_t c = threadIdx.x; c < hidden; c += kThreads) {
      if (c == 0) continue;
      float sum = row[c];
      for (int i = 0; i < count; ++i)
        sum += missing[i] * weight[static_cast<int64_t>(classes[index * most + i]) * hidden + c];
      row[c] = sum;
    }
    __syncthreads();
  }
  for (int64_t c = threadIdx.x; c < hidden; c += kThreads)
    out[index * hidden + c] = __float2bfloat16_rn(row[c]);
}

// out[r, :] = sum over i of logits[i] * weight[candidates[r, i], :]; one block for each row.
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

// Draws the candidates of all rows, [rows, kCandidates]. Candidate i (from 0) is to get the (i + 1)-th
// largest logit.
std::vector<int32_t> DrawCandidates(const DataShape& shape, std::mt19937_64& rng) {
  std::vector<int32_t> popularity(static_cast<size_t>(shape.vocab));
  std::iota(popularity.begin(), popularity.end(), 0);
  std::shuffle(popularity.begin(), popularity.end(), rng);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  const double vocab = static_cast<double>(shape.vocab);
  // Candidate j of a row has a popularity rank in the j-th of kCandidates equal intervals of log(rank +
  // offset). So ranks are spread logarithmically.
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
  WeightRowsKernel<<<static_cast<unsigned>(shape.vocab), kThreads>>>(weight, nullptr, shape.hidden, seed);
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
  // hidden^-1/4 for both factors gives logits a variance of 1.
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

LossData MakeReal(const DataShape& shape, const data::RealArrays& arrays, uint64_t seed) {
  LossData data;
  data.targets = arrays.targets;
  float* weight = Allocate<float>(shape.vocab * shape.hidden);
  float* first_elements = Upload(arrays.first_elements);
  int32_t* classes = Upload(arrays.classes);
  float* logits = Upload(arrays.logits);
  int32_t* counts = Upload(arrays.counts);
  float* noise = Upload(arrays.noise);
  data.weight = Allocate<__nv_bfloat16>(shape.vocab * shape.hidden);
  data.hidden = Allocate<__nv_bfloat16>(shape.rows * shape.hidden);
  WeightRowsKernel<<<static_cast<unsigned>(shape.vocab), kThreads>>>(weight, first_elements, shape.hidden,
                                                                     seed);
  const size_t shared_bytes = static_cast<size_t>(shape.hidden + arrays.most) * sizeof(float);
  Check(cudaFuncSetAttribute(RealRowsKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)),
        "cudaFuncSetAttribute");
  RealRowsKernel<<<static_cast<unsigned>(shape.rows), kThreads, shared_bytes>>>(
      weight, classes, logits, counts, noise, arrays.most, shape.hidden,
      static_cast<float>(data::RealRows::kShared), seed + 1, static_cast<__nv_bfloat16*>(data.hidden));
  RoundKernel<<<4096, kThreads>>>(weight, static_cast<__nv_bfloat16*>(data.weight),
                                  shape.vocab * shape.hidden);
  Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  cudaFree(weight);
  cudaFree(first_elements);
  cudaFree(classes);
  cudaFree(logits);
  cudaFree(counts);
  cudaFree(noise);
  return data;
}

// The rows that CheckProfile compares.
constexpr int64_t kProfileRows = 256;

data::RealArrays DrawReal(const DataShape& shape, uint64_t seed) {
  const auto rows = data::RealRows::Create(shape.rows, shape.hidden, shape.vocab, seed);
  if (!rows.ok()) {
    std::fprintf(stderr, "%s\n", rows.status().ToString().c_str());
    std::exit(2);
  }
  return data::ToArrays(*rows);
}

// ---- References ----

constexpr int kRowTile = 8;  // rows that a thread of the reference computes at the same time
// The parts into which WeightedSum divides its sum, to have enough blocks.
constexpr int kVocabSplits = 128;
constexpr int64_t kRowsAtOnce = 1024;  // rows whose logits are in memory at the same time

// z[i, j] = x[rows[i]] . w[classes[j]] in double. A warp computes kRowTile rows of one class at a time. A
// null list means all rows or classes.
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

// lse[i] of z[i, 0 ... count), and the entropy of its softmax; one block for each row.
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

// out[i, c] += sum over j of g[i, j] * m[j, c], where each blockIdx.y adds one part of the j. g is transposed
// if g_stride_i == 1. A thread computes column c of kRowTile rows.
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

// out [count_i, hidden] = sum over j of g[i, j] * m[j, :], with WeightedSumKernel. The caller frees it.
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

// The logits [row_count, class_count] in double. A null list means all. The caller frees them.
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

// The values of some rows.
struct RowSums {
  std::vector<double> lse, entropy;
};

// The values of all rows, computed kRowsAtOnce rows at a time.
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

// dL/dz of one class of one row (docs/math.md), with p = exp(log_p): scale * g_loss * (p - [is_target]) +
// g_lse * p - g_entropy * p * (log p + entropy). `hard` is p - [is_target]; expm1 keeps its precision for p
// near 1.
double LogitGradient(const ReferenceQuery& query, size_t row, bool is_target, double log_p, double entropy) {
  const double p = std::exp(log_p), hard = is_target ? std::expm1(log_p) : p;
  if (query.gradients == nullptr) return query.scale * hard;
  const RowGradients& g = *query.gradients;
  return query.scale * static_cast<double>(g.loss[row]) * hard + static_cast<double>(g.lse[row]) * p -
         static_cast<double>(g.entropy[row]) * p * (log_p + entropy);
}

// Sets lse, loss and hidden gradient of the query's rows.
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

// Sets the weight gradient of the query's classes. It sums over all rows, so lse and entropy of all rows are
// computed first.
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

DataKind ParseDataKind(const std::string& name) {
  if (name == "real") return DataKind::kReal;
  if (name == "peaked") return DataKind::kPeaked;
  if (name == "flat") return DataKind::kFlat;
  std::fprintf(stderr, "--data: must be real, peaked or flat, got %s\n", name.c_str());
  std::exit(2);
}

LossData MakeData(DataKind kind, const DataShape& shape, uint64_t seed) {
  switch (kind) {
    case DataKind::kReal:
      return MakeReal(shape, DrawReal(shape, seed), seed);
    case DataKind::kPeaked:
      return MakePeaked(shape, seed);
    case DataKind::kFlat:
      break;
  }
  return MakeFlat(shape, seed);
}

RowGradients MakeRowGradients(const DataShape& shape, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  const float share = 1.0f / static_cast<float>(shape.rows);
  RowGradients gradients;
  for (int64_t r = 0; r < shape.rows; ++r) {
    gradients.loss.push_back(uniform(rng));
    gradients.lse.push_back(uniform(rng) * share);
    gradients.entropy.push_back(uniform(rng) * share);
  }
  return gradients;
}

data::ProfileCheck CheckProfile(const DataShape& shape, const LossData& data) {
  data::ProfileCheck check(data::RealProfile());
  std::vector<int32_t> rows(static_cast<size_t>(std::min(kProfileRows, shape.rows)));
  std::iota(rows.begin(), rows.end(), 0);
  const std::vector<double> logits = ComputeLogits(shape, data, rows);
  const std::vector<float> narrow(logits.begin(), logits.end());
  const size_t vocab = static_cast<size_t>(shape.vocab);
  for (size_t i = 0; i < rows.size(); ++i) {
    check.Add(absl::MakeSpan(narrow).subspan(i * vocab, vocab), data.targets[i]);
  }
  return check;
}

void Free(LossData& data) {
  cudaFree(data.hidden);
  cudaFree(data.weight);
  data = LossData();
}

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
