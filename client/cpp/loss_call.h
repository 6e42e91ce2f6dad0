// SPDX-License-Identifier: Apache-2.0
// One loss computation. LossCall learns the head's limits, splits the rows over streams, repeats what broke
// and sums up. LossStream is one ComputeLoss call of gRPC for it, and the work that the streams share stands
// first.
//
// Threads: Start, Cancel, Done, Wait and WaitFor of LossCall are thread-safe. Everything else runs on the
// executor, unless its comment says otherwise. Core keeps a LossCall alive until it is done.
#ifndef LOSSD_CLIENT_CPP_LOSS_CALL_H_
#define LOSSD_CLIENT_CPP_LOSS_CALL_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/client_options.h"
#include "client/cpp/connections.h"
#include "client/cpp/core.h"
#include "client/cpp/cuda_driver.h"
#include "client/cpp/loss_plan.h"
#include "client/cpp/regions.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/direct_call.h"
#include "proto/wire/payload_codec.h"

namespace lossd::client::internal {

// What one loss call computes, the rows of a microbatch or the gradients of rows that the server retained,
// and where the slices of each of its streams lie (SlicePlaces): in messages or in shared memory.
//
// The work is thread-compatible, and its const methods may run concurrently; SlicePlaces is thread-safe.

// What one stream sends, and where its results go.
struct StreamWork {
  v1::ComputeLossRequest first;    // opens the call
  Rows rows;                       // the range it opens
  bool server_cuts = false;        // no slices are sent; the server answers any it likes
  std::vector<Rows> slices;        // else: to be sent; ascending, disjoint, inside `rows`
  RowPieces hidden;                // hidden states of the microbatch
  uint64_t row_bytes = 0;          // of a row of hidden states
  const char* teacher = nullptr;   // the teacher's, if the rows have one, likewise
  uint64_t teacher_row_bytes = 0;  // 0: they have none
  LossOutputs outputs;             // of the whole microbatch
  RowPieces grad_hidden;           // where gradients go, in the place of outputs.grad_hidden
  std::optional<int> gpu;          // whose memory `hidden` and `grad_hidden` are; nullopt: the host's
  std::shared_ptr<const StreamPoint> after;  // copies of that GPU's memory begin after it; null: at once
};

// Where the caller's rows are, and what comes before copies of them, as in StreamWork.
struct RowsPlace {
  std::optional<int> gpu;
  std::shared_ptr<const StreamPoint> after;
};

// What one loss call computes, whole; it makes the StreamWork of each stream.
class LossWork {
 public:
  // Copies everything but the hidden states and the outputs.
  static std::unique_ptr<LossWork> Forward(const Microbatch& microbatch, const LossOutputs& outputs,
                                           const ComputeOptions& options);
  static std::unique_ptr<LossWork> Backward(const RetainedGradients& gradients, void* grad_hidden,
                                            const BackwardOptions& options);
  virtual ~LossWork() = default;

  const std::string& head() const { return head_; }
  std::optional<uint64_t> step() const { return step_; }
  bool accumulates() const { return accumulates_; }
  // What the call does ends with the gradients of its step (AnswerCheck).
  bool in_step() const { return in_step_; }
  // Nothing of a call that fails stays, so it may begin again with what it finds.
  bool restartable() const { return !in_step_; }
  uint64_t hidden_size() const { return hidden_size_; }
  uint64_t row_bytes() const { return row_bytes_; }
  // What is sent of a row: with the hidden state of a teacher.
  virtual uint64_t sent_row_bytes() const { return row_bytes_; }
  // The GPU whose memory the caller's rows are; nullopt: they are the host's. Known once Validate is OK.
  std::optional<int> gpu() const { return place_.ok() ? place_->gpu : std::nullopt; }

  // Comes before Split, again if the head has become another one. Rows whose target a head with a draft
  // vocabulary does not have count as ignored. INVALID_ARGUMENT, as the server would say it, if it would
  // refuse a value of a single row. Of several streams it would refuse one, after rows of the others have
  // been accumulated.
  virtual absl::Status KnowHead(const HeadInfo& head) = 0;
  // INVALID_ARGUMENT naming the field and its value; UNAVAILABLE if rows are said to be on a GPU and there is
  // no driver.
  virtual absl::Status Validate() const = 0;
  // How many rows' hidden states or gradients travel.
  virtual uint64_t MovedRows() const = 0;
  // Splits the rows into ranges for about `streams` streams, whose first messages stay below
  // `max_message_bytes` and below 4 MiB.
  virtual std::vector<Rows> Split(int streams, uint64_t max_message_bytes) const = 0;
  // What the stream of a range sends, cut by `rule`, meant for these gradients (nullopt: for any). Writes the
  // results of rows that nothing will be received for; UNAVAILABLE if the driver of their GPU cannot.
  virtual absl::StatusOr<StreamWork> Prepare(Rows rows, const SliceRule& rule,
                                             std::optional<GradientsId> meant) const = 0;
  // Sets what follows from the sums over all streams: loss and normalizer. INTERNAL if the sums cannot be
  // right.
  virtual absl::Status Conclude(LossResult* total) const = 0;

 protected:
  LossWork(const std::string& head, std::optional<uint64_t> step, bool accumulates, bool in_step,
           uint64_t hidden_size, v1::DType dtype, absl::StatusOr<RowsPlace> place)
      : head_(head),
        step_(step),
        accumulates_(accumulates),
        in_step_(in_step),
        hidden_size_(hidden_size),
        row_bytes_(hidden_size * ElementSize(dtype)),
        place_(std::move(place)) {}

  absl::Status located() const { return place_.status(); }
  std::shared_ptr<const StreamPoint> after() const { return place_.ok() ? place_->after : nullptr; }
  // Writes the results of ignored rows to the outputs of the rows in `rows` that are in no slice.
  absl::Status FillUnsent(const LossOutputs& outputs, const RowPieces& grad_hidden, Rows rows,
                          absl::Span<const Rows> slices) const;

 private:
  const std::string head_;
  const std::optional<uint64_t> step_;
  const bool accumulates_;
  const bool in_step_;
  const uint64_t hidden_size_;
  const uint64_t row_bytes_;
  const absl::StatusOr<RowsPlace> place_;
};

// Where the slices of one ComputeLoss call lie: in messages, or in a region of shared memory, where their
// gradients come back to the same place. Gradients of rows that the server has retained come to a part of the
// region that is taken when the call begins, or in messages.
//
// Thread-safe.
class SlicePlaces {
 public:
  // Null: all slices go in messages. `may_wait`: answers come while further slices are not sent, so a slice
  // may wait for the place of one before it. `gpu`: whose memory the caller's rows are; nullopt: the host's.
  SlicePlaces(std::shared_ptr<SharedRegion> region, bool may_wait, std::optional<int> gpu);
  SlicePlaces(const SlicePlaces&) = delete;
  SlicePlaces& operator=(const SlicePlaces&) = delete;

  // How slices are cut that may find a place here: `rule` for rows in messages.
  SliceRule RuleFor(const SliceRule& rule, Rows rows, uint64_t row_bytes) const;

  // Names the region in the message that opens the call, if the call uses one. Call once, first.
  void Name(const StreamWork& work, v1::ComputeLossRequest* first) ABSL_LOCKS_EXCLUDED(mu_);

  struct Place {
    enum class Kind { kMessage, kRegion, kWait, kWaitForOthers } kind = Kind::kMessage;
    uint64_t offset = 0;  // kRegion
  };
  // Finds a place for the next slice, whose first row is `row`, and copies it there if that is in the region.
  // kWait: there is none before a slice of this call is answered; then Put is to be called again.
  // kWaitForOthers: there is none before another call gives some back; then `freed` of WaitForOthers runs,
  // and Put is to be called again. An error of the driver ends the call.
  // `bytes` of the place. `hidden`: empty if the slice brings no values, and the place is for the rows that
  // come back. `teacher`: lies behind `hidden`; empty if there is none.
  absl::StatusOr<Place> Put(uint64_t row, uint64_t bytes, absl::Span<const uint8_t> hidden,
                            absl::Span<const uint8_t> teacher = {}) ABSL_LOCKS_EXCLUDED(mu_);
  // From now on a call that has nothing in the region waits for what others give back, if it may wait at all;
  // `freed` as in SharedRegion::Await. False: it may not.
  bool WaitForOthers(std::function<void()> freed) ABSL_LOCKS_EXCLUDED(mu_);
  // It has waited long enough: what finds no room travels in messages.
  void StopWaitingForOthers() ABSL_LOCKS_EXCLUDED(mu_);
  // Where the slice of this first row lies, if it has at least so many bytes; null: in a message.
  const uint8_t* Find(uint64_t row, uint64_t bytes) const ABSL_LOCKS_EXCLUDED(mu_);
  // Copies what Find has found to the caller's memory.
  absl::Status Fetch(const uint8_t* from, uint64_t bytes, void* to) const;
  // The slice has been answered, and its gradients have been used.
  void Free(uint64_t row) ABSL_LOCKS_EXCLUDED(mu_);

  // The call has ended. After an error the region is retired if the server may still write to it, or may have
  // lost it.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Taken {
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  // What a slice of so many bytes does that finds no room.
  Place::Kind WithoutRoom(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // The part of the region for gradients of retained rows.
  struct Room {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t first_row = 0;
    uint64_t row_bytes = 1;
  };

  const std::shared_ptr<SharedRegion> region_;
  const bool may_wait_;
  // Which GPU copies to the region, and from it; nullopt: the host does.
  struct Copiers {
    std::optional<int> to_region, from_region;
  };
  static Copiers CopiersFor(const SharedRegion* region, std::optional<int> gpu);
  const Copiers copiers_;
  std::shared_ptr<const StreamPoint> after_;  // of the work that Name was given; not changed afterwards
  mutable absl::Mutex mu_;
  std::map<uint64_t, Taken> taken_ ABSL_GUARDED_BY(mu_);  // by first row
  uint64_t taken_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<Room> room_ ABSL_GUARDED_BY(mu_);
  std::function<void()> freed_ ABSL_GUARDED_BY(mu_);  // null: the call does not wait for others
};

// One ComputeLoss call of gRPC (LossStream) with its messages, and the count of the caller's memory that gRPC
// still refers to (PayloadHolds). loss_call.h makes several of these streams for one computation.

// Counts the caller's memory that gRPC still refers to. The end of a call does not mean that the transport
// has written or dropped everything that it was given. So the caller gets the memory back only when this
// count is zero.
//
// Thread-safe.
class PayloadHolds : public std::enable_shared_from_this<PayloadHolds> {
 public:
  static std::shared_ptr<PayloadHolds> Create() { return std::make_shared<PayloadHolds>(); }

  // Takes a hold; calling the result gives it back. Never blocks.
  absl::AnyInvocable<void()> Take();

  // Runs `task` once there are no holds: at once, or on the thread that gives back the last one. The task
  // must not block. At most one task waits at a time.
  void WhenFree(absl::AnyInvocable<void()> task);

  // Whether there are none now.
  bool free() ABSL_LOCKS_EXCLUDED(mu_);

  // Blocks until there are no holds.
  void WaitUntilFree();

 private:
  void GiveBack();

  absl::Mutex mu_;
  int64_t held_ ABSL_GUARDED_BY(mu_) = 0;
  absl::AnyInvocable<void()> task_ ABSL_GUARDED_BY(mu_);
};

// The following functions and StreamAnswers are the messages of one ComputeLoss call, apart from gRPC: the
// bytes of a slice, and what the server's answers mean. tests/client/golden/messages.json and
// stream_answers.json have cases.

// The message of one slice of the work. It references the hidden states, or a copy of them if they are on a
// GPU; `release` runs once, on any thread, when nothing refers to them any more. UNAVAILABLE if the driver
// cannot copy them.
absl::StatusOr<grpc::ByteBuffer> EncodeSlice(const StreamWork& work, Rows rows,
                                             absl::AnyInvocable<void()> release);

// The message of a slice that lies in the call's region, at `offset`.
grpc::ByteBuffer EncodeSliceInRegion(const StreamWork& work, Rows rows, uint64_t offset);

// The hidden states of these rows, where the caller has them; and the teacher's, or nothing.
absl::Span<const uint8_t> HiddenOf(const StreamWork& work, Rows rows);
absl::Span<const uint8_t> TeacherOf(const StreamWork& work, Rows rows);

// Takes the answers of one call in their order, checks them and scatters results into the caller's memory.
//
// Thread-compatible. Errors are INTERNAL and say what the server sent, or UNAVAILABLE if the driver of a GPU
// fails; after one the outputs are unspecified.
class StreamAnswers {
 public:
  // Decides whether to go on from where the server stands; an error ends the call with it.
  using AcceptFn = absl::AnyInvocable<absl::Status(const v1::HeadState&)>;

  // `work` and `places` must outlive this. Null: no slice lies in a region.
  StreamAnswers(const StreamWork& work, AcceptFn accept, SlicePlaces* places = nullptr);

  absl::Status Handle(const grpc::ByteBuffer& message);
  // One of the slices is sent in parts.
  void Replace(Rows whole, const std::vector<Rows>& parts) { answers_.Replace(whole, parts); }
  // Whether the server may end the call with OK now.
  absl::Status CheckEnd() const;

  // Nullopt before it has come.
  const std::optional<v1::MicrobatchSummary>& summary() const { return summary_; }
  uint64_t received_bytes() const { return received_bytes_; }  // of payload
  uint64_t received_in_messages() const { return received_in_messages_; }

 private:
  absl::Status HandleAccepted(const v1::MicrobatchAccepted& accepted);
  absl::Status HandleSlice(const v1::SliceResult& result, const wire::PayloadView& payload);
  absl::Status HandleSummary(const v1::MicrobatchSummary& summary);
  absl::Status CheckSizes(const v1::SliceResult& result, size_t gradient_bytes, uint64_t rows) const;
  absl::Status TakeGradients(const wire::PayloadView& payload, const uint8_t* in_region, Rows rows) const;
  void Scatter(const v1::SliceResult& result, Rows rows) const;

  const StreamWork& work_;
  AcceptFn accept_;
  SlicePlaces* const places_;
  std::optional<v1::MicrobatchAccepted> accepted_;
  AnswerTracker answers_;
  std::optional<v1::MicrobatchSummary> summary_;
  uint64_t received_bytes_ = 0;
  uint64_t received_in_messages_ = 0;
};

// What a LossStream is given.
struct StreamJob {
  StreamWork work;
  SliceRule rule;  // of slices in messages
  absl::Time deadline;
  Peer peer;
  std::shared_ptr<wire::DirectServer>
      direct;  // the server, if it is in this process; null: over a connection
  wire::DirectCallOptions direct_options;
  std::shared_ptr<PayloadHolds> holds;
  std::unique_ptr<SlicePlaces> places;           // where slices lie
  std::shared_ptr<std::atomic<uint64_t>> moved;  // counts the payload that travels in messages, both ways
  Executor* executor = nullptr;                  // ends after the stream
  absl::Duration patience;  // how long a slice waits once for what other calls give back of the region
};

// How a LossStream ended.
struct StreamEnd {
  absl::Status status;
  v1::MicrobatchSummary summary;  // set if status is OK
  uint64_t sent_bytes = 0;
  uint64_t received_bytes = 0;
};

// One ComputeLoss call: sends the slices of its work and scatters the answers into the caller's memory.
//
// Threads: one thread creates and starts the stream; gRPC runs the reactions; Resume runs on the executor;
// Cancel is thread-safe. The object belongs to a shared_ptr. It must live until `done` has been called, and
// may be destroyed from then on.
class LossStream : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                   public std::enable_shared_from_this<LossStream> {
 public:
  // Runs once, on a gRPC thread; must not block.
  using DoneFn = absl::AnyInvocable<void(StreamEnd)>;

  LossStream(StreamJob job, StreamAnswers::AcceptFn accept, DoneFn done);

  // `channel`: for a call that goes over a connection.
  void Start(const std::shared_ptr<grpc::Channel>& channel);
  void Cancel();

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  // A place for the next slice, or for its first part if that may only be sent in parts.
  absl::StatusOr<SlicePlaces::Place> PlaceNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_)
      ABSL_LOCKS_EXCLUDED(read_mu_);
  // Writes request_, and with the last one the end.
  void Send() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_);
  // Sends the next slice, if one is left. If there is no room for the slice, a later answer or Resume calls
  // this again.
  void SendNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_) ABSL_LOCKS_EXCLUDED(read_mu_);
  absl::Status SendSlice() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_) ABSL_LOCKS_EXCLUDED(read_mu_);
  // Runs on the executor: other calls may have given back what a slice waits for, or the wait that is to end
  // at `end` is over.
  void Resume(absl::Time end) ABSL_LOCKS_EXCLUDED(write_mu_, read_mu_);
  // The slice waits for others; the first time that it does, the end of that is planned.
  void WaitForOthers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_);
  // Nothing is written any more but by gRPC's reactions.
  void ReleaseHold() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_);
  // False: the call has failed.
  bool TakeAnswer() ABSL_LOCKS_EXCLUDED(read_mu_);
  absl::Status EndStatus(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(read_mu_);

  const StreamJob job_;
  const StreamWork& work_;  // job_'s
  DoneFn done_;
  // The call: one of gRPC, or one within this process. Null before Start.
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericStub> stub_;
  std::shared_ptr<wire::DirectCall> direct_;
  SlicePlaces& places_;  // job_'s

  // gRPC runs one reaction of a kind at a time; the locks are for the threads it takes for them.
  absl::Mutex write_mu_;
  grpc::ByteBuffer request_ ABSL_GUARDED_BY(write_mu_);
  std::deque<Rows> left_ ABSL_GUARDED_BY(write_mu_);                         // slices to send
  bool waiting_ ABSL_GUARDED_BY(write_mu_) = false;                          // for room in the region
  absl::Time wait_end_ ABSL_GUARDED_BY(write_mu_) = absl::InfiniteFuture();  // of a wait for others
  bool held_ ABSL_GUARDED_BY(write_mu_) = false;    // gRPC waits for writes of the executor
  absl::Status unsent_ ABSL_GUARDED_BY(write_mu_);  // why a slice could not be sent
  uint64_t sent_bytes_ ABSL_GUARDED_BY(write_mu_) = 0;

  absl::Mutex read_mu_ ABSL_ACQUIRED_AFTER(write_mu_);
  grpc::ByteBuffer response_ ABSL_GUARDED_BY(read_mu_);
  StreamAnswers answers_ ABSL_GUARDED_BY(read_mu_);
  absl::Status error_ ABSL_GUARDED_BY(read_mu_);  // found by this side
};

// How a call travels. Zeros: the client's defaults.
struct CallOptions {
  int streams = 0;
  std::optional<uint64_t> slice_bytes;
  absl::Duration timeout;
  int max_attempts = 0;
  absl::Duration patience = absl::Milliseconds(100);  // StreamJob::patience
};

class LossCall : public std::enable_shared_from_this<LossCall> {
 public:
  LossCall(Core* core, std::unique_ptr<LossWork> work, const CallOptions& options, LossCallback callback);

  void Start();
  void Cancel();
  bool Done() const;
  absl::StatusOr<LossResult> Wait();
  bool WaitFor(absl::Duration timeout);

 private:
  // A range of rows and the stream that carries it.
  struct Part {
    Rows rows;
    int attempts = 0;
    int unanswered = 0;  // attempts after which the call was sent again
    bool done = false;
    SliceRule rule;  // of the last attempt
    absl::Status
        refused;  // why the server refused the last attempt, if the head's limits are being asked for
    std::shared_ptr<LossStream> stream;  // the attempt under way
  };
  struct Describe;  // the DescribeHead call under way

  void Begin();
  void StartDescribe();
  void FinishDescribe(const absl::Status& status);
  // `fresh`: the server has said so during this call.
  void Launch(const HeadInfo& facts, bool fresh);
  // Unless the caller has said so.
  int StreamsWanted() const;
  // Of rows that travel in either direction.
  uint64_t MovedBytes() const { return work_->MovedRows() * work_->sent_row_bytes(); }
  void StartPart(size_t index);
  void FinishPart(size_t index, const StreamEnd& end);

  absl::StatusOr<SliceRule> Rule() const;
  // Whether the head's limits, as known now, ask for other slices than the part's last attempt sent.
  bool WouldCutOtherwise(const Part& part) const;
  void AddSummary(const v1::MicrobatchSummary& summary);
  // The stream was refused, maybe because the head's limits are not what they were: asks for them and tries
  // again if so. False if that would not help.
  bool Relearn(Part& part, const absl::Status& status);
  void Relaunch(const HeadInfo& facts);
  // Whether attempt number `attempts` may be followed by another one; if so, when.
  std::optional<absl::Time> NextAttempt(const absl::Status& status, int attempts, Repeat repeat) const;
  // How often the part was tried, for the message: of attempts that the server answered it says all.
  int AttemptsOf(const Part& part, const absl::Status& status) const;
  // Whether the round of that number goes on.
  bool Goes(int round) const { return !finishing_ && rounds_ == round && !start_over_.has_value(); }
  // If the whole call may begin again after `status`: sees to that. False if not.
  bool BeginAgain(const absl::Status& status);
  // Begins again, once nothing is under way any more.
  void MaybeStartOver();
  void StartOver();
  // Remembers the first error and cancels what is under way.
  void Fail(const absl::Status& status);
  void CancelStreams();
  // Finishes if nothing is under way any more.
  void MaybeFinish();
  void Finish();
  absl::StatusOr<LossResult> MakeResult();

  // Set at construction.
  Core* const core_;
  const std::unique_ptr<LossWork> work_;
  const CallOptions options_;
  const absl::Time start_;
  const absl::Time deadline_;
  const std::shared_ptr<PayloadHolds> holds_ = PayloadHolds::Create();
  AnswerCheck answers_;  // gRPC's threads use it too

  // Used on the executor only.
  LossCallback callback_;
  HeadInfo facts_;
  bool facts_are_fresh_ = false;  // asked for again by this call, since a stream was refused
  std::shared_ptr<Describe> describe_;
  bool describing_ = false;  // from the first attempt to the last one, waits included
  int describe_attempts_ = 0;
  int rounds_ = 1;                        // how often all rows were begun
  std::optional<absl::Time> start_over_;  // a round has failed: when the next one begins
  std::vector<Part> parts_;
  int lent_streams_ = 0;    // by the core
  int under_way_ = 0;       // streams and descriptions
  bool finishing_ = false;  // only waits for what is under way
  bool finished_ = false;
  absl::Status error_;  // the first one
  LossResult total_;

  mutable absl::Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;    // by the caller
  bool done_ ABSL_GUARDED_BY(mu_) = false;         // result_ is final
  bool called_back_ ABSL_GUARDED_BY(mu_) = false;  // nothing will happen any more
  absl::StatusOr<LossResult> result_ ABSL_GUARDED_BY(mu_) = absl::UnknownError("not done");
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_LOSS_CALL_H_
