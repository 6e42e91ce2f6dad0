// What saving and reading a checkpoint have in common: the names of its files, and how tensors lie in them.
// Stateless and thread-safe.
#ifndef LOSSD_SERVER_HEAD_CHECKPOINT_LAYOUT_H_
#define LOSSD_SERVER_HEAD_CHECKPOINT_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/head_config.h"

namespace lossd::head {

inline constexpr char kTensorFile[] = "tensors.safetensors";
inline constexpr char kManifestFile[] = "manifest.json";

inline std::vector<int64_t> FileShape(const kernels::HeadConfig& config, kernels::Param param) {
  const kernels::TensorShape shape = kernels::ShapeOf(config, param);
  if (param == kernels::Param::kWeight) return {shape.rows, shape.cols};
  return {shape.rows};
}

// How many rows of a tensor are handled at once.
inline int64_t SliceRows(const kernels::TensorShape& shape, int64_t slice_bytes) {
  const int64_t row_bytes = shape.cols * static_cast<int64_t>(sizeof(float));
  return std::min(std::max<int64_t>(slice_bytes / row_bytes, 1), shape.rows);
}

inline int64_t Bytes(const kernels::TensorShape& shape) {
  return shape.elements() * static_cast<int64_t>(sizeof(float));
}

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_CHECKPOINT_LAYOUT_H_
