// SPDX-License-Identifier: Apache-2.0
// A Flight is a chunk on the device. It hands the chunk to the backend, sends the results of the slices when
// they are there, and books the rows in the ledger when the chunk is done. It treats all chunks alike; what
// is special about a chunk is in its ChunkWork (schedule.h).
//
// Exactly once. A flight commits rows when their weight gradient has been added, or together with the results
// if the work says so (ChunkWork::settles_with_results). It releases the rows if the gradient failed.
// Operations on the head run when no chunk of it is under way, so no step or read finds committed rows whose
// gradient is still to come. If the device fails in between, the head's gradients are marked invalid:
// whatever the calls were told, the step is not applied.
//
// Threads. Constructed and launched on the device thread, the rest on whatever thread the backend calls from.
// The backend's two callbacks share the flight, and the flight keeps its owner alive.
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
  // What a flight uses of its head. The kernels are valid until the head is deleted, and everything else as
  // long as the owner lives.
  struct Parts {
    absl::string_view head;  // its name
    EngineContext* context = nullptr;
    kernels::HeadKernels* kernels = nullptr;
    OpenStep* step = nullptr;
    StreamSet* streams = nullptr;
  };

  // The head, which is told how its chunk goes. Members are called with the engine's lock held unless they
  // say otherwise.
  class Owner {
   public:
    virtual ~Owner() = default;
    virtual Parts flight_parts() = 0;
    // How the chunk was computed. Called once, before the rows of the chunk are settled. Without the lock.
    virtual void NoteChunk(const ChunkReport& report, const std::vector<kernels::Choice>& choices) = 0;
    // The accumulators may be half-written.
    virtual void OnAccumulationFailed(const absl::Status& status) = 0;
    // All rows of a slice have been computed, and its numbers are final.
    virtual void FinishSlice(const SliceWork& slice, double compute_seconds) = 0;
    // The chunk of these slices is over, and nothing more follows.
    virtual void OnChunkLeft(std::vector<std::unique_ptr<SliceWork>> slices) = 0;
  };

  // The chunk counts as formed now.
  Flight(std::shared_ptr<Owner> owner, std::unique_ptr<ChunkWork> work);

  bool accumulates() const { return work_->accumulates; }
  // Without the lock.
  void Launch();

 private:
  // Results of all rows of the chunk; empty if no slice wants them.
  struct RowResults {
    std::vector<float> loss, lse, entropy, logprob;
    std::vector<int32_t> argmax;
    // Rows of what the widest slice wants: [rows, wants.class_count], [rows, wants.top_k].
    std::vector<float> class_logprobs, top_logprobs;
    std::vector<int32_t> top_classes;
    RowWants wants;  // of all slices
  };

  void MakeChunk();
  // The two callbacks of the backend.
  void OnResults(const absl::Status& status);
  void OnDone(const absl::Status& status);

  bool IsGood(size_t segment) const { return results_ok_ && slices_[segment].first_nonfinite_row < 0; }
  // Gives every slice what was computed of its rows. Without the lock.
  void TakeResults();
  // Sends the results of a slice to its stream's observer.
  void Deliver(SliceWork& slice);
  // Tells all who want to know how the chunk was computed. Without the lock.
  void Tell();
  // Books every segment and every slice. A row that several good slices hold is accumulated for the first of
  // them and a repeat for the others.
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
  bool results_ok_ = false;
  bool settled_ = false;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_FLIGHT_H_
