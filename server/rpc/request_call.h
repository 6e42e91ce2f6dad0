// SPDX-License-Identifier: Apache-2.0
// RequestCall is a call whose client sends one request. UnaryCall answers it once; other subclasses send
// several messages. WithRequestMethods registers the methods of a service whose calls are RequestCalls.
//
// gRPC shows such a call to a server when the request is complete, so a client that never completes it could
// hold its memory without any limit of lossd's. So the methods are registered as if clients streamed their
// requests, which looks the same on the wire. The server then sees a call when it begins, asks who makes it,
// bounds the number of such calls (in all and per peer) and ends a call whose request does not come.
//
// Calls are thread-safe.
#ifndef LOSSD_SERVER_RPC_REQUEST_CALL_H_
#define LOSSD_SERVER_RPC_REQUEST_CALL_H_

#include <google/protobuf/descriptor.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/wire/payload_codec.h"
#include "server/metrics/metrics.h"
#include "server/rpc/access_control.h"
#include "server/rpc/call_registry.h"

namespace lossd::rpc {

// What all calls share; outlives them.
struct RequestEnvironment {
  const AccessControl* access = nullptr;
  metrics::Metrics* metrics = nullptr;
  CallRegistry* requests = nullptr;  // the calls whose request is not complete
  uint64_t incarnation = 0;          // of the engine
};

// What a call that failed ends with; counts it.
grpc::Status Failed(const RequestEnvironment& environment, absl::string_view method, absl::Status status);

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

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REQUEST_CALL_H_
