// SPDX-License-Identifier: Apache-2.0
// Kernels that compute the divergence of rows from their teacher, and its gradient (distill_rows.h).
//
// Math. With y = z / T of the student, y' = z' / T of the teacher, q = softmax(y) and p = softmax(y'), the
// divergence of a row is a sum over classes of a function of p and q, and
//
//   dD/ds_v = (dz_v/ds_v) / T (f_v - q_v sum f),   f = q times the derivative by q
//
// without the logit scale. docs/math.md has f of each divergence. A KL divergence needs no pass over the
// logits of its own. With u_v = y_v - max y, u'_v = y'_v - max y', and C = sum_v exp(u'_v) (u'_v - u_v),
// which is summed up together with the softmaxes,
//
//   KL(p || q) = C / sum_v exp(u'_v) - log sum_v exp(u'_v) + log sum_v exp(u_v),   sum f = -1
//
// and KL(q || p) is the same with p and q exchanged; its sum f is the divergence itself.
//
// Plan if one device has all classes and the loss with targets does not count (WholeDivergenceKernel): one
// block a row. The first pass also sums up the softmax at temperature 1, which gives the row's other results.
// A plan with several blocks a row, whose rows stay in L2 from the first pass to the last, is slower: each
// thread then has so few classes that the fixed cost of a pass dominates.
//
// Plan if, in addition, the divergence is KL(p || q) and the products have computed the softmaxes of their
// tiles (KnownDivergenceKernel): one block a row. It adds up the softmaxes of the tiles and then reads the
// logits only once, for the gradient.
//
// Plan otherwise: one block a row. It reads the logits of both heads once for the softmaxes, once more for a
// divergence that is not a KL divergence, and once for the gradient. Sums are combined in a fixed order.
//
// Bytes: each pass reads rows * V * 8. The last pass also writes rows * V * 4, or, if the loss with targets
// does not count, the gradient in the compute dtype. Operations: each pass has 2 exponentials an element, by
// ex2.approx (relative error 2^-22), and about 16 other operations. Exponentials are relative to a reference,
// `top`. It moves to the largest logit only if that is far away (kSlack), so sums are rarely rescaled.
//
// Names in this file: q, y and z are the student's, p, y' and z' (`taught`) the teacher's. A Lane is kLane
// classes that a thread processes together.

#include <type_traits>

#include "kernels/cuda/device/kernel_code.h"
#include "kernels/cuda/kernels/device_math.cuh"
#include "kernels/cuda/kernels/distill_rows.h"
#include "kernels/cuda/kernels/row_loss_math.cuh"

namespace lossd::kernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMergeThreads = 256;
constexpr int kLane = 4;  // elements that a thread processes at once

// ---- a row ----

template <Divergence kDivergence>
constexpr bool kIsKl = kDivergence == Divergence::kForwardKl || kDivergence == Divergence::kReverseKl;

// Computes z of a class from its dot product, and dz/ds without the logit scale. kScaleOnly: z is the dot
// product times the logit scale, because there is no bias, no softcap and no masked class.
template <bool kScaleOnly>
struct Logits {
  LogitMap<float, true> map;

  __device__ __forceinline__ explicit Logits(const LossTerms& terms) : map(terms) {}
  __device__ __forceinline__ Logit operator()(float dot, int column) const {
    if constexpr (kScaleOnly) return {map.scale * dot, 1.0f};
    return map(dot, column);
  }
};

// Values of kLane consecutive classes.
struct Lane {
  float x[kLane];
};

// Loads a vector. kLast: the matrix is not read again afterwards.
template <bool kLast>
__device__ __forceinline__ Lane LoadLane(const LogitMatrix& matrix, int64_t row, int v) {
  const float4* const from =
      reinterpret_cast<const float4*>(static_cast<const float*>(matrix.data) + row * matrix.ld) + v;
  const float4 x = kLast ? __ldcs(from) : *from;
  return {x.x, x.y, x.z, x.w};
}

// Calls body(column, student, teacher) with `kLane` dot products of each head, from `column` on, for this
// thread's vectors among the first `count`. Rows are padded to whole vectors. Two vectors are loaded before
// the first is used.
template <bool kLast = false, typename Body>
__device__ __forceinline__ void ForEachVector(const DivergenceParams& p, int64_t row, int count, Body body) {
  const auto student = [&](int v) { return LoadLane<kLast>(p.student, row, v); };
  const auto teacher = [&](int v) { return LoadLane<kLast>(p.teacher, row, v); };
  int v = static_cast<int>(threadIdx.x);
  for (; v + kThreads < count; v += 2 * kThreads) {
    const Lane s = student(v), t = teacher(v), next_s = student(v + kThreads), next_t = teacher(v + kThreads);
    body(v * kLane, s, t);
    body((v + kThreads) * kLane, next_s, next_t);
  }
  if (v < count) body(v * kLane, student(v), teacher(v));
}

__device__ __forceinline__ int VectorsOf(int columns) { return (columns + kLane - 1) / kLane; }

// z of some classes; -infinity for columns at or past `classes`.
template <bool kScaleOnly>
__device__ __forceinline__ Lane LogitsOf(const Logits<kScaleOnly>& logits, const Lane& dots, int column,
                                         int classes = INT32_MAX) {
  Lane z;
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    z.x[i] = column + i < classes ? logits(dots.x[i], column + i).z : NegativeInfinity();
  }
  return z;
}

__device__ __forceinline__ float TopOf(const Lane& z) {
  return fmaxf(fmaxf(z.x[0], z.x[1]), fmaxf(z.x[2], z.x[3]));
}

__device__ __forceinline__ float Exp(float x) { return Exp2(x * kLog2E); }

// The value that is subtracted from logits. If there is no logit yet (top is -infinity), it is 0, so that the
// difference is not NaN.
__device__ __forceinline__ float BaseOf(float top) { return top == NegativeInfinity() ? 0.0f : top; }

// The logarithm of one softmax of a row.
struct LogSoftmax {
  float top;
  float inverse;  // of the temperature
  float log_sum;

  __device__ __forceinline__ LogSoftmax(float top_of_row, float sum, float inverse_temperature)
      : top(top_of_row), inverse(inverse_temperature), log_sum(logf(sum)) {}
  __device__ __forceinline__ float operator()(float z) const { return (z - top) * inverse - log_sum; }
};

// ---- softmaxes ----

// A KL divergence is an expectation over one softmax ("own"); Sides says which softmax that is, and which is
// the "other" one. Without kCross the divergence is not a KL divergence; own is then the teacher's softmax.
template <Divergence kDivergence>
struct Sides {
  static constexpr bool kCross = kIsKl<kDivergence>;
  static constexpr bool kOwnIsStudent = kDivergence == Divergence::kReverseKl;
};

// Sums of a row over the classes that have been added, at the temperature T. Each softmax has the sum of
// exp((z - top) / T). Both softmaxes together have
//   cross = sum of exp((own - own_top) / T) ((own - own_top) - (other - other_top)) / T
// Because cross is relative to the tops, cross is exact if both softmaxes have the same most probable class.
// A top is at most the largest logit, and at least the largest logit minus kSlack T.
constexpr float kSlack = 12.0f;

struct SoftenedSums {
  float own_top;
  float own_sum;
  float other_top;
  float other_sum;
  float cross;
};

__device__ __forceinline__ SoftenedSums NoSoftenedSums() {
  return {NegativeInfinity(), 0.0f, NegativeInfinity(), 0.0f, 0.0f};
}

// Whether `logit` exceeds `top` by so much that sums relative to `top` have to be rescaled.
__device__ __forceinline__ bool IsFar(float logit, float top, float inverse) {
  return (logit - top) * inverse > kSlack;
}

// Makes the sums relative to other tops, which are at least as large as the present tops. In `cross`, each
// term has the difference of two exponents; so a shift of the own top adds the shift to each difference, and
// a shift of the other top subtracts it. A sum is 0 only if no class has been added.
template <bool kCross>
__device__ __forceinline__ void Rebase(SoftenedSums& r, float own_top, float other_top, float inverse) {
  if (r.own_top != own_top) {
    const float shift = (r.own_top - own_top) * inverse;
    const float factor = expf(shift);
    if (kCross) r.cross = factor == 0.0f ? 0.0f : factor * (r.cross + r.own_sum * shift);
    r.own_sum *= factor;
    r.own_top = own_top;
  }
  if (r.other_top != other_top) {
    const float shift = (r.other_top - other_top) * inverse;
    if (kCross && r.own_sum != 0.0f) r.cross -= r.own_sum * shift;
    r.other_sum *= expf(shift);
    r.other_top = other_top;
  }
}

// Adds some classes. A masked class adds nothing to its softmax. If a logit is NaN, the sums become NaN.
// kMasks: some classes may be masked.
template <bool kCross, bool kMasks>
__device__ __forceinline__ void AddClasses(SoftenedSums& r, const Lane& own, const Lane& other,
                                           float inverse) {
  const float own_top = TopOf(own), other_top = TopOf(other);
  if (IsFar(own_top, r.own_top, inverse) || IsFar(other_top, r.other_top, inverse)) {
    Rebase<kCross>(r, fmaxf(own_top, r.own_top), fmaxf(other_top, r.other_top), inverse);
  }
  const float own_base = kMasks ? BaseOf(r.own_top) : r.own_top;
  const float other_base = kMasks ? BaseOf(r.other_top) : r.other_top;
  const float unit = inverse * kLog2E;
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    const float of_own = own.x[i] - own_base, of_other = other.x[i] - other_base;
    const float e = Exp2(of_own * unit);
    r.own_sum += e;
    r.other_sum += Exp2(of_other * unit);
    if (kCross) r.cross = fmaf(e, kMasks && !(e > 0.0f) ? 0.0f : (of_own - of_other) * inverse, r.cross);
  }
}

// The sums over two sets of classes together.
template <bool kCross>
__device__ __forceinline__ SoftenedSums Combine(SoftenedSums a, SoftenedSums b, float inverse) {
  const float own_top = fmaxf(a.own_top, b.own_top), other_top = fmaxf(a.other_top, b.other_top);
  Rebase<kCross>(a, own_top, other_top, inverse);
  Rebase<kCross>(b, own_top, other_top, inverse);
  return {own_top, a.own_sum + b.own_sum, other_top, a.other_sum + b.other_sum, a.cross + b.cross};
}

// Combines the sums of all threads of the block; complete in the first warp.
template <bool kCross>
__device__ __forceinline__ SoftenedSums Reduce(SoftenedSums r, SoftenedSums* scratch, float inverse) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    const SoftenedSums other = {
        __shfl_xor_sync(0xffffffffu, r.own_top, offset), __shfl_xor_sync(0xffffffffu, r.own_sum, offset),
        __shfl_xor_sync(0xffffffffu, r.other_top, offset), __shfl_xor_sync(0xffffffffu, r.other_sum, offset),
        __shfl_xor_sync(0xffffffffu, r.cross, offset)};
    r = Combine<kCross>(r, other, inverse);
  }
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = r;
  __syncthreads();
  SoftenedSums all = scratch[0];
  for (int i = 1; i < kWarps; ++i) all = Combine<kCross>(all, scratch[i], inverse);
  return all;
}

// Both functions translate between the sums of own and other softmax, and a record of student and teacher.
template <bool kOwnIsStudent>
__device__ __forceinline__ TaughtRecord RecordOf(const SoftenedSums& r) {
  return kOwnIsStudent ? TaughtRecord{r.own_top, r.own_sum, r.other_top, r.other_sum, r.cross, 0.0f}
                       : TaughtRecord{r.other_top, r.other_sum, r.own_top, r.own_sum, r.cross, 0.0f};
}

template <bool kOwnIsStudent>
__device__ __forceinline__ SoftenedSums SoftenedSumsOf(const TaughtRecord& r) {
  return kOwnIsStudent ? SoftenedSums{r.student_top, r.student_sum, r.teacher_top, r.teacher_sum, r.value}
                       : SoftenedSums{r.teacher_top, r.teacher_sum, r.student_top, r.student_sum, r.value};
}

template <Divergence kDivergence>
__global__ __launch_bounds__(kThreads) void SoftenKernel(const __grid_constant__ DivergenceParams p) {
  using Softmaxes = Sides<kDivergence>;
  __shared__ SoftenedSums scratch[kWarps];
  const int64_t row = blockIdx.x;
  const int classes = static_cast<int>(p.student.classes);
  const Logits<false> student(p.student_terms), teacher(p.teacher_terms);
  const float inverse = 1.0f / p.distillation.temperature;
  SoftenedSums sums = NoSoftenedSums();
  ForEachVector(p, row, VectorsOf(classes), [&](int column, const Lane& s, const Lane& t) {
    const Lane z = LogitsOf(student, s, column, classes), taught = LogitsOf(teacher, t, column, classes);
    AddClasses<Softmaxes::kCross, true>(sums, Softmaxes::kOwnIsStudent ? z : taught,
                                        Softmaxes::kOwnIsStudent ? taught : z, inverse);
  });
  sums = Reduce<Softmaxes::kCross>(sums, scratch, inverse);
  if (threadIdx.x != 0) return;
  p.rows.records[row] = RecordOf<Softmaxes::kOwnIsStudent>(sums);
  p.rows.target_weights[row] = p.in.weights[row] * p.distillation.target_weight;
  p.rows.target_coefs[row] = p.in.coef_loss[row] * p.distillation.target_weight;
}

// Grid: one thread a row.
template <Divergence kDivergence>
__global__ void MergeSoftenedKernel(const __grid_constant__ MergeTaughtParams p) {
  using Softmaxes = Sides<kDivergence>;
  const int64_t row = blockIdx.x * int64_t{kMergeThreads} + threadIdx.x;
  if (row >= p.rows) return;
  const float inverse = 1.0f / p.distillation.temperature;
  SoftenedSums sums = NoSoftenedSums();
  for (int part = 0; part < p.parts; ++part) {
    sums = Combine<Softmaxes::kCross>(
        sums, SoftenedSumsOf<Softmaxes::kOwnIsStudent>(p.all[part * p.rows + row]), inverse);
  }
  p.records[row] = RecordOf<Softmaxes::kOwnIsStudent>(sums);
}

__global__ void AddDivergencesKernel(const __grid_constant__ MergeTaughtParams p) {
  const int64_t row = blockIdx.x * int64_t{kMergeThreads} + threadIdx.x;
  if (row >= p.rows) return;
  float value = 0.0f, slope = 0.0f;
  for (int part = 0; part < p.parts; ++part) {
    value += p.all[part * p.rows + row].value;
    slope += p.all[part * p.rows + row].slope;
  }
  p.records[row].value = value;
  p.records[row].slope = slope;
}

// ---- sums and gradients ----

// The sums of both components over all threads of the block, the same in each thread.
__device__ __forceinline__ float2 Add(float2 x, float2* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    x.x += __shfl_xor_sync(0xffffffffu, x.x, offset);
    x.y += __shfl_xor_sync(0xffffffffu, x.y, offset);
  }
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = x;
  __syncthreads();
  float2 all = scratch[0];
  for (int i = 1; i < kWarps; ++i) {
    all.x += scratch[i].x;
    all.y += scratch[i].y;
  }
  return all;
}

// p log(p / other); 0 where p is 0.
__device__ __forceinline__ float Relative(float p, float log_p, float log_other) {
  return p == 0.0f ? 0.0f : p * (log_p - log_other);
}

// Returns x: the term of one class in the divergence, and y: f of the class (see the head of this file).
template <Divergence kDivergence>
__device__ __forceinline__ float2 TermOf(float p, float log_p, float q, float log_q, float beta) {
  if constexpr (kDivergence == Divergence::kForwardKl) {
    return make_float2(Relative(p, log_p, log_q), -p);
  } else if constexpr (kDivergence == Divergence::kReverseKl) {
    const float value = Relative(q, log_q, log_p);
    return make_float2(value, value);
  } else if constexpr (kDivergence == Divergence::kJensenShannon) {
    // The exponentials are relative to the larger logarithm, so that m is not 0 if p or q is not 0. If both
    // are 0, the result is not used.
    const float top = fmaxf(log_p, log_q);
    const float log_m = top + logf(beta * Exp(log_p - top) + (1.0f - beta) * Exp(log_q - top));
    const float of_student = (1.0f - beta) * Relative(q, log_q, log_m);
    return make_float2(beta * Relative(p, log_p, log_m) + of_student, of_student);
  } else {
    // Compares the logarithms, which have no rounding error of an exponential.
    const float half = log_q > log_p ? 0.5f : log_q < log_p ? -0.5f : 0.0f;
    return make_float2(half * (q - p), half * q);
  }
}

template <Divergence kDivergence>
__global__ __launch_bounds__(kThreads) void SumDivergenceKernel(const __grid_constant__ DivergenceParams p) {
  __shared__ float2 scratch[kWarps];
  const int64_t row = blockIdx.x;
  const int classes = static_cast<int>(p.student.classes);
  const LogitMap<float, true> student_map(p.student_terms), teacher_map(p.teacher_terms);
  const float inverse = 1.0f / p.distillation.temperature;
  const TaughtRecord record = p.rows.records[row];
  const LogSoftmax student(record.student_top, record.student_sum, inverse);
  const LogSoftmax teacher(record.teacher_top, record.teacher_sum, inverse);
  float2 total = make_float2(0.0f, 0.0f);
  ForEachVector(p, row, VectorsOf(classes), [&](int column, const Lane& s, const Lane& t) {
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      if (column + i >= classes) continue;
      const float log_q = student(student_map(s.x[i], column + i).z);
      const float log_p = teacher(teacher_map(t.x[i], column + i).z);
      const float2 term = TermOf<kDivergence>(Exp(log_p), log_p, Exp(log_q), log_q, p.distillation.beta);
      total.x += term.x;
      total.y += term.y;
    }
  });
  total = Add(total, scratch);
  if (threadIdx.x != 0) return;
  p.rows.records[row].value = total.x;
  p.rows.records[row].slope = total.y;
}

// Computes the divergence of a row, and the gradient of each class, from the row's record of all classes.
template <Divergence kDivergence>
struct RowDivergence {
  LogSoftmax student;
  LogSoftmax teacher;
  float value;
  float slope;  // sum of f

  __device__ __forceinline__ RowDivergence(const TaughtRecord& r, float inverse)
      : student(r.student_top, r.student_sum, inverse),
        teacher(r.teacher_top, r.teacher_sum, inverse),
        value(r.value),
        slope(r.slope) {
    if constexpr (kDivergence == Divergence::kForwardKl) {
      value = r.value / r.teacher_sum - teacher.log_sum + student.log_sum;
      slope = -1.0f;
    } else if constexpr (kDivergence == Divergence::kReverseKl) {
      value = r.value / r.student_sum - student.log_sum + teacher.log_sum;
      slope = value;
    }
  }
  // dD/ds without the logit scale.
  __device__ __forceinline__ float Gradient(const Logit& logit, float taught, float beta) const {
    const float log_q = student(logit.z);
    const float log_p = teacher(taught);
    const float q = Exp(log_q);
    const float2 term = TermOf<kDivergence>(Exp(log_p), log_p, q, log_q, beta);
    return (term.y - q * slope) * student.inverse * logit.slope;
  }
};

template <Divergence kDivergence>
__global__ __launch_bounds__(kThreads) void DivergenceGradientKernel(
    const __grid_constant__ DivergenceParams p) {
  const int64_t row = blockIdx.x;
  const RowDivergence<kDivergence> divergence(p.rows.records[row], 1.0f / p.distillation.temperature);
  if (!isfinite(divergence.value)) return;
  const int classes = static_cast<int>(p.student.classes);
  const LogitMap<float, true> student_map(p.student_terms), teacher_map(p.teacher_terms);
  auto* const to = reinterpret_cast<float4*>(static_cast<float*>(p.teacher.data) + row * p.teacher.ld);
  ForEachVector(p, row, VectorsOf(classes), [&](int column, const Lane& s, const Lane& t) {
    float out[kLane] = {};
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      if (column + i >= classes) continue;
      out[i] = divergence.Gradient(student_map(s.x[i], column + i), teacher_map(t.x[i], column + i).z,
                                   p.distillation.beta);
    }
    to[column / kLane] = make_float4(out[0], out[1], out[2], out[3]);
  });
}

// ---- the end of a row ----

template <typename T>
__device__ __forceinline__ T Rounded(float x) {
  if constexpr (std::is_same_v<T, __half>) x = SaturateHalf(x);
  return static_cast<T>(x);
}

// Some elements of a gradient, aligned for vector accesses.
template <typename T>
struct alignas(kLane * sizeof(T)) GradientLane {
  T x[kLane];
};

template <typename T>
__device__ __forceinline__ void ZeroRow(const LogitMatrix& gradient, int64_t row) {
  auto* const to = reinterpret_cast<GradientLane<T>*>(static_cast<T*>(gradient.data) + row * gradient.ld);
  GradientLane<T> zeros;
#pragma unroll
  for (int i = 0; i < kLane; ++i) zeros.x[i] = static_cast<T>(0.0f);
  for (int v = static_cast<int>(threadIdx.x); v * kLane < static_cast<int>(gradient.ld); v += kThreads)
    to[v] = zeros;
}

// Writes the results of a row, by one thread. Returns whether they are finite.
template <Divergence kDivergence>
__device__ __forceinline__ bool FinishRow(const DivergenceParams& p, int64_t row, float divergence) {
  const Distillation& distillation = p.distillation;
  const bool alone = distillation.target_weight == 0.0f;
  const float weight = p.in.weights[row];
  const float coef = p.in.coef_loss[row] * distillation.weight;
  p.divergence[row] = divergence;
  RowInputs with_target = p.in;
  with_target.coef_loss = p.rows.target_coefs;
  p.rows.factors[row] =
      GradientFactor(p.student_terms, with_target, row, p.out.lse[row], p.out.target_logprob[row]) +
      fabsf(coef) / distillation.temperature;
  // Unless the divergence stands alone, the row loss kernel has written the loss with targets to out.loss.
  const float with_targets = alone ? 0.0f : p.out.loss[row];
  const float loss = with_targets + weight * distillation.weight * divergence;
  const bool valid = isfinite(loss) && isfinite(divergence) && isfinite(p.out.lse[row]);
  p.out.loss[row] = valid ? loss : NAN;
  if (alone) {
    p.out.z_loss_part[row] = 0.0f;
    if (!p.wants_logprob && !isfinite(p.out.target_logprob[row])) p.out.target_logprob[row] = 0.0f;
  }
  return valid;
}

// T: the compute dtype. Absent rows have a divergence and a gradient of 0.
template <Divergence kDivergence, typename T>
__global__ __launch_bounds__(kThreads) void FinishDivergenceKernel(
    const __grid_constant__ DivergenceParams p) {
  __shared__ bool valid;
  const int64_t row = blockIdx.x;
  const bool alone = p.distillation.target_weight == 0.0f;
  const bool wants_gradient = p.gradient.data != nullptr;
  const bool present = row < p.in.rows && p.in.weights[row] != 0.0f;
  if (!present) {
    if (row < p.in.rows && threadIdx.x == 0) p.divergence[row] = p.rows.factors[row] = 0.0f;
    if (alone && wants_gradient) ZeroRow<T>(p.gradient, row);
    return;
  }
  const RowDivergence<kDivergence> divergence(p.rows.records[row], 1.0f / p.distillation.temperature);
  if (threadIdx.x == 0) valid = FinishRow<kDivergence>(p, row, divergence.value);
  __syncthreads();
  if (!wants_gradient) return;
  if (!valid) {
    ZeroRow<T>(p.gradient, row);
    return;
  }
  const int classes = static_cast<int>(p.student.classes);
  const LogitMap<float, true> student_map(p.student_terms), teacher_map(p.teacher_terms);
  const float factor = p.in.coef_loss[row] * p.distillation.weight;
  auto* const to = reinterpret_cast<GradientLane<T>*>(static_cast<T*>(p.gradient.data) + row * p.gradient.ld);
  const int columns = alone ? static_cast<int>(p.gradient.ld) : classes;
  if (alone) {
    ForEachVector<true>(p, row, VectorsOf(columns), [&](int column, const Lane& s, const Lane& t) {
      GradientLane<T> out;
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        const float own =
            column + i >= classes
                ? 0.0f
                : factor * divergence.Gradient(student_map(s.x[i], column + i),
                                               teacher_map(t.x[i], column + i).z, p.distillation.beta);
        out.x[i] = Rounded<T>(own);
      }
      to[column / kLane] = out;
    });
    return;
  }
  // Here the logits are no longer needed, and the student's are gone: the row loss kernel has overwritten
  // them. Before that, LaunchDivergenceGradient has replaced the teacher's logits by dD/ds. The gradient of
  // the loss with targets is in `to`; dD/ds times its factor is added.
  const auto* const own =
      reinterpret_cast<const float4*>(static_cast<const float*>(p.teacher.data) + row * p.teacher.ld);
  for (int v = static_cast<int>(threadIdx.x); v * kLane < columns; v += kThreads) {
    const float4 taught = own[v];
    const float more[kLane] = {taught.x, taught.y, taught.z, taught.w};
    GradientLane<T> out = to[v];
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      if (v * kLane + i < classes) {
        out.x[i] = Rounded<T>(static_cast<float>(out.x[i]) + factor * more[i]);
      }
    }
    to[v] = out;
  }
}

// ---- whole rows at once ----

// Writes a lane of a gradient in its dtype.
__device__ __forceinline__ void StoreLane(const LogitMatrix& gradient, int64_t row, int v, const Lane& x) {
  const auto store = [&](auto element) {
    using T = decltype(element);
    GradientLane<T> out;
#pragma unroll
    for (int i = 0; i < kLane; ++i) out.x[i] = Rounded<T>(x.x[i]);
    reinterpret_cast<GradientLane<T>*>(static_cast<T*>(gradient.data) + row * gradient.ld)[v] = out;
  };
  switch (gradient.dtype) {
    case DType::kBFloat16:
      return store(__nv_bfloat16());
    case DType::kFloat16:
      return store(__half());
    default:
      return store(float());
  }
}

// Sums of the student's row at temperature 1, over the classes that have been added. They are relative to
// `top`: the sum of exp(z - top), and the sum of exp(z - top) (z - top) (`moment`). `top` is at most the
// largest logit, and at least the largest logit minus kSlack.
struct UnsoftenedSums {
  float top;
  float sum;
  float moment;
  float largest;
  int32_t arg;  // the smallest class that has the largest logit; INT32_MAX: none
};

__device__ __forceinline__ UnsoftenedSums NoUnsoftenedSums() {
  return {NegativeInfinity(), 0.0f, 0.0f, NegativeInfinity(), INT32_MAX};
}

__device__ __forceinline__ void Rebase(UnsoftenedSums& r, float top) {
  if (r.top == top) return;
  const float shift = r.top - top;
  const float factor = expf(shift);
  r.moment = factor == 0.0f ? 0.0f : factor * (r.moment + r.sum * shift);
  r.sum *= factor;
  r.top = top;
}

// Adds some classes, from `column` on. A thread adds classes in ascending order.
template <bool kMasks>
__device__ __forceinline__ void AddClasses(UnsoftenedSums& r, const Lane& z, int column) {
  const float top = TopOf(z);
  if (top > r.largest) {
    r.largest = top;
    r.arg = column + (z.x[0] == top ? 0 : z.x[1] == top ? 1 : z.x[2] == top ? 2 : 3);
  }
  if (IsFar(top, r.top, 1.0f)) Rebase(r, top);
  const float base = kMasks ? BaseOf(r.top) : r.top;
#pragma unroll
  for (int i = 0; i < kLane; ++i) {
    const float d = z.x[i] - base;
    const float e = Exp(d);
    r.sum += e;
    r.moment = fmaf(e, kMasks && !(e > 0.0f) ? 0.0f : d, r.moment);
  }
}

__device__ __forceinline__ UnsoftenedSums Combine(UnsoftenedSums a, UnsoftenedSums b) {
  const float top = fmaxf(a.top, b.top), largest = fmaxf(a.largest, b.largest);
  const int32_t of_a = a.largest == largest ? a.arg : INT32_MAX;
  const int32_t of_b = b.largest == largest ? b.arg : INT32_MAX;
  Rebase(a, top);
  Rebase(b, top);
  return {top, a.sum + b.sum, a.moment + b.moment, largest, min(of_a, of_b)};
}

// Both kinds of sums over some classes of a row.
struct RowPartial {
  SoftenedSums softened;
  UnsoftenedSums unsoftened;
};

template <bool kCross>
__device__ __forceinline__ RowPartial Combine(const RowPartial& a, const RowPartial& b, float inverse) {
  return {Combine<kCross>(a.softened, b.softened, inverse), Combine(a.unsoftened, b.unsoftened)};
}

// Combines the sums of all threads; every thread gets the sums over the row.
template <bool kCross>
__device__ __forceinline__ RowPartial ReduceOfRow(RowPartial r, float inverse, RowPartial* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    RowPartial other;
    other.softened = {__shfl_xor_sync(0xffffffffu, r.softened.own_top, offset),
                      __shfl_xor_sync(0xffffffffu, r.softened.own_sum, offset),
                      __shfl_xor_sync(0xffffffffu, r.softened.other_top, offset),
                      __shfl_xor_sync(0xffffffffu, r.softened.other_sum, offset),
                      __shfl_xor_sync(0xffffffffu, r.softened.cross, offset)};
    other.unsoftened = {__shfl_xor_sync(0xffffffffu, r.unsoftened.top, offset),
                        __shfl_xor_sync(0xffffffffu, r.unsoftened.sum, offset),
                        __shfl_xor_sync(0xffffffffu, r.unsoftened.moment, offset),
                        __shfl_xor_sync(0xffffffffu, r.unsoftened.largest, offset),
                        __shfl_xor_sync(0xffffffffu, r.unsoftened.arg, offset)};
    r = Combine<kCross>(r, other, inverse);
  }
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = r;
  __syncthreads();
  RowPartial all = scratch[0];
  for (int i = 1; i < kWarps; ++i) all = Combine<kCross>(all, scratch[i], inverse);
  return all;
}

// Writes the results of a row, by one thread, if the loss with the target does not count.
__device__ __forceinline__ void WriteUnsoftened(const DivergenceParams& p, int64_t row,
                                                const UnsoftenedSums& unsoftened, float target) {
  const float log_sum = logf(unsoftened.sum);
  p.out.lse[row] = unsoftened.top + log_sum;
  p.out.entropy[row] = log_sum - unsoftened.moment / unsoftened.sum;
  // A NaN stays NaN.
  const float logprob = (target - unsoftened.top) - log_sum;
  p.out.target_logprob[row] = logprob > 0.0f ? 0.0f : logprob;
  p.out.argmax[row] =
      unsoftened.arg == INT32_MAX ? -1 : unsoftened.arg + static_cast<int32_t>(p.student_terms.first_class);
}

// All threads call this. Thread 0 writes the results of WriteUnsoftened, the divergence and the loss. Returns
// whether these results are finite.
__device__ __forceinline__ bool WriteWhole(const DivergenceParams& p, int64_t row,
                                           const UnsoftenedSums& unsoftened, float target, float divergence) {
  const float weight = p.in.weights[row];
  const bool absent = weight == 0.0f;
  const float loss = absent ? 0.0f : weight * p.distillation.weight * divergence;
  const bool valid =
      absent || (isfinite(loss) && isfinite(divergence) && isfinite(unsoftened.top + logf(unsoftened.sum)));
  if (threadIdx.x != 0) return valid;
  WriteUnsoftened(p, row, unsoftened, target);
  p.divergence[row] = absent ? 0.0f : divergence;
  p.rows.factors[row] = fabsf(p.in.coef_loss[row] * p.distillation.weight) / p.distillation.temperature;
  p.out.loss[row] = valid ? loss : NAN;
  p.out.z_loss_part[row] = 0.0f;
  if (!p.wants_logprob && !isfinite(p.out.target_logprob[row])) p.out.target_logprob[row] = 0.0f;
  return valid;
}

// z of the row's target; the target must be one of the classes here.
template <bool kScaleOnly>
__device__ __forceinline__ float TargetLogit(const DivergenceParams& p, int64_t row,
                                             const Logits<kScaleOnly>& logits) {
  const int column = p.in.targets[row];
  const float dot = p.in.target_dots != nullptr
                        ? p.in.target_dots[row]
                        : (static_cast<const float*>(p.student.data) + row * p.student.ld)[column];
  return logits(dot, column).z;
}

// Zeroes the gradient of a row.
__device__ __forceinline__ void ZeroWhole(const DivergenceParams& p, int64_t row, int vectors) {
  for (int v = static_cast<int>(threadIdx.x); v < vectors; v += kThreads)
    StoreLane(p.gradient, row, v, Lane{});
}

// Passes over the row: one for both kinds of sums; one for the divergence, unless it is a KL divergence; one
// for the gradient, if it is wanted.
template <Divergence kDivergence, bool kScaleOnly>
__global__ __launch_bounds__(kThreads,
                             2) void WholeDivergenceKernel(const __grid_constant__ DivergenceParams p) {
  using Softmaxes = Sides<kDivergence>;
  __shared__ RowPartial scratch[kWarps];
  __shared__ float2 sums[kWarps];
  const int64_t row = blockIdx.x;
  const int vectors = static_cast<int>(p.student.ld / kLane);
  const bool wants_gradient = p.gradient.data != nullptr;
  if (row >= p.in.rows) {
    if (wants_gradient) ZeroWhole(p, row, vectors);
    return;
  }
  const int classes = static_cast<int>(p.student.classes);
  const Logits<kScaleOnly> student_map(p.student_terms), teacher_map(p.teacher_terms);
  const float target = TargetLogit(p, row, student_map);
  const float inverse = 1.0f / p.distillation.temperature;
  RowPartial partial = {NoSoftenedSums(), NoUnsoftenedSums()};
  const auto add_classes = [&](auto masks, int column, const Lane& z, const Lane& taught) {
    constexpr bool kMasks = decltype(masks)::value;
    AddClasses<kMasks>(partial.unsoftened, z, column);
    AddClasses<Softmaxes::kCross, kMasks>(partial.softened, Softmaxes::kOwnIsStudent ? z : taught,
                                          Softmaxes::kOwnIsStudent ? taught : z, inverse);
  };
  ForEachVector(p, row, vectors, [&](int column, const Lane& s, const Lane& t) {
    if (kScaleOnly && column + kLane <= classes) {
      add_classes(std::false_type(), column, LogitsOf(student_map, s, column),
                  LogitsOf(teacher_map, t, column));
    } else {
      add_classes(std::true_type(), column, LogitsOf(student_map, s, column, classes),
                  LogitsOf(teacher_map, t, column, classes));
    }
  });
  partial = ReduceOfRow<Softmaxes::kCross>(partial, inverse, scratch);
  TaughtRecord record = RecordOf<Softmaxes::kOwnIsStudent>(partial.softened);
  if constexpr (!kIsKl<kDivergence>) {
    const LogSoftmax of_student(record.student_top, record.student_sum, inverse);
    const LogSoftmax of_teacher(record.teacher_top, record.teacher_sum, inverse);
    float2 total = make_float2(0.0f, 0.0f);
    ForEachVector(p, row, vectors, [&](int column, const Lane& s, const Lane& t) {
#pragma unroll
      for (int i = 0; i < kLane; ++i) {
        if (column + i >= classes) continue;
        const float log_q = of_student(student_map(s.x[i], column + i).z);
        const float log_p = of_teacher(teacher_map(t.x[i], column + i).z);
        const float2 term = TermOf<kDivergence>(Exp(log_p), log_p, Exp(log_q), log_q, p.distillation.beta);
        total.x += term.x;
        total.y += term.y;
      }
    });
    total = Add(total, sums);
    record.value = total.x;
    record.slope = total.y;
  }
  const RowDivergence<kDivergence> divergence(record, inverse);

  const bool valid = WriteWhole(p, row, partial.unsoftened, target, divergence.value);
  if (!wants_gradient) return;
  if (p.in.weights[row] == 0.0f || !valid) {
    ZeroWhole(p, row, vectors);
    return;
  }
  const float coef = p.in.coef_loss[row] * p.distillation.weight;
  ForEachVector<true>(p, row, vectors, [&](int column, const Lane& s, const Lane& t) {
    Lane out;
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      out.x[i] = column + i >= classes
                     ? 0.0f
                     : coef * divergence.Gradient(student_map(s.x[i], column + i),
                                                  teacher_map(t.x[i], column + i).z, p.distillation.beta);
    }
    StoreLane(p.gradient, row, column / kLane, out);
  });
}

// ---- whole rows whose softmaxes are known ----

__device__ __forceinline__ SoftmaxPart Combine(const SoftmaxPart& a, const SoftmaxPart& b, float inverse) {
  const float top = fmaxf(a.top, b.top);
  // If both parts have no class, both tops are -infinity, and their difference would be NaN.
  const auto moved = [&](const SoftmaxPart& part) {
    return part.top == top ? part.sum : part.sum * expf((part.top - top) * inverse);
  };
  return {top, moved(a) + moved(b)};
}

// The softmax of a row from its `count` parts, in every thread.
__device__ __forceinline__ SoftmaxPart SoftmaxOfRow(const SoftmaxPart* parts, int count, float inverse,
                                                    SoftmaxPart* scratch) {
  SoftmaxPart all = {NegativeInfinity(), 0.0f};
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) all = Combine(all, parts[i], inverse);
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) {
    const SoftmaxPart other = {__shfl_xor_sync(0xffffffffu, all.top, offset),
                               __shfl_xor_sync(0xffffffffu, all.sum, offset)};
    all = Combine(all, other, inverse);
  }
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = all;
  __syncthreads();
  all = scratch[0];
  for (int i = 1; i < kWarps; ++i) all = Combine(all, scratch[i], inverse);
  return all;
}

// For KL(p || q), whose gradient is dz/ds (q - p) / T: it needs only the softmaxes, so one pass over the row
// computes it and all sums. The row may turn out not to be finite after that; then its gradient is
// overwritten with zeros. kUnit: the temperature is 1.
template <bool kScaleOnly, bool kUnit>
__global__ __launch_bounds__(kThreads,
                             2) void KnownDivergenceKernel(const __grid_constant__ DivergenceParams p) {
  __shared__ SoftmaxPart students[kWarps], teachers[kWarps];
  __shared__ RowPartial scratch[kWarps];
  const int64_t row = blockIdx.x;
  const int vectors = static_cast<int>(p.student.ld / kLane);
  const bool wants_gradient = p.gradient.data != nullptr;
  if (row >= p.in.rows) {
    if (wants_gradient) ZeroWhole(p, row, vectors);
    return;
  }
  const int classes = static_cast<int>(p.student.classes);
  const Logits<kScaleOnly> student_map(p.student_terms), teacher_map(p.teacher_terms);
  const float target = TargetLogit(p, row, student_map);
  const float inverse = 1.0f / p.distillation.temperature;
  const SoftmaxPart student = SoftmaxOfRow(p.student_parts + row * p.parts, p.parts, inverse, students);
  const SoftmaxPart teacher = SoftmaxOfRow(p.teacher_parts + row * p.parts, p.parts, inverse, teachers);
  const float student_base = BaseOf(student.top), teacher_base = BaseOf(teacher.top);

  const bool absent = p.in.weights[row] == 0.0f;
  const bool writes = wants_gradient && !absent;
  const float factor = p.in.coef_loss[row] * p.distillation.weight * inverse;
  const float of_student = factor / student.sum, of_teacher = factor / teacher.sum;
  // The top of the softmax at the temperature is the row's largest logit, so it also serves the sums at
  // temperature 1. All threads have the same tops, so ReduceOfRow rescales nothing. Of the softened sums,
  // only `cross` is used.
  UnsoftenedSums unsoftened = NoUnsoftenedSums();
  unsoftened.top = student.top;
  float cross = 0.0f;
  const auto process = [&](auto masks, int column, const Lane& s, const Lane& t) {
    constexpr bool kMasks = decltype(masks)::value;
    Lane z, out;
#pragma unroll
    for (int i = 0; i < kLane; ++i) {
      z.x[i] = NegativeInfinity();
      out.x[i] = 0.0f;
      if (kMasks && column + i >= classes) continue;
      const Logit logit = student_map(s.x[i], column + i);
      z.x[i] = logit.z;
      const float own = logit.z - student_base;
      const float taught = teacher_map(t.x[i], column + i).z - teacher_base;
      const float e = Exp(own), p_of = Exp(taught * inverse);
      const float q_of = kUnit ? e : Exp(own * inverse);
      unsoftened.sum += e;
      unsoftened.moment = fmaf(e, kMasks && !(e > 0.0f) ? 0.0f : own, unsoftened.moment);
      cross = fmaf(p_of, kMasks && !(p_of > 0.0f) ? 0.0f : taught - own, cross);
      out.x[i] = (q_of * of_student - p_of * of_teacher) * logit.slope;
    }
    const float top = TopOf(z);
    if (top > unsoftened.largest) {
      unsoftened.largest = top;
      unsoftened.arg = column + (z.x[0] == top ? 0 : z.x[1] == top ? 1 : z.x[2] == top ? 2 : 3);
    }
    if (writes) StoreLane(p.gradient, row, column / kLane, out);
  };
  ForEachVector<true>(p, row, vectors, [&](int column, const Lane& s, const Lane& t) {
    if (kScaleOnly && column + kLane <= classes) {
      process(std::false_type(), column, s, t);
    } else {
      process(std::true_type(), column, s, t);
    }
  });
  const RowPartial sums = ReduceOfRow<true>(
      {{teacher.top, 0.0f, student.top, 0.0f, cross * inverse}, unsoftened}, inverse, scratch);
  const TaughtRecord record = {student.top, student.sum, teacher.top, teacher.sum, sums.softened.cross, 0.0f};
  const RowDivergence<Divergence::kForwardKl> divergence(record, inverse);
  const bool valid = WriteWhole(p, row, sums.unsoftened, target, divergence.value);
  if (wants_gradient && (absent || !valid)) ZeroWhole(p, row, vectors);
}

// ---- launches ----

// Calls launch(std::integral_constant) with the divergence as a constant.
template <typename LaunchFn>
cudaError_t WithDivergence(Divergence divergence, LaunchFn launch) {
  switch (divergence) {
    case Divergence::kNone:
      break;
    case Divergence::kForwardKl:
      return launch(std::integral_constant<Divergence, Divergence::kForwardKl>());
    case Divergence::kReverseKl:
      return launch(std::integral_constant<Divergence, Divergence::kReverseKl>());
    case Divergence::kJensenShannon:
      return launch(std::integral_constant<Divergence, Divergence::kJensenShannon>());
    case Divergence::kTotalVariation:
      return launch(std::integral_constant<Divergence, Divergence::kTotalVariation>());
  }
  return cudaErrorInvalidValue;
}

unsigned MergeBlocks(int64_t rows) {
  return static_cast<unsigned>((rows + kMergeThreads - 1) / kMergeThreads);
}

}  // namespace

cudaError_t LaunchSoften(const DivergenceParams& params, cudaStream_t stream) {
  if (params.in.rows == 0) return cudaSuccess;
  return WithDivergence(params.distillation.divergence, [&](auto divergence) {
    SoftenKernel<decltype(divergence)::value>
        <<<static_cast<unsigned>(params.in.rows), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t LaunchSumDivergence(const DivergenceParams& params, cudaStream_t stream) {
  if (params.in.rows == 0) return cudaSuccess;
  return WithDivergence(params.distillation.divergence, [&](auto divergence) {
    SumDivergenceKernel<decltype(divergence)::value>
        <<<static_cast<unsigned>(params.in.rows), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t LaunchDivergenceGradient(const DivergenceParams& params, cudaStream_t stream) {
  if (params.in.rows == 0) return cudaSuccess;
  return WithDivergence(params.distillation.divergence, [&](auto divergence) {
    DivergenceGradientKernel<decltype(divergence)::value>
        <<<static_cast<unsigned>(params.in.rows), kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t LaunchFinishDivergence(const DivergenceParams& params, cudaStream_t stream) {
  if (params.in.padded_rows == 0) return cudaSuccess;
  return WithDivergence(params.distillation.divergence, [&](auto divergence) {
    return WithElement(params.gradient.dtype, [&](auto element) {
      using T = typename decltype(element)::Type;
      FinishDivergenceKernel<decltype(divergence)::value, T>
          <<<static_cast<unsigned>(params.in.padded_rows), kThreads, 0, stream>>>(params);
      return cudaGetLastError();
    });
  });
}

namespace {

// Whether Logits can be used with kScaleOnly for these terms.
bool IsScaleOnly(const LossTerms& terms) {
  return terms.bias == nullptr && terms.softcap == 0.0f && !terms.soft;
}

}  // namespace

cudaError_t LaunchWholeDivergence(const DivergenceParams& params, cudaStream_t stream) {
  if (params.in.padded_rows == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(params.in.padded_rows);
  const bool scale_only = IsScaleOnly(params.student_terms) && IsScaleOnly(params.teacher_terms);
  return WithDivergence(params.distillation.divergence, [&](auto divergence) {
    constexpr Divergence kDivergence = decltype(divergence)::value;
    if (scale_only) {
      WholeDivergenceKernel<kDivergence, true><<<blocks, kThreads, 0, stream>>>(params);
    } else {
      WholeDivergenceKernel<kDivergence, false><<<blocks, kThreads, 0, stream>>>(params);
    }
    return cudaGetLastError();
  });
}

cudaError_t LaunchKnownDivergence(const DivergenceParams& params, cudaStream_t stream) {
  if (params.in.padded_rows == 0) return cudaSuccess;
  if (params.distillation.divergence != Divergence::kForwardKl) return cudaErrorInvalidValue;
  const auto blocks = static_cast<unsigned>(params.in.padded_rows);
  const bool scale_only = IsScaleOnly(params.student_terms) && IsScaleOnly(params.teacher_terms);
  const bool unit = params.distillation.temperature == 1.0f;
  const auto launch = [&](auto is_scale_only, auto is_unit) {
    KnownDivergenceKernel<decltype(is_scale_only)::value, decltype(is_unit)::value>
        <<<blocks, kThreads, 0, stream>>>(params);
    return cudaGetLastError();
  };
  if (scale_only)
    return unit ? launch(std::true_type(), std::true_type()) : launch(std::true_type(), std::false_type());
  return unit ? launch(std::false_type(), std::true_type()) : launch(std::false_type(), std::false_type());
}

cudaError_t LaunchMergeSoftened(const MergeTaughtParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  return WithDivergence(params.distillation.divergence, [&](auto divergence) {
    MergeSoftenedKernel<decltype(divergence)::value>
        <<<MergeBlocks(params.rows), kMergeThreads, 0, stream>>>(params);
    return cudaGetLastError();
  });
}

cudaError_t LaunchAddDivergences(const MergeTaughtParams& params, cudaStream_t stream) {
  if (params.rows == 0) return cudaSuccess;
  AddDivergencesKernel<<<MergeBlocks(params.rows), kMergeThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace lossd::kernels::cuda

LOSSD_KERNEL_FILE(DistillRows)
