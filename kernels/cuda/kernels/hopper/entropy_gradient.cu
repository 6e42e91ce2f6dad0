// SPDX-License-Identifier: Apache-2.0
// From 2^d to (factor + tilt d) 2^d slope, with d and the slope recovered from the 16 bits of 2^d.
//
// Plan: a block has kBlockVectors vectors of eight elements of a row; a thread loads all of its vectors
// before it uses the first. Blocks of rows without an upstream gradient of the entropy end at once.
//
// Bytes: 4 an element of the other rows. Operations: a logarithm and about 8 others; with a softcap about 20.
#include <cstdint>

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/hopper/entropy_gradient.h"
#include "kernels/cuda/kernels/hopper/logit_tiles.h"
#include "kernels/cuda/kernels/hopper/recoverable.cuh"

namespace lossd::kernels::cuda::hopper {
namespace {

constexpr int kThreads = 256;
constexpr int kThreadVectors = 4;
constexpr int kBlockVectors = kThreads * kThreadVectors;
using Elements = Vec<__nv_bfloat16>;

struct Params {
  const float* coef_entropy;
  const int32_t* targets;
  const float* reference;
  const EntropyRow* rows;
  uint4* exponentials;  // [rows, vectors]
  int vectors;          // of a row
  int parts;            // blocks of a row
  float softcap;
};

struct Row {
  EntropyRow entropy;
  float reference;
  int target;
};

template <bool kCapped>
__device__ __forceinline__ float GradientOf(const Params& p, const Row& row, float stored, bool top) {
  const Recovered r = kCapped ? RecoverCapped(stored, row.reference, p.softcap) : RecoverPlain(stored);
  if (top) return row.entropy.top_gradient * r.slope;
  if (r.exponential == 0.0f) return 0.0f;
  return fmaf(row.entropy.tilt, r.exponent, row.entropy.factor) * r.exponential * r.slope;
}

template <bool kCapped>
__device__ __forceinline__ uint4 GradientsOf(const Params& p, const Row& row, const uint4& raw, int v) {
  constexpr int kSize = Elements::kSize;
  const int target = row.target - v * kSize, top = row.entropy.top - v * kSize;
  float x[kSize];
  Elements::Unpack(raw, x);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float g = GradientOf<kCapped>(p, row, x[i], i == top);
    x[i] = i == target ? x[i] : g;
  }
  return Elements::Pack(x);
}

template <bool kCapped>
__global__ __launch_bounds__(kThreads) void EntropyGradientKernel(const __grid_constant__ Params p) {
  const int64_t index = blockIdx.x / p.parts;
  if (p.coef_entropy[index] == 0.0f) return;
  const Row row = {p.rows[index], p.reference[index], p.targets[index]};
  uint4* const vectors = p.exponentials + index * p.vectors;
  const int first = static_cast<int>(blockIdx.x) % p.parts * kBlockVectors + static_cast<int>(threadIdx.x);
  uint4 raw[kThreadVectors] = {};
#pragma unroll
  for (int i = 0; i < kThreadVectors; ++i) {
    const int v = first + i * kThreads;
    if (v < p.vectors) raw[i] = vectors[v];
  }
#pragma unroll
  for (int i = 0; i < kThreadVectors; ++i) {
    const int v = first + i * kThreads;
    if (v < p.vectors) vectors[v] = GradientsOf<kCapped>(p, row, raw[i], v);
  }
}

}  // namespace

cudaError_t LaunchEntropyGradient(const LossTerms& terms, const RowInputs& in, const FusedRows& rows,
                                  void* exponentials, int64_t ld, cudaStream_t stream) {
  if (in.rows == 0) return cudaSuccess;
  Params p = {};
  p.coef_entropy = in.coef_entropy;
  p.targets = in.targets;
  p.reference = rows.reference;
  p.rows = rows.entropy;
  p.exponentials = static_cast<uint4*>(exponentials);
  p.vectors = static_cast<int>(ld / Elements::kSize);
  p.parts = static_cast<int>(CeilDiv(p.vectors, kBlockVectors));
  p.softcap = terms.softcap;
  auto* kernel = terms.softcap > 0.0f ? EntropyGradientKernel<true> : EntropyGradientKernel<false>;
  kernel<<<static_cast<unsigned>(in.rows * p.parts), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda::hopper
