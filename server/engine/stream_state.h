// SPDX-License-Identifier: Apache-2.0
// The bookkeeping of one open stream, beside what its rows are (stream_rows.h): which rows were sent, what is
// outstanding, the sums so far, and when it is over.
// Plain state without locks or threads; the engine's lock guards it.
#ifndef LOSSD_SERVER_ENGINE_STREAM_STATE_H_
#define LOSSD_SERVER_ENGINE_STREAM_STATE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "server/engine/stream.h"
#include "server/engine/stream_rows.h"

namespace lossd::engine {

class StreamState : public StreamRows {
 public:
  StreamState(StreamRows rows, std::shared_ptr<StreamObserver> observer);
  // As StreamRows::Create.
  static absl::StatusOr<std::shared_ptr<StreamState>> Create(StreamSpec spec,
                                                             const kernels::HeadConfig& config,
                                                             HeadState state, SliceLimits limits,
                                                             std::shared_ptr<StreamObserver> observer);

  StreamObserver& observer() { return *observer_; }

  // Checks a slice and marks its rows as sent. `bytes`, `in_place` as in CheckSlice. INVALID_ARGUMENT; then
  // nothing has changed.
  absl::Status AddSlice(RowRange rows, int64_t bytes, bool in_place = false);
  // A slice that was added has been received and queued.
  void OnQueued();
  // A slice of this stream left the device.
  void FinishSlice(const kernels::SliceSums& sums, int64_t accumulated, int64_t repeated,
                   double queue_seconds, double compute_seconds);
  // INVALID_ARGUMENT naming the first missing row if valid rows were not sent.
  absl::Status HalfClose();
  // Remembers the first failure.
  void Fail(absl::Status status);

  void Start() { started_ = true; }
  // Its rows were admitted, for so much memory.
  void SetAdmitted(int64_t host_bytes) { host_bytes_ = host_bytes; }
  int64_t host_bytes() const { return host_bytes_; }
  void AddOutstanding(int64_t slices) { outstanding_ += slices; }
  // The request to the staging pool of the last slice that had to wait there; 0: there was none.
  void SetMemoryTicket(uint64_t ticket) { memory_ticket_ = ticket; }
  uint64_t memory_ticket() const { return memory_ticket_; }
  bool failed() const { return !status_.ok(); }
  bool finished() const { return finished_; }
  // True if OnFinished is due: started, nothing outstanding, and failed or completely received.
  bool ReadyToFinish() const;
  void MarkFinished() { finished_ = true; }
  const absl::Status& status() const { return status_; }
  const StreamSummary& summary() const { return summary_; }

 private:
  absl::Status CheckNew(RowRange rows, int64_t bytes, bool in_place) const;
  size_t Index(int64_t row) const { return static_cast<size_t>(row - spec().rows.begin); }

  const std::shared_ptr<StreamObserver> observer_;
  std::vector<uint8_t> sent_;  // per row of the range
  int64_t sent_end_ = 0;       // end of the last slice
  int64_t unsent_rows_ = 0;
  int64_t unsent_valid_rows_ = 0;
  int64_t receiving_ = 0;    // slices added and not yet queued
  int64_t outstanding_ = 0;  // slices queued or on the device
  uint64_t memory_ticket_ = 0;
  int64_t host_bytes_ = 0;
  bool started_ = false;
  bool half_closed_ = false;
  bool finished_ = false;
  absl::Status status_;
  StreamSummary summary_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STREAM_STATE_H_
