// SPDX-License-Identifier: Apache-2.0
// The streams and rows that tests of the engine send unless they want others.
#ifndef LOSSD_TESTS_SERVER_ENGINE_STREAM_SPECS_H_
#define LOSSD_TESTS_SERVER_ENGINE_STREAM_SPECS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/engine/stream.h"

namespace lossd::engine {

// Rows [begin, end) of a microbatch of `rows` rows that accumulates for `step`.
inline StreamSpec Spec(uint64_t id, int64_t rows, RowRange range, uint64_t step = 0) {
  StreamSpec spec;
  spec.head = "head";
  spec.step = step;
  spec.microbatch_id = id;
  spec.microbatch_rows = rows;
  spec.rows = range;
  spec.hidden_dtype = kernels::DType::kFloat32;
  spec.want_grad_hidden = true;
  spec.accumulate_gradients = true;
  spec.want_rows.loss = true;
  spec.targets.assign(static_cast<size_t>(range.size()), 1);
  return spec;
}

// The first hidden value of a row names it: 1000 id + row.
inline float RowName(uint64_t id, int64_t row) {
  return static_cast<float>(1000 * id + static_cast<uint64_t>(row));
}
inline std::vector<float> Names(uint64_t id, RowRange rows) {
  std::vector<float> names;
  for (int64_t row = rows.begin; row < rows.end; ++row) names.push_back(RowName(id, row));
  return names;
}

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_SERVER_ENGINE_STREAM_SPECS_H_
