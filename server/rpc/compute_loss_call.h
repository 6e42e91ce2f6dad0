// SPDX-License-Identifier: Apache-2.0
// The ComputeLoss call and its parts. ComputeLossCall is the reactor between gRPC and an engine stream.
// CallInbox delivers to the call what the engine tells it. SlicePlaces knows where slices and their gradients
// lie: in messages, or in a region of shared memory. PeerTable counts for ListStreams what each client has
// sent and taken. Each class says which threads use it.
#ifndef LOSSD_SERVER_RPC_COMPUTE_LOSS_CALL_H_
#define LOSSD_SERVER_RPC_COMPUTE_LOSS_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/server.pb.h"
#include "proto/wire/direct_call.h"
#include "proto/wire/payload_codec.h"
#include "server/engine/engine.h"
#include "server/engine/stream.h"
#include "server/metrics/metrics.h"
#include "server/regions/regions.h"
#include "server/rpc/access_control.h"
#include "server/rpc/request_call.h"
#include "server/rpc/workers.h"

namespace lossd::rpc {

// What the engine tells a ComputeLoss call, delivered in order, one piece after another. A piece whose
// delivery takes microseconds is delivered by the engine's thread that brings it, because waking another
// thread takes longer. All other pieces are delivered in turns on a pool of workers.
//
// Thread-safe. The handler is never called by two threads at a time. A worker calls the handler, or the
// thread that leaves a piece, if that piece is quick or the workers take no more tasks. Lifetime: the engine
// (until OnFinished) and scheduled turns share the inbox; the inbox keeps the handler.
class CallInbox final : public engine::StreamObserver, public std::enable_shared_from_this<CallInbox> {
 public:
  struct Slice {
    engine::SliceOutput output;
    absl::Time ready;  // when the engine had it
  };
  struct End {
    absl::Status status;
    engine::StreamSummary summary;
  };
  class Handler {
   public:
    virtual ~Handler() = default;
    // Whether Handle takes only microseconds. Called by one thread at a time, and with slices in their order.
    virtual bool IsQuick(const Slice& slice) = 0;
    virtual void Handle(Slice slice) = 0;
    // The last call.
    virtual void Handle(End end) = 0;
  };

  // `workers` outlives the inbox.
  CallInbox(std::shared_ptr<Handler> handler, WorkerPool* workers)
      : handler_(std::move(handler)), workers_(workers) {}

  // engine::StreamObserver. A slice that has got its memory is received in a turn, too.
  void OnMemory(absl::AnyInvocable<void()> receive) override;
  void OnSlice(engine::SliceOutput output) override;
  void OnFinished(absl::Status status, const engine::StreamSummary& summary) override;

 private:
  using Event = std::variant<absl::AnyInvocable<void()>, Slice, End>;

  void Post(Event event) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether the thread that brings an event may deliver it.
  bool IsQuick(const Event& event);
  // Delivers what there is.
  void TakeTurn() ABSL_LOCKS_EXCLUDED(mutex_);
  // The same on the thread that brings an event: leaves the rest to a worker from the first one on that takes
  // its time.
  void TakeQuickTurn() ABSL_LOCKS_EXCLUDED(mutex_);
  void ScheduleTurn();
  void Deliver(Event event);

  const std::shared_ptr<Handler> handler_;
  WorkerPool* const workers_;
  absl::Mutex mutex_;
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);
  bool turn_scheduled_ ABSL_GUARDED_BY(mutex_) = false;
};

// ClaimRegion and BytesOf check what a call says of a region of shared memory, before any of the memory is
// used. Both are thread-safe.

inline constexpr uint64_t kRegionAlignment = 256;  // of ranges in a region, in bytes

// The region that a caller of this identity names in `field`. UNAVAILABLE, which says nothing of regions of
// others, if it has no such region. `regions` null: the server shares no memory.
absl::StatusOr<std::shared_ptr<regions::Region>> ClaimRegion(regions::Regions* regions,
                                                             absl::string_view field, const std::string& id,
                                                             const std::string& identity);

// The memory of a part of the region that is named in `field`. INVALID_ARGUMENT, naming field and value, if
// the region has no such part.
absl::StatusOr<absl::Span<uint8_t>> BytesOf(const regions::Region& region, absl::string_view field,
                                            const v1::RegionRange& range);

// Where the slices of one ComputeLoss call lie, and so their gradients: in messages, or in a region of shared
// memory.
//
// What the client says of a region is checked against the region's size before anything is read. Hidden
// states in a region may change while they are read, so nothing but their values depends on them, and they
// are read once.
//
// Thread-safe after Use or UseForGradients.
class SlicePlaces {
 public:
  // Slices may lie in `region` from now on. Its memory stays as long as this object.
  void Use(std::shared_ptr<regions::Region> region) { region_ = std::move(region); }
  // For rows that the server has retained: the gradients of `first_row` and of the rows behind it go to
  // `range` of the region until the range is full. INVALID_ARGUMENT, naming field and value, if there is no
  // such range.
  absl::Status UseForGradients(std::shared_ptr<regions::Region> region, const v1::RegionRange& range,
                               int64_t first_row);

  // The slice as the engine takes it, but for on_queued. INVALID_ARGUMENT, naming field and value, if it
  // cannot lie where the header says.
  absl::StatusOr<engine::IncomingSlice> Take(const v1::SliceHeader& header, const engine::RowRange& rows,
                                             wire::PayloadView payload) ABSL_LOCKS_EXCLUDED(mutex_);

  // Whether Answer copies the gradients to the region, which on a device waits for work under way there.
  bool AnswerCopies(const engine::SliceOutput& output) ABSL_LOCKS_EXCLUDED(mutex_);

  // The message with the results of a slice. Its gradients are where its hidden states were, or where
  // UseForGradients says: the message refers to their memory, or they are in the region.
  grpc::ByteBuffer Answer(engine::SliceOutput output) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Where the gradients of a slice go; null: in the message.
  uint8_t* Place(const engine::SliceOutput& output) ABSL_LOCKS_EXCLUDED(mutex_);

  std::shared_ptr<regions::Region> region_;  // null: all slices are in messages
  absl::Span<uint8_t> gradients_;            // of first_row_ and those behind it
  int64_t first_row_ = 0;
  absl::Mutex mutex_;
  std::map<int64_t, absl::Span<uint8_t>> in_region_ ABSL_GUARDED_BY(mutex_);  // by their first rows
};

// The sums over all ComputeLoss calls of one client.
struct PeerTotals {
  int64_t open_streams = 0;
  int64_t streams = 0;         // open and ended
  int64_t rows = 0;            // whose results the client has taken
  int64_t received_bytes = 0;  // hidden states that were queued
  int64_t sent_bytes = 0;      // gradients that the client has taken
  double device_wait_seconds = 0.0;
  absl::Time last_active;  // it last opened a call, sent or took something
};

// What each client has sent and taken since the server knows it, for ListStreams.
//
// Memory: one entry for each client. There are at most `most` entries, or one for each client with an open
// call if these are more. When another client comes, the table forgets the client that has been idle longest.
//
// Thread-safe.
class PeerTable {
 public:
  explicit PeerTable(size_t most) : most_(most) {}

  // The numbers of one client, as long as one of its calls is open.
  class Peer {
   public:
    void Queued(int64_t bytes, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);
    void Computed(double device_wait_seconds) ABSL_LOCKS_EXCLUDED(mutex_);
    void Sent(int64_t rows, int64_t bytes, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);
    // The call that was opened has ended.
    void Close() ABSL_LOCKS_EXCLUDED(mutex_);
    PeerTotals totals() const ABSL_LOCKS_EXCLUDED(mutex_);

   private:
    friend class PeerTable;
    void Open(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

    mutable absl::Mutex mutex_;
    PeerTotals totals_ ABSL_GUARDED_BY(mutex_);
  };

  // A call of `peer` begins; Peer::Close is called when it ends.
  std::shared_ptr<Peer> Open(const std::string& peer, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

  struct Entry {
    std::string peer;
    PeerTotals totals;
  };
  std::vector<Entry> List() const ABSL_LOCKS_EXCLUDED(mutex_);  // by name

 private:
  // The client that was idle longest; false if all have open calls.
  bool ForgetOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t most_;
  mutable absl::Mutex mutex_;  // taken before that of a Peer
  std::map<std::string, std::shared_ptr<Peer>> peers_ ABSL_GUARDED_BY(mutex_);
};

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

// One ComputeLoss call: the reactor between gRPC, or a client of this process (wire::DirectCall), and an
// engine stream.
//
//   awaiting open --open--> streaming --engine finished--> writing the rest --> finished
//
// A call that opens with `backward` is the same without reading: its slices are rows that the engine holds.
//
// Reading. At most one message is in flight. The engine takes a slice when it has memory for it (on a
// deterministic server, when it is the slice's turn), which is after it has arrived, not before: an idle call
// holds no memory. No further message is read while a slice waits, or while slices of this call that are with
// the engine or waiting to be sent take max_staging_bytes. So one stuck client can neither hold the pool nor
// pile up messages. Slices in order are bounded by the rows of a few groups instead: a group is not computed
// before all of it is here.
//
// Writing. Exactly one write is in flight; the queue is bounded by the slices in flight plus two. Gradients
// are sent from their staging buffer, which goes back to the pool when the transport drops its slice.
//
// Ending. With an engine stream open, the call always finishes through the engine's OnFinished; every other
// reason to end cancels the engine stream first.
//
// Threads. gRPC's reactions and the turns of CallInbox share mutex_, under which all gRPC operations are
// started (gRPC never runs a reaction from within them). A slice is copied on the thread of the reaction that
// received it, or in a turn if it had to wait for memory; never with mutex_ held.
//
// Lifetime. gRPC (until OnDone), the inbox (until OnFinished) and a slice that is being received share the
// call.
class ComputeLossCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                              public CallInbox::Handler,
                              public WatchedCall,
                              public std::enable_shared_from_this<ComputeLossCall> {
 public:
  // Starts a call that came over a connection; it deletes itself when it is over.
  static ComputeLossCall* Start(ComputeLossEnvironment* environment, grpc::CallbackServerContext* context);
  // Starts a call of a client of this process, on a server that asks nobody who calls. `client`: the number
  // of the client (wire::DirectServer::NextClient).
  static ComputeLossCall* StartDirect(ComputeLossEnvironment* environment, wire::CallContext* context,
                                      uint64_t client);

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

  explicit ComputeLossCall(ComputeLossEnvironment* environment);

  // Admits the call of `peer` (PeerKey), or has it end, and begins to read.
  ComputeLossCall* Begin(const absl::StatusOr<AdmittedCall>& admitted, const std::string& peer)
      ABSL_LOCKS_EXCLUDED(mutex_);
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
  // Makes the engine take rows that it holds, and the slices behind them as long as there is memory at once;
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
  std::unique_ptr<wire::CallContext> grpc_context_;  // null: the call came over no connection
  wire::CallContext* context_ = nullptr;             // set before anything else
  std::string peer_;                                 // PeerKey; set before anything else
  std::string identity_;                             // AdmittedCall's; set before anything else
  std::shared_ptr<PeerTable::Peer> totals_;          // of the peer; set before anything else; null: refused
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
