// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels for single classes of a row: the k classes with the largest logits, from the fp32
// dot products of a block of classes (LaunchSelectTop) or from 16-bit exponentials of all of them
// (LaunchSelectTopOfExponentials), the same of several devices together (LaunchMergeTop), and the logits of
// classes that the caller names (LaunchClassLogits).
//
// All enqueue on `stream`. Pointers are device memory, or pinned memory of the host, which the device reaches
// too. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_ROW_CLASSES_H_
#define LOSSD_KERNELS_CUDA_KERNELS_ROW_CLASSES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

inline constexpr int kMostSelected = 128;  // k at most

// The first k classes of some rows in their order, by the larger logit and then by the smaller class: [rows,
// k] each. Where there are fewer than k classes: -infinity, INT32_MAX. A logit that is NaN counts as
// -infinity.
struct TopLists {
  float* logits = nullptr;    // after bias, scale and softcap
  int32_t* places = nullptr;  // counted from the first class of the vocabulary

  TopLists From(int64_t entry) const { return {logits + entry, places + entry}; }
};

struct SelectTopParams {
  LogitMatrix logits;       // fp32 dot products of a block of classes, [rows, ld]
  int64_t first_class = 0;  // of the block, among the classes here
  LossTerms terms;          // of all classes here
  DType compute = DType::kBFloat16;
  int64_t rows = 0;
  int k = 0;        // in [1, kMostSelected]
  TopLists before;  // of the blocks of classes before; null: there are none. It may be `top`
  TopLists top;     // out: of all blocks so far
};
cudaError_t LaunchSelectTop(const SelectTopParams& params, cudaStream_t stream);

// The same from exponentials: of a row they are in the order of its logits, up to rounding to bf16. What
// rounding leaves open is computed: the logits of some more than k classes a row, of more where that many
// logits lie within 2^-7 of each other. (Where all are equal, of all: as much work as the product, which this
// does much more slowly.)
struct SelectTopOfExponentialsParams {
  const void* exponentials = nullptr;  // [rows, ld] bf16, not negative; whatever it is at the target
  int64_t ld = 0;                      // a multiple of 8
  const void* hidden = nullptr;        // [rows, inner] bf16
  const void* weight = nullptr;        // [terms.vocab, inner] bf16
  int64_t inner = 0;                   // a multiple of 8
  LossTerms terms;                     // of all classes, without a softcap
  const int32_t* targets = nullptr;    // [rows], classes counted from 0; -1: none
  int64_t rows = 0;
  int k = 0;  // in [1, kMostSelected]
  TopLists top;
};
cudaError_t LaunchSelectTopOfExponentials(const SelectTopOfExponentialsParams& params, cudaStream_t stream);

// `all`: of part i the lists that begin at i * stride entries, [rows, k]. top: of all parts together.
struct MergeTopParams {
  TopLists all;
  int64_t stride = 0;
  int parts = 0;
  int64_t rows = 0;
  int k = 0;
  TopLists top;
};
cudaError_t LaunchMergeTop(const MergeTopParams& params, cudaStream_t stream);

// logits[r, i] = the logit of class classes[r, i] of row r, or 0 if it is not here; classes are counted from
// the first of the vocabulary. Both [rows, count], and may be the same memory.
struct ClassLogitsParams {
  const void* hidden = nullptr;  // [rows, ld] of `dtype`
  const void* weight = nullptr;  // [terms.vocab, ld] of `dtype`
  DType dtype = DType::kBFloat16;
  int64_t ld = 0;
  int64_t rows = 0;
  int count = 0;
  LossTerms terms;  // of all classes here
  const int32_t* classes = nullptr;
  float* logits = nullptr;
};
cudaError_t LaunchClassLogits(const ClassLogitsParams& params, cudaStream_t stream);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_KERNELS_ROW_CLASSES_H_
