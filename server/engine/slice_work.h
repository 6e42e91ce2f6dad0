// A slice on its way through the engine.
#ifndef LOSSD_SERVER_ENGINE_SLICE_WORK_H_
#define LOSSD_SERVER_ENGINE_SLICE_WORK_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "server/engine/staging_pool.h"
#include "server/engine/stream.h"
#include "server/engine/stream_state.h"

namespace lossd::engine {

struct SliceWork {
  std::shared_ptr<StreamState> stream;
  RowRange rows;
  StagingBuffer buffer;
  absl::Time submitted;
  double queue_seconds = 0.0;
  // Set when it joins a chunk that accumulates.
  bool reserved = false;
  int64_t repeated_rows = 0;
  std::vector<uint8_t> accumulate;  // [rows], used if some rows are repeats
  SliceOutput output;               // per-row results
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_SLICE_WORK_H_
