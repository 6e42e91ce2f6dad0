// SPDX-License-Identifier: Apache-2.0
// The services of lossd.v1 (services.h). HeadService::ServeMethods has a line for each unary method.
#include "server/rpc/services.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/memory/memory.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "proto/wire/payload_codec.h"
#include "server/log/log.h"
#include "server/messages/convert.h"

namespace lossd::rpc {

// ---- HeadService ----

namespace {

using grpc::CallbackServerContext;

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

// The subject of a request for audit lines: its head, or the checkpoint, whose name contains the head.
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

}  // namespace

HeadService::HeadService(const HeadServiceOptions& options, engine::Engine* engine,
                         const AccessControl* access, metrics::Metrics* metrics)
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

bool HeadService::WaitUntilIdle(absl::Time deadline) {
  const bool tensors_done = registry_.WaitUntilEmpty(deadline);
  const bool streams_done = saves_.WaitUntilEmpty(deadline) && tensors_done;
  absl::MutexLock lock(&mutex_);
  return clocks::AwaitUntil(mutex_, absl::Condition(this, &HeadService::NothingUnfinished), deadline) &&
         streams_done;
}

grpc::ServerReadReactor<grpc::ByteBuffer>* HeadService::WriteTensor(CallbackServerContext* context,
                                                                    grpc::ByteBuffer* response) {
  return WriteTensorCall::Start(&environment_, context, response);
}

grpc::ServerReadReactor<grpc::ByteBuffer>* HeadService::AddGradient(CallbackServerContext* context,
                                                                    grpc::ByteBuffer* response) {
  return AddGradientCall::Start(&environment_, context, response);
}

void HeadService::Serve(absl::string_view method, std::function<Reactor*(CallbackServerContext*)> start) {
  WithRequestMethods::Serve(
      v1::HeadState::descriptor()->file()->pool()->FindServiceByName("lossd.v1.HeadService"), method,
      std::move(start));
}

template <typename Request, typename Response>
void HeadService::Unary(absl::string_view method, AdminKind kind, Operation<Request, Response> operation) {
  Serve(method, [=, this](CallbackServerContext* context) {
    return UnaryCall::Start(environment_.requests, context, method,
                            [=, this](UnaryCall* call, const grpc::ByteBuffer& bytes) {
                              Run(method, kind, operation, call, bytes);
                            });
  });
}

namespace {

// PERMISSION_DENIED if a caller who is not an admin may not make this request.
template <typename Request>
absl::Status CheckAsked(const admin::Checkpoints&, const Request&) {
  return absl::OkStatus();
}
absl::Status CheckAsked(const admin::Checkpoints& checkpoints, const v1::DeleteCheckpointRequest& request) {
  return checkpoints.CheckDelete(request);
}

}  // namespace

template <typename Request, typename Response>
void HeadService::Run(absl::string_view method, AdminKind kind, Operation<Request, Response> operation,
                      UnaryCall* call, const grpc::ByteBuffer& bytes) {
  const auto request = std::make_shared<Request>();
  const auto decoded = wire::Decode(bytes, request.get());
  if (!decoded.ok()) request->Clear();
  absl::StatusOr<AdmittedCall> admitted = access_->Admit(*call->context(), method, SubjectOf(*request));
  if (!admitted.ok()) return call->Finish(Ended(PeerKey(*call->context(), ""), method, admitted.status()));
  const AdminTask task{
      .peer = PeerKey(*call->context(), admitted->identity), .head = HeadOf(*request), .kind = kind};
  const bool is_admin = admitted->role == access::Role::kAdmin;
  const auto end = [this, method, call, request, peer = task.peer, admitted = *std::move(admitted)](
                       const absl::StatusOr<Response>& result, bool is_refused = false) {
    const grpc::Status status = Ended(peer, method, result.status());
    if (is_refused) {
      access_->Refuse(*call->context(), admitted, SubjectOf(*request), result.status()).IgnoreError();
    } else {
      access_->Ended(admitted, SubjectOf(*request), CodeName(status));
    }
    result.ok() ? call->Answer(wire::Encode(*result)) : call->Finish(status);
  };
  if (!decoded.ok()) return end(decoded.status());
  if (environment_.draining && Changes(kind)) return end(absl::UnavailableError("the server is draining"));
  const absl::Status scheduled = workers_.Schedule(task, [=, this] {
    if (call->context()->IsCancelled()) return end(absl::CancelledError("the client no longer waits"));
    CountUnfinished(1);
    const absl::Status allowed =
        is_admin ? absl::OkStatus() : CheckAsked(operations_.checkpoints(), *request);
    allowed.ok() ? end((operations_.*operation)(*request)) : end(allowed, /*is_refused=*/true);
    CountUnfinished(-1);
  });
  if (!scheduled.ok()) end(scheduled);
}

void HeadService::ServeMethods() {
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
  // DeleteCheckpoint uses only the disk and changes no head (kRead), so it still works while the server
  // drains, as saves do.
  Unary("DeleteCheckpoint", AdminKind::kRead, &admin::HeadOperations::DeleteCheckpoint);
  Serve("SaveCheckpoint", [this](auto* context) { return SaveCall::Start(&save_environment_, context); });
  Serve("ReadTensor", [this](auto* context) { return ReadTensorCall::Start(&environment_, context); });
}

grpc::Status HeadService::Ended(absl::string_view peer, absl::string_view method, absl::Status status) {
  const grpc::Status result = CountedEnd(method, std::move(status), engine_->incarnation(), metrics_);
  if (result.ok()) return result;
  if (IsRefusal(result)) return result;
  access_->Failed(peer, method, CodeName(result), result.error_message());
  return result;
}

std::unique_ptr<HeadService> HeadService::Create(const HeadServiceOptions& options, engine::Engine* engine,
                                                 const AccessControl* access, metrics::Metrics* metrics) {
  return absl::WrapUnique(new HeadService(options, engine, access, metrics));
}

// ---- LossService ----

namespace {

constexpr absl::string_view kReleaseMicrobatch = "ReleaseMicrobatch";
constexpr uint32_t kDefaultStreams = 1000;  // streams that ListStreams lists by default
constexpr uint32_t kMostStreams = 10'000;   // the most that a request may ask for
constexpr size_t kPeers = 1024;             // peers that PeerTable remembers

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

LossService::LossService(const LossServiceOptions& options, engine::Engine* engine,
                         const AccessControl* access, metrics::Metrics* metrics,
                         const RequestEnvironment* requests)
    : requests_(requests),
      peers_(kPeers),
      // Calls that have not opened their microbatch yet count in the registry, but not in the engine. So the
      // registry takes twice as many calls as the engine takes streams.
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
  return ComputeLossCall::Start(&environment_, CallerOver(context, *environment_.access));
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
  LOSSD_TRY(const auto decoded, wire::Decode(bytes, &request));
  LOSSD_TRY(const auto admitted,
            environment_.access->Admit(*call->context(), kReleaseMicrobatch, request.head()));
  LOSSD_RETURN_IF_ERROR(messages::CheckRun("run", request.run()));
  const absl::StatusOr<engine::ReleaseResult> released = environment_.engine->Release(
      request.head(), request.microbatch_id(),
      {.identity = admitted.identity,
       .run = request.run(),
       .may_all = !admitted.identity.empty() && admitted.role == access::Role::kAdmin});
  if (absl::IsPermissionDenied(released.status())) {
    return environment_.access->Refuse(*call->context(), admitted, request.head(), released.status());
  }
  if (!released.ok()) return released.status();
  v1::ReleaseMicrobatchResponse response;
  *response.mutable_state() = messages::ToProto(released->state);
  response.set_released(released->released);
  return response;
}

// ---- ServerService ----

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
  LOSSD_TRY(v1::ListStreamsResponse response, losses_->ListStreams(request));
  response.set_incarnation(engine_->incarnation());
  response.set_time_seconds(absl::ToDoubleSeconds(clocks::SteadyNow() - options_.started));
  return response;
}

}  // namespace lossd::rpc
