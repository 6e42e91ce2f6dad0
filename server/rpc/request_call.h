// SPDX-License-Identifier: Apache-2.0
// How a call of gRPC begins and ends. CallRegistry counts the calls under way and bounds their time,
// RequestCall is a call whose client sends one request, WithRequestMethods registers the methods of a service
// whose calls are RequestCalls, and GrpcStatus makes the status that a call ends with.
//
// Everything here is thread-safe.
#ifndef LOSSD_SERVER_RPC_REQUEST_CALL_H_
#define LOSSD_SERVER_RPC_REQUEST_CALL_H_

#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "proto/wire/payload_codec.h"
#include "server/engine/staging.h"
#include "server/metrics/metrics.h"
#include "server/rpc/access_control.h"

namespace lossd::rpc {

// A CallRegistry holds the open calls of one kind. It bounds their number, in all and per peer, ends calls
// that wait too long for their client or for their turn, and lets a shutdown wait for the last call.
// CallTimeouts says how long a call may wait, and CallClock measures how long one call has waited.
//
// The registry is thread-safe; it does not own the calls.

// How long a call may wait, by what it waits for. All times are positive.
struct CallTimeouts {
  absl::Duration open = absl::Seconds(20);  // for the first message of a call
  absl::Duration idle =
      absl::Seconds(60);  // for the next one, while the server has nothing to do for the call
  absl::Duration turn = absl::Minutes(10);  // for memory, a turn or the device, without any progress
  absl::Duration send = absl::Seconds(60);  // for the client to take an answer
};

// What a call waits for, and since when. Thread-compatible: the lock of the call guards it.
class CallClock {
 public:
  enum class Waits { kNothing, kOpen, kMessage, kTurn, kSend };

  // From now on the call waits for `what`; that is progress.
  void Set(Waits what, absl::Time now = clocks::SteadyNow()) {
    what_ = what;
    since_ = now;
  }
  Waits what() const { return what_; }
  absl::Time since() const { return since_; }

  // DEADLINE_EXCEEDED naming the limit's flag (in `*limit` too) if the call has waited too long, else OK.
  absl::Status Check(absl::Time now, const CallTimeouts& timeouts, absl::string_view* limit) const {
    switch (what_) {
      case Waits::kNothing:
        return absl::OkStatus();
      case Waits::kOpen:
        return Late(now, timeouts.open, "the client did not send its first message", "open_timeout", limit);
      case Waits::kMessage:
        return Late(now, timeouts.idle, "the client sent nothing and took nothing", "idle_timeout", limit);
      case Waits::kTurn:
        return Late(now, timeouts.turn, "the call made no progress", "turn_timeout", limit);
      case Waits::kSend:
        return Late(now, timeouts.send, "the client did not take an answer", "send_timeout", limit);
    }
    return absl::OkStatus();
  }

  // For a call that is only cancelled when it is late: the limit's flag if the call has waited too long, and
  // then it waits for nothing any more, so that this is told once; else "".
  absl::string_view StopIfLate(absl::Time now, const CallTimeouts& timeouts) {
    absl::string_view limit;
    if (!Check(now, timeouts, &limit).ok()) Set(Waits::kNothing);
    return limit;
  }

 private:
  absl::Status Late(absl::Time now, absl::Duration most, absl::string_view what, absl::string_view flag,
                    absl::string_view* limit) const {
    if (now - since_ < most) return absl::OkStatus();
    *limit = flag;
    return absl::DeadlineExceededError(
        absl::StrCat(what, " for ", absl::FormatDuration(most), " (--", flag, ")"));
  }

  Waits what_ = Waits::kNothing;
  absl::Time since_ = absl::InfiniteFuture();
};

}  // namespace lossd::rpc

namespace lossd::v1 {
class StreamDescription;
}  // namespace lossd::v1

namespace lossd::rpc {

// A call as the registry sees it.
class WatchedCall {
 public:
  virtual ~WatchedCall() = default;
  // Ends the call if it has waited too long, as CallClock says; the limit's name, or "". Called on the
  // registry's thread; must not call into the registry.
  virtual absl::string_view EndIfLate(absl::Time now, const CallTimeouts& timeouts) = 0;
  // Ends the call with `why`: its place goes to another one (CallRegistryOptions::end_oldest). Called on any
  // thread; must not call into the registry, which knows the call no more.
  virtual void GiveUpPlace(absl::Status why) {}
  // Ends the call with `why`, unless it is ending. Called on any thread; must not call into the registry.
  virtual void EndWith(absl::Status why) {}
  // What the call is doing, but for its number and its peer. Called on any thread; must not call into the
  // registry.
  virtual void Describe(absl::Time now, v1::StreamDescription* description) {}

  // When the caller's certificate ends, and the call with it (EndWith). Set before the registry has the call.
  void set_until(absl::Time until) { until_ = until; }
  absl::Time until() const { return until_; }

 private:
  absl::Time until_ = absl::InfiniteFuture();
};

struct CallRegistryOptions {
  int64_t max_calls = 256;
  std::string flag = "max_streams";  // what sets max_calls
  double peer_share = 0.5;           // of max_calls, as engine::FairShare
  // When all places are taken, a peer that has none gets that of the call that has waited longest. For calls
  // that have done nothing yet: they only wait for their client.
  bool end_oldest = false;
  CallTimeouts timeouts;
  std::function<void(absl::string_view limit)> on_limit = [](absl::string_view) {};  // a limit was reached
};

// Thread-safe.
class CallRegistry {
 public:
  // Looks for late calls a few times per shortest timeout.
  explicit CallRegistry(const CallRegistryOptions& options);
  // All calls must have been removed.
  ~CallRegistry();

  // RESOURCE_EXHAUSTED naming the limit and its flag if there are too many calls, or too many of the peer;
  // such a call may be removed but need not. After Remove returns, the call is not used any more.
  absl::Status Add(WatchedCall* call, const std::string& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(WatchedCall* call) ABSL_LOCKS_EXCLUDED(mutex_);
  // Gives the place of the call to others before the call is removed. A call whose client sees that it has
  // ended gives its place back first: gRPC tells the server later that the answer has gone, and until then
  // the client's next call would be one too many. Changes nothing for a call that has no place. WatchedCall's
  // members may call it.
  void GiveBack(WatchedCall* call) ABSL_LOCKS_EXCLUDED(places_mutex_);
  // Ends all calls that are open.
  void EndAll(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `look` with each call that is open, from the oldest to the youngest. They stay open meanwhile;
  // `look` must not call into the registry.
  void ForEach(absl::FunctionRef<void(WatchedCall& call, const std::string& peer, uint64_t number)> look)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // True if no call is open, at the latest by `deadline`.
  bool WaitUntilEmpty(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool Empty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return calls_.empty(); }
  struct Entry {
    std::string peer;
    uint64_t number = 0;  // in the order of their coming
  };

  // Ends the oldest call for the sake of `peer`, if it may be.
  bool MakeRoom(const std::string& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Refusal(engine::FairShare::Answer answer, const std::string& peer)
      ABSL_LOCKS_EXCLUDED(places_mutex_);
  engine::FairShare::Answer TakePlace(WatchedCall* call, const std::string& peer)
      ABSL_LOCKS_EXCLUDED(places_mutex_);
  void Watch() ABSL_LOCKS_EXCLUDED(mutex_);

  const CallRegistryOptions options_;
  absl::Mutex mutex_;
  absl::flat_hash_map<WatchedCall*, Entry> calls_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  absl::Mutex places_mutex_ ABSL_ACQUIRED_AFTER(mutex_);  // a leaf
  engine::FairShare shares_ ABSL_GUARDED_BY(places_mutex_);
  // Calls that have a place, and whose share it is of.
  absl::flat_hash_map<WatchedCall*, std::string> places_ ABSL_GUARDED_BY(places_mutex_);
  std::thread watchdog_;  // last
};

// What all calls share; outlives them.
struct RequestEnvironment {
  const AccessControl* access = nullptr;
  metrics::Metrics* metrics = nullptr;
  CallRegistry* requests = nullptr;  // the calls whose request is not complete
  uint64_t incarnation = 0;          // of the engine
};

// What a call that failed ends with; counts it.
grpc::Status Failed(const RequestEnvironment& environment, absl::string_view method, absl::Status status);

// RequestCall is a call whose client sends one request. UnaryCall answers it once; other subclasses send
// several messages. WithRequestMethods registers the methods of a service whose calls are RequestCalls.
//
// gRPC shows such a call to a server when the request is complete, so a client that never completes it could
// hold its memory without any limit of lossd's. So the methods are registered as if clients streamed their
// requests, which looks the same on the wire. The server then sees a call when it begins, asks who makes it,
// bounds the number of such calls (in all and per peer) and ends a call whose request does not come.
//
// Calls are thread-safe.
class RequestCall : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  ~RequestCall() override { environment_->requests->Remove(&waiting_); }
  void OnReadDone(bool ok) final ABSL_LOCKS_EXCLUDED(mutex_);

 protected:
  // `method` is a name in MethodAccessTable that outlives the call.
  RequestCall(const RequestEnvironment* environment, grpc::CallbackServerContext* context,
              absl::string_view method)
      : environment_(environment), context_(context), method_(method) {}

  // Begins to receive the request, or ends the call. Call once, last.
  void Receive() ABSL_LOCKS_EXCLUDED(mutex_);
  // The request is complete. Not called if the call ended before.
  virtual void OnRequest(const grpc::ByteBuffer& request) = 0;

  grpc::CallbackServerContext* context() const { return context_; }
  const RequestEnvironment& environment() const { return *environment_; }
  absl::string_view method() const { return method_; }

 private:
  // The call as its registry sees it until the request is complete.
  class Waiting final : public WatchedCall {
   public:
    explicit Waiting(RequestCall* call) : call_(call) {}
    absl::string_view EndIfLate(absl::Time now, const CallTimeouts& timeouts) override {
      return call_->EndIfRequestIsLate(now, timeouts);
    }
    void GiveUpPlace(absl::Status why) override { call_->EndWaiting(std::move(why)); }

   private:
    RequestCall* const call_;
  };

  absl::Status Register();
  // Ends the call, unless its request has just come.
  void EndWaiting(absl::Status why) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::string_view EndIfRequestIsLate(absl::Time now, const CallTimeouts& timeouts)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const RequestEnvironment* const environment_;
  grpc::CallbackServerContext* const context_;
  const absl::string_view method_;
  Waiting waiting_{this};
  grpc::ByteBuffer request_;

  absl::Mutex mutex_;
  CallClock clock_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // with the read under way
};

// A call that is answered once. Deletes itself when gRPC is done with it.
class UnaryCall final : public RequestCall {
 public:
  // Must lead to one call of Answer, End or Finish.
  using Handler = std::function<void(UnaryCall* call, const grpc::ByteBuffer& request)>;

  static UnaryCall* Start(const RequestEnvironment* environment, grpc::CallbackServerContext* context,
                          absl::string_view method, Handler handler);

  using RequestCall::context;
  void Answer(const grpc::ByteBuffer& answer);
  // Answers with a message, or ends with a failure.
  template <typename Response>
  void End(const absl::StatusOr<Response>& response) {
    if (response.ok()) return Answer(wire::Encode(*response));
    Finish(Failed(environment(), method(), response.status()));
  }
  void OnDone() override { delete this; }

 private:
  UnaryCall(const RequestEnvironment* environment, grpc::CallbackServerContext* context,
            absl::string_view method, Handler handler)
      : RequestCall(environment, context, method), handler_(std::move(handler)) {}
  void OnRequest(const grpc::ByteBuffer& request) override { handler_(this, request); }

  const Handler handler_;
  grpc::ByteBuffer answer_;
};

// Registers methods of a generated service whose calls are RequestCalls. `Service` is a generated class, or
// derived from one.
//
// Thread-compatible: constructors of services use it.
template <typename Service>
class WithRequestMethods : public Service {
 protected:
  using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  // Has calls of the method begin with `start`. `service` describes the service in the protocol.
  void Serve(const google::protobuf::ServiceDescriptor* service, absl::string_view method,
             std::function<Reactor*(grpc::CallbackServerContext*)> start) {
    const int index = service->FindMethodByName(std::string(method))->index();
    // Streamed: the server sees the call before its request.
    this->MarkMethodStreamed(index, nullptr);
    this->MarkMethodRawCallback(
        index, new grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, grpc::ByteBuffer>(std::move(start)));
  }
};

// The functions below turn absl::Status, the one error type below this layer, into the status that a gRPC
// call ends with.

// What a call ends with: the code, the message, and a lossd.v1.ErrorDetail with the field and value at fault,
// the step that is open, and the server's incarnation.
grpc::Status ToGrpc(absl::Status status, uint64_t incarnation);

// The same, and counts an error: by its method and code, and the engine's limit that caused it.
grpc::Status CountedEnd(absl::string_view method, absl::Status status, uint64_t incarnation,
                        metrics::Metrics* metrics);

// "INVALID_ARGUMENT" and so on.
std::string CodeName(const grpc::Status& status);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REQUEST_CALL_H_
