// SPDX-License-Identifier: Apache-2.0
// A Flight is a chunk on the device. It hands the chunk to the backend, sends the results to the slices'
// streams, and settles the chunk's rows in the ledger when the chunk is done. It treats all chunks alike:
// what differs between schedules is in the ChunkWork (schedule.h).
//
// Exactly once. A flight commits rows in the ledger when their weight gradient has been added, or already
// with the results if ChunkWork::settles_with_results. It releases the rows if the gradient failed.
// Operations on the head run only when no chunk of the head is under way, so no step or read finds committed
// rows whose gradient is still missing. If the device fails after the commit, the head's gradients are marked
// invalid, and the step cannot be applied.
//
// Threads. A flight is constructed and launched on the device thread. Its callbacks run on threads of the
// backend. The two callbacks share the flight, and the flight keeps its owner alive.
#ifndef LOSSD_SERVER_ENGINE_FLIGHT_H_
#define LOSSD_SERVER_ENGINE_FLIGHT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/engine_options.h"
#include "server/engine/schedule.h"

namespace lossd::engine {

struct EngineContext;
class OpenStep;
class StreamSet;

class Flight : public std::enable_shared_from_this<Flight> {
 public:
  // The parts of its head that a flight uses. `kernels` is valid until the head is deleted, everything else
  // as long as the owner lives.
  struct Parts {
    absl::string_view head;  // name of the head
    EngineContext* context = nullptr;
    kernels::HeadKernels* kernels = nullptr;
    OpenStep* step = nullptr;
    StreamSet* streams = nullptr;
  };

  // The head (HeadSession), which a flight tells of its progress. Members are called with the engine's lock
  // held unless they say otherwise.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual Parts flight_parts() = 0;
    // Says how the chunk was computed. Called once, before the rows of the chunk are settled, without the
    // lock.
    virtual void NoteChunk(const ChunkReport& report, const std::vector<kernels::Choice>& choices) = 0;
    // The device failed, and the head's accumulators may be half-written.
    virtual void OnAccumulationFailed(const absl::Status& status) = 0;
    // All rows of a slice have been computed, and its sums and counts are final.
    virtual void FinishSlice(const SliceWork& slice, double compute_seconds) = 0;
    // The chunk of these slices has left the device. The last call of a flight.
    virtual void OnChunkLeft(std::vector<std::unique_ptr<SliceWork>> slices) = 0;
  };

  // The time of construction counts as the time when the chunk was formed.
  Flight(std::shared_ptr<Owner> owner, std::unique_ptr<ChunkWork> work);

  bool accumulates() const { return work_->accumulates; }
  // Submits the chunk to the backend. Called without the lock.
  void Launch();

 private:
  // Results of all rows of the chunk, each [rows]; empty if no slice wants it.
  struct RowResults {
    std::vector<float> loss, lse, entropy, logprob;
    std::vector<int32_t> argmax;
    // As wide as the slice that wants most: [rows, wants.class_count] and [rows, wants.top_k].
    std::vector<float> class_logprobs, top_logprobs;
    std::vector<int32_t> top_classes;
    RowWants wants;  // what any slice wants
  };

  void MakeChunk();
  // The two callbacks of the backend.
  void OnResults(const absl::Status& status);
  void OnDone(const absl::Status& status);

  bool IsGood(size_t segment) const { return results_ok_ && slices_[segment].first_nonfinite_row < 0; }
  // Copies the results of its rows to every slice. Without the lock.
  void TakeResults();
  // Fails the streams of rows without good results, and delivers the results of the other slices. Settles the
  // rows as well if the chunk settles with its results (ChunkWork::settles_with_results).
  void SettleResults(const absl::Status& status);
  // Sends the results of a slice to its stream's observer.
  void Deliver(SliceWork& slice);
  // Tells the observers and the owner how the chunk was computed. Without the lock.
  void ReportChunk();
  // Commits or releases the rows of every segment in the ledger, and finishes every slice. A row that several
  // good slices hold counts as accumulated for the first of them and as a repeat for the others.
  void Settle(bool accumulated);
  ChunkReport Report() const;

  const std::shared_ptr<Owner> owner_;
  const Parts head_;
  const std::unique_ptr<ChunkWork> work_;
  const absl::Time formed_;
  std::vector<kernels::Slice> slices_;  // parallel to the segments
  RowResults results_;
  kernels::Chunk chunk_;
  double compute_seconds_ = 0.0;
  bool results_ok_ = false;  // the chunk has results; single rows may still not be finite
  bool settled_ = false;     // Settle has run, or is about to run, with the results
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_FLIGHT_H_
