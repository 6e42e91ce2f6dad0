// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels of sampled gradients: from a chunk's matrix of ds to a list of a few classes a row
// that stands for it, to the predicted error, and to dx. dW comes from the list as that of filtered gradients
// does (filtered/filtered.h). docs/math.md has the rule, docs/kernels/sampled.md the picture.
//
// Hot classes, which are taken most often, have a part of their own: it is multiplied as a dense matrix of
// few columns, and only the other classes are sampled.
//
// All enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_H_
#define LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <limits>

#include "kernels/cuda/kernels/filtered/filtered.h"
#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/decision.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// The list of a chunk, or of a block of its rows, and what is known of them.
struct SampleList {
  SampleEntry* entries = nullptr;  // of the chunk; those of a row in the order of classes
  int32_t first = 0;               // of the entries that belong to these rows
  int32_t capacity = 0;            // how many these are, at least the rows
  SampledRow* rows = nullptr;      // [rows]
  SampleCounters* counters = nullptr;
  // [rows] each, over the gradient unit squared; 0 of rows without a gradient.
  float* variance = nullptr;
  float* square = nullptr;
};

// ---- selection ----

// The part of ds that is multiplied as a dense matrix instead of being sampled. Hot classes have no entries.
struct HotPart {
  HotClasses classes;        // bits null: no such part
  void* elements = nullptr;  // out: [rows, kHotClasses], columns of SampleRowsParams::elements
  float* widths = nullptr;  // out: [rows], |element| times this is the probability of being taken, if below 1
};

struct SampleRowsParams {
  // [rows, elements.ld]: row r times factors[r] (null: times 1) is dL/ds over (scale * gradient unit).
  LogitMatrix elements;
  const float* factors = nullptr;
  LossTerms terms;
  RowInputs in;
  const float* lse = nullptr;              // [rows]
  const float* target_logprob = nullptr;   // [rows]
  const float* kappas = nullptr;           // [rows], of rows with a teacher; null: from the four above
  const float* omega = nullptr;            // [rows]
  const int32_t* with_gradient = nullptr;  // [rows]; the others have no entries
  float threshold = 0.0f;                  // tau
  SampleList list;
  HotPart hot;
};
// The list at the lowest level that fits, and that level. Reads the matrix once, or three times if the level
// is not 0.
cudaError_t LaunchSampleRows(const SampleRowsParams& params, cudaStream_t stream);

// Its parts: the list at level 0, which may be too long, or, again, at the level that was chosen unless that
// is 0; and the level, from what the rows have counted at level 0. Between them the level may be raised,
// where several devices sample classes of the same rows: to the largest of their `levels` [parts].
cudaError_t LaunchSelectSamples(const SampleRowsParams& params, bool again, cudaStream_t stream);
cudaError_t LaunchChooseLevel(const SampleRowsParams& params, cudaStream_t stream);
cudaError_t LaunchRaiseLevel(SampleCounters* counters, const int32_t* levels, int parts, cudaStream_t stream);

// ---- decision ----

// kTooMuchError if the predicted error of the rows with a gradient exceeds max_error.
struct DecideSampledParams {
  SampleList list;
  int64_t rows = 0;
  float threshold = 0.0f;
  float max_error = std::numeric_limits<float>::infinity();
  Decision* decision = nullptr;       // [1]
  float* chosen_threshold = nullptr;  // [1]
};
cudaError_t LaunchDecideSampled(const DecideSampledParams& params, cudaStream_t stream);

// kTooManyCandidates if one of the levels [parts] is not 0, and then zeros in dropped_mass [rows].
struct DecideListedParams {
  const int32_t* levels = nullptr;
  int parts = 0;
  Decision* decision = nullptr;  // [1]
  float* dropped_mass = nullptr;
  int64_t rows = 0;
};
cudaError_t LaunchDecideListed(const DecideListedParams& params, cudaStream_t stream);

// ---- rows ----

// hidden_gradient[r] = gradient_scale * (sum of value * weight[column] over r's entries - uniform part),
// where the uniform part is coef_loss * smoothing / vocab * weight_sum. Also the entries of accumulated rows
// as kept.keys and kept.coefs, each at the place that it has in the list.
struct SampledHiddenParams {
  SampleList list;
  LossTerms terms;
  RowInputs in;
  DType dtype = DType::kBFloat16;          // of weight
  const void* weight = nullptr;            // [vocab, ld]
  int64_t ld = 0;                          // a multiple of 8; CanFilterRows()
  const float* weight_sum = nullptr;       // [ld], sum of u_v w_v; null: no uniform part
  void* hidden_gradient = nullptr;         // [rows, ld], or null: not wanted
  DType gradient_dtype = DType::kFloat32;  // `dtype` or fp32
  float gradient_scale = 1.0f;
  const int32_t* accumulate = nullptr;  // [rows]; whose entries are kept
  KeptList kept;                        // keys null: none wanted; without count
  // Where dx begins: row r of `dense` [rows, ld] times dense_factors[r] (null: times 1). Null: at 0.
  const float* dense = nullptr;
  const float* dense_factors = nullptr;
  int32_t* taken = nullptr;  // HotClasses::taken, to which the entries are added; or null
};
cudaError_t LaunchSampledHidden(const SampledHiddenParams& params, cudaStream_t stream);

// ---- hot classes ----

// The most popular classes become hot, of those that are taken at least `least` times between two choices.
cudaError_t LaunchChooseHot(const HotClasses& hot, float least, cudaStream_t stream);

// Adds to hot.taken how often the rows would have taken each hot class: the sum over rows of min(width *
// |element|, 1).
struct CountHotParams {
  HotClasses hot;
  const void* elements = nullptr;  // [rows, kHotClasses]
  DType dtype = DType::kBFloat16;
  const float* widths = nullptr;  // [rows]
  int64_t rows = 0;
};
cudaError_t LaunchCountHot(const CountHotParams& params, cudaStream_t stream);

// to[i] = weight[ids[i]], [kHotClasses, ld]; rows of `to` that are no class are 0.
cudaError_t LaunchGatherHot(const HotClasses& hot, const void* weight, DType dtype, int64_t ld, void* to,
                            cudaStream_t stream);
// weight_gradient[ids[i]] += scale * from[i], [kHotClasses, ld], and likewise the bias's unless it is null.
struct ScatterHotParams {
  HotClasses hot;
  const float* from = nullptr;
  const float* bias_from = nullptr;  // [kHotClasses]; already scaled
  int64_t ld = 0;
  float scale = 1.0f;
  float* weight_gradient = nullptr;  // [vocab, ld]
  float* bias_gradient = nullptr;    // [vocab] or null
};
cudaError_t LaunchScatterHot(const ScatterHotParams& params, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_SAMPLED_H_
