// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/head_service.h"

#include <grpcpp/server_context.h>

#include <utility>

#include "kernels/clocks/waits.h"
#include "lossd/v1/head.grpc.pb.h"
#include "proto/wire/payload_codec.h"
#include "server/admin/restore.h"
#include "server/messages/errors.h"
#include "server/rpc/admin_workers.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/request_methods.h"
#include "server/rpc/save_call.h"
#include "server/rpc/status.h"
#include "server/rpc/tensor_calls.h"
#include "server/rpc/worker_pool.h"

namespace lossd::rpc {
namespace {

using grpc::CallbackServerContext;

// Of the generated service, the methods to which clients stream tensors; the others begin with one request.
using Base = WithRequestMethods<v1::HeadService::WithRawCallbackMethod_WriteTensor<
    v1::HeadService::WithRawCallbackMethod_AddGradient<v1::HeadService::Service>>>;

// What does a request.
template <typename Request, typename Response>
using Operation = absl::StatusOr<Response> (admin::HeadOperations::*)(const Request&);

// The head that a request is about; "": none.
template <typename Request>
std::string HeadOf(const Request& request) {
  return request.head();
}
std::string HeadOf(const v1::CreateHeadRequest& request) { return request.spec().name(); }
std::string HeadOf(const v1::ListHeadsRequest&) { return ""; }
std::string HeadOf(const v1::ListCheckpointsRequest&) { return ""; }
std::string HeadOf(const v1::DeleteCheckpointRequest&) { return ""; }

bool Changes(AdminKind kind) { return kind == AdminKind::kChange || kind == AdminKind::kLong; }

// What a request is about, for audit lines: its head, or the checkpoint that says which.
template <typename Request>
const std::string& SubjectOf(const Request& request) {
  static const std::string* const none = new std::string();
  if constexpr (requires { request.spec().name(); }) {
    return request.spec().name();
  } else if constexpr (requires { request.checkpoint(), request.head(); }) {
    return request.head().empty() ? request.checkpoint() : request.head();
  } else if constexpr (requires { request.checkpoint(); }) {
    return request.checkpoint();
  } else if constexpr (requires { request.head(); }) {
    return request.head();
  } else {
    return *none;
  }
}

class HeadServiceImpl final : public HeadService, public Base {
 public:
  HeadServiceImpl(const HeadServiceOptions& options, engine::Engine* engine, const AccessControl* access,
                  metrics::Metrics* metrics)
      : engine_(engine),
        access_(access),
        metrics_(metrics),
        operations_(options.operations, engine, metrics),
        requests_({.max_calls = options.max_waiting_calls,
                   .flag = "max_waiting_calls",
                   .peer_share = options.peer_share,
                   .end_oldest = true,
                   .timeouts = options.timeouts,
                   .on_limit = [metrics](absl::string_view limit) { metrics->CountLimit(limit); }}),
        request_environment_({.access = access,
                              .metrics = metrics,
                              .requests = &requests_,
                              .incarnation = engine->incarnation()}),
        registry_({.max_calls = options.max_tensor_calls,
                   .flag = "max_tensor_calls",
                   .peer_share = options.peer_share,
                   .timeouts = options.timeouts,
                   .on_limit = [metrics](absl::string_view limit) { metrics->CountLimit(limit); }}),
        saves_({.max_calls = options.max_saves,
                .flag = "max_saves",
                .peer_share = options.peer_share,
                .timeouts = options.timeouts,
                .on_limit = [metrics](absl::string_view limit) { metrics->CountLimit(limit); }}),
        savers_(/*threads=*/1, static_cast<size_t>(options.max_saves)),
        workers_({.threads = options.worker_threads,
                  .max_waiting = options.max_waiting_calls,
                  .peer_share = options.peer_share,
                  .on_limit = [metrics](absl::string_view limit) { metrics->CountLimit(limit); }}) {
    environment_.requests = save_environment_.requests = &request_environment_;
    environment_.operations = &operations_;
    environment_.engine = engine;
    environment_.access = access;
    environment_.metrics = metrics;
    environment_.registry = &registry_;
    environment_.workers = &workers_;
    environment_.regions = options.regions;
    save_environment_.checkpoints = &operations_.checkpoints();
    save_environment_.registry = &saves_;
    save_environment_.workers = &savers_;
    save_environment_.access = access;
    save_environment_.ended = [this](absl::string_view peer, absl::Status status) {
      return Ended(peer, "SaveCheckpoint", std::move(status));
    };
    save_environment_.count = [this](int change) { CountUnfinished(change); };
    operations_.checkpoints().RemoveLeftovers();
    ServeMethods();
  }

  grpc::Service* service() override { return this; }
  absl::Status RestoreLatest() override { return admin::RestoreLatest(operations_); }
  const RequestEnvironment* requests() const override { return &request_environment_; }
  void Drain() override { environment_.draining = true; }
  void CancelSaves() override { operations_.checkpoints().CancelSaves(); }
  bool WaitUntilIdle(absl::Time deadline) override {
    const bool tensors_done = registry_.WaitUntilEmpty(deadline);
    const bool streams_done = saves_.WaitUntilEmpty(deadline) && tensors_done;
    absl::MutexLock lock(&mutex_);
    return clocks::AwaitUntil(mutex_, absl::Condition(this, &HeadServiceImpl::NothingUnfinished), deadline) &&
           streams_done;
  }

  grpc::ServerReadReactor<grpc::ByteBuffer>* WriteTensor(CallbackServerContext* context,
                                                         grpc::ByteBuffer* response) override {
    return WriteTensorCall::Start(&environment_, context, response);
  }
  grpc::ServerReadReactor<grpc::ByteBuffer>* AddGradient(CallbackServerContext* context,
                                                         grpc::ByteBuffer* response) override {
    return AddGradientCall::Start(&environment_, context, response);
  }

 private:
  void ServeMethods() {
    Unary("CreateHead", AdminKind::kLong, &admin::HeadOperations::CreateHead);
    Unary("PlanHead", AdminKind::kLook, &admin::HeadOperations::PlanHead);
    Unary("LoadCheckpoint", AdminKind::kLong, &admin::HeadOperations::LoadCheckpoint);
    Unary("DeleteHead", AdminKind::kChange, &admin::HeadOperations::DeleteHead);
    Unary("ResetHead", AdminKind::kLong, &admin::HeadOperations::ResetHead);
    Unary("SetShares", AdminKind::kLong, &admin::HeadOperations::SetShares);
    Unary("ApplyStep", AdminKind::kChange, &admin::HeadOperations::ApplyStep);
    Unary("ZeroGradients", AdminKind::kChange, &admin::HeadOperations::ZeroGradients);
    Unary("GradNorm", AdminKind::kRead, &admin::HeadOperations::GradNorm);
    Unary("DescribeHead", AdminKind::kLook, &admin::HeadOperations::DescribeHead);
    Unary("ListHeads", AdminKind::kLook, &admin::HeadOperations::ListHeads);
    Unary("ListCheckpoints", AdminKind::kList, &admin::HeadOperations::ListCheckpoints);
    // Of the disk alone: changes no head, so it goes on while the server drains, as saves do.
    Unary("DeleteCheckpoint", AdminKind::kRead, &admin::HeadOperations::DeleteCheckpoint);
    Serve("SaveCheckpoint", [this](auto* context) { return SaveCall::Start(&save_environment_, context); });
    Serve("ReadTensor", [this](auto* context) { return ReadTensorCall::Start(&environment_, context); });
  }
  void Serve(absl::string_view method, std::function<Reactor*(CallbackServerContext*)> start) {
    Base::Serve(v1::HeadState::descriptor()->file()->pool()->FindServiceByName("lossd.v1.HeadService"),
                method, std::move(start));
  }
  // `method` outlives the service.
  template <typename Request, typename Response>
  void Unary(absl::string_view method, AdminKind kind, Operation<Request, Response> operation) {
    Serve(method, [=, this](CallbackServerContext* context) {
      return UnaryCall::Start(environment_.requests, context, method,
                              [=, this](UnaryCall* call, const grpc::ByteBuffer& bytes) {
                                Run(method, kind, operation, call, bytes);
                              });
    });
  }

  // Has a worker run `operation` and end the call.
  template <typename Request, typename Response>
  void Run(absl::string_view method, AdminKind kind, Operation<Request, Response> operation, UnaryCall* call,
           const grpc::ByteBuffer& bytes) {
    const auto request = std::make_shared<Request>();
    const auto decoded = wire::Decode(bytes, request.get());
    if (!decoded.ok()) return call->Finish(Ended(PeerKey(*call->context(), ""), method, decoded.status()));
    absl::StatusOr<AdmittedCall> admitted = access_->Admit(*call->context(), method, SubjectOf(*request));
    if (!admitted.ok()) return call->Finish(Ended(PeerKey(*call->context(), ""), method, admitted.status()));
    const AdminTask task{
        .peer = PeerKey(*call->context(), admitted->identity), .head = HeadOf(*request), .kind = kind};
    const auto end = [this, method, call, request, peer = task.peer,
                      admitted = *std::move(admitted)](const absl::StatusOr<Response>& result) {
      const grpc::Status status = Ended(peer, method, result.status());
      access_->Ended(admitted, SubjectOf(*request), CodeName(status));
      result.ok() ? call->Answer(wire::Encode(*result)) : call->Finish(status);
    };
    if (environment_.draining && Changes(kind)) return end(absl::UnavailableError("the server is draining"));
    const absl::Status scheduled = workers_.Schedule(task, [=, this] {
      if (call->context()->IsCancelled()) return end(absl::CancelledError("the client no longer waits"));
      CountUnfinished(1);
      end((operations_.*operation)(*request));
      CountUnfinished(-1);
    });
    if (!scheduled.ok()) end(scheduled);
  }

  grpc::Status Ended(absl::string_view peer, absl::string_view method, absl::Status status) {
    const grpc::Status result = ToGrpc(std::move(status), engine_->incarnation());
    if (result.ok()) return result;
    metrics_->CountError(method, CodeName(result));
    if (IsRefusal(result)) return result;
    access_->Failed(peer, method, CodeName(result), result.error_message());
    return result;
  }

  void CountUnfinished(int change) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    unfinished_ += change;
  }
  bool NothingUnfinished() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return unfinished_ == 0; }

  engine::Engine* const engine_;
  const AccessControl* const access_;
  metrics::Metrics* const metrics_;
  absl::Mutex mutex_;
  int unfinished_ ABSL_GUARDED_BY(mutex_) = 0;  // calls being worked on, and saves
  admin::HeadOperations operations_;
  TensorCallEnvironment environment_;
  SaveCallEnvironment save_environment_;
  CallRegistry requests_;  // of calls whose request is not complete
  const RequestEnvironment request_environment_;
  CallRegistry registry_;  // of calls that move tensors
  CallRegistry saves_;     // saves have places of their own, which other calls cannot take
  WorkerPool savers_;      // one thread: saves take turns, and never keep workers from other calls
  AdminWorkers workers_;   // both first to go: their last tasks use the others
};

}  // namespace

std::unique_ptr<HeadService> HeadService::Create(const HeadServiceOptions& options, engine::Engine* engine,
                                                 const AccessControl* access, metrics::Metrics* metrics) {
  return std::make_unique<HeadServiceImpl>(options, engine, access, metrics);
}

}  // namespace lossd::rpc
