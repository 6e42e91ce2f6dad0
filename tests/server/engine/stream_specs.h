// The stream that tests of the engine open unless they want another one.
#ifndef LOSSD_TESTS_SERVER_ENGINE_STREAM_SPECS_H_
#define LOSSD_TESTS_SERVER_ENGINE_STREAM_SPECS_H_

#include <cstddef>
#include <cstdint>

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

}  // namespace lossd::engine

#endif  // LOSSD_TESTS_SERVER_ENGINE_STREAM_SPECS_H_
