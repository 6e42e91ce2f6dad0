// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels of sampled gradients. From a chunk's matrix of ds (dL/ds) they compute a list with
// a few classes of each row, which takes the place of the matrix. From the list they compute the predicted
// error and dx. dW is computed from the list as for filtered gradients (filtered/filtered.h). docs/math.md
// has the formulas, docs/kernels/sampled.md an overview.
//
// Hot classes, which are taken most often, are not sampled: they are multiplied as a dense matrix of few
// columns.
//
// Order of the launches for a chunk: LaunchSampleRows (or its steps) writes the list, and the elements of hot
// classes. LaunchDecideSampled decides whether the list becomes the gradient. LaunchGatherHot and a product
// compute the hot classes' part of dx; LaunchSampledHidden adds the part of the list, and copies the list in
// the form of a KeptList (filtered/filtered.h), from which dW is computed. LaunchCountHot counts how often
// sampling would have taken the hot classes. LaunchScatterHot adds their part of dW. At last, LaunchChooseHot
// chooses the hot classes of the next chunk.
//
// All launchers enqueue on `stream`; all pointers are device memory. Stateless and thread-safe.
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
  int32_t capacity = 0;            // number of entries for these rows; at least one for each row
  SampledRow* rows = nullptr;      // [rows]
  SampleCounters* counters = nullptr;
  // [rows] each, divided by the gradient unit squared; 0 for rows without a gradient.
  float* variance = nullptr;  // estimate of the variance that sampling adds
  float* square = nullptr;    // estimate of the square of the gradient
};

// ---- selection ----

// The part of ds that is multiplied as a dense matrix instead of being sampled. Its classes, the hot classes,
// have no entries in the list.
struct HotPart {
  HotClasses classes;        // bits null: there is no such part
  void* elements = nullptr;  // out: [rows, kHotClasses], copied from SampleRowsParams::elements
  // out: [rows]; |element| times this, but at most 1, is the probability that sampling would take the class.
  float* widths = nullptr;
};

// Selects the entries of rows, and the dense part of hot classes.
struct SampleRowsParams {
  // [rows, elements.ld]: row r times factors[r] (null: times 1) is dL/ds divided by (scale * gradient unit).
  LogitMatrix elements;
  const float* factors = nullptr;
  LossTerms terms;
  RowInputs in;
  const float* lse = nullptr;             // [rows]
  const float* target_logprob = nullptr;  // [rows]
  // [rows], only with a teacher; null: computed from `terms`, `in`, `lse` and `target_logprob`
  const float* kappas = nullptr;
  const float* omega = nullptr;            // [rows]: the row's random number (SystematicSampler)
  const int32_t* with_gradient = nullptr;  // [rows]; rows where it is 0 have no entries
  float threshold = 0.0f;                  // tau; 0: at level 0, all elements but 0 are taken
  SampleList list;
  HotPart hot;
};
// Chooses the lowest level of the threshold (kSampleLevels) at which the entries fit into the list; writes
// the list and the level. Reads the matrix once, or three times if the level is not 0.
cudaError_t LaunchSampleRows(const SampleRowsParams& params, cudaStream_t stream);

// The steps of LaunchSampleRows, in this order:
// - LaunchSelectSamples without `again` writes the list at level 0; the list may be incomplete.
// - LaunchChooseLevel chooses the level from the rows' counts at level 0.
// - LaunchRaiseLevel raises the level to the largest of `levels` [parts], if several devices sample classes
//   of the same rows.
// - LaunchSelectSamples with `again` writes the list at the chosen level, unless that level is 0.
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
  float* chosen_threshold = nullptr;  // [1], out: the threshold of the highest level that was used
};
cudaError_t LaunchDecideSampled(const DecideSampledParams& params, cudaStream_t stream);

// For filtered gradients that are listed by LaunchSampleRows, from a matrix in which the elements below
// epsilon are 0. With a tau of 0, the list has all other elements as they are at level 0, but not at a higher
// level. So this decides kTooManyCandidates if one of the levels [parts] is not 0, and then zeroes
// dropped_mass [rows].
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
// where the uniform part is coef_loss * smoothing / vocab * weight_sum. Also copies the entries of
// accumulated rows to kept.keys and kept.coefs; an entry keeps its index in the list.
struct SampledHiddenParams {
  SampleList list;
  LossTerms terms;
  RowInputs in;
  DType dtype = DType::kBFloat16;  // of weight
  const void* weight = nullptr;    // [vocab, ld]
  int64_t ld = 0;                  // a multiple of 8; CanFilterRows()
  // [ld], the sum of u_v * row v of the weight; null: no uniform part
  const float* weight_sum = nullptr;
  void* hidden_gradient = nullptr;         // [rows, ld], or null: not wanted
  DType gradient_dtype = DType::kFloat32;  // `dtype` or fp32
  float gradient_scale = 1.0f;
  const int32_t* accumulate = nullptr;  // [rows]; the rows whose entries are kept
  KeptList kept;                        // keys null: not wanted; `count` is not used
  // The initial value of dx: row r of `dense` [rows, ld] times dense_factors[r] (null: times 1). Null: 0.
  const float* dense = nullptr;
  const float* dense_factors = nullptr;
  int32_t* taken = nullptr;  // HotClasses::taken; the entries are added to these counts; or null
};
cudaError_t LaunchSampledHidden(const SampledHiddenParams& params, cudaStream_t stream);

// ---- hot classes ----

// Chooses the hot classes: the most popular of the classes whose popularity is at least `least`. The
// popularity of a class is how often chunks have taken it, where earlier chunks count less (HotClasses).
cudaError_t LaunchChooseHot(const HotClasses& hot, float least, cudaStream_t stream);

// Adds to hot.taken how often sampling would have taken each hot class: the sum of min(width * |element|, 1)
// over the rows.
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
