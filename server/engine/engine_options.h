// SPDX-License-Identifier: Apache-2.0
// How an engine is set up (EngineOptions), and what it reports to observers about its work as it happens
// (EngineObserver), for metrics and logs.
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

// How often the device thread shows that it lives while nothing is to be done.
inline constexpr absl::Duration kDeviceBeat = absl::Seconds(1);

struct EngineOptions {
  int64_t slice_bytes = int64_t{4} << 20;      // the largest slice payload
  int64_t staging_bytes = int64_t{256} << 20;  // all slices in transit; at least two of the largest
  int64_t max_streams = 256;                   // open at once, over all heads
  int64_t max_heads = 64;
  int64_t max_queued_operations = 64;  // waiting for the device, per head
  // The most rows of microbatches (5 to 21 bytes each), and the most rows of contributions (8 bytes each),
  // that the ledger of a head keeps for one step.
  int64_t max_ledger_rows = int64_t{1} << 26;
  // The most microbatches, and the most contributions, of one head and step. Each takes some hundred bytes
  // even without rows.
  int64_t max_step_microbatches = int64_t{1} << 18;
  // Host memory for targets and weights of open streams and for the ledgers of open steps, over all heads
  // (staging.h).
  int64_t ledger_bytes = int64_t{256} << 20;
  // What one peer may hold of the staging memory, and one peer or head of ledger_bytes (staging.h); in (0,
  // 1].
  double peer_share = 0.5;
  int64_t retained_bytes = 0;  // hidden states of deferred microbatches; 0: none are kept
  // Weight gradients are summed in a fixed order (deterministic_schedule.h), so that the same microbatches
  // give the same bits whatever arrives first. Each trainable head then takes up to staging_bytes in addition
  // to the pool.
  bool deterministic = false;
};

// A slice in a chunk.
struct SliceReport {
  uint64_t microbatch_id = 0;
  int64_t first_row = 0;  // in its microbatch
  int64_t rows = 0;
};

// What became of a chunk.
struct ChunkReport {
  absl::string_view head;
  int64_t rows = 0;  // computed of those that were sent; zeros in their place do not count
  // How its gradients were computed: kExact, kFiltered or kSampled (kernels::Chunk::gradients).
  kernels::Gradients gradients = kernels::Gradients::kExact;
  kernels::Embedding embedding = kernels::Embedding::kNone;  // kNone: the rows have a loss
  kernels::LossSums sums;                                    // over these rows
  kernels::LossSums accumulating;  // over those of them that may reach the accumulators
  double compute_seconds = 0.0;    // from its forming until its results were ready
  double device_seconds = 0.0;     // from its forming until now: until it left the device, if it has
  // How long each of its slices was queued until the chunk was formed.
  std::vector<double> queue_seconds;
  std::vector<SliceReport> slices;  // in the same order
};

// A chunk was computed in another way than the one before it on its head.
struct ChoicesReport {
  absl::string_view head;
  absl::Span<const kernels::Choice> choices;
};

// Rows of a contribution were handed in.
struct ContributionReport {
  absl::string_view head;
  int64_t added_rows = 0;  // those that had not been added before
};

// A step was closed, or its update has made values infinite or NaN.
struct StepReport {
  absl::string_view head;
  bool skipped = false;  // without an update, because its gradients were not finite
  uint64_t step = 0;     // the one that was closed
  int64_t rows = 0;      // in its gradients
  double grad_norm = 0.0;
  double learning_rate = 0.0;
  // So many values and moments are not finite any more; then the step is not closed, and the head is not
  // usable until others are loaded.
  int64_t made_not_finite = 0;
};

// Receives the engine's reports, one for each kind of event. Every member is pure virtual, so that an
// observer cannot forget an event by accident.
//
// An engine has a list of observers and tells them one after the other, so no observer has to pass an event
// on to another one. To add an event, add its report here and fill it in where the event happens.
//
// Threads. Reports come on the threads of the engine, of the backend and of the engine's callers, never under
// a lock of the engine's. An observer must be thread-safe, must not block and must not call back into the
// engine. Views in a report are valid during the call.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  // Its results are final. The calls of its rows have not ended.
  virtual void OnChunk(const ChunkReport& report) = 0;
  // It has left the device, also if it failed there. After OnChunk.
  virtual void OnChunkLeft(const ChunkReport& report) = 0;
  virtual void OnChoices(const ChoicesReport& report) = 0;
  virtual void OnContribution(const ContributionReport& report) = 0;
  virtual void OnStep(const StepReport& report) = 0;
  // An operation failed on the device.
  virtual void OnDeviceError(const absl::Status& status) = 0;
};

// All observers of one engine, in the order in which they are told. Immutable.
class EngineObservers {
 public:
  explicit EngineObservers(std::vector<EngineObserver*> observers) : observers_(std::move(observers)) {}

  // E.g. Tell(&EngineObserver::OnStep, {.head = "head"}).
  template <typename Report>
  void Tell(void (EngineObserver::*event)(const Report&), const Report& report) const {
    for (EngineObserver* observer : observers_) (observer->*event)(report);
  }

 private:
  const std::vector<EngineObserver*> observers_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_ENGINE_OPTIONS_H_
