#include "server/rpc/head_service.h"

#include <grpcpp/server_context.h>

#include <utility>

#include "lossd/v1/head.grpc.pb.h"
#include "server/log/log.h"
#include "server/messages/errors.h"
#include "server/rpc/admin_workers.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/save_call.h"
#include "server/rpc/status.h"
#include "server/rpc/tensor_calls.h"
#include "server/rpc/worker_pool.h"

namespace lossd::rpc {
namespace {

using grpc::CallbackServerContext;
using grpc::ServerUnaryReactor;

// The methods that stream tensors on raw bytes, the others on messages; all with callbacks.
using Base = v1::HeadService::WithRawCallbackMethod_ReadTensor<
    v1::HeadService::WithRawCallbackMethod_WriteTensor<v1::HeadService::WithRawCallbackMethod_AddGradient<
        v1::HeadService::WithCallbackMethod_CreateHead<v1::HeadService::WithCallbackMethod_DescribeHead<
            v1::HeadService::WithCallbackMethod_ListHeads<v1::HeadService::WithCallbackMethod_DeleteHead<
                v1::HeadService::WithCallbackMethod_GradNorm<v1::HeadService::WithCallbackMethod_ApplyStep<
                    v1::HeadService::WithCallbackMethod_ZeroGradients<
                        v1::HeadService::WithCallbackMethod_SaveCheckpoint<
                            v1::HeadService::WithCallbackMethod_LoadCheckpoint<
                                v1::HeadService::WithCallbackMethod_ListCheckpoints<
                                    v1::HeadService::Service>>>>>>>>>>>>>;

// The head that a request is about; "": none.
template <typename Request>
std::string HeadOf(const Request& request) {
  return request.head();
}
std::string HeadOf(const v1::CreateHeadRequest& request) { return request.spec().name(); }
std::string HeadOf(const v1::ListHeadsRequest&) { return ""; }

bool Changes(AdminKind kind) { return kind == AdminKind::kChange || kind == AdminKind::kLong; }

// What a request is about, for audit lines: its head, or the checkpoint that says which.
template <typename Request>
const std::string& SubjectOf(const Request& request) {
  static const std::string* const none = new std::string();
  if constexpr (requires { request.spec().name(); }) {
    return request.spec().name();
  } else if constexpr (requires { request.checkpoint(); }) {
    return request.head().empty() ? request.checkpoint() : request.head();
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
    environment_.operations = &operations_;
    environment_.engine = engine;
    environment_.access = access;
    environment_.metrics = metrics;
    environment_.registry = &registry_;
    environment_.workers = &workers_;
    save_environment_.checkpoints = &operations_.checkpoints();
    save_environment_.registry = &saves_;
    save_environment_.workers = &savers_;
    save_environment_.access = access;
    save_environment_.ended = [this](absl::Status status) {
      return Ended("SaveCheckpoint", std::move(status));
    };
    save_environment_.count = [this](int change) { CountUnfinished(change); };
    operations_.checkpoints().RemoveLeftovers();
  }

  grpc::Service* service() override { return this; }
  void Drain() override { environment_.draining = true; }
  void CancelSaves() override { operations_.checkpoints().CancelSaves(); }
  bool WaitUntilIdle(absl::Time deadline) override {
    const bool tensors_done = registry_.WaitUntilEmpty(deadline);
    const bool streams_done = saves_.WaitUntilEmpty(deadline) && tensors_done;
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithDeadline(absl::Condition(this, &HeadServiceImpl::NothingUnfinished), deadline) &&
           streams_done;
  }

  ServerUnaryReactor* CreateHead(CallbackServerContext* context, const v1::CreateHeadRequest* request,
                                 v1::HeadDescription* response) override {
    return Run("CreateHead", AdminKind::kLong, context, request, response,
               &admin::HeadOperations::CreateHead);
  }
  ServerUnaryReactor* DescribeHead(CallbackServerContext* context, const v1::DescribeHeadRequest* request,
                                   v1::HeadDescription* response) override {
    return Run("DescribeHead", AdminKind::kLook, context, request, response,
               &admin::HeadOperations::DescribeHead);
  }
  ServerUnaryReactor* ListHeads(CallbackServerContext* context, const v1::ListHeadsRequest* request,
                                v1::ListHeadsResponse* response) override {
    return Run("ListHeads", AdminKind::kLook, context, request, response, &admin::HeadOperations::ListHeads);
  }
  ServerUnaryReactor* DeleteHead(CallbackServerContext* context, const v1::DeleteHeadRequest* request,
                                 v1::DeleteHeadResponse* response) override {
    return Run("DeleteHead", AdminKind::kChange, context, request, response,
               &admin::HeadOperations::DeleteHead);
  }
  ServerUnaryReactor* GradNorm(CallbackServerContext* context, const v1::GradNormRequest* request,
                               v1::GradNormResponse* response) override {
    return Run("GradNorm", AdminKind::kRead, context, request, response, &admin::HeadOperations::GradNorm);
  }
  ServerUnaryReactor* ApplyStep(CallbackServerContext* context, const v1::ApplyStepRequest* request,
                                v1::ApplyStepResponse* response) override {
    return Run("ApplyStep", AdminKind::kChange, context, request, response,
               &admin::HeadOperations::ApplyStep);
  }
  ServerUnaryReactor* ZeroGradients(CallbackServerContext* context, const v1::ZeroGradientsRequest* request,
                                    v1::ZeroGradientsResponse* response) override {
    return Run("ZeroGradients", AdminKind::kChange, context, request, response,
               &admin::HeadOperations::ZeroGradients);
  }
  grpc::ServerWriteReactor<v1::SaveCheckpointUpdate>* SaveCheckpoint(
      CallbackServerContext* context, const v1::SaveCheckpointRequest* request) override {
    metrics_->CountRequest("SaveCheckpoint");
    return SaveCall::Start(&save_environment_, context, request);
  }
  ServerUnaryReactor* ListCheckpoints(CallbackServerContext* context,
                                      const v1::ListCheckpointsRequest* request,
                                      v1::ListCheckpointsResponse* response) override {
    return Run("ListCheckpoints", AdminKind::kLook, context, request, response,
               &admin::HeadOperations::ListCheckpoints);
  }
  ServerUnaryReactor* LoadCheckpoint(CallbackServerContext* context, const v1::LoadCheckpointRequest* request,
                                     v1::HeadDescription* response) override {
    return Run("LoadCheckpoint", AdminKind::kLong, context, request, response,
               &admin::HeadOperations::LoadCheckpoint);
  }
  grpc::ServerWriteReactor<grpc::ByteBuffer>* ReadTensor(CallbackServerContext* context,
                                                         const grpc::ByteBuffer* request) override {
    return ReadTensorCall::Start(&environment_, context, request);
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
  // Has a worker run `operation` and finish the call.
  template <typename Request, typename Response>
  ServerUnaryReactor* Run(absl::string_view method, AdminKind kind, CallbackServerContext* context,
                          const Request* request, Response* response,
                          absl::StatusOr<Response> (admin::HeadOperations::*operation)(const Request&)) {
    metrics_->CountRequest(method);
    ServerUnaryReactor* const reactor = context->DefaultReactor();
    absl::StatusOr<AdmittedCall> admitted = access_->Admit(*context, method, SubjectOf(*request));
    if (!admitted.ok()) {
      reactor->Finish(Ended(method, admitted.status()));
      return reactor;
    }
    const AdminTask task{
        .peer = PeerKey(*context, admitted->identity), .head = HeadOf(*request), .kind = kind};
    const auto end = [this, method, reactor, request, call = *std::move(admitted)](absl::Status status) {
      const grpc::Status result = Ended(method, std::move(status));
      access_->Ended(call, SubjectOf(*request), CodeName(result));
      reactor->Finish(result);
    };
    if (environment_.draining && Changes(kind)) {
      end(absl::UnavailableError("the server is draining"));
      return reactor;
    }
    absl::Status scheduled = workers_.Schedule(task, [=, this] {
      if (context->IsCancelled()) return end(absl::CancelledError("the client no longer waits"));
      CountUnfinished(1);
      absl::StatusOr<Response> result = (operations_.*operation)(*request);
      const absl::Status status = result.status();
      if (status.ok()) *response = *std::move(result);
      end(status);
      CountUnfinished(-1);
    });
    if (!scheduled.ok()) end(std::move(scheduled));
    return reactor;
  }

  grpc::Status Ended(absl::string_view method, absl::Status status) {
    const grpc::Status result = ToGrpc(std::move(status), engine_->incarnation());
    if (result.ok()) return result;
    metrics_->CountError(method, CodeName(result));
    if (IsRefusal(result)) return result;
    log::Log(log::LogLevel::kInfo, "call failed",
             {{"method", method}, {"code", CodeName(result)}, {"error", result.error_message()}});
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
