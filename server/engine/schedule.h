// SPDX-License-Identifier: Apache-2.0
// The work that waits for the device on one head, and the choice of what comes next. A SliceWork is a slice
// on its way through the engine. A ChunkWork holds the rows that are computed together. An Operation is
// anything else that the device thread does on the head. WorkQueue keeps slices and operations in order and
// forms chunks from the slices.
//
// A Schedule decides which work of one head goes to the device next, and into which memory slices are
// received. It is the interface of two classes. ArrivalSchedule, in this file, computes rows in the order in
// which they arrive. DeterministicSchedule (deterministic_schedule.h) accumulates rows in a fixed order and
// contains an arrival schedule for everything else. Turns exist only there; HeadSession::order gives access
// to them.
//
// A slice goes through a schedule in three steps: FindMemory finds memory for its rows, Queue takes it when
// its rows have been copied there, and TakeNext makes it part of a chunk. A stream stays with the schedule
// that For returned for it.
//
// Plain state. The engine's lock guards it unless a type says otherwise, and is held in all calls of a
// schedule. Slices that a schedule gives back must be destroyed without the lock.
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

// A slice on its way through the engine. The schedule owns it while it waits, its chunk afterwards. Destroyed
// without the engine's lock.
struct SliceWork {
  std::shared_ptr<StreamState> stream;
  RowRange rows;
  int64_t bytes = 0;     // of its hidden states
  IncomingSlice caller;  // the caller's functions: copy the rows, learn that they are queued
  StagingBuffer buffer;  // its memory; empty until it is found
  absl::Time queued;
  int64_t round = 0;    // the round in which it is to be computed (WorkQueue)
  int passed_over = 0;  // how many chunks of later slices went first (WorkQueue)
  // These two are set when the slice joins a chunk of an ArrivalSchedule that accumulates.
  std::vector<uint8_t> accumulate;  // [rows], 1: the row is reserved for this slice
  bool has_repeats = false;         // some of its rows had been settled before

  // ---- In a chunk ----
  size_t index = 0;  // index of its first row in the arrays over the chunk
  double queue_seconds = 0.0;
  int64_t bad_row = -1;  // the first row, as numbered in the microbatch, without a result; -1: none
  // A segment with rows of this slice is good and accumulated. If the slice is bad because of another
  // segment, its error says that some rows may have been accumulated (RowNotFinite in errors.h).
  bool accumulated_all_the_same = false;
  kernels::LossSums sums;
  int64_t accumulated_rows = 0;
  int64_t repeated_rows = 0;
  SliceOutput output;

  bool is_good() const { return bad_row < 0; }
};

// The slices that a schedule had of failed streams.
struct DroppedSlices {
  std::vector<std::unique_ptr<SliceWork>> queued;
  std::vector<std::unique_ptr<SliceWork>> waiting;  // for memory
};

// The seed of a microbatch's random numbers (kernels/decision.h). It depends only on what identifies the
// microbatch, so a row is sampled in the same way whenever it is computed: in a repeat, over another
// connection, cut into other slices, in its backward pass, after a restart. `step`: the step that was open
// when the stream was opened. Pure; thread-safe. The result must not change from one version of the program
// to the next.
uint64_t SampleSeed(absl::string_view head, uint64_t step, uint64_t microbatch_id);

// A run of rows of one microbatch in a chunk. It usually belongs to one slice. It belongs to several slices
// if the same rows were sent twice, and to none if rows are computed that were not sent (deterministic mode).
struct Segment {
  uint64_t microbatch_id = 0;
  RowRange rows;
  size_t index = 0;                // index of its first row in the arrays over the chunk
  std::vector<SliceWork*> slices;  // the slices that hold the rows, in order of arrival
  RowWants wants;                  // the results to compute
  kernels::Slice input;            // the backend's input; Flight adds where results go
};

// A chunk on its way through the engine: a list of segments that are computed together. A schedule makes the
// chunk by deriving from this struct. A Flight (flight.h), which is the same for all schedules, has it
// computed. The engine's lock guards the chunk before the launch; afterwards the flight owns it.
struct ChunkWork {
  virtual ~ChunkWork() = default;

  // Called on the device thread, without the lock, right before the launch.
  virtual void Prepare() = 0;
  // The members below are called with the lock held.
  // OnComputed says how the chunk was computed. Called before OnResults, unless the chunk failed.
  virtual void OnComputed(const kernels::Chunk& chunk) {}
  // The results are there, and the memory of the slices is no longer in use. `all_good`: every slice has
  // results.
  virtual void OnResults(bool all_good) = 0;
  // The chunk has left the device, and the ledger knows which of its rows are settled.
  virtual void OnLeft() = 0;
  // True if a stream depends on this chunk although none of its slices is in it. The stream then ends, too,
  // if the device fails while it accumulates the chunk.
  virtual bool Affects(const StreamState& stream) const = 0;

  std::vector<std::unique_ptr<SliceWork>> slices;  // in order of arrival
  std::vector<Segment> segments;                   // by index
  size_t rows = 0;                                 // the length of the arrays over the chunk
  kernels::LossOptions options;
  kernels::DType hidden_dtype = kernels::DType::kBFloat16;
  bool accumulates = false;  // rows of the segments are reserved in the ledger
  // Rows are settled in the ledger, and calls end, when the results are there, before the weight gradient is
  // complete.
  bool settles_with_results = false;
  uint64_t turn = 0;                     // kernels::Chunk::turn
  std::shared_ptr<HeadSession> teacher;  // teacher of all rows; null if there is none
};

// Sets in `slice` what identifies the random numbers of these rows of the stream's microbatch.
inline void NameSamples(const StreamState& stream, RowRange rows, kernels::Slice& slice) {
  const StreamSpec& spec = stream.spec();
  slice.sample_seed = SampleSeed(spec.head, stream.head_state().step, spec.microbatch_id);
  slice.first_row = rows.begin;
}

// The backend's input for some rows of a stream. `memory`: where their hidden states are, unless these are
// retained, and where the gradients of the hidden states go, if wanted.
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

// ---- When a chunk is formed from the queue ----
// A chunk that accumulates reads and writes the whole fp32 weight gradient, even if it has few rows. So it is
// worth waiting for more rows, as long as the device does not become idle. A chunk in flight has its results
// before it computes its weight gradient, which takes about a third of its time. The next chunk is not needed
// before those results, and may fill until then. Nothing waits for a clock: if no chunk in flight is still
// without results, the queued rows go at once.

// The chunk that could be launched now.
struct NextChunk {
  int64_t rows = 0;  // 0: nothing
  bool accumulates = false;
  bool closed = false;  // no more rows can join it: it is full, or an operation comes next
};

// Whether the next chunk should wait for more rows. `without_results`: the number of accumulating chunks in
// flight that have no results yet.
inline bool WaitsForRows(const NextChunk& next, int without_results) {
  return next.accumulates && !next.closed && without_results > 0;
}

// A function to run on the device thread while no chunk of the head is in flight. Owned by the thread that
// waits for `done`.
struct Operation {
  absl::FunctionRef<absl::Status(head::Head&)> run;
  absl::Status result;
  absl::Notification done;
  uint64_t arrival = 0;  // set when it is queued
};

// ---- The queue ----

// WorkQueue holds the slices and operations that wait for the device on one head, and chooses what goes next.
//
// Peers share the device in rounds. In each round every peer with slices here has about `round_rows` rows,
// and slices of a round come before slices of the next round. Within a round slices are in order of arrival.
// So a peer that queues many rows does not hold up other peers: their slices join the round that has begun.
// The slices of a peer keep their order, and no slice passes an operation.
//
// There is one exception. If slices have teachers that live in host memory, slices whose teacher is on the
// device go before slices whose teacher is not, so that rows of one teacher are computed together. At most
// kMostPassedOver chunks pass a slice in this way. The slices of one teacher keep their order.
class WorkQueue {
 public:
  // Says where the values are that a slice needs from host memory. Called with the lock held.
  using ValuesOf = std::function<ValuesAre(const SliceWork&)>;

  // `round_rows`: the rows of a chunk, so that one peer's rows of a round fill a chunk. `values` null: no
  // slice needs values from host memory.
  explicit WorkQueue(int64_t round_rows, ValuesOf values = nullptr)
      : round_rows_(round_rows), values_(std::move(values)) {}

  void Push(std::unique_ptr<SliceWork> slice);
  void Push(Operation* operation);

  // Removes the slices of failed streams.
  std::vector<std::unique_ptr<SliceWork>> TakeFailed();
  // Removes all operations.
  std::vector<Operation*> TakeOperations();

  // The operation at the front; null if a slice is at the front or the queue is empty.
  Operation* FrontOperation() const;
  // Removes and returns the operation at the front; null as FrontOperation.
  Operation* TakeOperation();
  // Describes the next chunk: the slice that comes next, and later slices up to the next operation that have
  // the same options and dtype and also accumulate or also do not. At most `chunk_rows` rows, in the queue's
  // order.
  NextChunk Next(int64_t chunk_rows) const;
  // Removes and returns the slices of the next chunk, and reserves their rows in the ledger. Stops at the
  // first slice with rows that another chunk is computing now.
  std::vector<std::unique_ptr<SliceWork>> TakeChunk(int64_t chunk_rows, Ledger& ledger);

  // Where the values are that the next chunk needs.
  ValuesAre Values() const;

  bool empty() const { return items_.empty(); }
  int64_t slices() const { return slices_; }
  int64_t rows() const { return rows_; }
  int64_t operations() const { return static_cast<int64_t>(items_.size()) - slices_; }

 private:
  using Item = std::variant<std::unique_ptr<SliceWork>, Operation*>;

  const SliceWork* SliceAt(size_t position) const;  // null: an operation is at this position, or nothing
  ValuesAre ValuesAt(size_t position) const;
  // The position of the slice that leads the next chunk: the chunk has this slice's options. It is the first
  // slice, unless slices pass others because of their teachers (above). The size of the queue if an operation
  // is at the front, or nothing.
  size_t Lead() const;
  // Calls fn(position) for each slice of the next chunk as long as fn returns true. Returns whether no
  // further slice can join the chunk.
  template <typename Fn>
  bool ForEachOfNext(int64_t chunk_rows, Fn fn) const;

  // The round of a slice that is pushed now. Charges the slice's rows to its peer.
  int64_t RoundOf(const SliceWork& slice);
  // Forgets the peers that have no rows in the present round or a later one.
  void ForgetPeers();

  const int64_t round_rows_;
  const ValuesOf values_;
  int64_t round_ = 0;  // the round of the last chunk
  // By peer: the rows that are charged to the peer. These are round_rows_ for each round before the round of
  // its first slice, and the rows of its slices so far. So the peer's next slice belongs to round
  // charged_rows_ / round_rows_.
  std::map<std::string, int64_t> charged_rows_;
  std::deque<Item> items_;
  int64_t slices_ = 0;
  int64_t rows_ = 0;
};

// ---- Schedules ----

// Takes a slice that had to wait for its memory and has it now. Called without the lock, on any thread.
using MemoryReady = std::function<void(std::unique_ptr<SliceWork>)>;

// A chunk, an operation, or nothing.
using ScheduledWork = std::variant<std::monostate, std::unique_ptr<ChunkWork>, Operation*>;

// Counts of what a schedule holds.
struct Backlog {
  int64_t queued_slices = 0;
  int64_t queued_rows = 0;     // rows of slices that are computed by arrival
  int64_t waiting_slices = 0;  // slices and contributions that wait for their turn
  std::string waits_for;       // e.g. "microbatch 3, rows [0, 128)"; empty if no slice waits for another
};

class Schedule {
 public:
  virtual ~Schedule() = default;

  // The schedule for streams of the head that accumulate, or for those that do not: this schedule or a part
  // of it.
  virtual Schedule& For(bool accumulates) = 0;

  // ---- Slices of this schedule's streams ----
  virtual SliceLimits limits() const = 0;
  // Changes the limits on slices and the rows of a chunk. No stream of the head is open. FAILED_PRECONDITION
  // if the schedule needs more rows in a slice; then nothing has changed.
  virtual absl::Status SetLimits(const SliceLimits& limits, int64_t chunk_rows) = 0;
  // True if `slice` has its memory (SliceWork::buffer) now. False if the schedule has taken the slice:
  // MemoryReady gets it when there is memory, unless its stream fails before.
  virtual bool FindMemory(std::unique_ptr<SliceWork>& slice) = 0;
  // Takes a slice whose rows have been copied into its memory and whose stream has not failed.
  virtual void Queue(std::unique_ptr<SliceWork> slice) = 0;

  // ---- The whole head ----
  // Removes the slices of failed streams.
  virtual DroppedSlices TakeFailed() = 0;
  // Queues an operation. It runs when everything that was complete before it has left the device.
  virtual void Push(Operation* operation) = 0;
  // Removes all operations.
  virtual std::vector<Operation*> TakeOperations() = 0;
  virtual int64_t operations() const = 0;
  // Removes and returns the next chunk or operation; the rows of a chunk are reserved in the ledger.
  // `head_is_idle`: no chunk of the head is on the device.
  virtual ScheduledWork TakeNext(const DeviceLoad& load, bool head_is_idle) = 0;
  // Where the values are that the next chunk needs from host memory; kHome if there is no next chunk.
  virtual ValuesAre Values(const DeviceLoad& load) {
    Schedule& by_arrival = For(/*accumulates=*/false);  // rows in groups have no teacher
    return &by_arrival == this ? ValuesAre::kHome : by_arrival.Values(load);
  }
  virtual Backlog backlog() const = 0;
};

// The schedule that computes by arrival. Slices wait in one queue, and a chunk takes as many slices with the
// same options as it has room for, from any streams. Memory comes from the staging pool (staging.h).
//
// Threads and locks as in Schedule.
class ArrivalSchedule final : public Schedule {
 public:
  // `chunk_rows`: the most rows of a chunk. The pool and the ledger outlive the schedule. `values`: as in
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
