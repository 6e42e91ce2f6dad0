// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "bench/gpu_data_kinds.h"
#include "bench/gpu_memory.h"
#include "kernels/data/real_rows.h"

namespace lossd::bench {
namespace {

using data::kMovePart;
using data::kMoves;
using memory::Allocate;
using memory::Check;
using memory::Upload;

constexpr int kThreads = 256;
constexpr int kCandidates = 100;
constexpr double kFirstLogit = 17.0;
constexpr double kSlope = 1.92;
constexpr double kPopularityOffset = 50.0;

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

// Normal noise of this length in elements `begin` to the end of a row, by one block.
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

// One block a row of the weight: noise of length 1, after the given first element if there is one.
__global__ void WeightRowsKernel(float* weight, const float* first_elements, int64_t hidden, uint64_t seed) {
  float* row = weight + blockIdx.x * hidden;
  if (first_elements != nullptr && threadIdx.x == 0) row[0] = first_elements[blockIdx.x];
  FillNoise(row, first_elements != nullptr ? 1 : 0, hidden, 1.0f, seed, blockIdx.x);
}

// One block a row of the hidden states: noise, moved within the span of the candidates' weight rows until
// each of them has the logit wanted. Element 0 is given. Shared memory: [hidden] and [most] floats.
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

}  // namespace

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

void Free(LossData& data) {
  cudaFree(data.hidden);
  cudaFree(data.weight);
  data = LossData();
}

}  // namespace lossd::bench
