// SPDX-License-Identifier: Apache-2.0
// The heads of an engine. A HeadSession is one head with all work on it. A Stream is the caller's end of one
// of its streams. A HeadDirectory has the sessions of all heads by name.
//
// Threads. The engine's lock guards all of it. Members are called with the lock held unless they say
// otherwise. A Stream takes the lock itself.
#ifndef LOSSD_SERVER_ENGINE_HEAD_SESSION_H_
#define LOSSD_SERVER_ENGINE_HEAD_SESSION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/engine/deterministic_schedule.h"
#include "server/engine/device_loop.h"
#include "server/engine/engine_context.h"
#include "server/engine/engine_options.h"
#include "server/engine/flight.h"
#include "server/engine/magnitudes.h"
#include "server/engine/open_step.h"
#include "server/engine/schedule.h"
#include "server/engine/stream.h"
#include "server/engine/stream_admission.h"
#include "server/engine/stream_state.h"
#include "server/engine/teaching.h"
#include "server/head/head.h"

namespace lossd::engine {

// One head and all work on it: its open step (open_step.h), its streams (stream_admission.h), its deferred
// microbatches (stream_state.h), and the schedule of its work (schedule.h). A session lives from the creation
// of the head until the last of its slices is destroyed. The head itself is destroyed earlier, on the device
// thread (DeleteHead).
//
// Each part has a contract of its own. The session does what concerns several parts: it passes a slice from
// its caller to the schedule, it sends a chunk to the device and takes it back, and it begins a new step.
class HeadSession final : public DeviceLoop::Source,
                          public Flight::Owner,
                          public std::enable_shared_from_this<HeadSession> {
 public:
  // Creates the session of a head whose kernels exist, and allocates the memory of its schedule. Called on
  // the device thread, without the lock. The context outlives the session. `class_list`: the list for
  // config().class_list, which the kernels do not know.
  static absl::StatusOr<std::shared_ptr<HeadSession>> Create(EngineContext* context, std::string name,
                                                             std::unique_ptr<kernels::HeadKernels> kernels,
                                                             kernels::ClassList class_list = {});

  // ---- Parts; the first three are constant, except config().shares ----
  const std::string& name() const { return name_; }
  const kernels::HeadConfig& config() const { return config_; }
  EngineContext& context() { return *context_; }
  OpenStep& step() { return *step_; }
  StreamSet& streams() { return *streams_; }
  StreamAdmission& admission() { return *admission_; }
  DeferredMicrobatches& deferred() { return deferred_; }
  Schedule& schedule() { return *schedule_; }
  // The schedule that puts rows and contributions in order, in deterministic mode. Null: they accumulate in
  // any order, and nothing waits for a turn.
  DeterministicSchedule* order() { return order_; }
  // Used on the device thread only, without the lock.
  head::Head& head() { return *head_; }
  Magnitudes magnitudes;  // of the head's values and moments; used on the device thread only
  Teaching teaching;      // the streams of other heads that this head teaches
  // Destroys the head, and gives back the context's memory that the session holds, because the backend may
  // keep the session alive longer than the engine. Called on the device thread, without the lock.
  void DeleteHead();

  // ---- Slices ----
  // Takes a slice of an open stream. True if `slice` has its memory now; the caller then calls CopyAndQueue.
  // False if the slice waits for memory, or was refused; the caller destroys a slice that was refused without
  // the lock.
  bool Receive(std::unique_ptr<SliceWork>& slice);
  // Copies the slice's rows into its memory and queues the slice. Called without the lock, on a thread that
  // may spend the time of a copy.
  void CopyAndQueue(std::unique_ptr<SliceWork> slice);

  // ---- Versions ----
  // Calls `enter`, which replaces the open step by another one, and then ends the calls that are bound to the
  // former step.
  void EnterStep(absl::FunctionRef<void(OpenStep&)> enter);
  // Called after a change of versions. Ends the streams of this head, and the streams that it teaches, that
  // are bound to an earlier version (OpenStep::CheckBound). Releases the deferred microbatches that are.
  void EndStale();
  // Calls SetShares of the head's kernels and adopts the new sizes of slices and chunks. On the device
  // thread, without the lock, while nothing is under way on the head.
  absl::Status SetShares(const std::vector<int32_t>& shares);
  // Notes that the weights may be half-written, and ends the calls that are bound to them (EndStale).
  void MarkWeightsInvalid(absl::Status why);
  void OnAccumulationFailed(const absl::Status& status) override;

  // ---- The device ----
  // Runs `operation` on the device thread after everything that was submitted to the head before, and blocks
  // until it has run. Called without the lock. NOT_FOUND if the head is deleted, UNAVAILABLE,
  // RESOURCE_EXHAUSTED (too many operations wait), or what `operation` returns.
  absl::Status Run(absl::FunctionRef<absl::Status()> operation);
  // Begins to delete the head: Run refuses from now on. False if a chunk of the head is still under way,
  // which is possible although all calls that sent rows have ended.
  bool BeginDelete() {
    deleting_ = true;
    return chunks_in_flight_ == 0;
  }
  bool deleting() const { return deleting_; }
  DeviceLoop::Work TakeWork(const DeviceLoad& load) override;
  ValuesAre Values(const DeviceLoad& load) override { return schedule_->Values(load); }

  // ---- Its flights ----
  Flight::Parts flight_parts() override;
  // Keeps the description of the last chunk, and tells the observers if the chunk was computed in another way
  // than the chunk before it.
  void NoteChunk(const ChunkReport& report, const std::vector<kernels::Choice>& choices) override;
  void FinishSlice(const SliceWork& slice, double compute_seconds) override;
  void OnChunkLeft(std::vector<std::unique_ptr<SliceWork>> slices) override;

  HeadSnapshot Snapshot();

 private:
  HeadSession(EngineContext* context, std::string name, std::unique_ptr<kernels::HeadKernels> kernels,
              VersionCounter* counter);

  EngineContext* const context_;
  const std::string name_;
  std::unique_ptr<head::Head> head_;
  kernels::HeadConfig config_;
  const kernels::DType compute_dtype_;
  int64_t chunk_rows_;
  int64_t slice_rows_;
  kernels::MemoryBytes memory_;
  std::vector<kernels::Choice> choices_;
  const bool divided_;  // each of several devices has some of the classes

  const std::shared_ptr<OpenStep> step_;
  DeferredMicrobatches deferred_;
  std::shared_ptr<Schedule> schedule_;          // set once, by Create
  DeterministicSchedule* order_ = nullptr;      // schedule_ if it is deterministic; else null
  std::unique_ptr<StreamSet> streams_;          // set once, by Create
  std::unique_ptr<StreamAdmission> admission_;  // set once, by Create
  std::vector<kernels::Choice> last_chunk_choices_;
  double gradient_error_ = 0.0;   // predicted, of the last chunk with sampled gradients
  int64_t chunks_in_flight_ = 0;  // includes chunks of other heads that this head teaches
  bool deleting_ = false;
  int64_t total_rows_ = 0;
};

// Adds the streams, slices and rows of the head to `stats`.
void AddTo(HeadSession& session, EngineStats& stats);

// The limits that a head with this config would have on its slices, if its backend takes slices of at most
// `slice_rows` rows.
SliceLimits PlannedLimits(const EngineOptions& options, const kernels::HeadConfig& config,
                          int64_t slice_rows);

// The caller's end of an open stream. Thread-safe. Destroying it cancels the stream if it has not finished;
// StreamObserver::OnFinished still comes. Must be destroyed before the engine.
class Stream {
 public:
  Stream(std::shared_ptr<HeadSession> session, std::shared_ptr<StreamState> state)
      : session_(std::move(session)), state_(std::move(state)) {}
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // The name of its head; valid as long as the stream.
  absl::string_view head() const { return state_->spec().head; }
  uint64_t microbatch_id() const { return state_->spec().microbatch_id; }
  HeadState state() const { return state_->head_state(); }  // when the stream was opened
  SliceLimits limits() const { return state_->limits(); }   // for this stream's dtype
  int64_t hidden_size() const { return state_->hidden_size(); }
  bool brings_rows() const { return BringsRows(*state_); }  // whether slices bring values of their rows

  // Lets results flow; the observer is not called before. Call once.
  void Start();
  // Takes one slice: checks it, finds memory for its rows, copies the rows there and queues the slice. If
  // there is memory now, this call does all of that. Otherwise the slice waits, and StreamObserver::OnMemory
  // continues. The memory is usually a buffer of the staging pool. For a stream that accumulates on a
  // deterministic engine it is the place of the rows in their group, when the group has its turn. A slice
  // that breaks a rule fails the stream, with OnFinished. Hand over one slice at a time: the next one after
  // IncomingSlice::on_queued was called.
  void Receive(IncomingSlice slice);
  // For streams of OpenBackward: the slices to hand to Receive, in order. Their hidden states are in retained
  // memory, so Receive uses only IncomingSlice::rows and on_queued.
  std::vector<RowRange> RetainedSlices() const { return state_->RetainedSlices(); }
  // Says that no more slices will come. Fails the stream if valid rows are missing.
  void HalfClose();
  // Fails the stream with `why` (not OK). Slices that wait or are queued are dropped; slices on the device
  // finish.
  void Cancel(absl::Status why);

 private:
  const std::shared_ptr<HeadSession> session_;
  const std::shared_ptr<StreamState> state_;
};

// The heads of an engine by name. A head passes through these states: its name is taken when creation begins
// (Reserve), the head exists when it has its session (Fill), callers see it when it is published (Publish),
// and they see it no longer when deletion begins (BeginDelete).
//
// Plain state; the engine's lock guards it.
class HeadDirectory {
 public:
  using SessionPtr = std::shared_ptr<HeadSession>;

  explicit HeadDirectory(int64_t max_heads) : max_heads_(max_heads) {}

  // ---- Creation ----
  // Takes a name, and returns the number of the head that is to be created, for Fill and Remove.
  // RESOURCE_EXHAUSTED or ALREADY_EXISTS.
  absl::StatusOr<uint64_t> Reserve(absl::string_view name);
  // Checks whether Reserve would take the name; errors as Reserve.
  absl::Status CheckFree(absl::string_view name) const;
  // Gives the head with this number its session. False if the head was deleted meanwhile; the name may then
  // belong to another head.
  [[nodiscard]] bool Fill(absl::string_view name, uint64_t number, SessionPtr session);
  // Makes a head visible. Errors as Find.
  absl::Status Publish(absl::string_view name);

  // ---- Deletion ----
  // Hides a head from Find. Returns its number, for EndDelete. NOT_FOUND if there is no such head.
  absl::StatusOr<uint64_t> BeginDelete(absl::string_view name);
  // Frees the name of the head with this number and returns the head's session. Null if the creation of that
  // head has failed meanwhile, or has not come to Fill. The name may then belong to another head, which
  // stays.
  SessionPtr EndDelete(absl::string_view name, uint64_t number);
  // Frees the name of the head with this number, whose creation failed. Another head of the name stays.
  void Remove(absl::string_view name, uint64_t number);
  std::vector<SessionPtr> RemoveAll();

  // ---- Look-up ----
  // NOT_FOUND, or UNAVAILABLE while the head is being created.
  absl::StatusOr<SessionPtr> Find(absl::string_view name) const;
  // As Find, for published heads only; UNAVAILABLE before a head is published.
  absl::StatusOr<SessionPtr> FindPublished(absl::string_view name) const;
  // The sessions of all heads that have one, also of heads that are being deleted. Ordered by name.
  std::vector<SessionPtr> Sessions() const;
  // The sessions of all published heads that are not being deleted. Ordered by name.
  std::vector<SessionPtr> Published() const;
  int64_t published() const;  // includes published heads that are being deleted

 private:
  struct Slot {
    uint64_t number = 0;  // unique in the directory
    SessionPtr session;   // null while the head is being created
    bool published = false;
    bool deleting = false;
  };
  using Slots = std::map<std::string, Slot, std::less<>>;
  // NOT_FOUND if there is no such head.
  absl::StatusOr<const Slot*> FindSlot(absl::string_view name) const;
  // The slot of the head with this number; the end if there is none.
  Slots::iterator SlotOf(absl::string_view name, uint64_t number);

  const int64_t max_heads_;
  uint64_t last_number_ = 0;
  Slots slots_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_SESSION_H_
