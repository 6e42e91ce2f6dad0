// SPDX-License-Identifier: Apache-2.0
// The work of the device on one head, and what comes next of it. A SliceWork is a slice on its way through
// the engine, a ChunkWork is the rows that are computed together, an Operation is anything else that the
// device thread does on the head. WorkQueue keeps slices and operations in order and forms chunks of the
// slices.
//
// A Schedule decides what comes next to the device on one head, and where slices are received until then. Two
// schedules exist. ArrivalSchedule, in this file, computes rows in the order in which they arrive.
// DeterministicSchedule (deterministic_schedule.h) accumulates rows in an order of its own and contains an
// arrival schedule for everything else. Schedule is what both are: the work that waits for the device. What
// only an order has, turns, are further members of DeterministicSchedule (HeadSession::order).
//
// A slice goes through a schedule in three steps: FindMemory (its rows may now be copied), Queue (they have
// been), and TakeNext, which makes it part of a chunk. A stream stays with the schedule that For gave it.
//
// Plain state without locks. The engine's lock guards it unless a type says otherwise, and is held in all
// calls of a schedule. Slices that a schedule gives back are to be destroyed without the lock.
#ifndef LOSSD_SERVER_ENGINE_SCHEDULE_H_
#define LOSSD_SERVER_ENGINE_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "server/engine/device_loop.h"
#include "server/engine/ledger.h"
#include "server/engine/staging.h"
#include "server/engine/stream.h"
#include "server/engine/stream_state.h"
#include "server/head/head.h"

namespace lossd::engine {

// ---- Work ----

// A slice on its way through the engine. Owned by whoever has it: the schedule while it waits, its chunk
// afterwards. Destroyed without the engine's lock.
struct SliceWork {
  std::shared_ptr<StreamState> stream;
  RowRange rows;
  int64_t bytes = 0;     // of its hidden states
  IncomingSlice caller;  // how its rows are copied, and what is called then
  StagingBuffer buffer;  // its memory, once it has been found
  absl::Time queued;
  int64_t round = 0;    // in which it is to be computed (WorkQueue)
  int passed_over = 0;  // chunks of slices behind it that went before it (WorkQueue)
  // Set when it joins a chunk by arrival that accumulates.
  std::vector<uint8_t> accumulate;  // [rows], 1: reserved for it
  bool has_repeats = false;         // some of its rows were settled before

  // ---- In a chunk ----
  size_t index = 0;  // of its first row in the arrays over the chunk
  double queue_seconds = 0.0;
  int64_t bad_row = -1;  // of the microbatch: the first one without a result; -1: all have one
  // If it is bad: rows of it are accumulated that it shares with other slices, or that lie behind such rows.
  bool accumulated_all_the_same = false;
  kernels::LossSums sums;
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

// The seed of a microbatch's random numbers (kernels/decision.h): a function of what identifies it and of
// nothing else. So a row is sampled alike whenever and wherever it is computed: in a repeat, by another
// connection, cut into other slices, in its backward pass, after a restart. Pure; thread-safe.
// `step`: the one that was open when the rows were opened. The result may not change from one version of the
// program to the next.
uint64_t SampleSeed(absl::string_view head, uint64_t step, uint64_t microbatch_id);

// A run of rows of one microbatch in a chunk. It belongs to the slices that hold its rows: usually one,
// several if the same rows were sent twice, or none if rows have to be computed that were not sent.
struct Segment {
  uint64_t microbatch_id = 0;
  RowRange rows;
  size_t index = 0;                // of its first row in the arrays over the chunk
  std::vector<SliceWork*> slices;  // that hold the rows, in order of arrival
  RowWants wants;                  // results that are computed
  kernels::Slice input;            // all that the backend is given but for the results
};

// A chunk on its way through the engine: a list of segments that are computed together. The schedule that put
// them together describes the chunk, and a Flight (flight.h), which is the same for all
// schedules, computes it. Guarded by the engine's lock before the launch; the flight's own afterwards.
struct ChunkWork {
  virtual ~ChunkWork() = default;

  // Called on the device thread, without the lock, right before the launch.
  virtual void Prepare() = 0;
  // The members below are called with the lock held.
  // How the chunk was computed, before OnResults; not if that failed.
  virtual void OnComputed(const kernels::Chunk& chunk) {}
  // Results are there, and the memory of the slices is not in use any more. `all_good`: every slice has
  // results.
  virtual void OnResults(bool all_good) = 0;
  // The chunk has left the device, and the ledger knows what of it is settled.
  virtual void OnLeft() = 0;
  // True if a stream depends on rows of this chunk besides its own: then it ends if the device fails half-way
  // through accumulating the chunk.
  virtual bool Affects(const StreamState& stream) const = 0;

  std::vector<std::unique_ptr<SliceWork>> slices;  // in order of arrival
  std::vector<Segment> segments;                   // by index
  size_t rows = 0;                                 // length of the arrays over the chunk
  kernels::LossOptions options;
  kernels::DType hidden_dtype = kernels::DType::kBFloat16;
  bool accumulates = false;  // rows of the segments are reserved in the ledger
  // Rows are booked, and calls end, with the results instead of with the weight gradient.
  bool settles_with_results = false;
  uint64_t turn = 0;                     // kernels::Chunk::turn
  std::shared_ptr<HeadSession> teacher;  // of all rows; null without one
};

// Says which random numbers are those of some rows of the stream's microbatch.
inline void NameSamples(const StreamState& stream, RowRange rows, kernels::Slice& slice) {
  const StreamSpec& spec = stream.spec();
  slice.sample_seed = SampleSeed(spec.head, stream.head_state().step, spec.microbatch_id);
  slice.first_row = rows.begin;
}

// What the backend is given of rows of a stream. `memory`: where their hidden states are, unless they are
// retained, and where their gradients go, if wanted.
inline kernels::Slice InputOf(const StreamState& stream, RowRange rows, uint8_t* memory) {
  kernels::Slice slice;
  slice.rows = rows.size();
  slice.hidden = BringsRows(stream) ? memory : nullptr;
  slice.retained_offset = stream.RetainedOffset(rows);
  if (stream.teacher()) slice.teacher_hidden = memory + stream.RowBytes(rows.size());
  stream.PutValues(rows, slice);
  slice.grad_scale = stream.grad_scale(rows.begin);
  slice.grad_hidden = stream.spec().want_grad_hidden ? memory : nullptr;
  NameSamples(stream, rows, slice);
  return slice;
}

// ---- When a chunk is formed of what is queued ----
// A chunk that accumulates reads and writes the whole fp32 weight gradient, however few rows it has. So rows
// are worth waiting for, as long as the device does not idle over it: a chunk in flight has its results
// before it computes its weight gradient, about a third of its time, and by then the next chunk is needed.
// Until then it may fill. Nothing waits for a clock: with no such chunk in flight, what is there goes at
// once.

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

// Something to run on the device thread while no chunk of the head is in flight. Owned by the thread
// that waits for `done`.
struct Operation {
  absl::FunctionRef<absl::Status(head::Head&)> run;
  absl::Status result;
  absl::Notification done;
  uint64_t arrival = 0;  // set when it is queued
};

// ---- The queue ----

// What waits for the device on one head, in order: slices and operations, and the choice of what goes next.
//
// Peers share the device in rounds: of each peer that has slices here, about `round_rows` rows belong to a
// round, and the slices of a round come before those of the next one. Within a round the order is that of
// arrival. So a peer that queues much does not hold up the others, whose slices join the round that has
// begun. The slices of a peer keep their order, and none passes an operation.
//
// With one exception: where the rows of slices have teachers that live in host memory, those whose teacher is
// on the device go before those whose teacher is not, so that rows of one teacher are computed together. At
// most kMostPassedOver chunks go before a slice in this way. The slices of one teacher keep their order.
class WorkQueue {
 public:
  // Where the values are that a slice needs from host memory. Called with the lock held.
  using ValuesOf = std::function<ValuesAre(const SliceWork&)>;

  // `round_rows`: those of a chunk, so that a round of one peer fills one. `values`: null: no slice needs
  // any.
  explicit WorkQueue(int64_t round_rows, ValuesOf values = nullptr)
      : round_rows_(round_rows), values_(std::move(values)) {}

  void Push(std::unique_ptr<SliceWork> slice);
  void Push(Operation* operation);

  // Removes the slices of failed streams.
  std::vector<std::unique_ptr<SliceWork>> TakeFailed();
  // Removes all operations.
  std::vector<Operation*> TakeOperations();

  // The operation at the front; null if a slice is there or nothing.
  Operation* FrontOperation() const;
  // The same, removed.
  Operation* TakeOperation();
  // The next chunk: the slice that comes next and others, up to the next operation, that share its options,
  // dtype and kind, at most `chunk_rows` rows in all, in their order.
  NextChunk Next(int64_t chunk_rows) const;
  // Its slices, removed, with their rows reserved in the ledger; only those before the first one with rows
  // that another chunk is computing right now.
  std::vector<std::unique_ptr<SliceWork>> TakeChunk(int64_t chunk_rows, Ledger& ledger);

  // Where the values are that the next chunk needs.
  ValuesAre Values() const;

  bool empty() const { return items_.empty(); }
  int64_t slices() const { return slices_; }
  int64_t rows() const { return rows_; }
  int64_t operations() const { return static_cast<int64_t>(items_.size()) - slices_; }

 private:
  using Item = std::variant<std::unique_ptr<SliceWork>, Operation*>;

  const SliceWork* SliceAt(size_t position) const;  // null: an operation is there
  ValuesAre ValuesAt(size_t position) const;
  // The position of the slice whose options the next chunk has; the size of the queue if there is none.
  size_t Lead() const;
  // Calls fn(position) for the slices of the next chunk while it returns true; returns whether no further
  // slice can join them.
  template <typename Fn>
  bool ForEachOfNext(int64_t chunk_rows, Fn fn) const;

  // The round of a slice that is pushed now.
  int64_t RoundOf(const SliceWork& slice);
  // Forgets the peers that have nothing of the present round or a later one.
  void ForgetPeers();

  const int64_t round_rows_;
  const ValuesOf values_;
  int64_t round_ = 0;                     // that of the last chunk
  std::map<std::string, int64_t> given_;  // by peer: rows up to its last slice, round_rows_ for each round
  std::deque<Item> items_;
  int64_t slices_ = 0;
  int64_t rows_ = 0;
};

// ---- Schedules ----

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
// options as it holds, from whatever streams. Memory comes from the staging pool (staging.h).
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
