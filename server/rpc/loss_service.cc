#include "server/rpc/loss_service.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "proto/wire/payload_codec.h"
#include "server/log/log.h"
#include "server/messages/convert.h"
#include "server/messages/errors.h"
#include "server/rpc/status.h"

namespace lossd::rpc {
namespace {

constexpr absl::string_view kReleaseMicrobatch = "ReleaseMicrobatch";

}  // namespace

// Calls that have not opened their microbatch yet count in the registry but not in the engine: twice as
// many calls as streams leave room for them.
LossService::LossService(const LossServiceOptions& options, engine::Engine* engine,
                         const AccessControl* access, metrics::Metrics* metrics,
                         const RequestEnvironment* requests)
    : requests_(requests),
      registry_({.max_calls = 2 * options.max_streams,
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
  environment_.regions = options.regions;
  environment_.max_staging_bytes = options.max_staging_bytes;
  Serve(v1::HeadState::descriptor()->file()->pool()->FindServiceByName("lossd.v1.LossService"),
        kReleaseMicrobatch, [this](grpc::CallbackServerContext* context) {
          return UnaryCall::Start(
              requests_, context, kReleaseMicrobatch,
              [this](UnaryCall* call, const grpc::ByteBuffer& bytes) { call->End(Release(call, bytes)); });
        });
}

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* LossService::ComputeLoss(
    grpc::CallbackServerContext* context) {
  return ComputeLossCall::Start(&environment_, context);
}

absl::StatusOr<v1::ReleaseMicrobatchResponse> LossService::Release(UnaryCall* call,
                                                                   const grpc::ByteBuffer& bytes) {
  v1::ReleaseMicrobatchRequest request;
  const auto decoded = wire::Decode(bytes, &request);
  if (!decoded.ok()) return decoded.status();
  const auto admitted = environment_.access->Admit(*call->context(), kReleaseMicrobatch, request.head());
  if (!admitted.ok()) return admitted.status();
  const absl::StatusOr<engine::ReleaseResult> released =
      environment_.engine->Release(request.head(), request.microbatch_id());
  if (!released.ok()) return released.status();
  v1::ReleaseMicrobatchResponse response;
  *response.mutable_state() = messages::ToProto(released->state);
  response.set_released(released->released);
  return response;
}

}  // namespace lossd::rpc
