// SPDX-License-Identifier: Apache-2.0
// When a chunk is formed of what is queued.
//
// A chunk that accumulates reads and writes the whole fp32 weight gradient, however few rows it has. So rows
// are worth waiting for, as long as the device does not idle over it: a chunk in flight has its results
// before it computes its weight gradient, about a third of its time, and by then the next chunk is needed.
// Until then it may fill. Nothing waits for a clock: with no such chunk in flight, what is there goes at
// once.
#ifndef LOSSD_SERVER_ENGINE_CHUNK_POLICY_H_
#define LOSSD_SERVER_ENGINE_CHUNK_POLICY_H_

#include <cstdint>

namespace lossd::engine {

// What could be launched now.
struct NextChunk {
  int64_t rows = 0;  // 0: nothing
  bool accumulates = false;
  bool closed = false;  // no row can join it any more: it is full, or an operation is next
};

// `without_results`: accumulating chunks in flight whose results are not there yet.
inline bool WaitsForRows(const NextChunk& next, int without_results) {
  return next.accumulates && !next.closed && without_results > 0;
}

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CHUNK_POLICY_H_
