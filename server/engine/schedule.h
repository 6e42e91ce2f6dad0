// SPDX-License-Identifier: Apache-2.0
// A Schedule decides what comes next to the device on one head, and where slices are received until then. Two
// schedules exist. ArrivalSchedule, in this file, computes rows in the order in which they arrive.
// DeterministicSchedule (deterministic_schedule.h) accumulates rows in an order of its own and contains an
// arrival schedule for everything else. Schedule is what both are: the work that waits for the device. What
// only an order has, turns, are further members of DeterministicSchedule (HeadSession::order).
//
// A slice goes through a schedule in three steps: FindMemory (its rows may now be copied), Queue (they have
// been), and TakeNext, which makes it part of a chunk. A stream stays with the schedule that For gave it.
//
// Guarded by the engine's lock, which is held in all calls. Slices that a schedule gives back are to be
// destroyed without it.
#ifndef LOSSD_SERVER_ENGINE_SCHEDULE_H_
#define LOSSD_SERVER_ENGINE_SCHEDULE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/device_loop.h"
#include "server/engine/ledger.h"
#include "server/engine/staging.h"
#include "server/engine/stream.h"
#include "server/engine/stream_state.h"
#include "server/engine/work_queue.h"

namespace lossd::engine {

// Takes a slice whose memory has been found after a while. Called without the lock, on any thread.
using MemoryReady = std::function<void(std::unique_ptr<SliceWork>)>;

// A chunk, an operation, or nothing.
using ScheduledWork = std::variant<std::monostate, std::unique_ptr<ChunkWork>, Operation*>;

// What lies in a schedule.
struct Backlog {
  int64_t queued_slices = 0;
  int64_t queued_rows = 0;     // of those that are computed by arrival
  int64_t waiting_slices = 0;  // for their turn; contributions too
  std::string waits_for;       // e.g. "microbatch 3, rows [0, 128)"; empty if no slice waits for another
};

class Schedule {
 public:
  virtual ~Schedule() = default;

  // The schedule of those streams of the head that accumulate, or do not; this one or a part of it.
  virtual Schedule& For(bool accumulates) = 0;

  // ---- Slices of this schedule's streams ----
  virtual SliceLimits limits() const = 0;
  // The head computes other numbers of rows from now on; none of its streams is open. FAILED_PRECONDITION if
  // the schedule cannot do with so few; then nothing changed.
  virtual absl::Status SetLimits(const SliceLimits& limits, int64_t chunk_rows) = 0;
  // True if `slice` has its memory (SliceWork::buffer) now. False if it has been taken over: MemoryReady gets
  // it when it has memory, unless its stream fails before.
  virtual bool FindMemory(std::unique_ptr<SliceWork>& slice) = 0;
  // Takes a slice whose rows are in its memory and whose stream has not failed.
  virtual void Queue(std::unique_ptr<SliceWork> slice) = 0;

  // ---- The whole head ----
  // Removes the slices of failed streams.
  virtual DroppedSlices TakeFailed() = 0;
  // An operation runs when everything that was complete before it has left the device.
  virtual void Push(Operation* operation) = 0;
  virtual std::vector<Operation*> TakeOperations() = 0;
  virtual int64_t operations() const = 0;
  // The next thing to do, removed, with its rows reserved in the ledger. `head_is_idle`: no chunk of the head
  // is on the device.
  virtual ScheduledWork TakeNext(const DeviceLoad& load, bool head_is_idle) = 0;
  // Where the values are that the chunk needs from host memory which would be next; kHome if none is.
  virtual ValuesAre Values(const DeviceLoad& load) {
    Schedule& by_arrival = For(/*accumulates=*/false);  // groups of rows have no teacher
    return &by_arrival == this ? ValuesAre::kHome : by_arrival.Values(load);
  }
  virtual Backlog backlog() const = 0;
};

// The schedule that computes by arrival: slices wait in one queue, and a chunk takes as many with the same
// options as it holds, from whatever streams (work_queue.h). Memory comes from the staging pool (staging.h).
//
// Threads and locks as in Schedule.
class ArrivalSchedule final : public Schedule {
 public:
  // `chunk_rows`: the most rows of a chunk. The pool and the ledger outlive the schedule. `values`: as
  // WorkQueue.
  ArrivalSchedule(SliceLimits limits, int64_t chunk_rows, StagingPool* staging, Ledger* ledger,
                  MemoryReady memory_ready, WorkQueue::ValuesOf values = nullptr);

  Schedule& For(bool accumulates) override { return *this; }
  SliceLimits limits() const override { return limits_; }
  absl::Status SetLimits(const SliceLimits& limits, int64_t chunk_rows) override {
    limits_ = limits;
    chunk_rows_ = chunk_rows;
    return absl::OkStatus();
  }
  bool FindMemory(std::unique_ptr<SliceWork>& slice) override;
  void Queue(std::unique_ptr<SliceWork> slice) override { queue_.Push(std::move(slice)); }

  DroppedSlices TakeFailed() override { return {.queued = queue_.TakeFailed()}; }
  void Push(Operation* operation) override { queue_.Push(operation); }
  std::vector<Operation*> TakeOperations() override { return queue_.TakeOperations(); }
  int64_t operations() const override { return queue_.operations(); }
  ScheduledWork TakeNext(const DeviceLoad& load, bool head_is_idle) override;
  ValuesAre Values(const DeviceLoad& load) override {
    return load.accepts_chunk() ? queue_.Values() : ValuesAre::kHome;
  }
  Backlog backlog() const override {
    return {.queued_slices = queue_.slices(), .queued_rows = queue_.rows()};
  }
  // The operation that TakeNext would return before anything else; null if there is none.
  const Operation* FrontOperation() const { return queue_.FrontOperation(); }

 private:
  SliceLimits limits_;
  int64_t chunk_rows_;
  StagingPool* const staging_;
  Ledger* const ledger_;
  const MemoryReady memory_ready_;
  WorkQueue queue_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_SCHEDULE_H_
