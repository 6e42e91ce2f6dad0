// SPDX-License-Identifier: Apache-2.0
// Launchers of the kernels for single classes of a row:
// - LaunchSelectTop: the k classes with the largest logits, from the fp32 dot products of a block of classes,
// - LaunchSelectTopOfExponentials: the same from 16-bit exponentials of all classes,
// - LaunchMergeTop: merges the top classes of several devices,
// - LaunchClassLogits: the logits of classes that the caller names.
//
// The classes "here" are those on this device: all classes, or a part of them if the head is split by
// vocabulary.
//
// All launchers enqueue on `stream`. Pointers are to device memory, or to pinned host memory, which the
// device can access, too. Stateless and thread-safe.
#ifndef LOSSD_KERNELS_CUDA_KERNELS_ROW_CLASSES_H_
#define LOSSD_KERNELS_CUDA_KERNELS_ROW_CLASSES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/kernels/loss_rows.h"
#include "kernels/head_config.h"

namespace lossd::kernels::cuda {

inline constexpr int kMostSelected = 128;  // the largest k

// The first k classes of some rows, [rows, k] each, ordered by larger logit, then by smaller class. If there
// are fewer than k classes, the remaining entries are -infinity and INT32_MAX. A logit that is NaN counts as
// -infinity.
struct TopLists {
  float* logits = nullptr;    // after bias, scale and softcap
  int32_t* places = nullptr;  // numbers in the vocabulary

  TopLists From(int64_t entry) const { return {logits + entry, places + entry}; }
};

// Selects the top classes of a block of classes and of all blocks before this block.
struct SelectTopParams {
  LogitMatrix logits;       // fp32 dot products of a block of classes, [rows, ld]
  int64_t first_class = 0;  // first class of the block, among the classes here
  LossTerms terms;          // of all classes here
  DType compute = DType::kBFloat16;
  int64_t rows = 0;
  int k = 0;        // in [1, kMostSelected]
  TopLists before;  // top classes of earlier blocks; null: there are none. May be the same memory as `top`
  TopLists top;     // out: of all blocks so far
};
cudaError_t LaunchSelectTop(const SelectTopParams& params, cudaStream_t stream);

// Selects the top classes from exponentials of all classes, which the logit pass of the fused loss stores
// instead of logits (hopper/logit_pass.h). Exponentials order the classes of a row as its logits do, except
// where rounding to bf16 makes them equal. So the kernel computes the logits, from `hidden` and `weight`, of
// the classes that may be among the top k: a few more than k classes a row, and more if many logits lie
// within 2^-7 of each other. (If all logits are equal, it computes the logits of all classes: as much work as
// the product, and much slower.)
struct SelectTopOfExponentialsParams {
  // [rows, ld] bf16, not negative; any value at the target, whose logit is always computed
  const void* exponentials = nullptr;
  int64_t ld = 0;                    // a multiple of 8
  const void* hidden = nullptr;      // [rows, inner] bf16
  const void* weight = nullptr;      // [terms.vocab, inner] bf16
  int64_t inner = 0;                 // a multiple of 8
  LossTerms terms;                   // of all classes, without a softcap
  const int32_t* targets = nullptr;  // [rows], classes counted from 0; -1: the target is on another device
  int64_t rows = 0;
  int k = 0;  // in [1, kMostSelected]
  TopLists top;
};
cudaError_t LaunchSelectTopOfExponentials(const SelectTopOfExponentialsParams& params, cudaStream_t stream);

// Merges the top classes of several devices (parts). `all`: the lists of all parts; the lists of part i,
// [rows, k], begin at entry i * stride. `top`: the merged lists.
struct MergeTopParams {
  TopLists all;
  int64_t stride = 0;
  int parts = 0;
  int64_t rows = 0;
  int k = 0;
  TopLists top;
};
cudaError_t LaunchMergeTop(const MergeTopParams& params, cudaStream_t stream);

// logits[r, i] = the logit of class classes[r, i] in row r, or 0 if the class is not here. `classes` are
// numbers in the vocabulary. Both arrays are [rows, count], and may be the same memory.
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
