// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/heads/param_blocks.h"

#include "kernels/cuda/device/device_memory.h"
#include "kernels/shard_rows.h"

namespace lossd::kernels::cuda {

ShardRanges ShardRanges::Of(const HeadSizes& sizes, const Shard& shard) {
  const int64_t end = shard.end_class() == sizes.vocab ? sizes.padded_vocab : shard.end_class();
  // A replica by rows without classes updates none; a part without any still has its padding.
  const int64_t rows = shard.classes > 0 || sizes.vocab == 0 ? end - shard.first_class : 0;
  return {.weight = {shard.first_class * sizes.padded_hidden, rows * sizes.padded_hidden},
          .bias = {shard.first_class, rows},
          .norm = {0, shard.norm ? sizes.padded_hidden : 0}};
}

Shard OwnShard(const HeadConfig& config, const HeadSizes& sizes, Replica replica) {
  return ShardOf(sizes.vocab, CopyOf(config, replica));
}

ParamBlock ParamBlock::Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base) {
  return CarveRanges(config, ShardRanges::Of(sizes, ShardOf(sizes.vocab, {})), base);
}

ParamBlock ParamBlock::CarveRanges(const HeadConfig& config, const ShardRanges& ranges, uint8_t* base) {
  Carver carver(base);
  const auto take = [&](bool has, const ShardRange& range) {
    return has && range.count > 0 ? carver.Take<float>(range.count) : nullptr;
  };
  ParamBlock block;
  block.weight = take(true, ranges.weight);
  block.bias = take(config.has_bias, ranges.bias);
  block.norm_gain = take(config.norm != Norm::kNone, ranges.norm);
  block.norm_shift = take(config.norm == Norm::kLayerNorm, ranges.norm);
  block.bytes = carver.used();
  return block;
}

ValueBuffer ValueBuffer::Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base) {
  ValueBuffer values;
  values.params = ParamBlock::Carve(config, sizes, base);
  Carver carver(base == nullptr ? nullptr : base + values.params.bytes);
  if (config.has_class_weights) values.class_weights = carver.Take<float>(RoundUp(sizes.all_classes, 8));
  if (config.compute_dtype == DType::kFloat32) {
    values.compute_weight = values.params.weight;
  } else {
    values.compute_weight = carver.Take<uint16_t>(sizes.padded_vocab * sizes.padded_hidden);
  }
  values.bytes = values.params.bytes + carver.used();
  return values;
}

int MomentCount(const HeadConfig& config) {
  if (!config.trainable) return 0;
  switch (config.optimizer_state) {
    case OptimizerState::kNone:
      return 0;
    case OptimizerState::kMomentum:
      return 1;
    case OptimizerState::kAdam:
      return 2;
  }
  return 0;
}

}  // namespace lossd::kernels::cuda
