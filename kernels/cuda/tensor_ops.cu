// Kernels over a head's parameters, bound by memory: the optimizer step reads value, gradient and moments
// once and writes them once, together with the 16-bit copy that the GEMMs multiply.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/tensor_ops.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 16;

unsigned Blocks(int64_t items) {
  return static_cast<unsigned>(std::clamp<int64_t>((items + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

// One work item is eight columns of one row.
__global__ void ConvertKernel(DeviceMatrix from, DeviceMatrix to, int64_t rows) {
  const int64_t groups = (from.cols + 7) / 8;
  const int64_t from_bytes = from.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t to_bytes = to.dtype == DType::kFloat32 ? 4 : 2;
  const bool from_aligned = from.ld % 8 == 0 && reinterpret_cast<uintptr_t>(from.data) % 16 == 0;
  const bool to_aligned = to.ld % 8 == 0 && reinterpret_cast<uintptr_t>(to.data) % 16 == 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; item < rows * groups;
       item += step) {
    const int64_t row = item / groups;
    const int64_t c = (item - row * groups) * 8;
    float x[8];
    Load8(static_cast<const uint8_t*>(from.data) + row * from.ld * from_bytes, from.dtype, c, from.cols,
          from_aligned, x);
    Store8(static_cast<uint8_t*>(to.data) + row * to.ld * to_bytes, to.dtype, c, from.cols, to_aligned, x);
  }
}

__global__ void FillKernel(float* values, int64_t count, float value) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count; i += step)
    values[i] = value;
}

__global__ void FillPatternKernel(void* values, DType dtype, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count; i += step) {
    uint32_t hash = static_cast<uint32_t>(i) * 0x9e3779b1u;
    hash = (hash ^ (hash >> 15)) * 0x85ebca77u;
    hash ^= hash >> 13;
    StoreElement(values, dtype, i, static_cast<float>(static_cast<int32_t>(hash)) * 0x1p-31f);
  }
}

// The options as the kernel needs them.
struct StepFactors {
  bool adam;
  bool momentum;
  bool nesterov;
  bool first;
  float gradient;      // grad_multiplier
  float matrix_decay;  // AdamW: 1 - lr wd; SGD: wd
  float vector_decay;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float step;          // AdamW: lr / (1 - beta1^t); SGD: lr
  float inverse_root;  // 1 / sqrt(1 - beta2^t)
  float epsilon;
  float mu, one_minus_dampening;
};

StepFactors MakeFactors(const OptimizerOptions& o, int64_t update) {
  StepFactors f = {};
  const double t = static_cast<double>(update);
  f.adam = o.kind == OptimizerOptions::Kind::kAdamW;
  f.gradient = static_cast<float>(o.grad_multiplier);
  const double decay = f.adam ? 1.0 - o.learning_rate * o.weight_decay : o.weight_decay;
  f.matrix_decay = static_cast<float>(decay);
  f.vector_decay = o.decay_vectors ? f.matrix_decay : (f.adam ? 1.0f : 0.0f);
  f.beta1 = static_cast<float>(o.beta1);
  f.one_minus_beta1 = static_cast<float>(1.0 - o.beta1);
  f.beta2 = static_cast<float>(o.beta2);
  f.one_minus_beta2 = static_cast<float>(1.0 - o.beta2);
  f.step = static_cast<float>(f.adam ? o.learning_rate / (1.0 - std::pow(o.beta1, t)) : o.learning_rate);
  f.inverse_root = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(o.beta2, t)));
  f.epsilon = static_cast<float>(o.epsilon);
  f.momentum = o.momentum > 0.0;
  f.nesterov = o.nesterov;
  f.first = update == 1;
  f.mu = static_cast<float>(o.momentum);
  f.one_minus_dampening = static_cast<float>(1.0 - o.dampening);
  return f;
}

__device__ __forceinline__ float AdamW(const StepFactors& f, float decay, float g, float value, float& m1,
                                       float& m2) {
  g *= f.gradient;
  m1 = f.beta1 * m1 + f.one_minus_beta1 * g;
  m2 = f.beta2 * m2 + f.one_minus_beta2 * (g * g);
  value *= decay;
  // A parameter without any gradient so far stays, even with epsilon 0; the padding relies on it.
  return m1 == 0.0f ? value : value - f.step * m1 / (sqrtf(m2) * f.inverse_root + f.epsilon);
}

__device__ __forceinline__ float Sgd(const StepFactors& f, float decay, float g, float value, float& buffer) {
  float step = g * f.gradient + decay * value;
  if (f.momentum) {
    buffer = f.first ? step : f.mu * buffer + f.one_minus_dampening * step;
    step = f.nesterov ? step + f.mu * buffer : buffer;
  }
  return value - f.step * step;
}

struct StepPointers {
  float4* values;
  float4* gradients;
  float4* moment1;
  float4* moment2;
  void* copy;
  DType copy_dtype;
};

__device__ __forceinline__ uint2 Pack4(DType dtype, const float (&x)[4]) {
  const float wide[8] = {x[0], x[1], x[2], x[3], 0.0f, 0.0f, 0.0f, 0.0f};
  const uint4 raw = dtype == DType::kBFloat16 ? Vec<__nv_bfloat16>::Pack(wide) : Vec<__half>::Pack(wide);
  return make_uint2(raw.x, raw.y);
}

__global__ void OptimizerStepKernel(StepFactors f, StepPointers p, int64_t quads, int64_t matrix_quads) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t q = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; q < quads; q += step) {
    const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float4 v4 = p.values[q];
    const float4 g4 = p.gradients[q];
    const float4 a4 = p.moment1 != nullptr ? p.moment1[q] : none;
    const float4 b4 = p.moment2 != nullptr ? p.moment2[q] : none;
    float v[4] = {v4.x, v4.y, v4.z, v4.w};
    const float g[4] = {g4.x, g4.y, g4.z, g4.w};
    float a[4] = {a4.x, a4.y, a4.z, a4.w};
    float b[4] = {b4.x, b4.y, b4.z, b4.w};
    const float decay = q < matrix_quads ? f.matrix_decay : f.vector_decay;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = f.adam ? AdamW(f, decay, g[i], v[i], a[i], b[i]) : Sgd(f, decay, g[i], v[i], a[i]);
    p.values[q] = make_float4(v[0], v[1], v[2], v[3]);
    p.gradients[q] = none;
    if (p.moment1 != nullptr) p.moment1[q] = make_float4(a[0], a[1], a[2], a[3]);
    if (p.moment2 != nullptr) p.moment2[q] = make_float4(b[0], b[1], b[2], b[3]);
    if (p.copy != nullptr && q < matrix_quads) static_cast<uint2*>(p.copy)[q] = Pack4(p.copy_dtype, v);
  }
}

__device__ __forceinline__ double BlockSumDouble(double value) {
  __shared__ double scratch[kThreads / 32];
  for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = value;
  __syncthreads();
  double total = 0.0;
  for (int i = 0; i < kThreads / 32; ++i) total += scratch[i];
  return total;
}

__global__ void SquareSumKernel(const float4* values, int64_t quads, double* partials) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  double sum = 0.0;
  for (int64_t q = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; q < quads; q += step) {
    const float4 v = values[q];
    sum += static_cast<double>(v.x) * v.x + static_cast<double>(v.y) * v.y + static_cast<double>(v.z) * v.z +
           static_cast<double>(v.w) * v.w;
  }
  sum = BlockSumDouble(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void SumDoublesKernel(const double* partials, int count, double* result) {
  double sum = 0.0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += partials[i];
  sum = BlockSumDouble(sum);
  if (threadIdx.x == 0) *result = sum;
}

}  // namespace

cudaError_t LaunchConvert(const DeviceMatrix& from, const DeviceMatrix& to, int64_t rows,
                          cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  ConvertKernel<<<Blocks(rows * ((from.cols + 7) / 8)), kThreads, 0, stream>>>(from, to, rows);
  return cudaGetLastError();
}

cudaError_t LaunchFill(float* values, int64_t count, float value, cudaStream_t stream) {
  FillKernel<<<Blocks(count), kThreads, 0, stream>>>(values, count, value);
  return cudaGetLastError();
}

cudaError_t LaunchFillPattern(void* values, DType dtype, int64_t count, cudaStream_t stream) {
  FillPatternKernel<<<Blocks(count), kThreads, 0, stream>>>(values, dtype, count);
  return cudaGetLastError();
}

cudaError_t LaunchOptimizerStep(const OptimizerStepParams& params, cudaStream_t stream) {
  const StepPointers pointers = {reinterpret_cast<float4*>(params.values),
                                 reinterpret_cast<float4*>(params.gradients),
                                 reinterpret_cast<float4*>(params.moment1),
                                 reinterpret_cast<float4*>(params.moment2),
                                 params.compute_copy,
                                 params.compute_dtype};
  OptimizerStepKernel<<<Blocks(params.count / 4), kThreads, 0, stream>>>(
      MakeFactors(params.options, params.update), pointers, params.count / 4, params.matrix_count / 4);
  return cudaGetLastError();
}

cudaError_t LaunchSquareSum(const float* values, int64_t count, double* partials, double* result,
                            cudaStream_t stream) {
  SquareSumKernel<<<kSquareSumPartials, kThreads, 0, stream>>>(reinterpret_cast<const float4*>(values),
                                                               count / 4, partials);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  SumDoublesKernel<<<1, kThreads, 0, stream>>>(partials, kSquareSumPartials, result);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda
