// SPDX-License-Identifier: Apache-2.0
// The loss of rows as kernels get it, in groups: what all rows share, what each row brings, what becomes of
// it, and the matrix of its logits. A launcher takes the groups that its kernels use.
//
// Plain data; pointers are device memory of the caller's.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_LOSS_ROWS_H_
#define LOSSD_KERNELS_CUDA_KERNELS_LOSS_ROWS_H_

#include <algorithm>
#include <cstdint>

#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

// The loss that all rows of a chunk share; docs/math.md has the formulas.
struct LossTerms {
  int64_t vocab = 0;                     // classes here: V, but for those elsewhere
  const float* bias = nullptr;           // [vocab] or null: none
  const float* class_weights = nullptr;  // [vocab] or null: all 1; those of classes elsewhere lie around them
  float class_weight_sum = 0.0f;         // sum of all class weights; V without them
  float scale = 1.0f;                    // t
  float softcap = 0.0f;                  // c; 0: none
  float smoothing = 0.0f;                // alpha
  float z_loss = 0.0f;                   // lambda
  bool want_entropy = false;             // the entropy of some row is a result
  bool any_coef_entropy = false;         // some row has an upstream gradient of its entropy
  // Of a head that is split by vocabulary. Kernels count classes from the first that is here.
  int64_t first_class = 0;       // in the vocabulary
  int64_t elsewhere = 0;         // classes on other devices
  bool bias_in_targets = false;  // RowInputs::target_dots have the bias of the target already
  // Whether the kernels need the general form of the formulas (row_loss.cu).
  bool IsGeneral() const {
    return bias != nullptr || class_weights != nullptr || softcap > 0.0f || smoothing > 0.0f ||
           want_entropy || any_coef_entropy || scale < 0.0f;
  }
  // Whether entropies of rows have to be computed, as a result or for a gradient.
  bool NeedsEntropy() const { return want_entropy || any_coef_entropy; }
  // The same loss with classes counted from `first`.
  LossTerms From(int64_t first) const {
    LossTerms terms = *this;
    if (bias != nullptr) terms.bias += first;
    if (class_weights != nullptr) terms.class_weights += first;
    return terms;
  }
};

// What each row brings, [rows] each.
struct RowInputs {
  int64_t rows = 0;
  int64_t padded_rows = 0;               // of the matrices beside them; at least `rows`
  const int32_t* targets = nullptr;      // classes in [0, vocab); -1: elsewhere
  const int32_t* all_targets = nullptr;  // the targets wherever they are; null: they are all here
  const float* target_dots = nullptr;    // W x at the target, in fp32; null: as stored among the logits
  const float* weights = nullptr;        // row weight
  const float* coef_loss = nullptr;      // dL/d(loss) with weight and scale, over the gradient unit
  const float* coef_lse = nullptr;       // dL/dlse over the gradient unit
  const float* coef_entropy = nullptr;   // dL/dentropy over the gradient unit

  // The rows [begin, begin + padded_count), of which those below `rows` exist.
  RowInputs Block(int64_t begin, int64_t padded_count) const {
    return {.rows = std::clamp<int64_t>(rows - begin, 0, padded_count),
            .padded_rows = padded_count,
            .targets = targets + begin,
            .all_targets = all_targets == nullptr ? nullptr : all_targets + begin,
            .target_dots = target_dots == nullptr ? nullptr : target_dots + begin,
            .weights = weights + begin,
            .coef_loss = coef_loss + begin,
            .coef_lse = coef_lse + begin,
            .coef_entropy = coef_entropy + begin};
  }
};

// What becomes of each row, [rows] each; kernels/backend.h (RowOutputs) says what the numbers mean.
struct RowResults {
  float* loss = nullptr;
  float* z_loss_part = nullptr;
  float* lse = nullptr;
  float* entropy = nullptr;
  float* target_logprob = nullptr;
  int32_t* argmax = nullptr;

  RowResults From(int64_t begin) const {
    return {loss + begin,    z_loss_part + begin,    lse + begin,
            entropy + begin, target_logprob + begin, argmax + begin};
  }
};

// Dot products of rows and classes, or what has taken their place: [padded_rows, ld], of which the columns
// from `classes` on are padding.
struct LogitMatrix {
  void* data = nullptr;
  DType dtype = DType::kBFloat16;
  int64_t ld = 0;  // a multiple of 8
  int64_t classes = 0;
};

// The matrix of `dtype` whose rows begin where those of fp32 logits do.
inline LogitMatrix InPlaceOf(const LogitMatrix& logits, DType dtype) {
  return {logits.data, dtype, logits.ld * static_cast<int64_t>(sizeof(float) / SizeOf(dtype)),
          logits.classes};
}

// dL/dz of a row over the gradient unit, as factors of 2^(z f - reference); see row_loss.cu.
struct GradientRule {
  float softmax;
  float entropy;  // c_H / S
  float uniform;  // c alpha / V
  float reference;
  float log2_sum;
  float row_entropy;
  float target;        // dL/ds of the target itself, but for the uniform part
  float target_slope;  // dz/ds of the target, a factor of that and of the uniform part
  bool valid;          // false: the loss is not finite and the gradient zero
};

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_LOSS_ROWS_H_
