// SPDX-License-Identifier: Apache-2.0
// The tensors of a head on the device and where they lie in their buffers: one function lays out a buffer for
// counting (null base) and for use, so that a plan is what is allocated. Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_CUDA_HEADS_PARAM_BLOCKS_H_
#define LOSSD_KERNELS_CUDA_HEADS_PARAM_BLOCKS_H_

#include <cstdint>

#include "kernels/cuda/paths/head_sizes.h"
#include "kernels/head_config.h"
#include "kernels/replica.h"

namespace lossd::kernels::cuda {

// Consecutive floats of a tensor, padding included.
struct ShardRange {
  int64_t begin = 0;
  int64_t count = 0;
};

// What a replica updates of each tensor: whole rows of the weight; all of the norm's two vectors or nothing.
struct ShardRanges {
  ShardRange weight, bias, norm;

  static ShardRanges Of(const HeadSizes& sizes, const Shard& shard);
};

// What a replica updates, its classes counted as those here: its shard among the copies of the head
// (shard_rows.h), which is all that it has where there is one copy.
Shard OwnShard(const HeadConfig& config, const HeadSizes& sizes, Replica replica);

// One role's tensors (value, gradient or a moment): all trained parameters one after the other.
struct ParamBlock {
  float* weight = nullptr;      // [padded_vocab, padded_hidden]
  float* bias = nullptr;        // [padded_vocab] or null, likewise below
  float* norm_gain = nullptr;   // [padded_hidden]
  float* norm_shift = nullptr;  // [padded_hidden]
  int64_t bytes = 0;

  static ParamBlock Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base);
  // Of the ranges alone: every tensor begins with its range, and those with none are null.
  static ParamBlock CarveRanges(const HeadConfig& config, const ShardRanges& ranges, uint8_t* base);
  float* first() const { return weight; }
  int64_t floats() const { return bytes / static_cast<int64_t>(sizeof(float)); }
};

// Values, class weights and the 16-bit copy of the weight.
struct ValueBuffer {
  ParamBlock params;
  float* class_weights = nullptr;  // [all_classes], rounded up, or null
  void* compute_weight = nullptr;  // [padded_vocab, padded_hidden] compute dtype; fp32: the weight itself
  int64_t bytes = 0;

  static ValueBuffer Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base);
};

// How many moments a head keeps of each parameter.
int MomentCount(const HeadConfig& config);

}  // namespace lossd::kernels::cuda

#endif  // LOSSD_KERNELS_CUDA_HEADS_PARAM_BLOCKS_H_
