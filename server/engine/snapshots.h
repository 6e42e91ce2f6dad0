// SPDX-License-Identifier: Apache-2.0
// What an engine tells about itself and its heads at one moment. Plain data.
#ifndef LOSSD_SERVER_ENGINE_SNAPSHOTS_H_
#define LOSSD_SERVER_ENGINE_SNAPSHOTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/stream.h"
#include "server/head/applied_step.h"
#include "server/head/history.h"

namespace lossd::engine {

// What a device has of a head whose classes are divided; times and rows are of all its heads (kernels::MemberState).
struct HeadDevice {
  std::string device;
  int32_t share = 0;
  int64_t classes = 0;
  int64_t rows = 0;
  absl::Duration busy;
  absl::Duration exchanging;
};

// A consistent view of one head.
struct HeadSnapshot {
  std::string name;
  kernels::HeadConfig config;
  kernels::DType compute_dtype = kernels::DType::kFloat32;
  HeadState state;
  SliceLimits limits;  // of its streams that accumulate; of all, if the head is frozen
  int64_t chunk_rows = 0;
  kernels::MemoryBytes memory;
  std::vector<kernels::Choice> choices;             // HeadKernels::Describe
  std::vector<kernels::Choice> last_chunk_choices;  // Chunk::choices; empty before the first chunk
  double gradient_error = 0.0;                      // predicted, of the last chunk with sampled gradients
  std::vector<HeadDevice> devices;                  // of a head whose classes several devices have
  int64_t open_streams = 0;
  int64_t queued_slices = 0;
  uint64_t updates = 0;  // head::Progress
  int64_t step_microbatches = 0;
  int64_t step_contributions = 0;
  int64_t retained_microbatches = 0;
  // Deterministic mode: slices that wait for their turn outside the staging memory, and for what, e.g.
  // "microbatch 3, rows [0, 128)"; empty if no slice waits.
  int64_t waiting_slices = 0;
  std::string waits_for;
  int64_t step_rows = 0;   // valid rows accumulated in the open step
  int64_t total_rows = 0;  // computed since the head was added
  // OK, or why values and moments may be neither used nor kept: they may be half-written, or are being
  // written.
  absl::Status tensors_status;
  // The step before the open one, if this engine applied it or BeginLoad told how it was applied.
  std::optional<head::AppliedStep> last_step;
  head::History history;
  std::string open_run;  // that sent the first rows of the open step
  uint64_t origin = 0;   // StepHistory::origin, for TensorReader::NoteSaved
};

struct EngineStats {
  int64_t open_streams = 0;
  int64_t queued_slices = 0;
  int64_t waiting_slices = 0;  // deterministic mode: for their turn
  int64_t queued_rows = 0;
  int64_t staging_bytes = 0;
  int64_t staging_used_bytes = 0;
  int64_t staging_peak_bytes = 0;  // most that was used at once
  int64_t area_buffers_lent = 0;   // deterministic mode: to slices that are received, computed or sent
  int64_t heads = 0;
  int64_t ledger_rows = 0;
  int64_t ledger_bytes = 0;
  int64_t row_bytes = 0;       // EngineOptions::ledger_bytes
  int64_t row_bytes_used = 0;  // of them; ledger_bytes and what open streams have
  int64_t retained_microbatches = 0;
  int64_t retained_bytes_used = 0;
  // How long, since the start, the device thread has worked or a chunk has been on the device.
  absl::Duration device_busy;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_SNAPSHOTS_H_
