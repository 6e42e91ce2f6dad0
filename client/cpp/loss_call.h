// SPDX-License-Identifier: Apache-2.0
// One loss computation of a Client (client.h), from its arguments to its result. LossCall learns the head's
// limits, splits the rows over streams, repeats streams that broke, and adds up the sums. Each stream is a
// LossStream: one ComputeLoss call of gRPC.
// The parts, in the order of this file: LossWork (what to compute), SlicePlaces (where slices lie),
// PayloadHolds, the messages of a stream (EncodeSlice, StreamAnswers), LossStream, LossCall.
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

// LossWork is what one loss call computes: the rows of a microbatch, or the gradients of rows that the server
// retained. SlicePlaces says where the slices of a stream lie: in messages or in shared memory.
//
// LossWork is thread-compatible, and its const methods may run concurrently. SlicePlaces is thread-safe.

// What one stream sends, and where its results go.
struct StreamWork {
  v1::ComputeLossRequest first;              // opens the call
  Rows rows;                                 // the range of rows that the call opens
  bool server_cuts = false;                  // no slices are sent; the server cuts the range as it likes
  std::vector<Rows> slices;                  // else the slices to send: ascending, disjoint, inside `rows`
  RowPieces hidden;                          // hidden states of the microbatch
  uint64_t row_bytes = 0;                    // bytes of one row of hidden states
  const char* teacher = nullptr;             // hidden states of the teacher; null: there is none
  uint64_t teacher_row_bytes = 0;            // bytes of one row of `teacher`; 0: there is none
  LossOutputs outputs;                       // the outputs of the whole microbatch
  RowPieces grad_hidden;                     // where gradients go; outputs.grad_hidden is not used
  std::optional<int> gpu;                    // the GPU that has `hidden` and `grad_hidden`; nullopt: the host
  std::shared_ptr<const StreamPoint> after;  // copies of GPU memory wait for this point; null: for none
};

// Where the caller's rows are, and the point that copies of them wait for. The members are as in StreamWork.
struct RowsPlace {
  std::optional<int> gpu;
  std::shared_ptr<const StreamPoint> after;
};

// All that one loss call computes. Prepare makes the StreamWork of each stream.
class LossWork {
 public:
  // The work of a microbatch (Forward) or of retained rows (Backward). Both copy everything but the hidden
  // states and the outputs.
  static std::unique_ptr<LossWork> Forward(const Microbatch& microbatch, const LossOutputs& outputs,
                                           const ComputeOptions& options);
  static std::unique_ptr<LossWork> Backward(const RetainedGradients& gradients, void* grad_hidden,
                                            const BackwardOptions& options);
  virtual ~LossWork() = default;

  const std::string& head() const { return head_; }
  std::optional<uint64_t> step() const { return step_; }
  bool accumulates() const { return accumulates_; }
  // Whether the effect of the call ends with the gradients of its step (AnswerCheck).
  bool in_step() const { return in_step_; }
  // Whether a failed call leaves nothing in the server, so that it may begin again, even with other weights.
  bool restartable() const { return !in_step_; }
  uint64_t hidden_size() const { return hidden_size_; }
  uint64_t row_bytes() const { return row_bytes_; }
  // Bytes that are sent for a row: its hidden state, and the teacher's if there is one.
  virtual uint64_t sent_row_bytes() const { return row_bytes_; }
  // The GPU that has the caller's rows; nullopt: the rows are in host memory. Valid once Validate has
  // returned OK.
  std::optional<int> gpu() const { return place_.ok() ? place_->gpu : std::nullopt; }

  // Tells the work what the client knows of the head. Comes before Split. In a head with a draft vocabulary,
  // rows whose target the head does not have count as ignored. INVALID_ARGUMENT, in the server's words, if
  // the server would refuse the value of a single row. The client checks this because the server would refuse
  // only the stream with that row, after rows of other streams have been accumulated.
  virtual absl::Status KnowHead(const HeadInfo& head) = 0;
  // INVALID_ARGUMENT, naming the field and its value, if the call is wrong. UNAVAILABLE if the rows are on a
  // GPU according to the caller, and there is no driver.
  virtual absl::Status Validate() const = 0;
  // The number of rows whose hidden states or gradients travel.
  virtual uint64_t MovedRows() const = 0;
  // Splits the rows into ranges, one for each of about `streams` streams. The first message of each stream
  // stays below `max_message_bytes` and below 4 MiB.
  virtual std::vector<Rows> Split(int streams, uint64_t max_message_bytes) const = 0;
  // Makes the work of the stream that has this range of rows. `rule` says how slices are cut. `meant` names
  // the accumulated gradients that the stream is meant for; nullopt: any. Prepare also writes the results of
  // ignored rows that are in no slice; UNAVAILABLE if the driver of their GPU cannot.
  virtual absl::StatusOr<StreamWork> Prepare(Rows rows, const SliceRule& rule,
                                             std::optional<GradientsId> meant) const = 0;
  // Computes loss and normalizer from the sums over all streams. INTERNAL if the sums cannot be right.
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

// Where the slices of one ComputeLoss call lie: in messages, or in a region of shared memory. The gradients
// of a slice in the region come back to the same place. If the rows are retained by the server, their
// gradients come in messages, or to a part of the region that this object takes when the call begins.
//
// Thread-safe.
class SlicePlaces {
 public:
  // If `region` is null, all slices go in messages. `may_wait`: the server answers slices before all of them
  // are sent, so a slice may wait for the place of an earlier one. `gpu`: the GPU that has the caller's rows;
  // nullopt: they are in host memory.
  SlicePlaces(std::shared_ptr<SharedRegion> region, bool may_wait, std::optional<int> gpu);
  SlicePlaces(const SlicePlaces&) = delete;
  SlicePlaces& operator=(const SlicePlaces&) = delete;

  // The rule for slices that may lie in the region. `rule` is the one for slices in messages.
  SliceRule RuleFor(const SliceRule& rule, Rows rows, uint64_t row_bytes) const;

  // Writes the id of the region, if there is one, into `first`, the message that opens the call. Call once,
  // before all other methods except RuleFor.
  void Name(const StreamWork& work, v1::ComputeLossRequest* first) ABSL_LOCKS_EXCLUDED(mu_);

  struct Place {
    enum class Kind { kMessage, kRegion, kWait, kWaitForOthers } kind = Kind::kMessage;
    uint64_t offset = 0;  // kRegion
  };
  // Finds a place of `bytes` for the next slice, whose first row is `row`. If the place is in the region, Put
  // copies `hidden` and, behind it, `teacher` there. `hidden` is empty if the slice brings no values; the
  // place is then for the rows that come back. `teacher` is empty if there is none.
  // kMessage: the slice goes in a message. kWait: there is no room before a slice of this call is answered;
  // call Put again then. kWaitForOthers: there is no room before another call gives some back; then `freed`
  // of WaitForOthers runs, and Put is to be called again. An error of the driver ends the call.
  absl::StatusOr<Place> Put(uint64_t row, uint64_t bytes, absl::Span<const uint8_t> hidden,
                            absl::Span<const uint8_t> teacher = {}) ABSL_LOCKS_EXCLUDED(mu_);
  // From now on, if this call has no slice in the region, Put waits for room that other calls give back
  // (kWaitForOthers). `freed` is as in SharedRegion::Await. Returns false, and changes nothing, if the call
  // may not wait.
  bool WaitForOthers(std::function<void()> freed) ABSL_LOCKS_EXCLUDED(mu_);
  // Ends such waits: from now on slices that find no room travel in messages.
  void StopWaitingForOthers() ABSL_LOCKS_EXCLUDED(mu_);
  // The address in the region of the slice whose first row is `row`, if its place has at least `bytes`; null:
  // the slice is in a message.
  const uint8_t* Find(uint64_t row, uint64_t bytes) const ABSL_LOCKS_EXCLUDED(mu_);
  // Copies gradients from `from`, which Find returned, to the caller's memory `to`.
  absl::Status Fetch(const uint8_t* from, uint64_t bytes, void* to) const;
  // Gives back the place of a slice that the server has answered and whose gradients have been copied.
  void Free(uint64_t row) ABSL_LOCKS_EXCLUDED(mu_);

  // The call has ended with `status`. After an error this retires the region if the server may still write to
  // it, or may not have it any more.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Taken {
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  // Says what a slice of `bytes` does that has found no room.
  Place::Kind WithoutRoom(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // The part of the region that receives gradients of retained rows.
  struct Room {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t first_row = 0;
    uint64_t row_bytes = 1;
  };

  const std::shared_ptr<SharedRegion> region_;
  const bool may_wait_;
  // The GPU that copies to the region, and the one that copies from it; nullopt: the CPU copies.
  struct Copiers {
    std::optional<int> to_region, from_region;
  };
  static Copiers CopiersFor(const SharedRegion* region, std::optional<int> gpu);
  const Copiers copiers_;
  std::shared_ptr<const StreamPoint> after_;  // StreamWork::after; only Name sets it
  mutable absl::Mutex mu_;
  std::map<uint64_t, Taken> taken_ ABSL_GUARDED_BY(mu_);  // slices in the region, by first row
  uint64_t taken_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<Room> room_ ABSL_GUARDED_BY(mu_);
  std::function<void()> freed_ ABSL_GUARDED_BY(mu_);  // null: the call does not wait for others
};

// One ComputeLoss call of gRPC (LossStream) with its messages, and the count of the caller's buffers that
// gRPC still refers to (PayloadHolds). LossCall makes one or more of these streams for one computation.

// Counts the references that gRPC still has to the caller's memory. When a call has ended, the transport may
// not have written or dropped yet all that it was given. So the caller gets its memory back only when this
// count is zero.
//
// Thread-safe.
class PayloadHolds : public std::enable_shared_from_this<PayloadHolds> {
 public:
  static std::shared_ptr<PayloadHolds> Create() { return std::make_shared<PayloadHolds>(); }

  // Adds a hold, and returns a function that removes it. Never blocks.
  absl::AnyInvocable<void()> Take();

  // Runs `task` once when there are no holds: at once, or on the thread that removes the last hold. The task
  // must not block. At most one task waits at a time.
  void WhenFree(absl::AnyInvocable<void()> task);

  // Whether there are no holds now.
  bool free() ABSL_LOCKS_EXCLUDED(mu_);

  // Blocks until there are no holds.
  void WaitUntilFree();

 private:
  void GiveBack();

  absl::Mutex mu_;
  int64_t held_ ABSL_GUARDED_BY(mu_) = 0;
  absl::AnyInvocable<void()> task_ ABSL_GUARDED_BY(mu_);
};

// The following functions and StreamAnswers encode and decode the messages of one ComputeLoss call, without
// gRPC: the bytes of a slice, and the server's answers. tests/client/golden/messages.json and
// stream_answers.json have cases.

// Encodes the message of one slice of the work. The message references the hidden states. If they are on a
// GPU, or have a teacher, it references a copy of them. `release` runs once, on any thread, when the caller's
// hidden states are not needed any more. UNAVAILABLE if the driver cannot copy them.
absl::StatusOr<grpc::ByteBuffer> EncodeSlice(const StreamWork& work, Rows rows,
                                             absl::AnyInvocable<void()> release);

// Encodes the message of a slice that lies in the call's region, at `offset` bytes.
grpc::ByteBuffer EncodeSliceInRegion(const StreamWork& work, Rows rows, uint64_t offset);

// The hidden states of these rows in the caller's memory, and those of the teacher (empty if there is none).
absl::Span<const uint8_t> HiddenOf(const StreamWork& work, Rows rows);
absl::Span<const uint8_t> TeacherOf(const StreamWork& work, Rows rows);

// Handles the answers of one ComputeLoss call in their order: checks them, and copies results to the caller's
// memory.
//
// Thread-compatible. Errors are INTERNAL and say what the server sent, or UNAVAILABLE if the driver of a GPU
// fails. After an error the outputs are unspecified.
class StreamAnswers {
 public:
  // Decides from the state of the head in the `accepted` answer whether the call goes on. If it returns an
  // error, the call ends with that error.
  using AcceptFn = absl::AnyInvocable<absl::Status(const v1::HeadState&)>;

  // `work` and `places` must outlive this object. If `places` is null, no slice lies in a region.
  StreamAnswers(const StreamWork& work, AcceptFn accept, SlicePlaces* places = nullptr);

  absl::Status Handle(const grpc::ByteBuffer& message);
  // The slice `whole` is sent as these parts instead.
  void Replace(Rows whole, const std::vector<Rows>& parts) { answers_.Replace(whole, parts); }
  // Whether the server may end the call with OK now.
  absl::Status CheckEnd() const;

  // The server's summary; nullopt before it has come.
  const std::optional<v1::MicrobatchSummary>& summary() const { return summary_; }
  uint64_t received_bytes() const { return received_bytes_; }  // payload in messages and in the region
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

// The input of a LossStream.
struct StreamJob {
  StreamWork work;
  SliceRule rule;  // for slices in messages
  absl::Time deadline;
  Peer peer;
  std::shared_ptr<wire::DirectServer>
      direct;  // the server, if it is in this process; null: over a connection
  wire::DirectCallOptions direct_options;
  std::shared_ptr<PayloadHolds> holds;
  std::unique_ptr<SlicePlaces> places;           // where the slices of the stream lie
  std::shared_ptr<std::atomic<uint64_t>> moved;  // counts the payload that travels in messages, both ways
  Executor* executor = nullptr;                  // ends after the stream
  absl::Duration patience;  // how long a slice waits for room that other calls give back in the region
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
// Threads: one thread creates and starts the stream; gRPC's threads run the reactions; Resume runs on the
// executor; Cancel is thread-safe. A shared_ptr must own the object. It must live until `done` is called;
// `done` may destroy it.
class LossStream : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                   public std::enable_shared_from_this<LossStream> {
 public:
  // Runs once, on a gRPC thread; must not block.
  using DoneFn = absl::AnyInvocable<void(StreamEnd)>;

  LossStream(StreamJob job, StreamAnswers::AcceptFn accept, DoneFn done);

  // Starts the call, over `channel` unless the server is in this process (StreamJob::direct).
  void Start(const std::shared_ptr<grpc::Channel>& channel);
  void Cancel();

 private:
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  // Finds a place for the next slice in left_. A slice that has to go in messages and is too large for one is
  // first cut into parts.
  absl::StatusOr<SlicePlaces::Place> PlaceNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_)
      ABSL_LOCKS_EXCLUDED(read_mu_);
  // Writes request_. With the last message it also ends the writes.
  void Send() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_);
  // Sends the next slice, if one is left. If there is no room for the slice, a later answer or Resume calls
  // this again.
  void SendNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_) ABSL_LOCKS_EXCLUDED(read_mu_);
  absl::Status SendSlice() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_) ABSL_LOCKS_EXCLUDED(read_mu_);
  // Runs on the executor, and tries to send a waiting slice again. Either other calls may have given back
  // room in the region, or the wait that ends at `end` is over.
  void Resume(absl::Time end) ABSL_LOCKS_EXCLUDED(write_mu_, read_mu_);
  // The next slice waits for room that other calls give back. When this wait begins, it plans its end with
  // the executor.
  void WaitForOthers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_);
  // Removes the hold, because from now on only gRPC's reactions write.
  void ReleaseHold() ABSL_EXCLUSIVE_LOCKS_REQUIRED(write_mu_);
  // Handles response_. False: the call has failed.
  bool TakeAnswer() ABSL_LOCKS_EXCLUDED(read_mu_);
  absl::Status EndStatus(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(read_mu_);

  const StreamJob job_;
  const StreamWork& work_;  // job_'s
  DoneFn done_;
  // The call: stub_ for a gRPC call, or direct_ for a call to a server in this process. Null before Start.
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericStub> stub_;
  std::shared_ptr<wire::DirectCall> direct_;
  SlicePlaces& places_;  // job_'s

  // gRPC runs one read reaction and one write reaction at a time, on changing threads; these locks order
  // them.
  absl::Mutex write_mu_;
  grpc::ByteBuffer request_ ABSL_GUARDED_BY(write_mu_);
  std::deque<Rows> left_ ABSL_GUARDED_BY(write_mu_);  // slices to send
  bool waiting_ ABSL_GUARDED_BY(write_mu_) = false;   // the next slice waits for room in the region
  absl::Time wait_end_ ABSL_GUARDED_BY(write_mu_) = absl::InfiniteFuture();  // end of a wait for other calls
  bool held_ ABSL_GUARDED_BY(write_mu_) = false;    // AddHold was called: the executor may still write
  absl::Status unsent_ ABSL_GUARDED_BY(write_mu_);  // why a slice could not be sent
  uint64_t sent_bytes_ ABSL_GUARDED_BY(write_mu_) = 0;

  absl::Mutex read_mu_ ABSL_ACQUIRED_AFTER(write_mu_);
  grpc::ByteBuffer response_ ABSL_GUARDED_BY(read_mu_);
  StreamAnswers answers_ ABSL_GUARDED_BY(read_mu_);
  absl::Status error_ ABSL_GUARDED_BY(read_mu_);  // an error that the client found in an answer
};

// How a LossCall travels. A zero means the client's default.
struct CallOptions {
  int streams = 0;
  std::optional<uint64_t> slice_bytes;
  absl::Duration timeout;
  int max_attempts = 0;
  bool short_callback = false;
  absl::Duration patience = absl::Milliseconds(100);  // StreamJob::patience
};

// One loss computation: its parts, their attempts and its result. PendingLoss is the caller's handle of it.
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
    int transient_failures = 0;  // attempts that ended with an IsTransient error, and were repeated
    bool done = false;
    SliceRule rule;  // the rule of the last attempt
    absl::Status
        refused;  // why the server refused the last attempt; set while the head's limits are asked for
    std::shared_ptr<LossStream> stream;  // the attempt under way
  };
  struct Describe;  // the DescribeHead call under way

  void Begin();
  void StartDescribe();
  void FinishDescribe(const absl::Status& status);
  // Splits the rows and starts all parts. `fresh`: the server has sent `facts` during this call.
  void Launch(const HeadInfo& facts, bool fresh);
  // How many streams to use if the caller has not set CallOptions::streams.
  int StreamsWanted() const;
  // The bytes of the rows whose hidden states or gradients travel.
  uint64_t MovedBytes() const { return work_->MovedRows() * work_->sent_row_bytes(); }
  void StartPart(size_t index);
  void FinishPart(size_t index, const StreamEnd& end);

  absl::StatusOr<SliceRule> Rule() const;
  // Whether the present limits of the head require slices other than those of the part's last attempt.
  bool WouldCutOtherwise(const Part& part) const;
  void AddSummary(const v1::MicrobatchSummary& summary);
  // For a stream that the server refused, maybe because the head's limits have changed: asks for the limits
  // and tries again if they have. Returns false if this cannot help.
  bool Relearn(Part& part, const absl::Status& status);
  void Relaunch(const HeadInfo& facts);
  // When the attempt after attempt number `attempts` begins; nullopt if there is none.
  std::optional<absl::Time> NextAttempt(const absl::Status& status, int attempts, Repeat repeat) const;
  // The number of attempts that the error of the part tells (WithAttempts).
  int AttemptsOf(const Part& part, const absl::Status& status) const;
  // Whether round number `round` still goes on.
  bool Goes(int round) const { return !finishing_ && rounds_ == round && !start_over_.has_value(); }
  // Plans that the whole call begins again after `status`. Returns false if it may not begin again.
  bool BeginAgain(const absl::Status& status);
  // Begins the next round if nothing is under way any more.
  void MaybeStartOver();
  void StartOver();
  // Remembers the first error and cancels the streams and the description under way.
  void Fail(const absl::Status& status);
  void CancelStreams();
  // Finishes the call if nothing is under way any more.
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
  bool facts_are_fresh_ = false;  // this call has asked again, because a stream was refused
  std::shared_ptr<Describe> describe_;
  bool describing_ = false;  // DescribeHead is being tried, or waits for its next attempt
  int describe_attempts_ = 0;
  int rounds_ = 1;  // a round sends all rows; the next one begins if the weights have changed
  std::optional<absl::Time> start_over_;  // when the next round begins; nullopt: the present one goes on
  std::vector<Part> parts_;
  int lent_streams_ = 0;    // Core::LendStreams
  int under_way_ = 0;       // streams and descriptions
  bool finishing_ = false;  // starts nothing more, and waits for the end of what is under way
  bool finished_ = false;
  absl::Status error_;  // the first one
  LossResult total_;

  mutable absl::Mutex mu_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;    // the caller has cancelled
  bool done_ ABSL_GUARDED_BY(mu_) = false;         // result_ is final
  bool called_back_ ABSL_GUARDED_BY(mu_) = false;  // the callback, if any, has returned
  absl::StatusOr<LossResult> result_ ABSL_GUARDED_BY(mu_) = absl::UnknownError("not done");
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_LOSS_CALL_H_
