// SPDX-License-Identifier: Apache-2.0
// The streaming calls of HeadService: ReadTensor, WriteTensor, AddGradient and SaveCheckpoint.
//
// In the first three calls, a message holds at most 4 MiB of a tensor (at least one row). One message is in
// transit at a time, so a slow peer costs the memory of one message. Each step of such a call (device, then
// transport) starts when the step before it has ended. Steps that wait for the device run on AdminWorkers.
#ifndef LOSSD_SERVER_RPC_TENSOR_CALLS_H_
#define LOSSD_SERVER_RPC_TENSOR_CALLS_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "lossd/v1/head.pb.h"
#include "proto/wire/payload_codec.h"
#include "server/admin/checkpoints.h"
#include "server/admin/head_operations.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"
#include "server/regions/regions.h"
#include "server/rpc/access_control.h"
#include "server/rpc/request_call.h"
#include "server/rpc/workers.h"

namespace lossd::rpc {

// What all calls of ReadTensor, WriteTensor and AddGradient share. Must outlive them.
struct TensorCallEnvironment {
  const RequestEnvironment* requests = nullptr;
  admin::HeadOperations* operations = nullptr;
  engine::Engine* engine = nullptr;
  const AccessControl* access = nullptr;
  metrics::Metrics* metrics = nullptr;
  CallRegistry* registry = nullptr;
  AdminWorkers* workers = nullptr;
  regions::Regions* regions = nullptr;  // null: the server shares no memory
  std::atomic<bool> draining{false};
};

// Admits a call: returns OK, or the status that the call must end with. Sets `*peer` to the peer that limits
// count the call for.
absl::Status AdmitTensorCall(TensorCallEnvironment* environment, const grpc::CallbackServerContext& context,
                             WatchedCall* call, absl::string_view method, AdmittedCall* admitted,
                             std::string* peer);
// The status that a call ends with. Counts it if it is an error.
grpc::Status EndedTensorCall(TensorCallEnvironment* environment, absl::string_view method,
                             absl::Status status);

// A call of ReadTensor. Deletes itself in OnDone.
class ReadTensorCall final : public RequestCall, public WatchedCall {
 public:
  static ReadTensorCall* Start(TensorCallEnvironment* environment, grpc::CallbackServerContext* context);

  void OnWriteDone(bool ok) override;
  void OnCancel() override { cancelled_ = true; }
  void OnDone() override;
  absl::string_view EndIfLate(absl::Time now, const CallTimeouts& timeouts) override
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  ReadTensorCall(TensorCallEnvironment* environment, grpc::CallbackServerContext* context)
      : RequestCall(environment->requests, context, "ReadTensor"), environment_(environment) {}

  void OnRequest(const grpc::ByteBuffer& request) override;
  void Schedule(void (ReadTensorCall::*step)());
  void Begin();
  // Puts the rows into a region if the request says so.
  absl::Status UseRegion();
  void ReadSlice();
  void End(absl::Status status);

  TensorCallEnvironment* const environment_;
  std::string peer_;      // PeerKey; set before anything is scheduled
  std::string identity_;  // AdmittedCall's; set before anything is scheduled
  v1::ReadTensorRequest request_;
  admin::TensorRead read_;
  std::shared_ptr<regions::Region> region_;
  absl::Span<uint8_t> in_region_;  // where the rows go in region_; empty: they go in messages
  int64_t next_row_ = 0;
  grpc::ByteBuffer message_;
  std::atomic<bool> cancelled_{false};

  absl::Mutex mutex_;
  CallClock clock_ ABSL_GUARDED_BY(mutex_);
};

// The common base of WriteTensor and AddGradient: a call that receives rows in slices. The first message has
// `open`. Deletes itself in OnDone.
class ReceiveRowsCall : public grpc::ServerReadReactor<grpc::ByteBuffer>, public WatchedCall {
 public:
  void OnReadDone(bool ok) override ABSL_LOCKS_EXCLUDED(clock_mutex_);
  void OnDone() override;
  absl::string_view EndIfLate(absl::Time now, const CallTimeouts& timeouts) override
      ABSL_LOCKS_EXCLUDED(clock_mutex_);
  void EndWith(absl::Status why) override ABSL_LOCKS_EXCLUDED(clock_mutex_);

 protected:
  // The rows that a call carries, and the bytes of one row.
  struct Extent {
    engine::RowRange rows;
    int64_t row_bytes = 1;
  };

  ReceiveRowsCall(TensorCallEnvironment* environment, grpc::CallbackServerContext* context,
                  grpc::ByteBuffer* response, absl::string_view method)
      : environment_(environment), context_(context), response_(response), method_(method) {}

  // Starts reading, or ends the call if it is not admitted. Call once.
  void Begin();

  // The steps of a call: first Decode, Open and Await, then Decode and Take for each slice in order, then
  // Answer. They run one at a time, on workers or on gRPC's threads.
  // Decodes a message, stores it without its payload, and returns the payload. `*has_open`: whether the
  // message has an `open`, as only the first one may.
  virtual absl::StatusOr<wire::PayloadView> Decode(const grpc::ByteBuffer& received, bool* has_open) = 0;
  virtual absl::StatusOr<Extent> Open() = 0;
  // Comes after Open: runs `next` on a worker as soon as the call may take rows. OK: `next` will run or has
  // run.
  virtual absl::Status Await(std::function<void()> next) { return RunOnWorker(std::move(next)); }
  // Ends the wait that Await began; true if `next` will not run because of this.
  virtual bool GiveUpWaiting() { return false; }
  virtual absl::Status Take(engine::RowRange rows, absl::Span<const uint8_t> values) = 0;
  virtual absl::StatusOr<grpc::ByteBuffer> Answer() = 0;
  // The call is over. Runs before the client gets the status.
  virtual void Release() {}

  absl::Status RunOnWorker(std::function<void()> step);
  void End(absl::Status status);
  // Sets what the call waits for from now on.
  void WaitFor(CallClock::Waits what) ABSL_LOCKS_EXCLUDED(clock_mutex_);

  TensorCallEnvironment* const environment_;
  std::string head_;  // empty until known; AdminWorkers shares by it, and the audit line names it

 private:
  void Read(CallClock::Waits what) ABSL_LOCKS_EXCLUDED(clock_mutex_);
  // The steps of a message: decode it (and open the call), take its rows, read on.
  void HandleMessage() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status DecodeMessage(bool* has_open) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakePayload() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status TakeRows() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Complete() ABSL_LOCKS_EXCLUDED(mutex_);

  grpc::CallbackServerContext* const context_;
  std::string peer_;  // PeerKey; set before anything else
  grpc::ByteBuffer* const response_;
  const absl::string_view method_;
  AdmittedCall admitted_;
  grpc::ByteBuffer received_;

  absl::Mutex mutex_;  // never contended: steps follow each other, on different threads
  bool opened_ ABSL_GUARDED_BY(mutex_) = false;
  Extent extent_ ABSL_GUARDED_BY(mutex_);
  int64_t next_row_ ABSL_GUARDED_BY(mutex_) = 0;
  wire::PayloadView payload_ ABSL_GUARDED_BY(mutex_);  // the payload of the present message

  absl::Mutex clock_mutex_;  // a leaf
  CallClock clock_ ABSL_GUARDED_BY(clock_mutex_);
  bool given_up_ ABSL_GUARDED_BY(clock_mutex_) = false;  // ended while a read was under way
};

// A call of WriteTensor.
class WriteTensorCall final : public ReceiveRowsCall {
 public:
  static WriteTensorCall* Start(TensorCallEnvironment* environment, grpc::CallbackServerContext* context,
                                grpc::ByteBuffer* response);

 private:
  using ReceiveRowsCall::ReceiveRowsCall;
  absl::StatusOr<wire::PayloadView> Decode(const grpc::ByteBuffer& received, bool* has_open) override;
  absl::StatusOr<Extent> Open() override;
  absl::Status Take(engine::RowRange rows, absl::Span<const uint8_t> values) override;
  absl::StatusOr<grpc::ByteBuffer> Answer() override;

  void Release() override { write_.writer.reset(); }

  v1::WriteTensorRequest request_;
  admin::TensorWrite write_;
  v1::HeadState state_;  // the head's state when the last rows were written
};

// A call of AddGradient.
class AddGradientCall final : public ReceiveRowsCall {
 public:
  static AddGradientCall* Start(TensorCallEnvironment* environment, grpc::CallbackServerContext* context,
                                grpc::ByteBuffer* response);

  void OnCancel() override ABSL_LOCKS_EXCLUDED(turn_mutex_);

 private:
  using ReceiveRowsCall::ReceiveRowsCall;
  absl::StatusOr<wire::PayloadView> Decode(const grpc::ByteBuffer& received, bool* has_open) override;
  absl::StatusOr<Extent> Open() override;
  absl::Status Await(std::function<void()> next) override ABSL_LOCKS_EXCLUDED(turn_mutex_);
  bool GiveUpWaiting() override ABSL_LOCKS_EXCLUDED(turn_mutex_);
  absl::Status Take(engine::RowRange rows, absl::Span<const uint8_t> values) override;
  absl::StatusOr<grpc::ByteBuffer> Answer() override;

  void Release() override { contribution_.counted.reset(); }

  v1::AddGradientRequest request_;
  engine::Contribution contribution_;
  engine::AddedRows added_;  // the rows so far, and the head's state after the last ones

  absl::Mutex turn_mutex_;
  bool cancelled_ ABSL_GUARDED_BY(turn_mutex_) = false;
  uint64_t ticket_ ABSL_GUARDED_BY(turn_mutex_) = 0;  // names the wait for a turn; 0: no wait
};

// What all calls of SaveCheckpoint share. Must outlive the calls and the saves that they start.
struct SaveCallEnvironment {
  admin::Checkpoints* checkpoints = nullptr;
  const RequestEnvironment* requests = nullptr;
  const AccessControl* access = nullptr;
  CallRegistry* registry = nullptr;
  WorkerPool* workers = nullptr;
  // Makes the status that a call ends with. Counts and logs errors.
  std::function<grpc::Status(absl::string_view peer, absl::Status)> ended;
  std::function<void(int change)> count;  // changes the number of saves that wait or run
};

// A call of SaveCheckpoint. The save runs on a worker that runs nothing but saves; the call sends progress
// while the save runs, and the result last. If the client goes away, the save goes on, unless the client
// asked otherwise. Thread-safe. Lives until both gRPC and the save are done with it.
class SaveCall final : public RequestCall, public WatchedCall {
 public:
  static SaveCall* Start(SaveCallEnvironment* environment, grpc::CallbackServerContext* context);

  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnCancel() override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDone() override;
  absl::string_view EndIfLate(absl::Time now, const CallTimeouts& timeouts) override
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  SaveCall(SaveCallEnvironment* environment, grpc::CallbackServerContext* context)
      : RequestCall(environment->requests, context, "SaveCheckpoint"), environment_(environment) {}

  void OnRequest(const grpc::ByteBuffer& request) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Schedule(const grpc::ByteBuffer& request);
  void Run();
  // Sends the update. If several updates come while one is being sent, only the last of them is sent.
  void Post(v1::SaveCheckpointUpdate update) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends the call after the posted updates are sent.
  void End(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Starts the next write, or the end, unless a write is under way.
  void Continue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  SaveCallEnvironment* const environment_;
  v1::SaveCheckpointRequest request_;
  std::string peer_;                 // PeerKey; set before the call is admitted
  AdmittedCall admitted_;            // set before the save runs
  std::vector<std::string> pruned_;  // checkpoints that the save has removed
  std::shared_ptr<SaveCall> self_;   // gRPC's reference, until OnDone
  std::atomic<bool> gone_{false};    // the client has gone away

  absl::Mutex mutex_;
  // The request has come. Before that, RequestCall ends the call.
  bool received_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::ByteBuffer message_ ABSL_GUARDED_BY(mutex_);  // the message that is being sent
  std::optional<v1::SaveCheckpointUpdate> next_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  CallClock clock_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_TENSOR_CALLS_H_
