// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/server_service.h"

#include "kernels/clocks/clock.h"
#include "proto/wire/payload_codec.h"
#include "server/messages/convert.h"

namespace lossd::rpc {
namespace {

constexpr absl::string_view kGetServer = "GetServer";
constexpr absl::string_view kListStreams = "ListStreams";

void AddRanks(const metrics::ReadRanks& read, v1::ServerDescription* description) {
  if (!read) return;
  for (const metrics::RankReading& reading : read()) {
    v1::RankDescription* const rank = description->add_ranks();
    rank->set_rank(static_cast<uint32_t>(reading.state.rank));
    rank->set_host(reading.state.host);
    rank->set_device(reading.state.device);
    rank->set_lost(reading.state.lost);
    *rank->mutable_memory() = messages::ToProto(reading.state.memory.current);
  }
}

}  // namespace

ServerService::ServerService(const ServerServiceOptions& options, const engine::Engine* engine,
                             const kernels::Backend* backend, LossService* losses,
                             const AccessControl* access, const RequestEnvironment* requests)
    : options_(options), engine_(engine), backend_(backend), losses_(losses), access_(access) {
  const google::protobuf::ServiceDescriptor* const service =
      v1::ServerDescription::descriptor()->file()->FindServiceByName("ServerService");
  Serve(service, kGetServer, [this, requests](grpc::CallbackServerContext* context) {
    return UnaryCall::Start(requests, context, kGetServer,
                            [this](UnaryCall* call, const grpc::ByteBuffer&) { call->End(Describe(call)); });
  });
  Serve(service, kListStreams, [this, requests](grpc::CallbackServerContext* context) {
    return UnaryCall::Start(
        requests, context, kListStreams,
        [this](UnaryCall* call, const grpc::ByteBuffer& bytes) { call->End(DescribeStreams(call, bytes)); });
  });
}

absl::StatusOr<v1::ServerDescription> ServerService::Describe(UnaryCall* call) const {
  if (const auto admitted = access_->Admit(*call->context(), kGetServer); !admitted.ok()) {
    return admitted.status();
  }
  const kernels::BackendInfo info = backend_->info();
  const kernels::MemoryStats memory = backend_->memory();
  const engine::EngineStats stats = engine_->stats();
  v1::ServerDescription description;
  description.set_version(options_.version);
  description.set_incarnation(engine_->incarnation());
  description.set_backend(info.name);
  description.set_device(info.device);
  description.set_uptime_seconds(absl::ToDoubleSeconds(clocks::SteadyNow() - options_.started));
  description.set_draining(draining_);
  *description.mutable_memory() = messages::ToProto(memory.current);
  *description.mutable_memory_peak() = messages::ToProto(memory.peak);
  description.set_memory_limit(static_cast<uint64_t>(memory.limit));
  description.set_max_message_bytes(static_cast<uint64_t>(options_.max_message_bytes));
  description.set_max_streams(static_cast<uint64_t>(options_.max_streams));
  description.set_open_streams(static_cast<uint64_t>(stats.open_streams));
  description.set_heads(static_cast<uint64_t>(stats.heads));
  description.set_region_socket(options_.region_socket);
  if (options_.http) description.set_http(options_.http());
  for (const std::string& device : options_.region_devices) description.add_region_devices(device);
  if (!options_.region_devices.empty()) description.set_region_device(options_.region_devices.front());
  AddRanks(options_.ranks, &description);
  description.set_collectives(options_.collectives);
  description.set_gpu_sharing(info.gpu_sharing);
  return description;
}

absl::StatusOr<v1::ListStreamsResponse> ServerService::DescribeStreams(UnaryCall* call,
                                                                       const grpc::ByteBuffer& bytes) const {
  v1::ListStreamsRequest request;
  if (const auto decoded = wire::Decode(bytes, &request); !decoded.ok()) return decoded.status();
  if (const auto admitted = access_->Admit(*call->context(), kListStreams); !admitted.ok()) {
    return admitted.status();
  }
  absl::StatusOr<v1::ListStreamsResponse> response = losses_->ListStreams(request);
  if (!response.ok()) return response.status();
  response->set_incarnation(engine_->incarnation());
  response->set_time_seconds(absl::ToDoubleSeconds(clocks::SteadyNow() - options_.started));
  return response;
}

}  // namespace lossd::rpc
