#include "server/rpc/loss_service.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "server/log/log.h"
#include "server/messages/convert.h"
#include "server/messages/errors.h"
#include "server/rpc/status.h"

namespace lossd::rpc {

// Calls that have not opened their microbatch yet count in the registry but not in the engine: twice as
// many calls as streams leave room for them.
LossService::LossService(const LossServiceOptions& options, engine::Engine* engine,
                         const AccessControl* access, metrics::Metrics* metrics)
    : registry_({.max_calls = 2 * options.max_streams,
                 .peer_share = options.peer_share,
                 .timeouts = options.timeouts,
                 .on_limit = [metrics](absl::string_view limit) { metrics->CountLimit(limit); }}),
      senders_(options.sender_threads, static_cast<size_t>(4 * options.max_streams)),
      expiry_(options.retained_timeout / 10, [engine, timeout = options.retained_timeout] {
        const int64_t expired = engine->ExpireRetained(absl::Now() - timeout);
        if (expired > 0)
          log::Log(log::LogLevel::kInfo, "retained microbatches expired", {{"count", expired}});
      }) {
  environment_.engine = engine;
  environment_.access = access;
  environment_.metrics = metrics;
  environment_.registry = &registry_;
  environment_.senders = &senders_;
  environment_.max_staging_bytes = options.max_staging_bytes;
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* LossService::ComputeLoss(
    grpc::CallbackServerContext* context) {
  return ComputeLossCall::Start(&environment_, context);
}

grpc::ServerUnaryReactor* LossService::ReleaseMicrobatch(grpc::CallbackServerContext* context,
                                                         const v1::ReleaseMicrobatchRequest* request,
                                                         v1::ReleaseMicrobatchResponse* response) {
  constexpr absl::string_view kMethod = "ReleaseMicrobatch";
  environment_.metrics->CountRequest(kMethod);
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  if (const auto admitted = environment_.access->Admit(*context, kMethod, request->head()); !admitted.ok()) {
    const grpc::Status refusal = ToGrpc(admitted.status(), environment_.engine->incarnation());
    environment_.metrics->CountError(kMethod, CodeName(refusal));
    reactor->Finish(refusal);
    return reactor;
  }
  const absl::StatusOr<engine::ReleaseResult> released =
      environment_.engine->Release(request->head(), request->microbatch_id());
  const grpc::Status status = ToGrpc(released.status(), environment_.engine->incarnation());
  if (status.ok()) {
    *response->mutable_state() = messages::ToProto(released->state);
    response->set_released(released->released);
  } else {
    environment_.metrics->CountError(kMethod, CodeName(status));
  }
  reactor->Finish(status);
  return reactor;
}

}  // namespace lossd::rpc
