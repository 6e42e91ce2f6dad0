// SPDX-License-Identifier: Apache-2.0
// A slice on its way through the engine. Owned by whoever has it: the schedule while it waits, its chunk
// afterwards. Destroyed without the engine's lock.
#ifndef LOSSD_SERVER_ENGINE_SLICE_WORK_H_
#define LOSSD_SERVER_ENGINE_SLICE_WORK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/staging_pool.h"
#include "server/engine/stream.h"
#include "server/engine/stream_state.h"

namespace lossd::engine {

struct SliceWork {
  std::shared_ptr<StreamState> stream;
  RowRange rows;
  int64_t bytes = 0;     // of its hidden states
  IncomingSlice caller;  // how its rows are copied, and what is called then
  StagingBuffer buffer;  // its memory, once it has been found
  absl::Time queued;
  int64_t round = 0;  // in which it is to be computed (WorkQueue)
  // Set when it joins a chunk by arrival that accumulates.
  std::vector<uint8_t> accumulate;  // [rows], 1: reserved for it
  bool has_repeats = false;         // some of its rows were settled before

  // ---- In a chunk ----
  size_t index = 0;  // of its first row in the arrays over the chunk
  double queue_seconds = 0.0;
  int64_t bad_row = -1;  // of the microbatch: the first one without a result; -1: all have one
  // If it is bad: rows of it are accumulated that it shares with other slices, or that lie behind such rows.
  bool accumulated_all_the_same = false;
  kernels::SliceSums sums;
  int64_t accumulated_rows = 0;
  int64_t repeated_rows = 0;
  SliceOutput output;

  bool is_good() const { return bad_row < 0; }
};

// What failed streams leave behind.
struct DroppedSlices {
  std::vector<std::unique_ptr<SliceWork>> queued;
  std::vector<std::unique_ptr<SliceWork>> waiting;  // for memory
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_SLICE_WORK_H_
