// SPDX-License-Identifier: Apache-2.0
#include "tests/client/fake_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <chrono>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "lossd/v1/server.grpc.pb.h"
#include "tests/client/fake_services.h"

namespace lossd::fake {
namespace {

class FakeServerService final : public v1::ServerService::Service {
 public:
  explicit FakeServerService(FakeState* state) : state_(state) {}

  grpc::Status GetServer(grpc::ServerContext*, const v1::GetServerRequest*,
                         v1::ServerDescription* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    response->set_version("0.0.0-fake");
    response->set_incarnation(state_->incarnation);
    response->set_backend("fake");
    response->set_device("none");
    response->set_uptime_seconds(3725.5);
    response->set_max_message_bytes(64 << 20);
    response->set_max_streams(64);
    response->set_heads(state_->heads.size());
    return grpc::Status::OK;
  }

  // One trainer with one stream.
  grpc::Status ListStreams(grpc::ServerContext*, const v1::ListStreamsRequest*,
                           v1::ListStreamsResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    response->set_incarnation(state_->incarnation);
    response->set_time_seconds(3725.5);
    v1::PeerDescription* const peer = response->add_peers();
    peer->set_peer("dns:trainer-1");
    peer->set_open_streams(1);
    peer->set_streams(7);
    peer->set_rows(4096);
    peer->set_received_bytes(32 << 20);
    v1::StreamDescription* const stream = response->add_streams();
    stream->set_number(6);
    stream->set_peer("dns:trainer-1");
    stream->set_head("head");
    stream->set_rows(1024);
    stream->set_queued_rows(512);
    stream->set_waits_for(v1::STREAM_WAIT_CLIENT);
    stream->set_wait_seconds(2.5);
    return grpc::Status::OK;
  }

 private:
  FakeState* const state_;
};

}  // namespace

struct FakeServer::State : FakeState {
  explicit State(const Options& o)
      : FakeState(o),
        port(o.port),
        loss_service(MakeLossService(this)),
        head_service(MakeHeadService(this)),
        server_service(std::make_unique<FakeServerService>(this)) {}
  void Listen();

  int port = 0;
  const std::unique_ptr<v1::LossService::Service> loss_service;
  const std::unique_ptr<v1::HeadService::Service> head_service;
  const std::unique_ptr<v1::ServerService::Service> server_service;
  std::unique_ptr<grpc::Server> server;
};

void FakeServer::State::Listen() {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(absl::StrCat("127.0.0.1:", port), grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(loss_service.get());
  builder.RegisterService(head_service.get());
  builder.RegisterService(server_service.get());
  builder.SetMaxReceiveMessageSize(64 << 20);
  server = builder.BuildAndStart();
}

FakeServer::FakeServer(Options options) : state_(std::make_shared<State>(options)) {
  Restart();
  Listen();
}

FakeServer::~FakeServer() { StopListening(); }

std::string FakeServer::target() const { return absl::StrCat("127.0.0.1:", state_->port); }
int FakeServer::port() const { return state_->port; }

void FakeServer::SetFaults(Faults faults) {
  absl::MutexLock lock(&state_->mu);
  state_->faults = std::move(faults);
}

void FakeServer::AddHead(const std::string& name, uint64_t hidden_size, uint64_t vocab_size) {
  v1::HeadSpec spec;
  spec.set_name(name);
  spec.set_hidden_size(hidden_size);
  spec.set_vocab_size(vocab_size);
  spec.set_bias(true);
  absl::MutexLock lock(&state_->mu);
  state_->heads[name] = state_->MakeHead(spec);
}

void FakeServer::Restart() {
  absl::MutexLock lock(&state_->mu);
  state_->Restart();
}

void FakeServer::StopListening() {
  if (state_->server == nullptr) return;
  state_->server->Shutdown(std::chrono::system_clock::now());
  state_->server->Wait();
  state_->server = nullptr;
}

void FakeServer::Listen() { state_->Listen(); }

uint64_t FakeServer::incarnation() const {
  absl::MutexLock lock(&state_->mu);
  return state_->incarnation;
}
uint64_t FakeServer::deletions() const {
  absl::MutexLock lock(&state_->mu);
  return state_->deletions.size();
}
uint64_t FakeServer::streams_opened() const {
  absl::MutexLock lock(&state_->mu);
  return state_->streams_seen;
}
uint64_t FakeServer::describes() const {
  absl::MutexLock lock(&state_->mu);
  return state_->describes_seen;
}
uint64_t FakeServer::slices_received() const {
  absl::MutexLock lock(&state_->mu);
  return state_->slices_seen;
}
uint64_t FakeServer::rows_received() const {
  absl::MutexLock lock(&state_->mu);
  return state_->rows_seen;
}
double FakeServer::accumulated(const std::string& head) const {
  absl::MutexLock lock(&state_->mu);
  double sum = 0;
  Head* found = state_->Find(head);
  for (double g : found->weight_gradient) sum += g;
  return sum;
}

}  // namespace lossd::fake
