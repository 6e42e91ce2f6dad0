// SPDX-License-Identifier: Apache-2.0
// Parts of tensors, cut into what is read or written at once. Thread-compatible.
#ifndef LOSSD_SERVER_HEAD_SLICES_H_
#define LOSSD_SERVER_HEAD_SLICES_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/head_config.h"
#include "server/head/checkpoint_layout.h"
#include "server/head/shards.h"

namespace lossd::head {

// The most bytes that a slice of any tensor of such a head has.
inline int64_t MostSliceBytes(const kernels::HeadConfig& config, int64_t slice_bytes) {
  int64_t most = 1;
  for (const kernels::TensorId id : CheckpointTensors(config)) {
    const kernels::TensorShape shape = kernels::ShapeOf(config, id.param);
    most = std::max(most, Bytes({SliceRows(shape, slice_bytes), shape.cols}));
  }
  return most;
}

// Goes through the slices of some parts, in their order. `config` outlives it.
class SliceCursor {
 public:
  SliceCursor(const kernels::HeadConfig& config, std::vector<TensorPart> parts, int64_t slice_bytes)
      : config_(&config), parts_(std::move(parts)), slice_bytes_(slice_bytes) {}

  bool done() const { return part_ == parts_.size(); }
  // Only while there is one.
  TensorPart Next() {
    const TensorPart& part = parts_[part_];
    const int64_t most = SliceRows(kernels::ShapeOf(*config_, part.id.param), slice_bytes_);
    const TensorPart slice = {part.id, part.row_begin + row_, std::min(most, part.rows - row_)};
    row_ += slice.rows;
    if (row_ == part.rows) {
      row_ = 0;
      ++part_;
    }
    return slice;
  }

 private:
  const kernels::HeadConfig* config_;
  std::vector<TensorPart> parts_;
  int64_t slice_bytes_;
  size_t part_ = 0;  // whose slice comes next,
  int64_t row_ = 0;  // and its first row, counted from the part's
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_SLICES_H_
