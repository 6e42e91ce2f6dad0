// SPDX-License-Identifier: Apache-2.0
// Rows that have a teacher. With y = z / T of the student and y' = z' / T of the teacher, q = softmax(y) and
// p = softmax(y'), the divergence of a row is a sum over classes of a function of p and q, and
//
//   dD/ds_v = (dz_v/ds_v) / T (f_v - q_v sum f),   f = q times the derivative by q
//
// without the logit scale. docs/math.md has f of each divergence.
//
// Plan: one block a row, which goes over both rows of logits four times: for the two maxima, for the two sums
// of exponentials, for the divergence and the sum of f, and for the gradient. The first time they come from
// the memory that the products have just written, later from L2. Sums are combined in a fixed order.
//
// Bytes: rows * V * 8 read and, with the gradient, rows * V * 4 written; then rows * V * (4 + 2 * 2) by the
// kernel that adds them up in bf16. Operations: 6 exponentials an element.
#include <type_traits>

#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/distill_rows.h"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

struct Add {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
// The larger one; NaN is passed over, and shows in the sums.
struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Both components over all threads of the block, the same in each.
template <typename Op>
__device__ __forceinline__ float2 Reduce(float2 x, float2* scratch, Op op) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    x.x = op(x.x, __shfl_xor_sync(0xffffffffu, x.x, offset));
    x.y = op(x.y, __shfl_xor_sync(0xffffffffu, x.y, offset));
  }
  __syncthreads();  // the scratch memory has been read
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  float2 all = scratch[0];
  for (int i = 1; i < kWarps; ++i) {
    all.x = op(all.x, scratch[i].x);
    all.y = op(all.y, scratch[i].y);
  }
  return all;
}

// p log(p / other), which is 0 where p is.
__device__ __forceinline__ float Relative(float p, float log_p, float log_other) {
  return p == 0.0f ? 0.0f : p * (log_p - log_other);
}

// x: what one class adds to the divergence; y: f.
template <Divergence kDivergence>
__device__ __forceinline__ float2 TermOf(float p, float log_p, float q, float log_q, float beta) {
  if constexpr (kDivergence == Divergence::kForwardKl) {
    return make_float2(Relative(p, log_p, log_q), -p);
  } else if constexpr (kDivergence == Divergence::kReverseKl) {
    const float value = Relative(q, log_q, log_p);
    return make_float2(value, value);
  } else if constexpr (kDivergence == Divergence::kJensenShannon) {
    // Relative to the larger one, so that m is not 0 where p or q is not. Not used where both are 0.
    const float top = fmaxf(log_p, log_q);
    const float log_m = top + logf(beta * expf(log_p - top) + (1.0f - beta) * expf(log_q - top));
    const float of_student = (1.0f - beta) * Relative(q, log_q, log_m);
    return make_float2(beta * Relative(p, log_p, log_m) + of_student, of_student);
  } else {
    const float half = q > p ? 0.5f : q < p ? -0.5f : 0.0f;
    return make_float2(half * (q - p), half * q);
  }
}

template <Divergence kDivergence>
__global__ __launch_bounds__(kThreads) void DivergenceKernel(const __grid_constant__ DivergenceParams p) {
  __shared__ float2 scratch[kWarps];
  const int64_t row = blockIdx.x;
  const float* const student = static_cast<const float*>(p.student.data) + row * p.student.ld;
  float* const teacher = static_cast<float*>(p.teacher.data) + row * p.teacher.ld;
  const int classes = static_cast<int>(p.student.classes);
  const LogitMap<float, true> student_map(p.student_terms), teacher_map(p.teacher_terms);
  const float inverse = 1.0f / p.distillation.temperature;
  const float beta = p.distillation.beta;

  float2 top = make_float2(NegativeInfinity(), NegativeInfinity());
  for (int v = threadIdx.x; v < classes; v += kThreads) {
    top.x = fmaxf(top.x, student_map(student[v], v).z);
    top.y = fmaxf(top.y, teacher_map(teacher[v], v).z);
  }
  top = Reduce(top, scratch, Larger());
  float2 sum = make_float2(0.0f, 0.0f);
  for (int v = threadIdx.x; v < classes; v += kThreads) {
    sum.x += expf((student_map(student[v], v).z - top.x) * inverse);
    sum.y += expf((teacher_map(teacher[v], v).z - top.y) * inverse);
  }
  sum = Reduce(sum, scratch, Add());
  const float2 log_sum = make_float2(logf(sum.x), logf(sum.y));
  float2 total = make_float2(0.0f, 0.0f);  // D, sum of f
  for (int v = threadIdx.x; v < classes; v += kThreads) {
    const float log_q = (student_map(student[v], v).z - top.x) * inverse - log_sum.x;
    const float log_p = (teacher_map(teacher[v], v).z - top.y) * inverse - log_sum.y;
    const float2 term = TermOf<kDivergence>(expf(log_p), log_p, expf(log_q), log_q, beta);
    total.x += term.x;
    total.y += term.y;
  }
  total = Reduce(total, scratch, Add());
  if (threadIdx.x == 0) {
    p.rows.divergence[row] = total.x;
    p.rows.target_weights[row] = p.in.weights[row] * p.distillation.target_weight;
    p.rows.target_coefs[row] = p.in.coef_loss[row] * p.distillation.target_weight;
  }
  if (!p.want_gradient || !isfinite(total.x)) return;
  for (int v = threadIdx.x; v < classes; v += kThreads) {
    const Logit logit = student_map(student[v], v);
    const float log_q = (logit.z - top.x) * inverse - log_sum.x;
    const float log_p = (teacher_map(teacher[v], v).z - top.y) * inverse - log_sum.y;
    const float q = expf(log_q);
    const float2 term = TermOf<kDivergence>(expf(log_p), log_p, q, log_q, beta);
    teacher[v] = (term.y - q * total.y) * inverse * logit.slope;
  }
}

template <typename T>
__device__ __forceinline__ T Rounded(float x) {
  if constexpr (std::is_same_v<T, __half>) x = SaturateHalf(x);
  return static_cast<T>(x);
}

template <Divergence kDivergence>
cudaError_t Launch(const DivergenceParams& params, cudaStream_t stream) {
  DivergenceKernel<kDivergence><<<static_cast<unsigned>(params.in.rows), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

// T: the compute dtype.
template <typename T>
__global__ __launch_bounds__(kThreads) void MixDivergenceKernel(
    const __grid_constant__ MixDivergenceParams p) {
  __shared__ bool valid;
  const int64_t row = blockIdx.x;
  const float weight = p.in.weights[row];
  if (weight == 0.0f) return;  // absent: no divergence, no gradient
  const bool alone = p.distillation.target_weight == 0.0f;
  if (threadIdx.x == 0) {
    const float with_target = alone ? 0.0f : p.out.loss[row];
    const float loss = with_target + weight * p.distillation.weight * p.rows.divergence[row];
    valid = isfinite(loss) && isfinite(p.rows.divergence[row]) && isfinite(p.out.lse[row]);
    p.out.loss[row] = valid ? loss : NAN;
    if (alone) {
      p.out.z_loss_part[row] = 0.0f;
      if (!p.wants_logprob && !isfinite(p.out.target_logprob[row])) p.out.target_logprob[row] = 0.0f;
    }
  }
  __syncthreads();
  if (p.gradient.data == nullptr) return;
  T* const gradient = static_cast<T*>(p.gradient.data) + row * p.gradient.ld;
  const float* const teacher = static_cast<const float*>(p.teacher.data) + row * p.teacher.ld;
  const float factor = p.in.coef_loss[row] * p.distillation.weight;
  const int classes = static_cast<int>(p.teacher.classes);
  for (int v = threadIdx.x; v < classes; v += kThreads) {
    const float with_target = alone ? 0.0f : static_cast<float>(gradient[v]);
    gradient[v] = Rounded<T>(valid ? with_target + factor * teacher[v] : 0.0f);
  }
}

}  // namespace

cudaError_t LaunchDivergence(const DivergenceParams& params, cudaStream_t stream) {
  if (params.in.rows == 0) return cudaSuccess;
  switch (params.distillation.divergence) {
    case Divergence::kNone:
      break;
    case Divergence::kForwardKl:
      return Launch<Divergence::kForwardKl>(params, stream);
    case Divergence::kReverseKl:
      return Launch<Divergence::kReverseKl>(params, stream);
    case Divergence::kJensenShannon:
      return Launch<Divergence::kJensenShannon>(params, stream);
    case Divergence::kTotalVariation:
      return Launch<Divergence::kTotalVariation>(params, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchMixDivergence(const MixDivergenceParams& params, cudaStream_t stream) {
  if (params.in.rows == 0) return cudaSuccess;
  return WithElement(params.gradient.dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    MixDivergenceKernel<T><<<static_cast<unsigned>(params.in.rows), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

}  // namespace lossd::kernels::cuda
