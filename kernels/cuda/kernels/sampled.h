// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels of sampled gradients. From a chunk's matrix of ds they compute a list of a few
// classes a row, which stands for the matrix; from the list the predicted error and dx. dW is computed from
// the list as for filtered gradients (filtered/filtered.h). docs/math.md has the formulas,
// docs/kernels/sampled.md an overview.
//
// Hot classes, which are taken most often, are treated apart: they are multiplied as a dense matrix of few
// columns, and only the other classes are sampled.
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

// The list of a chunk, or of a block of its rows, and the results of these rows.
struct SampleList {
  SampleEntry* entries = nullptr;  // of the whole chunk; a row's entries are in the order of classes
  int32_t first = 0;               // index of the first entry that belongs to these rows
  int32_t capacity = 0;            // number of entries for these rows; at least the rows
  SampledRow* rows = nullptr;      // [rows]
  SampleCounters* counters = nullptr;
  // [rows] each, over the gradient unit squared; 0 for rows without a gradient.
  float* variance = nullptr;
  float* square = nullptr;
};

// ---- selection ----

// The part of ds that is multiplied as a dense matrix instead of being sampled. Hot classes have no entries
// in the list.
struct HotPart {
  HotClasses classes;        // bits null: there is no such part
  void* elements = nullptr;  // out: [rows, kHotClasses], copied from SampleRowsParams::elements
  // out: [rows]; |element| times this, but at most 1, is the probability of being taken.
  float* widths = nullptr;
};

// Selects the entries of rows, and the dense part of hot classes.
struct SampleRowsParams {
  // [rows, elements.ld]: row r times factors[r] (null: times 1) is dL/ds over (scale * gradient unit).
  LogitMatrix elements;
  const float* factors = nullptr;
  LossTerms terms;
  RowInputs in;
  const float* lse = nullptr;              // [rows]
  const float* target_logprob = nullptr;   // [rows]
  const float* kappas = nullptr;           // [rows], with a teacher; null: computed from the four above
  const float* omega = nullptr;            // [rows]
  const int32_t* with_gradient = nullptr;  // [rows]; other rows have no entries
  float threshold = 0.0f;                  // tau
  SampleList list;
  HotPart hot;
};
// Writes the list at the lowest level that fits, and that level. Reads the matrix once, or three times if the
// level is not 0.
cudaError_t LaunchSampleRows(const SampleRowsParams& params, cudaStream_t stream);

// The steps of LaunchSampleRows. LaunchSelectSamples writes the list at level 0, which may be too long; with
// `again`, at the level that was chosen, unless that is 0. LaunchChooseLevel, between the two, chooses the
// level from the rows' counts at level 0. If several devices sample classes of the same rows,
// LaunchRaiseLevel then raises the level to the largest of their `levels` [parts].
cudaError_t LaunchSelectSamples(const SampleRowsParams& params, bool again, cudaStream_t stream);
cudaError_t LaunchChooseLevel(const SampleRowsParams& params, cudaStream_t stream);
cudaError_t LaunchRaiseLevel(SampleCounters* counters, const int32_t* levels, int parts, cudaStream_t stream);

// ---- decision ----

// Decides kTooMuchError if the predicted error of the rows with a gradient exceeds max_error.
struct DecideSampledParams {
  SampleList list;
  int64_t rows = 0;
  float threshold = 0.0f;
  float max_error = std::numeric_limits<float>::infinity();
  Decision* decision = nullptr;       // [1]
  float* chosen_threshold = nullptr;  // [1]
};
cudaError_t LaunchDecideSampled(const DecideSampledParams& params, cudaStream_t stream);

// Decides kTooManyCandidates if one of the levels [parts] is not 0, and then zeroes dropped_mass [rows].
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
// where the uniform part is coef_loss * smoothing / vocab * weight_sum. Also writes the entries of
// accumulated rows to kept.keys and kept.coefs, each at the index that it has in the list.
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
  const int32_t* accumulate = nullptr;  // [rows]; the rows whose entries are kept
  KeptList kept;                        // keys null: not wanted; `count` is not used
  // The initial value of dx: row r of `dense` [rows, ld] times dense_factors[r] (null: times 1). Null: 0.
  const float* dense = nullptr;
  const float* dense_factors = nullptr;
  int32_t* taken = nullptr;  // HotClasses::taken, to which the entries are added; or null
};
cudaError_t LaunchSampledHidden(const SampledHiddenParams& params, cudaStream_t stream);

// ---- hot classes ----

// Makes the most popular classes hot, of those that are taken at least `least` times between two choices.
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

// to[i] = weight[ids[i]], [kHotClasses, ld]. Rows of `to` without a class are 0.
cudaError_t LaunchGatherHot(const HotClasses& hot, const void* weight, DType dtype, int64_t ld, void* to,
                            cudaStream_t stream);
// weight_gradient[ids[i]] += scale * from[i], [kHotClasses, ld]. bias_gradient[ids[i]] += bias_from[i],
// unless bias_gradient is null.
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
