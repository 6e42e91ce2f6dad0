// SPDX-License-Identifier: Apache-2.0
// Streaming calls between a client and a server in the same process, without a connection. A DirectServer
// takes the calls of one method of the server. A client that finds a DirectServer for its target opens its
// calls there, and so avoids gRPC's socket, framing and polling threads. DirectCall is one such call.
//
// Both sides are reactors of gRPC's callback API, the same objects that serve calls over a connection, and
// get the same reactions in the same order. A call is flow-controlled: a write is done when the other side
// has read it, so a call holds no message that was not asked for. A call ends with a status, and both sides
// can cancel it.
//
// A client's message is copied when the server reads it, so the server never refers to the client's memory.
// A server's message is not copied.
#ifndef LOSSD_PROTO_WIRE_DIRECT_CALL_H_
#define LOSSD_PROTO_WIRE_DIRECT_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::wire {

// The server's view of a call, the same for a direct call and for a call over a connection. Valid until the
// server's OnDone. Thread-safe.
class CallContext {
 public:
  virtual ~CallContext() = default;
  // The address of the client, for people.
  virtual std::string peer() const = 0;
  // True once the client has cancelled the call or gone away, or the deadline has passed. Afterwards the
  // server's reactor gets OnCancel.
  virtual bool IsCancelled() const = 0;
  virtual bool DeadlineHasPassed() const = 0;
  // Ends the call: for a client that does not read any more.
  virtual void TryCancel() = 0;
  // Calls `operations`, a function that starts operations of the server's reactor. If the call is direct, the
  // short reactions to them run on this thread before RunHere returns. So RunHere saves the time of waking
  // another thread. This thread must not hold a lock that a reaction takes.
  virtual void RunHere(absl::FunctionRef<void()> operations) = 0;
};

// What a client's reactions take time for. It decides on which threads they run.
enum class ClientWork : uint8_t {
  kLittle,         // nothing: they run on the thread that causes them
  kWaitForDevice,  // copies by a GPU: they do not run on the thread that calls StartCall
  kCopyMuch        // copies of much memory: they run on the threads of the DirectServer only
};

// The client's options of a call.
struct DirectCallOptions {
  uint64_t client = 0;  // the client's number, from DirectServer::NextClient
  // A time of the steady clock. At this time the call ends with DEADLINE_EXCEEDED.
  absl::Time deadline = absl::InfiniteFuture();
  // A larger message, of either side, ends the call with RESOURCE_EXHAUSTED.
  size_t max_message_bytes = SIZE_MAX;
  ClientWork sending = ClientWork::kLittle;    // work of the client's OnWriteDone
  ClientWork receiving = ClientWork::kLittle;  // work of the client's OnReadDone
};

class DirectCall;

// The calls of one method of one server, and the threads that run their reactions.
//
// Thread-safe. Create makes the object. Call Shutdown before the last reference is dropped.
class DirectServer : public std::enable_shared_from_this<DirectServer> {
 public:
  using ClientReactor = grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;
  using ServerReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;
  // Makes the server's reactor of a new call. `client` is the same number for all calls of one client. Must
  // not block.
  using StartFn = std::function<ServerReactor*(CallContext* context, uint64_t client)>;

  // `max_message_bytes`: a larger message of a client ends its call with RESOURCE_EXHAUSTED, as in gRPC.
  static std::shared_ptr<DirectServer> Create(size_t max_message_bytes, StartFn start);
  ~DirectServer();
  DirectServer(const DirectServer&) = delete;
  DirectServer& operator=(const DirectServer&) = delete;

  // Clients of this process whose target is `target` find the server from now on, until Shutdown. A server
  // may be published under several names.
  void Publish(const std::string& target) ABSL_LOCKS_EXCLUDED(mutex_);
  // The server that was published last under this name; null: there is none.
  static std::shared_ptr<DirectServer> Find(const std::string& target);
  // Returns a number that no other client of the process has.
  static uint64_t NextClient();

  // Opens a call for `reactor`, which gets the client's reactions and begins the call with StartCall. Null
  // after Shutdown. StartCall runs the first reactions of both sides on the thread that calls it, so this
  // thread must not hold a lock that a reaction takes.
  std::shared_ptr<DirectCall> Open(ClientReactor* reactor, const DirectCallOptions& options)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Takes no more calls, ends the open ones with UNAVAILABLE, and waits until both sides of each have had
  // OnDone. May be repeated, by one thread at a time. Threads that run reactions must not call it.
  void Shutdown() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  friend class DirectCall;
  using Task = absl::AnyInvocable<void()>;
  class Turn;

  DirectServer(size_t max_message_bytes, StartFn start)
      : max_message_bytes_(max_message_bytes), start_(std::move(start)) {}

  // Runs `task` soon: on this thread if it is in a Turn and the task is short, else on a thread of the
  // server. Takes no lock of a call.
  void Post(Task task, bool is_short) ABSL_LOCKS_EXCLUDED(mutex_);
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends calls whose deadlines have passed.
  void WatchDeadlines() ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(const DirectCall* call, absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);
  bool HasTask() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopped_ || !tasks_.empty(); }

  const size_t max_message_bytes_;
  const StartFn start_;
  absl::Mutex mutex_;  // taken after the lock of a DirectCall
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  std::map<const DirectCall*, std::shared_ptr<DirectCall>> calls_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<absl::Time, const DirectCall*>> deadlines_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;   // takes no calls
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;  // the threads end
  std::vector<std::thread> threads_;
};

// One call, as both sides see it. The client's reactor and the server's reactor use it through gRPC's
// interfaces. Thread-safe.
class DirectCall final : public CallContext, public std::enable_shared_from_this<DirectCall> {
 public:
  ~DirectCall() override = default;

  // The client's side cancels the call, with CANCELLED.
  void Cancel() { End(grpc::Status(grpc::StatusCode::CANCELLED, "the client cancelled the call")); }

  // CallContext, for the server's side.
  std::string peer() const override { return "unix:"; }
  bool IsCancelled() const override ABSL_LOCKS_EXCLUDED(mutex_);
  bool DeadlineHasPassed() const override;
  void TryCancel() override {
    End(grpc::Status(grpc::StatusCode::CANCELLED, "the server cancelled the call"));
  }
  void RunHere(absl::FunctionRef<void()> operations) override;

 private:
  friend class DirectServer;

  // The two objects of gRPC's interface through which the reactors start their operations.
  class ClientSide final : public grpc::ClientCallbackReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    ClientSide(DirectCall* call, DirectServer::ClientReactor* reactor) : call_(call), reactor_(reactor) {
      BindReactor(reactor);
    }
    void StartCall() override { call_->Start(); }
    void Write(const grpc::ByteBuffer* message, grpc::WriteOptions options) override {
      call_->ClientWrites(message, options.is_last_message());
    }
    void WritesDone() override { call_->ClientWrites(nullptr, /*is_last=*/true); }
    void Read(grpc::ByteBuffer* message) override { call_->ClientReads(message); }
    void AddHold(int holds) override { call_->AddHolds(holds); }
    void RemoveHold() override { call_->AddHolds(-1); }
    DirectServer::ClientReactor* reactor() const { return reactor_; }

   private:
    DirectCall* const call_;
    DirectServer::ClientReactor* const reactor_;
  };
  class ServerSide final : public grpc::ServerCallbackReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer> {
   public:
    explicit ServerSide(DirectCall* call) : call_(call) {}
    void Bind(DirectServer::ServerReactor* reactor) { BindReactor(reactor); }
    void SendInitialMetadata() override {}
    void Read(grpc::ByteBuffer* message) override { call_->ServerReads(message); }
    void Write(const grpc::ByteBuffer* message, grpc::WriteOptions) override {
      call_->ServerWrites(message, nullptr);
    }
    void WriteAndFinish(const grpc::ByteBuffer* message, grpc::WriteOptions, grpc::Status status) override {
      call_->ServerWrites(message, &status);
    }
    void Finish(grpc::Status status) override { call_->ServerFinishes(std::move(status)); }

   private:
    // gRPC's own calls count their reactions with these; DirectCall counts them itself.
    grpc::internal::ServerReactor* reactor() override { return nullptr; }
    void CallOnDone() override {}

    DirectCall* const call_;
  };

  DirectCall(std::shared_ptr<DirectServer> server, DirectServer::ClientReactor* reactor,
             const DirectCallOptions& options)
      : server_(std::move(server)), options_(options), client_side_(this, reactor) {}

  // The operations that the client's reactor starts.
  void Start() ABSL_LOCKS_EXCLUDED(mutex_);
  void ClientWrites(const grpc::ByteBuffer* message, bool is_last) ABSL_LOCKS_EXCLUDED(mutex_);
  void ClientReads(grpc::ByteBuffer* message) ABSL_LOCKS_EXCLUDED(mutex_);
  void AddHolds(int holds) ABSL_LOCKS_EXCLUDED(mutex_);
  // The operations that the server's reactor starts. `status`: the status with which the server finishes
  // after the message; null: the call goes on.
  void ServerReads(grpc::ByteBuffer* message) ABSL_LOCKS_EXCLUDED(mutex_);
  void ServerWrites(const grpc::ByteBuffer* message, const grpc::Status* status) ABSL_LOCKS_EXCLUDED(mutex_);
  void ServerFinishes(grpc::Status status) ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends the call with `status`, unless it has ended already. Messages that were not read yet are dropped.
  void End(grpc::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndLocked(grpc::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Posts the reactions that are possible now. These are: reactions to a write that meets a read, reactions
  // to operations that fail because the call has ended, and OnDone of a side for which nothing is left to do.
  // Called after each change.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AdvanceMessages() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailOperations() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Posts a reaction of one side. `*reactions` counts it until it is over. `bytes` is the size of the message
  // that the reaction copies, and `work` what else it takes time for.
  void React(int* reactions, size_t bytes, ClientWork work, absl::AnyInvocable<void()> reaction)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void React(int* reactions, size_t bytes, absl::AnyInvocable<void()> reaction)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    React(reactions, bytes, ClientWork::kLittle, std::move(reaction));
  }
  // Posts OnDone, the last reaction of a side.
  void PostDone(absl::AnyInvocable<void()> reaction) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<DirectServer> server_;
  const DirectCallOptions options_;
  ClientSide client_side_;
  ServerSide server_side_{this};

  mutable absl::Mutex mutex_;
  int open_sides_ ABSL_GUARDED_BY(mutex_) = 2;  // sides that have not had OnDone
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Status> status_ ABSL_GUARDED_BY(mutex_);  // set when the call has ended
  bool is_cancelled_ ABSL_GUARDED_BY(mutex_) = false;           // the call ended, but not by Finish

  // The client's operations under way; null: none.
  const grpc::ByteBuffer* client_write_ ABSL_GUARDED_BY(mutex_) = nullptr;
  grpc::ByteBuffer* client_read_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool is_last_write_ ABSL_GUARDED_BY(mutex_) = false;  // the client writes no more after client_write_
  int holds_ ABSL_GUARDED_BY(mutex_) = 0;
  int client_reactions_ ABSL_GUARDED_BY(mutex_) = 0;  // posted and not finished
  bool is_client_done_ ABSL_GUARDED_BY(mutex_) = false;

  // The server's reactor (null until it is made) and its operations under way (null: none).
  DirectServer::ServerReactor* server_reactor_ ABSL_GUARDED_BY(mutex_) = nullptr;
  grpc::ByteBuffer* server_read_ ABSL_GUARDED_BY(mutex_) = nullptr;
  const grpc::ByteBuffer* server_write_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::optional<grpc::Status> finish_ ABSL_GUARDED_BY(mutex_);  // takes effect after server_write_
  bool is_finished_ ABSL_GUARDED_BY(mutex_) = false;            // the server has called Finish
  int server_reactions_ ABSL_GUARDED_BY(mutex_) = 1;            // as client_reactions_; the start counts
  bool is_cancel_posted_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_server_done_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace lossd::wire

#endif  // LOSSD_PROTO_WIRE_DIRECT_CALL_H_
