#include "server/rpc/server_service.h"

#include "absl/time/clock.h"
#include "server/messages/convert.h"
#include "server/rpc/status.h"

namespace lossd::rpc {

grpc::ServerUnaryReactor* ServerService::GetServer(grpc::CallbackServerContext* context,
                                                   const v1::GetServerRequest* request,
                                                   v1::ServerDescription* response) {
  constexpr absl::string_view kMethod = "GetServer";
  metrics_->CountRequest(kMethod);
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  if (const auto admitted = access_->Admit(*context, kMethod); !admitted.ok()) {
    const grpc::Status refusal = ToGrpc(admitted.status(), engine_->incarnation());
    metrics_->CountError(kMethod, CodeName(refusal));
    reactor->Finish(refusal);
    return reactor;
  }
  const kernels::BackendInfo info = backend_->info();
  const kernels::MemoryStats memory = backend_->memory();
  const engine::EngineStats stats = engine_->stats();
  response->set_version(options_.version);
  response->set_incarnation(engine_->incarnation());
  response->set_backend(info.name);
  response->set_device(info.device);
  response->set_uptime_seconds(absl::ToDoubleSeconds(absl::Now() - options_.started));
  response->set_draining(draining_);
  *response->mutable_memory() = messages::ToProto(memory.current);
  *response->mutable_memory_peak() = messages::ToProto(memory.peak);
  response->set_memory_limit(static_cast<uint64_t>(memory.limit));
  response->set_max_message_bytes(static_cast<uint64_t>(options_.max_message_bytes));
  response->set_max_streams(static_cast<uint64_t>(options_.max_streams));
  response->set_open_streams(static_cast<uint64_t>(stats.open_streams));
  response->set_heads(static_cast<uint64_t>(stats.heads));
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

}  // namespace lossd::rpc
