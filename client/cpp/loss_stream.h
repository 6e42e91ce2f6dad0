// SPDX-License-Identifier: Apache-2.0
// One ComputeLoss call of gRPC (LossStream) with its messages, and the count of the caller's memory that gRPC
// still refers to (PayloadHolds). loss_call.h makes several of these streams for one computation.
#ifndef LOSSD_CLIENT_CPP_LOSS_STREAM_H_
#define LOSSD_CLIENT_CPP_LOSS_STREAM_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/connections.h"
#include "client/cpp/core.h"
#include "client/cpp/loss_plan.h"
#include "client/cpp/loss_work.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/payload_codec.h"

namespace lossd::client::internal {

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
// bytes of a slice, and what the server's answers mean. client/python/src/lossd/_stream.py does the
// same; tests/client/golden/messages.json and stream_answers.json hold both to it.

// The message of one slice of the work. It references the hidden states, or a copy of them if they are on a
// GPU; `release` runs once, on any thread, when nothing refers to them any more. UNAVAILABLE if the driver
// cannot copy them.
absl::StatusOr<grpc::ByteBuffer> EncodeSlice(const StreamWork& work, Rows rows,
                                             absl::AnyInvocable<void()> release);

// The message of a slice that lies in the call's region, at `offset`.
grpc::ByteBuffer EncodeSliceInRegion(const StreamWork& work, Rows rows, uint64_t offset);

// The hidden states of these rows, where the caller has them.
absl::Span<const uint8_t> HiddenOf(const StreamWork& work, Rows rows);

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

  void Start(const std::shared_ptr<grpc::Channel>& channel);
  void Cancel() { context_.TryCancel(); }

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
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericStub> stub_;
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

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_LOSS_STREAM_H_
