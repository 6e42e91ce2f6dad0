// SPDX-License-Identifier: Apache-2.0
// What saving and reading a checkpoint have in common: the names of its files, and how tensors lie in them.
// Stateless and thread-safe.
#ifndef LOSSD_SERVER_HEAD_CHECKPOINT_LAYOUT_H_
#define LOSSD_SERVER_HEAD_CHECKPOINT_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "absl/types/span.h"
#include "kernels/head_config.h"
#include "proto/tensorfile/direct_file.h"

namespace lossd::head {

inline constexpr char kTensorFile[] = "tensors.safetensors";  // of a checkpoint that has only one
inline constexpr char kManifestFile[] = "manifest.json";

// Of some rows of a tensor.
inline std::vector<int64_t> FileShape(const kernels::HeadConfig& config, kernels::Param param, int64_t rows) {
  if (param == kernels::Param::kWeight) return {rows, kernels::ShapeOf(config, param).cols};
  return {rows};
}

// How many rows of a tensor are handled at once: as many as `slice_bytes` take, at least one. So many that
// the next ones lie right for a direct write, if that is possible.
inline int64_t SliceRows(const kernels::TensorShape& shape, int64_t slice_bytes) {
  const int64_t row_bytes = shape.cols * static_cast<int64_t>(sizeof(float));
  const int64_t rows = std::max<int64_t>(slice_bytes / row_bytes, 1);
  const int64_t aligned_rows =
      formats::kDirectAlignment / std::gcd(formats::kDirectAlignment, row_bytes);  // the fewest
  const int64_t most = rows < aligned_rows ? rows : rows / aligned_rows * aligned_rows;
  return std::min(most, shape.rows);
}

inline int64_t Bytes(const kernels::TensorShape& shape) {
  return shape.elements() * static_cast<int64_t>(sizeof(float));
}

// How many of these fp32 values are infinite or NaN.
inline int64_t CountNotFinite(absl::Span<const uint8_t> values) {
  constexpr uint32_t kExponent = 0x7f800000;
  int64_t count = 0;
  for (size_t at = 0; at + sizeof(uint32_t) <= values.size(); at += sizeof(uint32_t)) {
    uint32_t bits = 0;
    std::memcpy(&bits, values.data() + at, sizeof(bits));
    count += (bits & kExponent) == kExponent ? 1 : 0;
  }
  return count;
}

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_CHECKPOINT_LAYOUT_H_
