// SPDX-License-Identifier: Apache-2.0
// The heads of an engine. A HeadSession is one head with everything that is going on with it, a Stream
// is the caller's end of one of its streams, and a HeadDirectory has the sessions of all heads by name.
//
// Threads. The engine's lock guards all of it. Members are called with the lock held unless they say
// otherwise; a Stream takes the lock itself.
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

// One head and everything that is going on with it: its open step (open_step.h), its streams
// (stream_admission.h), its deferred microbatches (stream_state.h), and the schedule of its work
// (schedule.h). A session lives from the creation of the head until the last of its slices is gone; the head
// itself ends on the device thread.
//
// Each part has a contract of its own. A session does what concerns several parts: it leads a slice from its
// caller to the schedule and a chunk to the device and back, and it lets a step begin.
class HeadSession final : public DeviceLoop::Source,
                          public Flight::Owner,
                          public std::enable_shared_from_this<HeadSession> {
 public:
  // On the device thread, without the lock. The context outlives the session. Allocates what the head's
  // schedule needs besides the head. `class_list`: config().class_list, which the kernels do not know.
  static absl::StatusOr<std::shared_ptr<HeadSession>> Create(EngineContext* context, std::string name,
                                                             std::unique_ptr<kernels::HeadKernels> kernels,
                                                             kernels::ClassList class_list = {});

  // ---- Parts; the first three are constant, but for config().shares ----
  const std::string& name() const { return name_; }
  const kernels::HeadConfig& config() const { return config_; }
  EngineContext& context() { return *context_; }
  OpenStep& step() { return *step_; }
  StreamSet& streams() { return *streams_; }
  StreamAdmission& admission() { return *admission_; }
  DeferredMicrobatches& deferred() { return deferred_; }
  Schedule& schedule() { return *schedule_; }
  // The order in which rows and contributions accumulate. Null: in whatever order they come, and nothing
  // waits for a turn.
  DeterministicSchedule* order() { return order_; }
  // On the device thread only, without the lock.
  head::Head& head() { return *head_; }
  Magnitudes magnitudes;  // of what the head holds; also on the device thread only
  Teaching teaching;      // of streams of other heads
  // On the device thread, without the lock. Ends the head, and gives back the context's memory that the
  // session holds, because the backend may keep the session longer than the engine lives.
  void DeleteHead();

  // ---- Slices ----
  // Takes a slice of an open stream. True if `slice` has its memory now: then the caller calls CopyAndQueue.
  // False if the slice waits for memory, or has been refused and is to be destroyed without the lock.
  bool Receive(std::unique_ptr<SliceWork>& slice);
  // Without the lock, where the time of a copy may be spent: has the rows copied and the slice queued.
  void CopyAndQueue(std::unique_ptr<SliceWork> slice);

  // ---- Versions ----
  // Calls `enter`, which puts another step in the place of the open one, and then ends what was bound to the
  // former step.
  void EnterStep(absl::FunctionRef<void(OpenStep&)> enter);
  // After a change of versions: ends the streams, also those that the head teaches, and releases the deferred
  // microbatches, that are bound to versions of the past (OpenStep::CheckBound).
  void EndStale();
  // On the device thread, without the lock, while nothing is under way: kernels::SetShares of the head.
  absl::Status SetShares(const std::vector<int32_t>& shares);
  // Notes that the weights may be half-written, and ends what is bound to them (EndStale).
  void MarkWeightsInvalid(absl::Status why);
  void OnAccumulationFailed(const absl::Status& status) override;

  // ---- The device ----
  // Without the lock; blocks until `operation` has run on the device thread, after everything submitted to
  // the head before. NOT_FOUND if the head is deleted, UNAVAILABLE, RESOURCE_EXHAUSTED (too many waiting), or
  // what `operation` returns.
  absl::Status Run(absl::FunctionRef<absl::Status()> operation);
  // The head is being deleted: Run refuses from now on. False if a chunk of the head is still under way; this
  // can be so although all calls that sent rows have ended.
  bool BeginDelete() {
    deleting_ = true;
    return chunks_in_flight_ == 0;
  }
  bool deleting() const { return deleting_; }
  DeviceLoop::Work TakeWork(const DeviceLoad& load) override;
  ValuesAre Values(const DeviceLoad& load) override { return schedule_->Values(load); }

  // ---- Its flights ----
  Flight::Parts flight_parts() override;
  // Keeps what is described of the last chunk, and tells the observers if it was computed in another way than
  // the one before it.
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
  const bool divided_;  // several devices have some of the classes each

  const std::shared_ptr<OpenStep> step_;
  DeferredMicrobatches deferred_;
  std::shared_ptr<Schedule> schedule_;          // set once, by Create
  DeterministicSchedule* order_ = nullptr;      // schedule_, if that is one
  std::unique_ptr<StreamSet> streams_;          // set once, by Create
  std::unique_ptr<StreamAdmission> admission_;  // set once, by Create
  std::vector<kernels::Choice> last_chunk_choices_;
  double gradient_error_ = 0.0;   // of the last chunk that was sampled
  int64_t chunks_in_flight_ = 0;  // also those of other heads that this one teaches
  bool deleting_ = false;
  int64_t total_rows_ = 0;
};

// Adds the streams, slices and rows of the head to `stats`.
void AddTo(HeadSession& session, EngineStats& stats);

// The limits on slices of a head with this config, whose backend takes slices of at most `slice_rows` rows.
SliceLimits PlannedLimits(const EngineOptions& options, const kernels::HeadConfig& config,
                          int64_t slice_rows);

// An open stream. Thread-safe; destroying it cancels what is not finished (OnFinished still comes). Must
// be destroyed before the engine.
class Stream {
 public:
  Stream(std::shared_ptr<HeadSession> session, std::shared_ptr<StreamState> state)
      : session_(std::move(session)), state_(std::move(state)) {}
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Its name; valid as long as the stream.
  absl::string_view head() const { return state_->spec().head; }
  uint64_t microbatch_id() const { return state_->spec().microbatch_id; }
  HeadState state() const { return state_->head_state(); }  // when it was opened
  SliceLimits limits() const { return state_->limits(); }   // for this stream's dtype
  int64_t hidden_size() const { return state_->hidden_size(); }
  bool brings_rows() const { return BringsRows(*state_); }  // slices bring values of their rows

  // Lets results flow; nothing reaches the observer before. Call once.
  void Start();
  // Takes one slice: checks it, finds memory for its rows, has them copied there and queues it. If there is
  // memory now, all of that happens in this call; otherwise the slice waits, and goes on with
  // StreamObserver::OnMemory. Memory is usually a buffer of the staging pool; on a deterministic engine, for
  // a stream that accumulates, it is the rows' place in their group, once it is their turn. A slice that
  // breaks a rule fails the stream through OnFinished. One slice at a time: the next one when
  // IncomingSlice::on_queued has been called.
  void Receive(IncomingSlice slice);
  // Streams of OpenBackward: the slices to be received, in order. Their hidden states are in retained memory,
  // so only IncomingSlice::rows and on_queued are used.
  std::vector<RowRange> RetainedSlices() const { return state_->RetainedSlices(); }
  // No more slices will come; fails the stream if valid rows are missing.
  void HalfClose();
  // Fails the stream with `why` (not OK): slices that wait or are queued are dropped, those on the device
  // finish.
  void Cancel(absl::Status why);

 private:
  const std::shared_ptr<HeadSession> session_;
  const std::shared_ptr<StreamState> state_;
};

// The heads of an engine by name, and how far each has come: a name is taken when creation begins, the head
// is there when its session is, it is visible when it has been published, and it is gone for callers when
// deletion begins.
//
// Plain state; the engine's lock guards it.
class HeadDirectory {
 public:
  using SessionPtr = std::shared_ptr<HeadSession>;

  explicit HeadDirectory(int64_t max_heads) : max_heads_(max_heads) {}

  // ---- Creation ----
  // Takes a name. RESOURCE_EXHAUSTED, or ALREADY_EXISTS.
  absl::Status Reserve(absl::string_view name);
  // Whether Reserve would take it.
  absl::Status CheckFree(absl::string_view name) const;
  // Gives a reserved name its session.
  void Fill(absl::string_view name, SessionPtr session);
  // Makes a head visible. Errors as those of Find.
  absl::Status Publish(absl::string_view name);

  // ---- Deletion ----
  // The head is not found from now on. Returns the number of the head, which EndDelete takes; NOT_FOUND if
  // there is no such head.
  absl::StatusOr<uint64_t> BeginDelete(absl::string_view name);
  // Frees the name of the head with this number, and returns the head's session. Null if the creation of that
  // head has failed meanwhile; the name may then belong to another head, which stays.
  SessionPtr EndDelete(absl::string_view name, uint64_t number);
  // Frees the name of a head that could not be created.
  void Remove(absl::string_view name);
  std::vector<SessionPtr> RemoveAll();

  // ---- Look-up ----
  // NOT_FOUND, or UNAVAILABLE while the head is being created.
  absl::StatusOr<SessionPtr> Find(absl::string_view name) const;
  // The same for a head that has been published; UNAVAILABLE before.
  absl::StatusOr<SessionPtr> FindPublished(absl::string_view name) const;
  // Both lists are in the order of the names.
  std::vector<SessionPtr> Sessions() const;  // of all heads that are there, also those that are being deleted
  std::vector<SessionPtr> Published() const;  // of those that Find finds
  int64_t published() const;                  // those that are being deleted are counted

 private:
  struct Slot {
    uint64_t number = 0;  // no two heads have the same
    SessionPtr session;   // null while the head is being created
    bool published = false;
    bool deleting = false;
  };
  // NOT_FOUND if there is no such head.
  absl::StatusOr<const Slot*> FindSlot(absl::string_view name) const;

  const int64_t max_heads_;
  uint64_t last_number_ = 0;
  std::map<std::string, Slot, std::less<>> slots_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_SESSION_H_
