// SPDX-License-Identifier: Apache-2.0
// Kernels that work on a head's parameters (tensor_ops.h): conversion, addition, optimizer step, gradient
// norm. They are bound by memory. The optimizer step reads values, gradients and moments once, and writes
// them once, together with the 16-bit copy that the GEMMs multiply.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/tensor_ops.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1 << 16;
constexpr int64_t kMaxRowBlocks = int64_t{1} << 30;  // for kernels with one block a row

unsigned Blocks(int64_t items) {
  return static_cast<unsigned>(std::clamp<int64_t>((items + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

// A matrix in the form that Load8 and Store8 need.
struct MatrixRows {
  __device__ explicit MatrixRows(const DeviceMatrix& m)
      : matrix(m),
        row_bytes(m.ld * (m.dtype == DType::kFloat32 ? 4 : 2)),
        aligned(m.ld % 8 == 0 && reinterpret_cast<uintptr_t>(m.data) % 16 == 0) {}
  __device__ uint8_t* Row(int64_t row) const { return static_cast<uint8_t*>(matrix.data) + row * row_bytes; }
  __device__ void Load(int64_t row, int64_t c, int64_t cols, float (&x)[8]) const {
    Load8(Row(row), matrix.dtype, c, cols, aligned, x);
  }
  __device__ void Store(int64_t row, int64_t c, int64_t cols, const float (&x)[8]) const {
    Store8(Row(row), matrix.dtype, c, cols, aligned, x);
  }

  const DeviceMatrix matrix;
  const int64_t row_bytes;
  const bool aligned;
};

// Calls fn(row, c) for the work items of this thread: eight columns from c on of one row.
template <typename Fn>
__device__ void ForEachGroup(int64_t rows, int64_t cols, Fn fn) {
  const int64_t groups = (cols + 7) / 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; item < rows * groups;
       item += step) {
    const int64_t row = item / groups;
    fn(row, (item - row * groups) * 8);
  }
}

__global__ void ConvertKernel(DeviceMatrix from, DeviceMatrix to, int64_t rows) {
  const MatrixRows in(from), out(to);
  ForEachGroup(rows, from.cols, [&](int64_t row, int64_t c) {
    float x[8];
    in.Load(row, c, from.cols, x);
    out.Store(row, c, from.cols, x);
  });
}

// to += scale * from; `to` is fp32.
__global__ void AddScaledKernel(DeviceMatrix from, DeviceMatrix to, int64_t rows, float scale) {
  to.dtype = DType::kFloat32;  // a constant for the compiler
  const MatrixRows in(from), sums(to);
  ForEachGroup(rows, from.cols, [&](int64_t row, int64_t c) {
    float x[8], sum[8];
    in.Load(row, c, from.cols, x);
    sums.Load(row, c, from.cols, sum);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(scale, x[i]));
    sums.Store(row, c, from.cols, sum);
  });
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

// The optimizer's options in the form that the kernels need.
struct StepFactors {
  float gradient;      // grad_multiplier
  float matrix_decay;  // AdamW: 1 - lr wd; SGD: wd
  float vector_decay;
  float step;  // AdamW: lr / (1 - beta1^t); SGD: lr
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float inverse_root;  // 1 / sqrt(1 - beta2^t)
  float epsilon;
  float keep, take;                    // momentum: buffer = keep * buffer + take * gradient
  float gradient_share, buffer_share;  // momentum: step = gradient_share * gradient + buffer_share * buffer
};

StepFactors MakeFactors(const OptimizerOptions& o, int64_t update) {
  StepFactors f = {};
  const double t = static_cast<double>(update);
  const bool adam = o.kind == OptimizerOptions::Kind::kAdamW;
  const double decay = adam ? 1.0 - o.learning_rate * o.weight_decay : o.weight_decay;
  f.gradient = static_cast<float>(o.grad_multiplier);
  f.matrix_decay = static_cast<float>(decay);
  f.vector_decay = o.decay_vectors ? f.matrix_decay : (adam ? 1.0f : 0.0f);
  f.step = static_cast<float>(adam ? o.learning_rate / (1.0 - std::pow(o.beta1, t)) : o.learning_rate);
  f.beta1 = static_cast<float>(o.beta1);
  f.one_minus_beta1 = static_cast<float>(1.0 - o.beta1);
  f.beta2 = static_cast<float>(o.beta2);
  f.one_minus_beta2 = static_cast<float>(1.0 - o.beta2);
  f.inverse_root = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(o.beta2, t)));
  f.epsilon = static_cast<float>(o.epsilon);
  // The first update sets the buffer to the gradient, without dampening.
  f.keep = update == 1 ? 0.0f : static_cast<float>(o.momentum);
  f.take = update == 1 ? 1.0f : static_cast<float>(1.0 - o.dampening);
  f.gradient_share = o.nesterov ? 1.0f : 0.0f;
  f.buffer_share = o.nesterov ? static_cast<float>(o.momentum) : 1.0f;
  return f;
}

// The rules: how one parameter changes. kMoments: the number of moments that a rule reads and writes.
struct AdamWRule {
  static constexpr int kMoments = 2;
  __device__ __forceinline__ static void Update(const StepFactors& f, float decay, float g, float& value,
                                                float& m1, float& m2) {
    g *= f.gradient;
    m1 = f.beta1 * m1 + f.one_minus_beta1 * g;
    m2 = f.beta2 * m2 + f.one_minus_beta2 * (g * g);
    value *= decay;
    // A parameter that never had a gradient does not change, even with epsilon 0. The padding relies on this.
    if (m1 != 0.0f) value -= f.step * m1 / (sqrtf(m2) * f.inverse_root + f.epsilon);
  }
};

// Returns decay * value. A value of -infinity masks a class and must not change if there is no decay; 0 times
// -infinity would be NaN, and is 0 here.
__device__ __forceinline__ float Decayed(float decay, float value) {
  return decay == 0.0f ? 0.0f : decay * value;
}

struct SgdRule {
  static constexpr int kMoments = 0;
  __device__ __forceinline__ static void Update(const StepFactors& f, float decay, float g, float& value,
                                                float&, float&) {
    value -= f.step * (g * f.gradient + Decayed(decay, value));
  }
};

struct MomentumRule {
  static constexpr int kMoments = 1;
  __device__ __forceinline__ static void Update(const StepFactors& f, float decay, float g, float& value,
                                                float& buffer, float&) {
    g = g * f.gradient + Decayed(decay, value);
    buffer = f.keep * buffer + f.take * g;
    value -= f.step * (f.gradient_share * g + f.buffer_share * buffer);
  }
};

// Pointers to four consecutive parameters at a time.
struct StepPointers {
  float4* values;
  float4* gradients;
  float4* moment1;
  float4* moment2;
  uint2* copy;  // null: none
  bool copy_is_bf16;
};

// Four parameters as 16-bit elements.
__device__ __forceinline__ uint2 Pack4(bool bf16, const float4& x) {
  const float wide[8] = {x.x, x.y, x.z, x.w, 0.0f, 0.0f, 0.0f, 0.0f};
  const uint4 raw = bf16 ? Vec<__nv_bfloat16>::Pack(wide) : Vec<__half>::Pack(wide);
  return make_uint2(raw.x, raw.y);
}

// Updates the four parameters at q, whose gradient is g, and zeroes the gradient. `copied`: whether the
// parameters belong to the matrix and the matrix has a 16-bit copy.
template <typename Rule>
__device__ __forceinline__ void UpdateQuad(const StepFactors& f, const StepPointers& p, float decay,
                                           int64_t q, const float4& g, bool copied) {
  const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float4 a = Rule::kMoments > 0 ? p.moment1[q] : none;
  float4 b = Rule::kMoments > 1 ? p.moment2[q] : none;
  float4 v = p.values[q];
  Rule::Update(f, decay, g.x, v.x, a.x, b.x);
  Rule::Update(f, decay, g.y, v.y, a.y, b.y);
  Rule::Update(f, decay, g.z, v.z, a.z, b.z);
  Rule::Update(f, decay, g.w, v.w, a.w, b.w);
  p.values[q] = v;
  p.gradients[q] = none;
  if (Rule::kMoments > 0) p.moment1[q] = a;
  if (Rule::kMoments > 1) p.moment2[q] = b;
  if (copied) p.copy[q] = Pack4(p.copy_is_bf16, v);
}

// One thread updates four parameters. Three variants were slower on an H200: two or four groups of parameters
// a thread by 2 percent of the copy bandwidth, a grid-stride loop over fewer blocks by 6, and streaming cache
// hints by 5.
template <typename Rule>
__global__ void __launch_bounds__(kThreads)
    OptimizerStepKernel(StepFactors f, StepPointers p, int64_t quads, int64_t matrix_quads) {
  const int64_t q = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (q >= quads) return;
  const float4 g = p.gradients[q];
  const bool in_matrix = q < matrix_quads;
  UpdateQuad<Rule>(f, p, in_matrix ? f.matrix_decay : f.vector_decay, q, g, in_matrix && p.copy != nullptr);
}

__device__ __forceinline__ uint32_t BitsOf(const float4& x) {
  return __float_as_uint(x.x) | __float_as_uint(x.y) | __float_as_uint(x.z) | __float_as_uint(x.w);
}

// Lazy rows of a matrix. Grid: one block a row. The block first tests whether the row has a gradient, by the
// bits of all elements, so that subnormal numbers count on every device and -0 does not. For a row without a
// gradient it only reads the gradient; if that has a -0, the row is overwritten with +0. Each thread has the
// same quads in both passes, and the second read of the gradient comes from the caches.
template <typename Rule>
__global__ void __launch_bounds__(kThreads)
    LazyRowsKernel(StepFactors f, StepPointers p, int64_t rows, int64_t row_quads) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t first = row * row_quads + threadIdx.x, end = (row + 1) * row_quads;
    uint32_t bits = 0;
    for (int64_t q = first; q < end; q += blockDim.x) bits |= BitsOf(p.gradients[q]);
    if (__syncthreads_or((bits << 1) != 0)) {
      for (int64_t q = first; q < end; q += blockDim.x)
        UpdateQuad<Rule>(f, p, f.matrix_decay, q, p.gradients[q], p.copy != nullptr);
    } else if (bits != 0) {
      for (int64_t q = first; q < end; q += blockDim.x) p.gradients[q] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
}

// The sum over the block, in every thread.
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

cudaError_t LaunchAddScaled(const DeviceMatrix& from, const DeviceMatrix& to, int64_t rows, float scale,
                            cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  AddScaledKernel<<<Blocks(rows * ((from.cols + 7) / 8)), kThreads, 0, stream>>>(from, to, rows, scale);
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

namespace {

StepPointers PointersOf(const OptimizerStepParams& params) {
  return {reinterpret_cast<float4*>(params.values),  reinterpret_cast<float4*>(params.gradients),
          reinterpret_cast<float4*>(params.moment1), reinterpret_cast<float4*>(params.moment2),
          static_cast<uint2*>(params.compute_copy),  params.compute_dtype == DType::kBFloat16};
}

template <typename Rule>
cudaError_t LaunchStepOf(const OptimizerStepParams& params, cudaStream_t stream) {
  const StepFactors factors = MakeFactors(params.options, params.update);
  const StepPointers pointers = PointersOf(params);
  const int64_t quads = params.count / 4;
  const int64_t matrix_quads = params.matrix_count / 4;
  const auto blocks = static_cast<unsigned>(std::max<int64_t>((quads + kThreads - 1) / kThreads, 1));
  OptimizerStepKernel<Rule><<<blocks, kThreads, 0, stream>>>(factors, pointers, quads, matrix_quads);
  return cudaGetLastError();
}

// For parameters that all belong to the matrix.
template <typename Rule>
cudaError_t LaunchLazyRowsOf(const OptimizerStepParams& params, cudaStream_t stream) {
  const int64_t row_quads = params.matrix_cols / 4;
  const int64_t rows = params.matrix_count / params.matrix_cols;
  const auto threads = static_cast<unsigned>(std::min<int64_t>(kThreads, (row_quads + 31) / 32 * 32));
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(rows, kMaxRowBlocks));
  LazyRowsKernel<Rule><<<blocks, threads, 0, stream>>>(MakeFactors(params.options, params.update),
                                                       PointersOf(params), rows, row_quads);
  return cudaGetLastError();
}

template <typename Rule>
cudaError_t LaunchRule(const OptimizerStepParams& params, cudaStream_t stream) {
  if (!params.options.lazy_rows || params.matrix_count == 0) return LaunchStepOf<Rule>(params, stream);
  return LaunchLazyRowsOf<Rule>(params, stream);
}

}  // namespace

cudaError_t LaunchOptimizerStep(const OptimizerStepParams& params, cudaStream_t stream) {
  if (params.options.lazy_rows && params.matrix_count != 0 &&
      (params.matrix_count != params.count || params.matrix_cols <= 0)) {
    return cudaErrorInvalidValue;
  }
  switch (RequiredState(params.options)) {
    case OptimizerState::kNone:
      return LaunchRule<SgdRule>(params, stream);
    case OptimizerState::kMomentum:
      return LaunchRule<MomentumRule>(params, stream);
    case OptimizerState::kAdam:
      return LaunchRule<AdamWRule>(params, stream);
  }
  return cudaErrorInvalidValue;
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

LOSSD_KERNEL_FILE(TensorOps)
