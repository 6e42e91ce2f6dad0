// SPDX-License-Identifier: Apache-2.0
// EngineOptions configure an engine. EngineObserver is the interface by which an engine reports events of its
// work, for metrics and logs.
//
// Options and reports are plain data.
#ifndef LOSSD_SERVER_ENGINE_ENGINE_OPTIONS_H_
#define LOSSD_SERVER_ENGINE_ENGINE_OPTIONS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::engine {

// How often the device thread records that it is alive while there is nothing to do.
inline constexpr absl::Duration kDeviceBeat = absl::Seconds(1);

struct EngineOptions {
  int64_t slice_bytes = int64_t{4} << 20;      // most bytes of a slice's payload
  int64_t staging_bytes = int64_t{256} << 20;  // memory of all slices in transit; at least two slice_bytes
  int64_t max_streams = 256;                   // streams open at once, over all heads
  int64_t max_heads = 64;
  int64_t max_queued_operations = 64;  // operations that wait for the device, per head
  // The most rows of microbatches, and the most rows of contributions, that the ledgers of a head keep for
  // one step. A row of a microbatch takes 5 bytes, and 4 more for each float that came with it; a row of a
  // contribution takes 8 bytes.
  int64_t max_ledger_rows = int64_t{1} << 26;
  // The most microbatches, and the most contributions, of one head and step. Each takes some hundred bytes
  // even without rows.
  int64_t max_step_microbatches = int64_t{1} << 18;
  // Host memory for the targets and weights of open streams and for the ledgers of open steps, over all heads
  // (RowMemory in staging.h).
  int64_t ledger_bytes = int64_t{256} << 20;
  // The share, in (0, 1], that one peer may hold of the staging memory, and one peer or head of ledger_bytes
  // (FairShare in staging.h).
  double peer_share = 0.5;
  int64_t retained_bytes = 0;  // memory for hidden states of deferred microbatches; 0: none are retained
  // Deterministic mode: weight gradients are summed in a fixed order (deterministic_schedule.h), so the same
  // microbatches give the same bits in any order of arrival. Each trainable head then takes up to
  // staging_bytes of memory in addition to the staging pool.
  bool deterministic = false;
};

// Identifies a slice in a chunk.
struct SliceReport {
  uint64_t microbatch_id = 0;
  int64_t first_row = 0;  // in its microbatch
  int64_t rows = 0;
};

// Reports how a chunk was computed.
struct ChunkReport {
  absl::string_view head;
  int64_t rows = 0;  // rows that clients sent; rows of zeros that stand in for missing rows do not count
  // How its gradients were computed: kExact, kFiltered or kSampled (kernels::Chunk::gradients).
  kernels::Gradients gradients = kernels::Gradients::kExact;
  kernels::Embedding embedding = kernels::Embedding::kNone;  // kNone: the rows have a loss
  kernels::LossSums sums;                                    // sums over these rows
  kernels::LossSums accumulating;  // sums over those of the rows that may be accumulated
  double compute_seconds = 0.0;    // from when the chunk was formed until its results were ready
  // From when it was formed until the report; in OnChunkLeft until it left the device.
  double device_seconds = 0.0;
  // How long each of its slices was queued until the chunk was formed.
  std::vector<double> queue_seconds;
  std::vector<SliceReport> slices;  // in the order of queue_seconds
};

// A chunk was computed in another way than the chunk before it on the same head.
struct ChoicesReport {
  absl::string_view head;
  absl::Span<const kernels::Choice> choices;
};

// A call brought rows of a contribution.
struct ContributionReport {
  absl::string_view head;
  int64_t added_rows = 0;  // rows that had not been added before
};

// A step was closed, or its update made values infinite or NaN.
struct StepReport {
  absl::string_view head;
  bool skipped = false;  // closed without an update, because the gradients were not finite
  uint64_t step = 0;     // the step that was closed
  int64_t rows = 0;      // rows in the step's gradients
  double grad_norm = 0.0;
  double learning_rate = 0.0;
  // How many values and moments the update made infinite or NaN. If not 0, the step is not closed, and the
  // head cannot be used until a checkpoint is loaded or the head is reset.
  int64_t made_not_finite = 0;
};

// Receives the engine's reports, by one member for each kind of event. Every member is pure virtual, so that
// an observer cannot forget an event by accident.
//
// An engine has a list of observers and calls each of them, so no observer passes an event on to another one.
// To add an event, add its report here and fill it in where the event happens.
//
// Threads. Members are called on threads of the engine, of the backend and of the engine's callers, never
// with the engine's lock held. An observer must be thread-safe, must not block and must not call back into
// the engine. Views in a report are valid during the call.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  // The results of a chunk are final. The calls that its rows belong to have not ended.
  virtual void OnChunk(const ChunkReport& report) = 0;
  // A chunk has left the device, computed or failed. Comes after OnChunk.
  virtual void OnChunkLeft(const ChunkReport& report) = 0;
  virtual void OnChoices(const ChoicesReport& report) = 0;
  virtual void OnContribution(const ContributionReport& report) = 0;
  virtual void OnStep(const StepReport& report) = 0;
  // An operation failed on the device.
  virtual void OnDeviceError(const absl::Status& status) = 0;
};

// All observers of one engine, in the order in which the engine calls them. Immutable.
class EngineObservers {
 public:
  explicit EngineObservers(std::vector<EngineObserver*> observers) : observers_(std::move(observers)) {}

  // Calls a member of every observer, e.g. Tell(&EngineObserver::OnStep, {.head = "head"}).
  template <typename Report>
  void Tell(void (EngineObserver::*event)(const Report&), const Report& report) const {
    for (EngineObserver* observer : observers_) (observer->*event)(report);
  }

 private:
  const std::vector<EngineObserver*> observers_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ENGINE_OPTIONS_H_
