// SPDX-License-Identifier: Apache-2.0
#include "tests/client/fake_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "lossd/v1/server.grpc.pb.h"
#include "proto/wire/status_details.h"

namespace lossd::fake {

// ---- What the fake server remembers, and what its services have in common ----

struct Head {
  v1::HeadSpec spec;
  uint64_t step = 0;
  uint64_t generation = 0;
  uint64_t weights_version = 0;
  uint64_t creation = 0;
  std::map<v1::Param, std::vector<float>> values;
  std::vector<double> weight_gradient;            // [V], of the first column
  std::map<uint64_t, std::set<uint64_t>> ledger;  // microbatch id -> rows
  std::map<uint64_t, std::set<uint64_t>> added;   // contribution id -> rows
  uint64_t updates = 0;
  uint64_t total_rows = 0;
  v1::ApplyStepResponse last_step;
  std::map<std::string, v1::ResetHeadResponse> resets;  // by id
  v1::HeadHistory history;
  struct Retained {
    v1::DType dtype = v1::DTYPE_FP32;
    std::map<uint64_t, std::vector<float>> hidden;  // by row; valid rows only
    std::map<uint64_t, int32_t> targets;            // by row; all rows
  };
  std::map<uint64_t, Retained> retained;  // by microbatch id
};

// Shared by the services, and outlives them.
struct FakeState {
  explicit FakeState(const FakeServer::Options& o) : options(o) {}

  grpc::Status Error(grpc::StatusCode code, const std::string& message, const std::string& field = "",
                     const std::string& value = "") ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    v1::ErrorDetail detail;
    detail.set_field(field);
    detail.set_value(value);
    detail.set_incarnation(incarnation);
    return wire::MakeGrpcStatus(code, message, detail);
  }
  grpc::Status NotFound(const std::string& head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return Error(grpc::StatusCode::NOT_FOUND, absl::StrCat("no head \"", head, "\""), "head", head);
  }
  // Does what a fault says; OK if the call goes on.
  grpc::Status Apply(const Fault& fault) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (fault.restart) Restart();
    for (auto& [name, head] : heads) {
      if (fault.discard) Discard(&head);
      if (fault.new_weights) head.weights_version = ++drawn;
      if (fault.make_again) {
        v1::HeadSpec spec = head.spec;
        if (fault.again_with != 0) spec.set_vocab_size(fault.again_with);
        head = MakeHead(spec);
      }
    }
    if (fault.max_rows > 0) faults.sudden_max_rows = fault.max_rows;
    const auto code = static_cast<grpc::StatusCode>(fault.code);
    if (code == grpc::StatusCode::OK) return grpc::Status::OK;
    if (fault.detail) return Error(code, "injected fault");
    return grpc::Status(code, fault.message.empty() ? "socket closed" : fault.message);
  }
  Head* Find(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    auto it = heads.find(name);
    return it == heads.end() ? nullptr : &it->second;
  }
  // Counts a unary call; true if it is to be refused.
  bool Refuse() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (faults.refuse_calls == 0) return false;
    --faults.refuse_calls;
    return true;
  }
  v1::HeadState StateOf(const Head& head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    v1::HeadState state;
    state.set_incarnation(incarnation);
    state.set_step(head.step);
    if (!options.versions) return state;
    state.set_generation(head.generation);
    state.set_weights_version(head.weights_version);
    state.set_creation(head.creation);
    return state;
  }
  // Zeroes what belongs to the open step.
  void Discard(Head* head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    head->ledger.clear();
    head->added.clear();
    head->retained.clear();
    std::fill(head->weight_gradient.begin(), head->weight_gradient.end(), 0.0);
    head->generation = ++drawn;
  }
  // Whether the gradients that a call names are the head's; `prefix` of the fields, "open." for instance.
  template <typename Request>
  grpc::Status CheckMeant(const Request& request, const Head& head, const std::string& prefix)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (request.has_incarnation() && request.incarnation() != incarnation) {
      return Error(grpc::StatusCode::FAILED_PRECONDITION, "meant for another process",
                   prefix + "incarnation");
    }
    if (request.has_generation() && request.generation() != head.generation) {
      return Error(grpc::StatusCode::ABORTED, "meant for other gradients", prefix + "generation",
                   absl::StrCat(request.generation()));
    }
    return grpc::Status::OK;
  }
  v1::SliceLimits Limits() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    v1::SliceLimits limits;
    limits.set_max_rows(faults.sudden_max_rows > 0 ? faults.sudden_max_rows : options.max_slice_rows);
    limits.set_max_bytes(options.max_slice_bytes);
    return limits;
  }
  v1::HeadDescription Describe(const Head& head) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    v1::HeadDescription description;
    *description.mutable_spec() = head.spec;
    *description.mutable_state() = StateOf(head);
    description.set_compute_dtype(v1::DTYPE_FP32);
    *description.mutable_slice_limits() = Limits();
    description.set_chunk_rows(options.max_slice_rows);
    const uint64_t parameters = head.spec.hidden_size() * head.spec.vocab_size();
    description.mutable_memory()->set_weights(parameters * 4);
    description.mutable_memory()->set_gradients(parameters * 4);
    description.set_step_microbatches(head.ledger.size());
    description.set_step_contributions(head.added.size());
    description.set_updates(head.updates);
    for (const auto& [id, seen] : head.ledger)
      description.set_step_rows(description.step_rows() + seen.size());
    description.set_total_rows(head.total_rows);
    if (options.histories) *description.mutable_history() = head.history;
    return description;
  }
  void Restart() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    absl::BitGen random;
    incarnation = options.numbered_incarnations
                      ? incarnation + 1
                      : absl::Uniform<uint64_t>(absl::IntervalClosed, random, 1, ~uint64_t{0});
    for (auto& [name, head] : heads) {
      Discard(&head);
      head.weights_version = ++drawn;
    }
  }
  Head MakeHead(const v1::HeadSpec& spec) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    Head head;
    head.generation = ++drawn;
    head.weights_version = ++drawn;
    head.creation = ++created;
    head.spec = spec;
    if (spec.norm() == v1::NORM_UNSPECIFIED) head.spec.set_norm(v1::NORM_NONE);
    if (spec.optimizer_state() == v1::OPTIMIZER_STATE_UNSPECIFIED)
      head.spec.set_optimizer_state(v1::OPTIMIZER_STATE_ADAM);
    if (spec.logits() == v1::LOGITS_UNSPECIFIED) head.spec.set_logits(v1::LOGITS_STORED);
    if (spec.gradients() == v1::GRADIENTS_UNSPECIFIED) head.spec.set_gradients(v1::GRADIENTS_EXACT);
    head.values[v1::PARAM_WEIGHT].resize(spec.vocab_size() * spec.hidden_size());
    if (spec.bias()) head.values[v1::PARAM_BIAS].resize(spec.vocab_size());
    head.weight_gradient.resize(spec.vocab_size());
    return head;
  }

  const FakeServer::Options options;
  mutable absl::Mutex mu;
  Faults faults ABSL_GUARDED_BY(mu);
  uint64_t incarnation ABSL_GUARDED_BY(mu) = 0;
  uint64_t drawn ABSL_GUARDED_BY(mu) = 0;    // generations and weights versions: 1, 2, ...
  uint64_t created ABSL_GUARDED_BY(mu) = 0;  // creations: 1, 2, ...
  std::map<std::string, Head> heads ABSL_GUARDED_BY(mu);
  std::map<std::string, std::string> deletions ABSL_GUARDED_BY(mu);  // deletion_id -> checkpoint
  uint64_t streams_seen ABSL_GUARDED_BY(mu) = 0;
  uint64_t describes_seen ABSL_GUARDED_BY(mu) = 0;
  uint64_t slices_seen ABSL_GUARDED_BY(mu) = 0;
  uint64_t additions_seen ABSL_GUARDED_BY(mu) = 0;
  uint64_t rows_seen ABSL_GUARDED_BY(mu) = 0;
};

// fp32 or bf16 bytes.
std::vector<float> ToFloats(const std::string& bytes, v1::DType dtype);
std::string ToBytes(const std::vector<float>& values, v1::DType dtype);

// The services of the fake server that keep the protocol's rules. `state` outlives them.
std::unique_ptr<v1::LossService::Service> MakeLossService(FakeState* state);
std::unique_ptr<v1::HeadService::Service> MakeHeadService(FakeState* state);

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

std::vector<float> ToFloats(const std::string& bytes, v1::DType dtype) {
  std::vector<float> values(bytes.size() / (dtype == v1::DTYPE_FP32 ? 4 : 2));
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t bits = 0;
    if (dtype == v1::DTYPE_FP32) {
      std::memcpy(&bits, bytes.data() + 4 * i, 4);
    } else {
      std::memcpy(reinterpret_cast<char*>(&bits) + 2, bytes.data() + 2 * i, 2);
    }
    std::memcpy(&values[i], &bits, 4);
  }
  return values;
}

std::string ToBytes(const std::vector<float>& values, v1::DType dtype) {
  std::string bytes(values.size() * (dtype == v1::DTYPE_FP32 ? 4 : 2), '\0');
  for (size_t i = 0; i < values.size(); ++i) {
    const char* bits = reinterpret_cast<const char*>(&values[i]);
    if (dtype == v1::DTYPE_FP32) {
      std::memcpy(bytes.data() + 4 * i, bits, 4);
    } else {
      std::memcpy(bytes.data() + 2 * i, bits + 2, 2);
    }
  }
  return bytes;
}

// ---- ComputeLoss and ReleaseMicrobatch ----

namespace {

bool IsValid(const v1::OpenMicrobatch& open, uint64_t row) {
  const int32_t ignore = open.options().has_ignore_index() ? open.options().ignore_index() : -100;
  return open.targets(static_cast<int>(row - open.rows().begin())) != ignore;
}

class FakeLossService final : public v1::LossService::Service {
 public:
  explicit FakeLossService(FakeState* state) : state_(state) {}

  using Stream = grpc::ServerReaderWriter<v1::ComputeLossResponse, v1::ComputeLossRequest>;

  grpc::Status ComputeLoss(grpc::ServerContext* context, Stream* stream) override {
    v1::ComputeLossRequest request;
    if (!stream->Read(&request)) return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "nothing opened");
    if (grpc::Status status = Ask(request); !status.ok()) return status;
    if (request.has_backward()) return Backward(request.backward(), stream);
    const v1::OpenMicrobatch open = request.open();
    v1::ComputeLossResponse accepted;
    v1::MicrobatchSummary summary;
    if (grpc::Status status = Open(open, accepted.mutable_accepted()); !status.ok()) return status;
    if (!stream->Write(accepted)) return grpc::Status::CANCELLED;
    uint64_t rows_left = 0;
    for (uint64_t row = open.rows().begin(); row < open.rows().end(); ++row) rows_left += IsValid(open, row);
    summary.set_valid_rows(rows_left);
    while (stream->Read(&request)) {
      if (grpc::Status status = Ask(request); !status.ok()) return status;
      v1::ComputeLossResponse response;
      grpc::Status status = Compute(open, request, accepted.accepted(), &response, &summary, &rows_left);
      if (!status.ok()) return status;
      std::function<bool(v1::ComputeLossResponse*)> on_slice;
      double delay;
      {
        absl::MutexLock lock(&state_->mu);
        on_slice = state_->faults.on_slice;
        delay = state_->faults.slice_delay_seconds;
      }
      if (delay > 0) absl::SleepFor(absl::Seconds(delay));
      if (on_slice && !on_slice(&response)) continue;
      if (!stream->Write(response)) return grpc::Status::CANCELLED;
    }
    if (context->IsCancelled()) return grpc::Status::CANCELLED;
    if (rows_left > 0) {
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, absl::StrCat(rows_left, " rows are missing"));
    }
    return Summarize(stream, open, accepted.accepted(), summary);
  }

 private:
  grpc::Status Ask(const v1::ComputeLossRequest& request) {
    absl::MutexLock lock(&state_->mu);
    return state_->faults.on_request ? state_->Apply(state_->faults.on_request(request)) : grpc::Status::OK;
  }

  grpc::Status Open(const v1::OpenMicrobatch& open, v1::MicrobatchAccepted* accepted) {
    absl::MutexLock lock(&state_->mu);
    ++state_->streams_seen;
    if (state_->faults.refuse_streams > 0) {
      --state_->faults.refuse_streams;
      return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    }
    Head* head = state_->Find(open.head());
    if (head == nullptr) return state_->NotFound(open.head());
    if (grpc::Status status = state_->CheckMeant(open, *head, "open."); !status.ok()) return status;
    if (open.accumulate_gradients() && open.step() != head->step) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION,
                           absl::StrCat("step ", open.step(), " is not open"), "open.step",
                           absl::StrCat(open.step()));
    }
    if (static_cast<uint64_t>(open.targets_size()) != open.rows().end() - open.rows().begin()) {
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, "open.targets has a wrong size",
                           "open.targets");
    }
    for (int i = 0; i < open.targets_size(); ++i) {
      const int32_t target = open.targets(i);
      if (!IsValid(open, open.rows().begin() + i)) continue;
      if (target < 0 || static_cast<uint64_t>(target) >= head->spec.vocab_size()) {
        return state_->Error(grpc::StatusCode::INVALID_ARGUMENT,
                             absl::StrCat("open.targets[", i, "] is ", target),
                             absl::StrCat("open.targets[", i, "]"), absl::StrCat(target));
      }
    }
    if (open.retain()) {
      Head::Retained& retained = head->retained[open.microbatch_id()];
      retained.dtype = open.hidden_dtype();
      for (int i = 0; i < open.targets_size(); ++i) {
        retained.targets[open.rows().begin() + i] =
            IsValid(open, open.rows().begin() + i) ? open.targets(i) : -1;
      }
    }
    *accepted->mutable_state() = state_->StateOf(*head);
    *accepted->mutable_limits() = state_->Limits();
    if (state_->faults.on_accepted) state_->faults.on_accepted(accepted);
    return grpc::Status::OK;
  }

  // Whether the call may go on as it was accepted.
  grpc::Status CheckUnchanged(const v1::OpenMicrobatch& open, const v1::HeadState& accepted, const Head& head)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu) {
    const v1::HeadState now = state_->StateOf(head);
    const bool in_step = open.accumulate_gradients() || open.retain();
    if (in_step && accepted.generation() != now.generation()) {
      return state_->Error(grpc::StatusCode::ABORTED, "the gradients were zeroed under the call");
    }
    if (accepted.weights_version() != now.weights_version()) {
      return state_->Error(grpc::StatusCode::ABORTED, "the weights changed under the call");
    }
    return grpc::Status::OK;
  }

  grpc::Status Compute(const v1::OpenMicrobatch& open, const v1::ComputeLossRequest& request,
                       const v1::MicrobatchAccepted& accepted, v1::ComputeLossResponse* response,
                       v1::MicrobatchSummary* summary, uint64_t* rows_left) {
    absl::MutexLock lock(&state_->mu);
    const v1::RowRange& rows = request.slice().rows();
    Head* head = state_->Find(open.head());
    if (head == nullptr) return state_->NotFound(open.head());
    if (grpc::Status status = CheckUnchanged(open, accepted.state(), *head); !status.ok()) return status;
    ++state_->slices_seen;
    if (state_->faults.fail_slice) {
      const int code = state_->faults.fail_slice(state_->slices_seen);
      if (code != 0 && state_->faults.restart_on_failure) state_->Restart();
      if (code == grpc::StatusCode::UNAVAILABLE)
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "socket closed");
      if (code != 0)
        return state_->Error(static_cast<grpc::StatusCode>(code), "injected fault", "slice.rows");
    }
    if (rows.begin() < open.rows().begin() || rows.end() > open.rows().end() || rows.begin() >= rows.end()) {
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, "slice.rows outside the range", "slice.rows");
    }
    const uint64_t count = rows.end() - rows.begin();
    const uint64_t d = head->spec.hidden_size();
    const uint64_t row_bytes = d * (open.hidden_dtype() == v1::DTYPE_FP32 ? 4 : 2);
    if (count > accepted.limits().max_rows() || request.payload().size() > accepted.limits().max_bytes()) {
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, absl::StrCat("slice of ", count, " rows"),
                           "slice.rows");
    }
    if (request.payload().size() != count * row_bytes) {
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, "payload has a wrong size", "payload");
    }
    state_->rows_seen += count;
    const std::vector<float> x = ToFloats(request.payload(), open.hidden_dtype());
    std::vector<float> dx(x.size(), 0.0f);
    v1::SliceResult* result = response->mutable_slice();
    *result->mutable_rows() = rows;
    for (uint64_t row = rows.begin(); row < rows.end(); ++row) {
      const bool valid = IsValid(open, row);
      const int at = static_cast<int>(row - open.rows().begin());
      const size_t first = (row - rows.begin()) * d;
      const int32_t target = open.targets(at);
      double sum = 0;
      for (size_t i = first; i < first + d; ++i) {
        sum += x[i];
        dx[i] = valid ? 2 * x[i] : 0;
      }
      const float weight = open.row_weights_size() > 0 ? open.row_weights(at) : 1.0f;
      const double loss = valid ? (sum + 0.25 * target) * weight : 0;
      const int32_t argmax = !valid ? -1 : row % 2 == 0 ? target : target + 1;
      if (open.want_row_loss()) result->add_row_loss(loss);
      if (open.want_row_lse()) result->add_row_lse(valid ? loss + 1 : 0);
      if (open.want_row_entropy()) result->add_row_entropy(valid ? 0.125f * target : 0);
      if (open.want_row_logprob()) result->add_row_logprob(valid ? -loss : 0);
      if (open.want_row_argmax()) result->add_row_argmax(argmax);
      const int each = static_cast<int>(open.class_count());
      const int of_row = open.classes_size() == each ? 0 : at * each;
      for (int i = 0; i < each; ++i) {
        result->add_class_logprobs(valid ? -0.5f * static_cast<float>(open.classes(of_row + i)) : 0.0f);
      }
      for (int i = 0; i < static_cast<int>(open.top_k()); ++i) {
        result->add_top_logprobs(valid ? -static_cast<float>(i) : 0.0f);
        result->add_top_classes(valid ? target + i : -1);
      }
      if (!valid) continue;
      if (open.options().has_objective()) {
        v1::ObjectiveSums* const objective = summary->mutable_objective();
        objective->set_rows(objective->rows() + 1);
        if (open.advantages_size() > 0) objective->set_ratio(objective->ratio() + open.advantages(at));
        if (open.old_logprobs_size() > 0) objective->set_old_kl(objective->old_kl() + open.old_logprobs(at));
        if (open.ref_logprobs_size() > 0) objective->set_ref_kl(objective->ref_kl() + open.ref_logprobs(at));
      }
      if (open.retain()) {
        head->retained[open.microbatch_id()].hidden[row].assign(x.begin() + first, x.begin() + first + d);
      }
      --*rows_left;
      ++head->total_rows;
      summary->set_loss_sum(summary->loss_sum() + loss);
      if (open.want_row_entropy()) summary->set_entropy_sum(summary->entropy_sum() + 0.125 * target);
      summary->set_correct_rows(summary->correct_rows() + (argmax == target));
      if (!open.accumulate_gradients()) continue;
      if (head->ledger[open.microbatch_id()].insert(row).second) {
        summary->set_accumulated_rows(summary->accumulated_rows() + 1);
        head->weight_gradient[target] += sum;
      } else {
        summary->set_repeated_rows(summary->repeated_rows() + 1);
      }
    }
    summary->set_queue_seconds(summary->queue_seconds() + 0.001);
    summary->set_compute_seconds(summary->compute_seconds() + 0.002);
    if (open.want_grad_hidden()) response->set_payload(ToBytes(dx, open.hidden_dtype()));
    return grpc::Status::OK;
  }

  // dL/dx = 2 x times the row's grad_loss, in slices of 7 rows, the last one first.
  grpc::Status Backward(const v1::OpenBackward& open, Stream* stream) {
    std::vector<v1::ComputeLossResponse> responses(1);
    {
      absl::MutexLock lock(&state_->mu);
      ++state_->streams_seen;
      Head* head = state_->Find(open.head());
      if (head == nullptr) return state_->NotFound(open.head());
      if (grpc::Status status = state_->CheckMeant(open, *head, "backward."); !status.ok()) return status;
      const auto it = head->retained.find(open.microbatch_id());
      if (it == head->retained.end() || it->second.targets.count(open.rows().end() - 1) == 0) {
        return state_->Error(grpc::StatusCode::NOT_FOUND, "the rows are not retained",
                             "backward.microbatch_id");
      }
      *responses[0].mutable_accepted()->mutable_state() = state_->StateOf(*head);
      v1::MicrobatchSummary summary;
      for (uint64_t end = open.rows().end(); end > open.rows().begin();
           end -= std::min(end - open.rows().begin(), uint64_t{7})) {
        const uint64_t begin = std::max(open.rows().begin(), end - std::min(end, uint64_t{7}));
        responses.push_back(BackwardSlice(open, it->second, begin, end, head, &summary));
      }
      *summary.mutable_state() = state_->StateOf(*head);
      *responses.emplace_back().mutable_summary() = summary;
      if (state_->faults.fail_slice && state_->faults.fail_slice(++state_->slices_seen) != 0)
        responses.resize(2);
    }
    for (const auto& response : responses) stream->Write(response);
    const bool whole = responses.back().has_summary();
    return whole ? grpc::Status::OK : grpc::Status(grpc::StatusCode::UNAVAILABLE, "socket closed");
  }

  v1::ComputeLossResponse BackwardSlice(const v1::OpenBackward& open, const Head::Retained& retained,
                                        uint64_t begin, uint64_t end, Head* head,
                                        v1::MicrobatchSummary* summary) {
    v1::ComputeLossResponse response;
    response.mutable_slice()->mutable_rows()->set_begin(begin);
    response.mutable_slice()->mutable_rows()->set_end(end);
    std::vector<float> dx;
    for (uint64_t row = begin; row < end; ++row) {
      const auto it = retained.hidden.find(row);
      if (it == retained.hidden.end()) {
        dx.insert(dx.end(), head->spec.hidden_size(), 0.0f);
        continue;
      }
      const float gradient = open.grad_loss(static_cast<int>(row - open.rows().begin()));
      double sum = 0;
      for (float x : it->second) {
        dx.push_back(2 * gradient * x);
        sum += x;
      }
      summary->set_valid_rows(summary->valid_rows() + 1);
      if (!open.accumulate_gradients()) continue;
      const bool added = head->ledger[open.microbatch_id()].insert(row).second;
      if (added) head->weight_gradient[retained.targets.at(row)] += gradient * sum;
      summary->set_accumulated_rows(summary->accumulated_rows() + added);
      summary->set_repeated_rows(summary->repeated_rows() + !added);
    }
    if (open.want_grad_hidden()) response.set_payload(ToBytes(dx, retained.dtype));
    return response;
  }

 public:
  grpc::Status ReleaseMicrobatch(grpc::ServerContext*, const v1::ReleaseMicrobatchRequest* request,
                                 v1::ReleaseMicrobatchResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    response->set_released(head->retained.erase(request->microbatch_id()) > 0);
    *response->mutable_state() = state_->StateOf(*head);
    return grpc::Status::OK;
  }

 private:
  grpc::Status Summarize(Stream* stream, const v1::OpenMicrobatch& open,
                         const v1::MicrobatchAccepted& accepted, const v1::MicrobatchSummary& summary) {
    std::vector<v1::ComputeLossResponse> responses;
    {
      absl::MutexLock lock(&state_->mu);
      Head* head = state_->Find(open.head());
      if (head == nullptr) return state_->NotFound(open.head());
      if (grpc::Status status = CheckUnchanged(open, accepted.state(), *head); !status.ok()) return status;
      if (open.accumulate_gradients()) head->ledger[open.microbatch_id()];
      if (state_->faults.extra) responses = state_->faults.extra();
      if (!state_->faults.no_summary) {
        v1::ComputeLossResponse response;
        *response.mutable_summary() = summary;
        *response.mutable_summary()->mutable_state() = state_->StateOf(*head);
        response.mutable_summary()->set_normalizer(open.reduction() == v1::REDUCTION_MEAN ? open.normalizer()
                                                                                          : 1);
        if (state_->faults.on_summary) state_->faults.on_summary(response.mutable_summary());
        responses.push_back(response);
      }
    }
    for (const auto& response : responses) stream->Write(response);
    return grpc::Status::OK;
  }

  FakeState* const state_;
};

}  // namespace

std::unique_ptr<v1::LossService::Service> MakeLossService(FakeState* state) {
  return std::make_unique<FakeLossService>(state);
}

// ---- Heads, their tensors, steps and checkpoints ----

namespace {

class FakeHeadService final : public v1::HeadService::Service {
 public:
  explicit FakeHeadService(FakeState* state) : state_(state) {}

  grpc::Status CreateHead(grpc::ServerContext*, const v1::CreateHeadRequest* request,
                          v1::HeadDescription* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    const v1::HeadSpec& spec = request->spec();
    if (spec.hidden_size() == 0) {
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, "spec.hidden_size is 0", "spec.hidden_size",
                           "0");
    }
    if (state_->Find(spec.name()) != nullptr) {
      return state_->Error(grpc::StatusCode::ALREADY_EXISTS,
                           absl::StrCat("head \"", spec.name(), "\" exists"), "spec.name", spec.name());
    }
    Head& head = state_->heads[spec.name()] = state_->MakeHead(spec);
    *response = state_->Describe(head);
    return grpc::Status::OK;
  }

  grpc::Status DescribeHead(grpc::ServerContext*, const v1::DescribeHeadRequest* request,
                            v1::HeadDescription* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    if (state_->faults.on_describe) {
      if (grpc::Status status = state_->Apply(state_->faults.on_describe()); !status.ok()) return status;
    }
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    ++state_->describes_seen;
    *response = state_->Describe(*head);
    return grpc::Status::OK;
  }

  grpc::Status ListHeads(grpc::ServerContext*, const v1::ListHeadsRequest*,
                         v1::ListHeadsResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    for (const auto& [name, head] : state_->heads) *response->add_heads() = state_->Describe(head);
    return grpc::Status::OK;
  }

  grpc::Status DeleteHead(grpc::ServerContext*, const v1::DeleteHeadRequest* request,
                          v1::DeleteHeadResponse*) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->heads.erase(request->head()) == 0) return state_->NotFound(request->head());
    return grpc::Status::OK;
  }

  grpc::Status ReadTensor(grpc::ServerContext*, const v1::ReadTensorRequest* request,
                          grpc::ServerWriter<v1::TensorSlice>* writer) override {
    uint64_t row = request->rows().begin();
    for (uint64_t slice = 0;; ++slice) {
      v1::TensorSlice answer;
      bool last = false;
      if (grpc::Status status = ReadSlice(*request, slice, row, &answer, &last); !status.ok()) return status;
      writer->Write(answer);
      if (last) return grpc::Status::OK;
      row = answer.rows().end();
    }
  }

  grpc::Status WriteTensor(grpc::ServerContext*, grpc::ServerReader<v1::WriteTensorRequest>* reader,
                           v1::WriteTensorResponse* response) override {
    v1::WriteTensorRequest request;
    v1::OpenTensor open;
    std::string bytes;
    while (reader->Read(&request)) {
      if (request.has_open()) open = request.open();
      bytes += request.payload();
    }
    absl::MutexLock lock(&state_->mu);
    if (state_->faults.on_write) {
      if (grpc::Status status = state_->Apply(state_->faults.on_write(open)); !status.ok()) return status;
    }
    Head* head = state_->Find(open.head());
    if (head == nullptr) return state_->NotFound(open.head());
    if (open.role() == v1::ROLE_GRADIENT) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION, "gradients only accumulate", "open.role");
    }
    std::vector<float>& values = head->values[open.param()];
    const uint64_t cols = open.param() == v1::PARAM_WEIGHT ? head->spec.hidden_size() : 1;
    const uint64_t begin = open.has_rows() ? open.rows().begin() : 0;
    const std::vector<float> written = ToFloats(bytes, open.dtype());
    if (begin * cols + written.size() > values.size()) {
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, "too many values", "payload");
    }
    std::copy(written.begin(), written.end(), values.begin() + begin * cols);
    head->weights_version = ++state_->drawn;
    *response->mutable_state() = state_->StateOf(*head);
    response->mutable_rows()->set_begin(begin);
    response->mutable_rows()->set_end(begin + written.size() / cols);
    return grpc::Status::OK;
  }

  grpc::Status AddGradient(grpc::ServerContext*, grpc::ServerReader<v1::AddGradientRequest>* reader,
                           v1::AddGradientResponse* response) override {
    v1::AddGradientRequest request;
    v1::OpenGradient open;
    uint64_t row = 0;
    while (reader->Read(&request)) {
      if (request.has_open()) {
        open = request.open();
        row = open.rows().begin();
      }
      grpc::Status status = AddRows(open, request.payload(), &row, response);
      if (!status.ok()) return status;
    }
    response->mutable_rows()->set_begin(open.rows().begin());
    response->mutable_rows()->set_end(row);
    return grpc::Status::OK;
  }

  grpc::Status GradNorm(grpc::ServerContext*, const v1::GradNormRequest* request,
                        v1::GradNormResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    *response->mutable_state() = state_->StateOf(*head);
    response->set_grad_norm(Norm(*head));
    return grpc::Status::OK;
  }

  grpc::Status ApplyStep(grpc::ServerContext*, const v1::ApplyStepRequest* request,
                         v1::ApplyStepResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->faults.on_apply) {
      if (grpc::Status status = state_->Apply(state_->faults.on_apply(*request)); !status.ok()) return status;
    }
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    if (head->step > 0 && request->step() == head->step - 1) {
      *response = head->last_step;
      response->set_repeated_call(true);
      return grpc::Status::OK;
    }
    uint64_t rows = 0;
    for (const auto& [id, accumulated] : head->ledger) rows += accumulated.size();
    if (grpc::Status status = state_->CheckMeant(*request, *head, ""); !status.ok()) return status;
    if (request->step() != head->step) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION,
                           absl::StrCat("step ", head->step, " is open"), "step",
                           absl::StrCat(request->step()));
    }
    if (request->has_expected_rows() && request->expected_rows() != rows) {
      return state_->Error(
          grpc::StatusCode::FAILED_PRECONDITION,
          absl::StrCat("expected_rows is ", request->expected_rows(), ", but ", rows, " rows are there"),
          "expected_rows", absl::StrCat(request->expected_rows()));
    }
    response->set_grad_norm(Norm(*head));
    response->set_microbatches(head->ledger.size());
    response->set_contributions(head->added.size());
    response->set_rows(rows);
    response->set_skipped(!std::isfinite(Norm(*head)));
    if (response->skipped() && !request->skip_non_finite()) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION, "the norm is not finite",
                           "skip_non_finite");
    }
    if (!response->skipped()) {
      ++head->updates;
      head->weights_version = ++state_->drawn;
    }
    ++head->step;
    state_->Discard(head);
    *response->mutable_state() = state_->StateOf(*head);
    response->set_applied_incarnation(response->state().incarnation());
    head->last_step = *response;
    // The step was applied, but the answer is lost.
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "connection reset");
    return grpc::Status::OK;
  }

  grpc::Status ZeroGradients(grpc::ServerContext*, const v1::ZeroGradientsRequest* request,
                             v1::ZeroGradientsResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "the server is draining");
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    if (request->step() != head->step) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION, "not the open step", "step",
                           absl::StrCat(request->step()));
    }
    state_->Discard(head);
    *response->mutable_state() = state_->StateOf(*head);
    return grpc::Status::OK;
  }

  grpc::Status SaveCheckpoint(grpc::ServerContext*, const v1::SaveCheckpointRequest* request,
                              grpc::ServerWriter<v1::SaveCheckpointUpdate>* writer) override {
    absl::MutexLock lock(&state_->mu);
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    const uint64_t bytes = head->values[v1::PARAM_WEIGHT].size() * 4;
    v1::SaveCheckpointUpdate update;
    update.mutable_progress()->set_phase(v1::SAVE_PHASE_WRITING);
    update.mutable_progress()->set_total_bytes(bytes);
    update.mutable_progress()->set_read_bytes(bytes);
    update.mutable_progress()->set_written_bytes(bytes / 2);
    writer->Write(update);
    v1::SaveCheckpointResponse& saved = *update.mutable_saved();
    *saved.mutable_state() = state_->StateOf(*head);
    const std::string name = request->name().empty() ? "step-0000000000" : request->name();
    saved.set_checkpoint(absl::StrCat(request->head(), "/", name));
    saved.set_bytes(bytes);
    saved.set_seconds(0.25);
    head->history.set_checkpoint(saved.checkpoint());
    head->history.set_checkpoint_step(head->step);
    if (request->keep() == 1) saved.add_pruned(absl::StrCat(request->head(), "/old"));
    writer->Write(update);
    return grpc::Status::OK;
  }

  grpc::Status ListCheckpoints(grpc::ServerContext*, const v1::ListCheckpointsRequest* request,
                               v1::ListCheckpointsResponse* response) override {
    v1::CheckpointInfo& whole = *response->add_checkpoints();
    whole.set_checkpoint("head/step-0000000007");
    whole.set_step(7);
    whole.set_bytes(3 << 20);
    whole.set_saved_unix_seconds(1'700'000'000);
    whole.set_automatic(true);
    whole.mutable_spec()->set_name("head");
    whole.mutable_spec()->set_hidden_size(4);
    whole.mutable_spec()->set_vocab_size(10);
    v1::CheckpointInfo& damaged = *response->add_checkpoints();
    damaged.set_checkpoint("head/damaged");
    damaged.set_error("the manifest's checksum does not match");
    response->set_left_out(2);
    return grpc::Status::OK;
  }

  grpc::Status LoadCheckpoint(grpc::ServerContext*, const v1::LoadCheckpointRequest* request,
                              v1::HeadDescription* response) override {
    absl::MutexLock lock(&state_->mu);
    const std::string name = request->head().empty()
                                 ? request->checkpoint().substr(0, request->checkpoint().find('/'))
                                 : request->head();
    Head* head = state_->Find(name);
    if (head == nullptr) return state_->NotFound(name);
    state_->Discard(head);
    head->weights_version = ++state_->drawn;
    *response = state_->Describe(*head);
    return grpc::Status::OK;
  }

  grpc::Status ResetHead(grpc::ServerContext*, const v1::ResetHeadRequest* request,
                         v1::ResetHeadResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    if (state_->faults.on_reset) {
      if (grpc::Status status = state_->Apply(state_->faults.on_reset(*request)); !status.ok()) return status;
    }
    Head* head = state_->Find(request->head());
    if (head == nullptr) return state_->NotFound(request->head());
    if (request->has_incarnation() && request->incarnation() != state_->incarnation) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION, "meant for another process", "incarnation");
    }
    const auto [reset, is_new] = head->resets.try_emplace(request->reset_id());
    if (is_new) {
      head->updates = 0;
      if (request->scope() == v1::RESET_SCOPE_ALL) head->step = 0;
      state_->Discard(head);
      *reset->second.mutable_head() = state_->Describe(*head);
    }
    *response = reset->second;
    response->set_repeated_call(!is_new);
    if (!is_new) return grpc::Status::OK;
    // The head was reset, but the answer is lost.
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "connection reset");
    return grpc::Status::OK;
  }

  // Of any name but "missing".
  grpc::Status DeleteCheckpoint(grpc::ServerContext*, const v1::DeleteCheckpointRequest* request,
                                v1::DeleteCheckpointResponse* response) override {
    absl::MutexLock lock(&state_->mu);
    const std::string& checkpoint = request->checkpoint();
    if (checkpoint.ends_with("/missing")) {
      return state_->Error(grpc::StatusCode::NOT_FOUND, "no such checkpoint", "checkpoint", checkpoint);
    }
    const bool is_new = state_->deletions.emplace(request->deletion_id(), checkpoint).second;
    response->set_repeated_call(!is_new);
    response->set_bytes(3 << 20);
    // It is deleted, but the answer is lost.
    if (state_->Refuse()) return state_->Error(grpc::StatusCode::UNAVAILABLE, "connection reset");
    return grpc::Status::OK;
  }

 private:
  // Three rows of a tensor, from `row` on.
  grpc::Status ReadSlice(const v1::ReadTensorRequest& request, uint64_t number, uint64_t row,
                         v1::TensorSlice* slice, bool* last) {
    absl::MutexLock lock(&state_->mu);
    if (state_->faults.on_read) {
      if (grpc::Status status = state_->Apply(state_->faults.on_read(number)); !status.ok()) return status;
    }
    Head* head = state_->Find(request.head());
    if (head == nullptr) return state_->NotFound(request.head());
    if (head->values.count(request.param()) == 0) {
      return state_->Error(grpc::StatusCode::NOT_FOUND, "no such tensor", "param");
    }
    const uint64_t cols = request.param() == v1::PARAM_WEIGHT ? head->spec.hidden_size() : 1;
    std::vector<float> values = head->values[request.param()];
    const uint64_t rows = values.size() / cols;
    if (request.role() == v1::ROLE_GRADIENT && request.param() == v1::PARAM_WEIGHT) {
      for (uint64_t v = 0; v < rows; ++v) values[v * cols] = head->weight_gradient[v];
    }
    const uint64_t end = request.has_rows() ? request.rows().end() : rows;
    if (end > rows || row > end)
      return state_->Error(grpc::StatusCode::INVALID_ARGUMENT, "rows are outside the tensor", "rows");
    const uint64_t slice_end = std::min(end, row + 3);
    *slice->mutable_state() = state_->StateOf(*head);
    slice->mutable_rows()->set_begin(row);
    slice->mutable_rows()->set_end(slice_end);
    slice->set_tensor_rows(rows);
    slice->set_tensor_cols(cols);
    slice->set_dtype(request.dtype());
    slice->set_payload(
        ToBytes({values.begin() + row * cols, values.begin() + slice_end * cols}, request.dtype()));
    *last = slice_end == end;
    return grpc::Status::OK;
  }

  // Adds a message's rows, from `row` on, and moves `row` behind them. open.rows is set.
  grpc::Status AddRows(const v1::OpenGradient& open, const std::string& payload, uint64_t* row,
                       v1::AddGradientResponse* response) {
    absl::MutexLock lock(&state_->mu);
    if (state_->faults.on_add) {
      if (grpc::Status status = state_->Apply(state_->faults.on_add(open)); !status.ok()) return status;
    }
    ++state_->additions_seen;
    const int code = state_->faults.fail_add ? state_->faults.fail_add(state_->additions_seen) : 0;
    if (code != 0 && state_->faults.restart_on_failure) state_->Restart();
    if (code != 0) return grpc::Status(static_cast<grpc::StatusCode>(code), "injected fault");
    Head* head = state_->Find(open.head());
    if (head == nullptr) return state_->NotFound(open.head());
    if (grpc::Status status = state_->CheckMeant(open, *head, "open."); !status.ok()) return status;
    if (open.step() != head->step) {
      return state_->Error(grpc::StatusCode::FAILED_PRECONDITION, "the step is not open", "open.step");
    }
    const uint64_t d = head->spec.hidden_size();
    const std::vector<float> values = ToFloats(payload, open.dtype());
    for (size_t i = 0; i < values.size(); i += d, ++*row) {
      if (head->added[open.contribution_id()].insert(*row).second) {
        head->weight_gradient[*row] += (open.has_scale() ? open.scale() : 1.0f) * values[i];
        response->set_added_rows(response->added_rows() + 1);
      } else {
        response->set_repeated_rows(response->repeated_rows() + 1);
      }
    }
    *response->mutable_state() = state_->StateOf(*head);
    return grpc::Status::OK;
  }

  static double Norm(const Head& head) {
    double sum = 0;
    for (double g : head.weight_gradient) sum += g * g;
    return std::sqrt(sum);
  }

  FakeState* const state_;
};

}  // namespace

std::unique_ptr<v1::HeadService::Service> MakeHeadService(FakeState* state) {
  return std::make_unique<FakeHeadService>(state);
}

}  // namespace lossd::fake
