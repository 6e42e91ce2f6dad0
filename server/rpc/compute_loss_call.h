// SPDX-License-Identifier: Apache-2.0
// One ComputeLoss call: the reactor between gRPC and an engine stream.
//
//   awaiting open --open--> streaming --engine finished--> writing the rest --> finished
//
// A call that opens with `backward` is the same without reading: its slices are rows that the engine holds.
//
// Reading. At most one message is in flight. The engine takes a slice when it has memory for it (on a
// deterministic server, when it is the slice's turn), which is after it has arrived, not before: an idle call
// holds no memory. No further message is read while a slice waits, or while slices of this call that are with
// the engine or waiting to be sent take max_staging_bytes, so one stuck client can neither hold the pool nor
// pile up messages. Slices in order are bounded by the rows of a few groups instead: a group is not computed
// before all of it is here. Writing. Exactly one write is in flight; the queue is bounded by the slices in
// flight plus two. Gradients are sent from their staging buffer, which goes back to the pool when the
// transport drops its slice. Ending. With an engine stream open, the call always finishes through the
// engine's OnFinished; every other reason to end cancels the engine stream first.
//
// Threads. gRPC's reactions and the turns of the inbox (call_inbox.h) share mutex_, under which all gRPC
// operations are started (gRPC never runs a reaction from within them). A slice is copied on the thread of
// the reaction that received it, or in a turn if it had to wait for memory; never with mutex_ held. Lifetime.
// Shared by gRPC (until OnDone), the inbox (until OnFinished) and a slice that is being received.
#ifndef LOSSD_SERVER_RPC_COMPUTE_LOSS_CALL_H_
#define LOSSD_SERVER_RPC_COMPUTE_LOSS_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/server.pb.h"
#include "proto/wire/payload_codec.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"
#include "server/regions/regions.h"
#include "server/rpc/access_control.h"
#include "server/rpc/call_inbox.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/peer_table.h"
#include "server/rpc/slice_places.h"
#include "server/rpc/worker_pool.h"

namespace lossd::rpc {

inline constexpr absl::string_view kComputeLoss = "ComputeLoss";

// What all calls share; outlives them.
struct ComputeLossEnvironment {
  engine::Engine* engine = nullptr;
  const AccessControl* access = nullptr;
  metrics::Metrics* metrics = nullptr;
  CallRegistry* registry = nullptr;
  PeerTable* peers = nullptr;
  WorkerPool* senders = nullptr;
  regions::Regions* regions = nullptr;            // null: the server shares no memory
  int64_t max_staging_bytes = int64_t{32} << 20;  // per call
  std::atomic<bool> draining{false};
};

// Why a call was cancelled: DEADLINE_EXCEEDED or CANCELLED.
absl::Status CancellationStatus(const grpc::CallbackServerContext& context);

class ComputeLossCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                              public CallInbox::Handler,
                              public WatchedCall,
                              public std::enable_shared_from_this<ComputeLossCall> {
 public:
  // Starts the call; it deletes itself when it is over.
  static ComputeLossCall* Start(ComputeLossEnvironment* environment, grpc::CallbackServerContext* context);

  // grpc::ServerBidiReactor
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  // CallInbox::Handler
  bool IsQuick(const CallInbox::Slice& slice) override;
  void Handle(CallInbox::Slice slice) override ABSL_LOCKS_EXCLUDED(mutex_);
  void Handle(CallInbox::End end) override ABSL_LOCKS_EXCLUDED(mutex_);

  // WatchedCall
  absl::string_view EndIfLate(absl::Time now, const CallTimeouts& timeouts) override;
  void EndWith(absl::Status why) override;
  void Describe(absl::Time now, v1::StreamDescription* description) override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // What has gone through the call.
  struct Traffic {
    std::string head;
    uint64_t microbatch_id = 0;
    bool shared_memory = false;
    int64_t rows = 0;
    int64_t queued_rows = 0;
    int64_t sent_rows = 0;
    int64_t received_bytes = 0;
    int64_t sent_bytes = 0;
  };
  struct Outgoing {
    grpc::ByteBuffer message;
    int64_t payload_bytes = 0;
    int64_t rows = 0;
    bool is_slice = false;
    int64_t staging_bytes = 0;  // SliceOutput::staging_bytes
    absl::Time ready;
    engine::RowRange range;  // of a slice
  };

  ComputeLossCall(ComputeLossEnvironment* environment, grpc::CallbackServerContext* context);

  // ---- Reading ----
  // There is progress: the clock begins again with what the call waits for now.
  void Progress() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status HandleMessage() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status HandleOpen(const v1::OpenMicrobatch& open, size_t payload_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status HandleBackward(const v1::OpenBackward& backward, size_t payload_bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Takes over an engine stream and sends `accepted`; false if the call was cancelled meanwhile.
  bool Accept(std::unique_ptr<engine::Stream> stream, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status HandleSlice(const v1::SliceHeader& header, wire::PayloadView payload, absl::Time arrived)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void HandleEndOfReads() ABSL_LOCKS_EXCLUDED(mutex_);
  // Has the engine take rows that it holds, and the slices behind them as long as there is memory at once;
  // null: there is nothing to do. One call at a time.
  void ReceiveRetained(std::optional<engine::RowRange> rows) ABSL_LOCKS_EXCLUDED(mutex_);
  // The engine has queued a slice, for which the client has sent `bytes`.
  void OnQueued(int64_t rows, int64_t bytes, int64_t staging_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void ReadNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool EnoughInFlight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Goes on to the next slice, unless there are enough in flight. If that is one the engine holds, returns it
  // for ReceiveRetained, which is called without the lock; a ReceiveRetained that runs finds it by itself.
  std::optional<engine::RowRange> NextSlice() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- Writing and ending ----
  // Books a write that has ended; the result is NextSlice's.
  std::optional<engine::RowRange> FinishWrite(bool ok) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Pump() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the call with `why` (not OK), through the engine if a stream is open.
  void Fail(absl::Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  void FailLocked(absl::Status why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<engine::Stream> stream() ABSL_LOCKS_EXCLUDED(mutex_);

  ComputeLossEnvironment* const environment_;
  grpc::CallbackServerContext* const context_;
  std::string peer_;                         // PeerKey; set before anything else
  std::string identity_;                     // AdmittedCall's; likewise
  std::shared_ptr<PeerTable::Peer> totals_;  // of the peer; likewise, null for a call that was refused
  const absl::Time came_;
  std::shared_ptr<ComputeLossCall> self_;  // gRPC's share

  grpc::ByteBuffer received_;  // the message read last
  SlicePlaces places_;

  absl::Mutex mutex_;
  std::shared_ptr<engine::Stream> stream_ ABSL_GUARDED_BY(mutex_);  // set once, by open
  std::deque<Outgoing> writes_ ABSL_GUARDED_BY(mutex_);
  Outgoing writing_ ABSL_GUARDED_BY(mutex_);
  bool write_active_ ABSL_GUARDED_BY(mutex_) = false;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  CallClock clock_ ABSL_GUARDED_BY(mutex_);
  int64_t staging_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of slices with the engine or not yet written
  bool read_withheld_ ABSL_GUARDED_BY(mutex_) = false;
  bool backward_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<engine::RowRange> retained_slices_ ABSL_GUARDED_BY(mutex_);   // backward: not received yet
  bool receiving_retained_ ABSL_GUARDED_BY(mutex_) = false;                // in ReceiveRetained
  std::optional<engine::RowRange> next_retained_ ABSL_GUARDED_BY(mutex_);  // which goes on with it
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // cancelled: nothing more can be sent
  std::optional<absl::Status> ending_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // Finish was called: no gRPC operation may start
  absl::Time opened_ ABSL_GUARDED_BY(mutex_);
  Traffic traffic_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_COMPUTE_LOSS_CALL_H_
