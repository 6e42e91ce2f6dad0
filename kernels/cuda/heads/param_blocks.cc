#include "kernels/cuda/heads/param_blocks.h"

#include "kernels/cuda/device/device_memory.h"

namespace lossd::kernels::cuda {

ParamBlock ParamBlock::Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base) {
  Carver carver(base);
  ParamBlock block;
  block.weight = carver.Take<float>(sizes.padded_vocab * sizes.padded_hidden);
  if (config.has_bias) block.bias = carver.Take<float>(sizes.padded_vocab);
  if (config.norm != Norm::kNone) block.norm_gain = carver.Take<float>(sizes.padded_hidden);
  if (config.norm == Norm::kLayerNorm) block.norm_shift = carver.Take<float>(sizes.padded_hidden);
  block.bytes = carver.used();
  return block;
}

ValueBuffer ValueBuffer::Carve(const HeadConfig& config, const HeadSizes& sizes, uint8_t* base) {
  ValueBuffer values;
  values.params = ParamBlock::Carve(config, sizes, base);
  Carver carver(base == nullptr ? nullptr : base + values.params.bytes);
  if (config.has_class_weights) values.class_weights = carver.Take<float>(sizes.padded_vocab);
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
