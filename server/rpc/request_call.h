// SPDX-License-Identifier: Apache-2.0
// How a call of gRPC begins and ends. CallRegistry bounds the number of open calls and the time that they
// wait. RequestCall is a call whose client sends one request. WithRequestMethods registers the methods of a
// service whose calls are RequestCalls. ToGrpc and CountedEnd make the status that a call ends with.
//
// All classes and functions are thread-safe, except CallClock and WithRequestMethods.
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
  absl::Duration open = absl::Seconds(20);  // for the first message of the client
  absl::Duration idle =
      absl::Seconds(60);  // for a further message, while the server has nothing to do for the call
  absl::Duration turn = absl::Minutes(10);  // for memory, a turn or the device, without any progress
  absl::Duration send = absl::Seconds(60);  // for the client to take an answer
};

// What a call waits for, and since when. Thread-compatible: the lock of the call guards it.
class CallClock {
 public:
  enum class Waits { kNothing, kOpen, kMessage, kTurn, kSend };

  // The call has made progress, and waits for `what` from now on.
  void Set(Waits what, absl::Time now = clocks::SteadyNow()) {
    what_ = what;
    since_ = now;
  }
  Waits what() const { return what_; }
  absl::Time since() const { return since_; }

  // DEADLINE_EXCEEDED if the call has waited too long, else OK. The error names the flag of the limit, which
  // is also stored in `*limit`.
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

  // For a call that is only cancelled when it is late. If the call has waited too long, returns the limit's
  // flag, and the call then waits for nothing any more, so the flag is returned only once. Else returns "".
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
  // If the call has waited too long, as CallClock says, ends it and returns the limit's flag; else returns
  // "". Called on the registry's thread; must not call into the registry.
  virtual absl::string_view EndIfLate(absl::Time now, const CallTimeouts& timeouts) = 0;
  // Ends the call with `why`, because another call gets its place (CallRegistryOptions::end_oldest). Called
  // on any thread; must not call into the registry, which then forgets the call.
  virtual void GiveUpPlace(absl::Status why) {}
  // Ends the call with `why`, unless it is ending already. Called on any thread; must not call into the
  // registry.
  virtual void EndWith(absl::Status why) {}
  // Writes what the call is doing to `description`, except for its number and its peer. Called on any thread;
  // must not call into the registry.
  virtual void Describe(absl::Time now, v1::StreamDescription* description) {}

  // When the caller's certificate expires; the registry then ends the call (EndWith). Set it before the call
  // is added to the registry.
  void set_until(absl::Time until) { until_ = until; }
  absl::Time until() const { return until_; }

 private:
  absl::Time until_ = absl::InfiniteFuture();
};

struct CallRegistryOptions {
  int64_t max_calls = 256;
  std::string flag = "max_streams";  // the flag that sets max_calls, for errors
  double peer_share = 0.5;           // the part of max_calls for one peer, as engine::FairShare
  // When all places are taken, a peer without a place gets the place of the call that has waited longest, and
  // that call ends. Only for calls that have done nothing yet and wait for their client.
  bool end_oldest = false;
  CallTimeouts timeouts;
  std::function<void(absl::string_view limit)> on_limit = [](absl::string_view) {};  // at each limit
};

// The open calls of one kind; see above. Thread-safe.
class CallRegistry {
 public:
  // Starts a thread that looks for late calls, several times within the shortest timeout.
  explicit CallRegistry(const CallRegistryOptions& options);
  // All calls must have been removed.
  ~CallRegistry();

  // Adds an open call, or removes it. Add returns RESOURCE_EXHAUSTED, naming the limit and its flag, if there
  // are too many calls, in all or of the peer; Remove is then optional. After Remove has returned, the
  // registry does not use the call any more.
  absl::Status Add(WatchedCall* call, const std::string& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(WatchedCall* call) ABSL_LOCKS_EXCLUDED(mutex_);
  // Frees the place of the call for other calls before the call is removed. A call uses this before its
  // client can see that it has ended: gRPC tells the server only later that the answer has been sent, and
  // until then the client's next call would be one too many. Has no effect for a call that has no place.
  // WatchedCall's members may call it.
  void GiveBack(WatchedCall* call) ABSL_LOCKS_EXCLUDED(places_mutex_);
  // Ends all calls that are open.
  void EndAll(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `look` with each open call, from the oldest to the youngest. The calls are not removed meanwhile.
  // `look` must not call into the registry.
  void ForEach(absl::FunctionRef<void(WatchedCall& call, const std::string& peer, uint64_t number)> look)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until no call is open, or until `deadline`; true if no call is open.
  bool WaitUntilEmpty(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool Empty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return calls_.empty(); }
  struct Entry {
    std::string peer;
    uint64_t number = 0;  // counts the calls in the order of Add
  };

  // Ends the oldest call so that `peer` gets its place; false if this is not allowed.
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
  // Calls that have a place, and the peer whose share the place is counted in.
  absl::flat_hash_map<WatchedCall*, std::string> places_ ABSL_GUARDED_BY(places_mutex_);
  std::thread watchdog_;  // last, because it uses the members above
};

// What all RequestCalls share. Must outlive them.
struct RequestEnvironment {
  const AccessControl* access = nullptr;
  metrics::Metrics* metrics = nullptr;
  CallRegistry* requests = nullptr;  // the calls whose request is not complete
  uint64_t incarnation = 0;          // the engine's incarnation
};

// The status that a failed call ends with. Counts the error.
grpc::Status Failed(const RequestEnvironment& environment, absl::string_view method, absl::Status status);

// RequestCall is a call whose client sends one request. UnaryCall answers it once; other subclasses send
// several messages. WithRequestMethods registers the methods of a service whose calls are RequestCalls.
//
// gRPC shows an ordinary unary call to the server only when the request is complete. So a client that never
// completes its request could hold memory that no limit of lossd bounds. Therefore the methods are registered
// as if clients streamed their requests, which looks the same on the wire. The server then sees a call when
// it begins. It asks who makes the call, bounds the number of such calls (in all and per peer), and ends a
// call whose request does not come.
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

  // Begins to receive the request, or ends the call. Call it once, as the last step of construction.
  void Receive() ABSL_LOCKS_EXCLUDED(mutex_);
  // The request is complete. Not called if the call ended before.
  virtual void OnRequest(const grpc::ByteBuffer& request) = 0;

  grpc::CallbackServerContext* context() const { return context_; }
  const RequestEnvironment& environment() const { return *environment_; }
  absl::string_view method() const { return method_; }

 private:
  // The entry of the call in its registry until the request is complete.
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
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // ended while the read was under way
};

// A call that is answered once. Deletes itself when gRPC is done with it.
class UnaryCall final : public RequestCall {
 public:
  // Handles the request; must lead to exactly one call of Answer, End or Finish.
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

// Base class of a service whose methods' calls are RequestCalls. Serve registers a method. `Service` is the
// generated class of the service, or a class that is derived from it.
//
// Thread-compatible: only constructors of services use it.
template <typename Service>
class WithRequestMethods : public Service {
 protected:
  using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  // Registers `start`, which begins a call of the method. `service` is the protocol's descriptor of the
  // service.
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

// The status that a call ends with: the code, the message, and a lossd.v1.ErrorDetail with the wrong field
// and its value, the open step, and the server's incarnation.
grpc::Status ToGrpc(absl::Status status, uint64_t incarnation);

// As ToGrpc, and counts an error by its method and code, and by the engine's limit that caused it.
grpc::Status CountedEnd(absl::string_view method, absl::Status status, uint64_t incarnation,
                        metrics::Metrics* metrics);

// The name of the status's code, such as "INVALID_ARGUMENT".
std::string CodeName(const grpc::Status& status);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REQUEST_CALL_H_
