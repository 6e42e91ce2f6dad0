// SPDX-License-Identifier: Apache-2.0
// How an engine is set up, and its fixed measures. Plain data.
#ifndef LOSSD_SERVER_ENGINE_ENGINE_OPTIONS_H_
#define LOSSD_SERVER_ENGINE_ENGINE_OPTIONS_H_

#include <cstdint>

#include "absl/time/time.h"

namespace lossd::engine {

// How often the device thread shows that it lives while nothing is to be done.
inline constexpr absl::Duration kDeviceBeat = absl::Seconds(1);

struct EngineOptions {
  int64_t slice_bytes = int64_t{4} << 20;      // the largest slice payload
  int64_t staging_bytes = int64_t{256} << 20;  // all slices in transit; at least two of the largest
  int64_t max_streams = 256;                   // open at once, over all heads
  int64_t max_heads = 64;
  int64_t max_queued_operations = 64;  // waiting for the device, per head
  // Remembered per head and step: so many rows of microbatches (5 to 21 bytes each), so many of contributions
  // (8).
  int64_t max_ledger_rows = int64_t{1} << 26;
  // Likewise microbatches, and contributions: some hundred bytes each even without rows.
  int64_t max_step_microbatches = int64_t{1} << 18;
  // Host memory for targets and weights of open streams and for the ledgers of open steps, over all heads
  // (row_memory.h).
  int64_t ledger_bytes = int64_t{256} << 20;
  // What one peer may hold of the staging memory, and one peer or head of ledger_bytes (fair_share.h); in (0,
  // 1].
  double peer_share = 0.5;
  int64_t retained_bytes = 0;  // hidden states of deferred microbatches; 0: none are kept
  // Weight gradients are sums in an order of their own (server/engine/sequencer.h), so that the same
  // microbatches give the same bits whatever arrives first. Each trainable head takes up to staging_bytes
  // besides the pool.
  bool deterministic = false;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ENGINE_OPTIONS_H_
