// SPDX-License-Identifier: Apache-2.0
// The ComputeLoss call and its parts. ComputeLossCall is the reactor between gRPC and an engine stream.
// CallInbox delivers the engine's results to the call. SlicePlaces knows where slices and their gradients
// lie: in messages, or in a region of shared memory. PeerTable counts, for ListStreams, what each client has
// sent and received. Each class says which threads use it.
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

// Delivers what the engine tells a ComputeLoss call (events: memory for a slice, results of a slice, the
// end), in order and one after another. If a delivery takes only microseconds, the engine's thread that
// brings the event delivers it, because waking another thread takes longer. All other events are delivered in
// turns on a pool of workers.
//
// Thread-safe. The handler is never called by two threads at a time. A worker calls the handler; or the
// thread that brings an event does, if the event is quick or the workers take no more tasks. Lifetime: the
// engine (until OnFinished) and scheduled turns own the inbox together; the inbox owns the handler.
class CallInbox final : public engine::StreamObserver, public std::enable_shared_from_this<CallInbox> {
 public:
  struct Slice {
    engine::SliceOutput output;
    absl::Time ready;  // when the engine delivered it
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
    // The end of the engine stream: the last call of the handler.
    virtual void Handle(End end) = 0;
  };

  // `workers` outlives the inbox.
  CallInbox(std::shared_ptr<Handler> handler, WorkerPool* workers)
      : handler_(std::move(handler)), workers_(workers) {}

  // engine::StreamObserver. `receive` copies a slice that has got memory; it runs in a turn, too.
  void OnMemory(absl::AnyInvocable<void()> receive) override;
  void OnSlice(engine::SliceOutput output) override;
  void OnFinished(absl::Status status, const engine::StreamSummary& summary) override;

 private:
  using Event = std::variant<absl::AnyInvocable<void()>, Slice, End>;

  void Post(Event event) ABSL_LOCKS_EXCLUDED(mutex_);
  // Whether the thread that brings an event may deliver it.
  bool IsQuick(const Event& event);
  // Delivers all events that there are.
  void TakeTurn() ABSL_LOCKS_EXCLUDED(mutex_);
  // Delivers events on the thread that brings one. At the first event that is not quick, leaves it and all
  // later ones to a worker.
  void TakeQuickTurn() ABSL_LOCKS_EXCLUDED(mutex_);
  void ScheduleTurn();
  void Deliver(Event event);

  const std::shared_ptr<Handler> handler_;
  WorkerPool* const workers_;
  absl::Mutex mutex_;
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);
  bool turn_scheduled_ ABSL_GUARDED_BY(mutex_) = false;
};

// ClaimRegion and BytesOf check the region of shared memory that a call names, before any of the memory is
// used. Both are thread-safe.

inline constexpr uint64_t kRegionAlignment = 256;  // bytes; of ranges in a region

// The region `id`, which a caller with this identity names in `field`. UNAVAILABLE if the caller has no such
// region; the error does not tell whether another client has it. `regions` is null if the server shares no
// memory.
absl::StatusOr<std::shared_ptr<regions::Region>> ClaimRegion(regions::Regions* regions,
                                                             absl::string_view field, const std::string& id,
                                                             const std::string& identity);

// The memory of `range` in the region; the call names the range in `field`. INVALID_ARGUMENT, naming field
// and value, if the region has no such range.
absl::StatusOr<absl::Span<uint8_t>> BytesOf(const regions::Region& region, absl::string_view field,
                                            const v1::RegionRange& range);

// Where the slices of one ComputeLoss call and their gradients lie: in messages, or in a region of shared
// memory.
//
// The ranges that the client names are checked against the region's size before anything is read. The client
// may change hidden states in a region while the server reads them, so the server reads them once, and
// nothing but results depends on their values.
//
// Thread-safe after Use or UseForGradients.
class SlicePlaces {
 public:
  // From now on slices may lie in `region`, whose memory lives as long as this object.
  void Use(std::shared_ptr<regions::Region> region) { region_ = std::move(region); }
  // For rows that the server has retained: the gradients of `first_row` and of the rows after it go to
  // `range` of the region until the range is full. INVALID_ARGUMENT, naming field and value, if there is no
  // such range.
  absl::Status UseForGradients(std::shared_ptr<regions::Region> region, const v1::RegionRange& range,
                               int64_t first_row);

  // Makes the engine's form of a slice, without on_queued. INVALID_ARGUMENT, naming field and value, if the
  // slice cannot lie where the header says.
  absl::StatusOr<engine::IncomingSlice> Take(const v1::SliceHeader& header, const engine::RowRange& rows,
                                             wire::PayloadView payload) ABSL_LOCKS_EXCLUDED(mutex_);

  // How Answer delivers the gradients of a slice.
  enum class Delivery : uint8_t {
    kNone,       // there are none, or they lie in their place already
    kInMessage,  // the message references them
    kCopied      // a copy to the region; if the region is on a device, it waits for work under way there
  };
  Delivery DeliveryOf(const engine::SliceOutput& output) ABSL_LOCKS_EXCLUDED(mutex_);

  // Makes the message with the results of a slice. If the gradients do not go to the region, the message
  // references their memory. In the region, they go to the place of the hidden states, or where
  // UseForGradients says.
  grpc::ByteBuffer Answer(engine::SliceOutput output) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Where the gradients of a slice go; null: in the message.
  uint8_t* Place(const engine::SliceOutput& output) ABSL_LOCKS_EXCLUDED(mutex_);

  std::shared_ptr<regions::Region> region_;  // null: all slices are in messages
  absl::Span<uint8_t> gradients_;            // for the gradients of first_row_ and the rows after it
  int64_t first_row_ = 0;
  absl::Mutex mutex_;
  std::map<int64_t, absl::Span<uint8_t>> in_region_ ABSL_GUARDED_BY(mutex_);  // slices by first row
};

// The sums over all ComputeLoss calls of one client.
struct PeerTotals {
  int64_t open_streams = 0;
  int64_t streams = 0;         // open ones and ended ones
  int64_t rows = 0;            // rows whose results the client has received
  int64_t received_bytes = 0;  // hidden states that were queued
  int64_t sent_bytes = 0;      // gradients that the client has received
  double device_wait_seconds = 0.0;
  absl::Time last_active;  // when the client last opened a call, sent or received something
};

// Counts, for ListStreams, what each client has sent and received since the server knows the client.
//
// Memory: one entry for each client. There are at most `most` entries, or one for each client with an open
// call if these are more. When another client comes, the table forgets the client that has been idle longest.
//
// Thread-safe.
class PeerTable {
 public:
  explicit PeerTable(size_t most) : most_(most) {}

  // The sums of one client, which its open calls update.
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
  std::vector<Entry> List() const ABSL_LOCKS_EXCLUDED(mutex_);  // sorted by name

 private:
  // Forgets the client that was idle longest. False if all clients have open calls.
  bool ForgetOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t most_;
  mutable absl::Mutex mutex_;  // taken before the lock of a Peer
  std::map<std::string, std::shared_ptr<Peer>> peers_ ABSL_GUARDED_BY(mutex_);
};

inline constexpr absl::string_view kComputeLoss = "ComputeLoss";

// What all ComputeLoss calls share. Must outlive them.
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

// Who calls, and what the call came through.
struct LossCaller {
  std::shared_ptr<wire::CallContext> context;  // not null; valid until the end of the call
  absl::StatusOr<AdmittedCall> admitted;       // an error ends the call
  std::string peer;                            // PeerKey; empty if the call was not admitted
};

// The caller of a call that came over a connection, who is asked for an identity if the server asks for one.
LossCaller CallerOver(grpc::CallbackServerContext* context, const AccessControl& access);
// The caller of a direct call, on a server that asks no caller for an identity. `client` is the client's
// number (wire::DirectServer::NextClient).
LossCaller DirectCaller(wire::CallContext* context, uint64_t client);

// One ComputeLoss call: the reactor between gRPC, or a client of this process (wire::DirectCall), and an
// engine stream.
//
//   awaiting open --open--> streaming --engine finished--> writing the rest --> finished
//
// A call that opens with `backward` goes through the same states, but reads no slices: its slices are rows
// that the engine has retained.
//
// Reading. The call reads one message at a time. A slice gets memory only after it has arrived, so an idle
// call holds no memory. The engine takes the slice when it has memory for it; on a deterministic server, when
// it is the slice's turn. The call reads no further message while a slice waits, or while its slices that the
// engine has or that wait to be sent take max_staging_bytes. So one stuck client can neither hold the memory
// pool nor pile up messages. Slices of a deterministic server are bounded by the rows of a few groups
// instead, because a group is not computed before all its rows have arrived.
//
// Writing. One write is in flight at a time. The queue has at most as many messages as slices are in flight,
// plus two. Gradients are sent from their staging buffer, which goes back to the pool when the transport
// drops its reference.
//
// Ending. While an engine stream is open, the call finishes only through the engine's OnFinished. Any other
// reason to end cancels the engine stream first.
//
// Threads. gRPC's reactions and the turns of CallInbox share mutex_, under which all gRPC operations are
// started (gRPC never runs a reaction from within them). A slice is copied on the thread of the reaction that
// received it, or in a turn if it had to wait for memory; never with mutex_ held.
//
// Lifetime. gRPC (until OnDone), the inbox (until OnFinished) and a slice that is being received own the call
// together.
class ComputeLossCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                              public CallInbox::Handler,
                              public WatchedCall,
                              public std::enable_shared_from_this<ComputeLossCall> {
 public:
  // Starts a call. The call deletes itself when it is over.
  static ComputeLossCall* Start(ComputeLossEnvironment* environment, LossCaller caller);

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
  // What the call has carried, for ListStreams.
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
    engine::RowRange range;  // the rows of a slice
  };

  ComputeLossCall(ComputeLossEnvironment* environment, LossCaller caller);

  // ---- Reading ----
  // The call has made progress: restarts its clock for what it waits for now.
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
  // Makes the engine queue retained rows, and the retained slices after them as long as there is memory at
  // once. Nullopt: there is nothing to do. Only one thread may run it at a time.
  void ReceiveRetained(std::optional<engine::RowRange> rows) ABSL_LOCKS_EXCLUDED(mutex_);
  // The engine has queued a slice, for which the client has sent `bytes`.
  void OnQueued(int64_t rows, int64_t bytes, int64_t staging_bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  void ReadNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool EnoughInFlight() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Goes on to the next slice, unless enough slices are in flight. If this is a slice of retained rows,
  // returns it for ReceiveRetained, which the caller then calls without the lock. A ReceiveRetained that runs
  // already gets the slice by itself.
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
  const std::shared_ptr<wire::CallContext> context_;
  const std::string peer_;                   // LossCaller's
  const std::string identity_;               // AdmittedCall's; empty if the call was not admitted
  std::shared_ptr<PeerTable::Peer> totals_;  // sums of the peer; set before anything else; null: refused
  const absl::Time came_;
  std::shared_ptr<ComputeLossCall> self_;  // gRPC's reference, until OnDone

  grpc::ByteBuffer received_;  // the message read last
  SlicePlaces places_;

  absl::Mutex mutex_;
  std::shared_ptr<engine::Stream> stream_ ABSL_GUARDED_BY(mutex_);  // set once, by open
  std::deque<Outgoing> writes_ ABSL_GUARDED_BY(mutex_);
  Outgoing writing_ ABSL_GUARDED_BY(mutex_);
  bool write_active_ ABSL_GUARDED_BY(mutex_) = false;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  CallClock clock_ ABSL_GUARDED_BY(mutex_);
  int64_t staging_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // for slices in the engine or not written yet
  bool read_withheld_ ABSL_GUARDED_BY(mutex_) = false;
  bool backward_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<engine::RowRange> retained_slices_ ABSL_GUARDED_BY(mutex_);   // backward: not received yet
  bool receiving_retained_ ABSL_GUARDED_BY(mutex_) = false;                // a thread is in ReceiveRetained
  std::optional<engine::RowRange> next_retained_ ABSL_GUARDED_BY(mutex_);  // the next for ReceiveRetained
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;  // cancelled: nothing more can be sent
  std::optional<absl::Status> ending_ ABSL_GUARDED_BY(mutex_);
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // Finish was called: no gRPC operation may start
  absl::Time opened_ ABSL_GUARDED_BY(mutex_);
  Traffic traffic_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_COMPUTE_LOSS_CALL_H_
