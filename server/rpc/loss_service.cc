// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/loss_service.h"

#include <algorithm>
#include <map>
#include <string>

#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "proto/wire/payload_codec.h"
#include "server/log/log.h"
#include "server/messages/convert.h"
#include "server/messages/errors.h"
#include "server/messages/texts.h"
#include "server/rpc/status.h"

namespace lossd::rpc {
namespace {

constexpr absl::string_view kReleaseMicrobatch = "ReleaseMicrobatch";
constexpr uint32_t kDefaultStreams = 1000;  // that ListStreams lists
constexpr uint32_t kMostStreams = 10'000;
constexpr size_t kPeers = 1024;  // that are remembered

void Describe(const PeerTable::Entry& entry, absl::Time now, v1::PeerDescription* description) {
  description->set_peer(entry.peer);
  description->set_open_streams(static_cast<uint64_t>(std::max<int64_t>(0, entry.totals.open_streams)));
  description->set_streams(static_cast<uint64_t>(entry.totals.streams));
  description->set_rows(static_cast<uint64_t>(entry.totals.rows));
  description->set_received_bytes(static_cast<uint64_t>(entry.totals.received_bytes));
  description->set_sent_bytes(static_cast<uint64_t>(entry.totals.sent_bytes));
  description->set_device_wait_seconds(entry.totals.device_wait_seconds);
  description->set_idle_seconds(std::max(0.0, absl::ToDoubleSeconds(now - entry.totals.last_active)));
}

}  // namespace

// Calls that have not opened their microbatch yet count in the registry but not in the engine: twice as
// many calls as streams leave room for them.
LossService::LossService(const LossServiceOptions& options, engine::Engine* engine,
                         const AccessControl* access, metrics::Metrics* metrics,
                         const RequestEnvironment* requests)
    : requests_(requests),
      peers_(kPeers),
      registry_({.max_calls = 2 * options.max_streams,
                 .peer_share = options.peer_share,
                 .timeouts = options.timeouts,
                 .on_limit = [metrics](absl::string_view limit) { metrics->CountLimit(limit); }}),
      senders_(options.sender_threads, static_cast<size_t>(4 * options.max_streams)),
      expiry_(options.retained_timeout / 10, [engine, timeout = options.retained_timeout] {
        const int64_t expired = engine->ExpireRetained(clocks::SteadyNow() - timeout);
        if (expired > 0)
          log::Log(log::LogLevel::kInfo, "retained microbatches expired", {{"count", expired}});
      }) {
  environment_.engine = engine;
  environment_.access = access;
  environment_.metrics = metrics;
  environment_.registry = &registry_;
  environment_.peers = &peers_;
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

absl::StatusOr<v1::ListStreamsResponse> LossService::ListStreams(const v1::ListStreamsRequest& request) {
  if (request.max_streams() > kMostStreams) {
    return errors::FieldError("max_streams", absl::StrCat("be at most ", kMostStreams),
                              request.max_streams());
  }
  const uint32_t most = request.max_streams() == 0 ? kDefaultStreams : request.max_streams();
  const absl::Time now = clocks::SteadyNow();
  v1::ListStreamsResponse response;
  std::map<std::string, uint64_t> staging_bytes;
  registry_.ForEach([&](WatchedCall& call, const std::string& peer, uint64_t number) {
    v1::StreamDescription description;
    call.Describe(now, &description);
    staging_bytes[peer] += description.staging_bytes();
    if (static_cast<uint32_t>(response.streams_size()) >= most) {
      response.set_streams_left_out(response.streams_left_out() + 1);
      return;
    }
    description.set_number(number);
    description.set_peer(peer);
    *response.add_streams() = std::move(description);
  });
  for (const PeerTable::Entry& entry : peers_.List()) {
    v1::PeerDescription* const description = response.add_peers();
    Describe(entry, now, description);
    description->set_staging_bytes(staging_bytes[entry.peer]);
  }
  return response;
}

absl::StatusOr<v1::ReleaseMicrobatchResponse> LossService::Release(UnaryCall* call,
                                                                   const grpc::ByteBuffer& bytes) {
  v1::ReleaseMicrobatchRequest request;
  const auto decoded = wire::Decode(bytes, &request);
  if (!decoded.ok()) return decoded.status();
  const auto admitted = environment_.access->Admit(*call->context(), kReleaseMicrobatch, request.head());
  if (!admitted.ok()) return admitted.status();
  if (absl::Status run = messages::CheckRun("run", request.run()); !run.ok()) return run;
  const absl::StatusOr<engine::ReleaseResult> released = environment_.engine->Release(
      request.head(), request.microbatch_id(),
      {.identity = admitted->identity,
       .run = request.run(),
       .may_all = !admitted->identity.empty() && admitted->role == access::Role::kAdmin});
  if (absl::IsPermissionDenied(released.status())) {
    return environment_.access->Refuse(*call->context(), *admitted, request.head(), released.status());
  }
  if (!released.ok()) return released.status();
  v1::ReleaseMicrobatchResponse response;
  *response.mutable_state() = messages::ToProto(released->state);
  response.set_released(released->released);
  return response;
}

}  // namespace lossd::rpc
