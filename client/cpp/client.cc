// SPDX-License-Identifier: Apache-2.0
// The methods of Client, PendingLoss, CheckpointCalls and MonitoringCalls (client.h), except the loss
// computations themselves (loss_call.cc). Each method makes the request of one call, and keeps the client's
// HeadCache up to date.
#include "client/cpp/client.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/text_format.h>

#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/connections.h"
#include "client/cpp/core.h"
#include "client/cpp/loss_call.h"
#include "client/cpp/tensor_transfer.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::client {
namespace {

using internal::Call;
using internal::Core;
using internal::DeadlineAfter;
using internal::GradientsId;
using internal::kNever;
using internal::Repeat;
using internal::Repeated;
using internal::TrainerStep;

}  // namespace

// ---- CheckpointCalls ----

absl::StatusOr<v1::SaveCheckpointResponse> CheckpointCalls::SaveCheckpoint(absl::string_view head,
                                                                           absl::string_view name,
                                                                           absl::Duration timeout) {
  v1::SaveCheckpointRequest request;
  request.set_head(std::string(head));
  request.set_name(std::string(name));
  return SaveCheckpoint(request, nullptr, timeout);
}

absl::StatusOr<v1::SaveCheckpointResponse> CheckpointCalls::SaveCheckpoint(
    const v1::SaveCheckpointRequest& request, const std::function<void(const v1::SaveProgress&)>& on_progress,
    absl::Duration timeout) {
  grpc::ClientContext context;
  const internal::CancellableContext cancellable(&context);
  internal::SetDeadline(DeadlineAfter(timeout, calls_core_->options().transfer_timeout), &context);
  const auto reader = calls_core_->connections().heads()->SaveCheckpoint(&context, request);
  std::optional<v1::SaveCheckpointResponse> saved;
  v1::SaveCheckpointUpdate update;
  while (reader->Read(&update)) {
    if (update.has_progress() && on_progress != nullptr) on_progress(update.progress());
    if (update.has_saved()) saved = std::move(*update.mutable_saved());
  }
  LOSSD_RETURN_IF_ERROR(internal::CallStatus(reader->Finish(), calls_core_->connections().peer()));
  if (!saved.has_value()) return absl::InternalError("the server did not say what it saved");
  return *std::move(saved);
}

absl::StatusOr<v1::ListCheckpointsResponse> CheckpointCalls::ListCheckpoints(absl::string_view head,
                                                                             absl::Duration timeout) {
  v1::ListCheckpointsRequest request;
  request.set_head(std::string(head));
  return Call(*calls_core_, calls_core_->connections().heads(), &v1::HeadService::Stub::ListCheckpoints,
              request, DeadlineAfter(timeout, calls_core_->options().call_timeout), Repeat::kIfTransient);
}

absl::StatusOr<v1::HeadDescription> CheckpointCalls::LoadCheckpoint(absl::string_view checkpoint,
                                                                    absl::string_view head,
                                                                    absl::Duration timeout) {
  v1::LoadCheckpointRequest request;
  request.set_checkpoint(std::string(checkpoint));
  request.set_head(std::string(head));
  auto result = Call(*calls_core_, calls_core_->connections().heads(), &v1::HeadService::Stub::LoadCheckpoint,
                     request, DeadlineAfter(timeout, calls_core_->options().transfer_timeout), kNever);
  if (result.ok()) {
    calls_core_->head_cache().Learn(*result);
    calls_core_->head_cache().ForgetAccumulation(result->spec().name());
  }
  return result;
}

absl::StatusOr<v1::DeleteCheckpointResponse> CheckpointCalls::DeleteCheckpoint(absl::string_view checkpoint,
                                                                               absl::Duration timeout) {
  v1::DeleteCheckpointRequest request;
  request.set_checkpoint(std::string(checkpoint));
  request.set_deletion_id(internal::RandomDigits(32));
  return Call(*calls_core_, calls_core_->connections().heads(), &v1::HeadService::Stub::DeleteCheckpoint,
              request, DeadlineAfter(timeout, calls_core_->options().transfer_timeout), Repeat::kIfTransient);
}

// ---- MonitoringCalls ----

absl::StatusOr<v1::ListStreamsResponse> MonitoringCalls::ListStreams(uint32_t max_streams,
                                                                     absl::Duration timeout) const {
  v1::ListStreamsRequest request;
  request.set_max_streams(max_streams);
  return Call(*core_, core_->connections().server(), &v1::ServerService::Stub::ListStreams, request,
              DeadlineAfter(timeout, core_->options().call_timeout), Repeat::kIfTransient);
}

absl::StatusOr<Health> MonitoringCalls::CheckHealth(absl::string_view service, absl::Duration timeout) const {
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(std::string(service));
  auto result = Call(*core_, core_->connections().health(), &grpc::health::v1::Health::Stub::Check, request,
                     DeadlineAfter(timeout, core_->options().call_timeout), kNever);
  if (absl::IsNotFound(result.status())) return Health::kUnknownService;
  if (!result.ok()) return result.status();
  return result->status() == grpc::health::v1::HealthCheckResponse::SERVING ? Health::kServing
                                                                            : Health::kNotServing;
}

const std::string& MonitoringCalls::server_version() const { return core_->connections().peer().version; }

std::optional<bool> MonitoringCalls::KnowsMemory(int gpu) const {
  return core_->connections().KnowsMemory(gpu);
}

std::optional<uint64_t> MonitoringCalls::KnownHiddenSize(absl::string_view head) const {
  const std::optional<internal::HeadInfo> facts = core_->head_cache().Facts(head);
  return facts.has_value() ? std::make_optional(facts->hidden_size) : std::nullopt;
}

// ---- Client ----

namespace {

template <typename T>
absl::Span<char> AsBytes(std::vector<T>* values) {
  return absl::MakeSpan(reinterpret_cast<char*>(values->data()), values->size() * sizeof(T));
}

// Sets the client's run, unless the caller has set another one in the request.
template <typename Request>
void NameRun(const std::string& run, Request* request) {
  if (request->run().empty()) request->set_run(run);
}

// UNIMPLEMENTED if the server would ignore begin_optimizer or lazy_rows in a step. A server that describes
// histories knows both. begin_optimizer has no effect on a new head, so there any server will do.
absl::Status CheckKnowsStep(Client& client, const internal::HeadCache& cache,
                            const v1::ApplyStepRequest& request, absl::Duration timeout) {
  const bool lazy_rows = request.optimizer().lazy_rows();
  if (!request.begin_optimizer() && !lazy_rows) return absl::OkStatus();
  const std::optional<internal::HeadInfo> facts = cache.Facts(request.head());
  if (facts.has_value() && facts->histories) return absl::OkStatus();
  LOSSD_TRY(const v1::HeadDescription found, client.DescribeHead(request.head(), timeout));
  const bool is_new = found.updates() == 0 && found.state().step() == 0;
  if (found.has_history() || (is_new && !lazy_rows)) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("the server does not know ",
                                               lazy_rows ? "lazy_rows" : "begin_optimizer",
                                               ": it is of an earlier version"));
}

}  // namespace

PendingLoss& PendingLoss::operator=(PendingLoss&& other) noexcept {
  if (this == &other) return *this;
  PendingLoss old = std::move(*this);
  call_ = std::move(other.call_);
  return *this;
}

PendingLoss::~PendingLoss() {
  if (call_ == nullptr) return;
  call_->Cancel();
  (void)call_->Wait();
}

bool PendingLoss::Done() const { return call_ == nullptr || call_->Done(); }

absl::StatusOr<LossResult> PendingLoss::Wait() {
  if (call_ == nullptr) return absl::FailedPreconditionError("no loss computation was started");
  return call_->Wait();
}

bool PendingLoss::WaitFor(absl::Duration timeout) { return call_ == nullptr || call_->WaitFor(timeout); }

void PendingLoss::Cancel() {
  if (call_ != nullptr) call_->Cancel();
}

Client::Client(std::unique_ptr<Core> core) : CheckpointCalls(core.get()), core_(std::move(core)) {}

Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ClientOptions& options) {
  LOSSD_TRY(std::unique_ptr<internal::Connections> connections, internal::Connections::Open(options));
  const uint64_t expected = options.expected_incarnation, found = connections->incarnation();
  if (expected != 0 && expected != found) return internal::RestartedError(expected, found);
  return std::unique_ptr<Client>(new Client(std::make_unique<Core>(options, std::move(connections))));
}

const ClientOptions& Client::options() const { return core_->options(); }

absl::StatusOr<LossResult> Client::ComputeLoss(const Microbatch& microbatch, const LossOutputs& outputs,
                                               const ComputeOptions& options) {
  return ComputeLossAsync(microbatch, outputs, options).Wait();
}

TransportChoice Client::transport() const { return core_->connections().transport(); }

bool Client::OpenMemory(std::optional<int> gpu) { return core_->connections().OpenMemory(gpu); }

PendingLoss Client::ComputeLossAsync(const Microbatch& microbatch, const LossOutputs& outputs,
                                     const ComputeOptions& options, LossCallback callback) {
  auto call = std::make_shared<internal::LossCall>(
      core_.get(), internal::LossWork::Forward(microbatch, outputs, options),
      internal::CallOptions{options.streams, options.slice_bytes, options.timeout, options.max_attempts,
                            options.short_callback},
      std::move(callback));
  call->Start();
  return PendingLoss(std::move(call));
}

absl::StatusOr<LossResult> Client::Backward(const RetainedGradients& gradients, void* grad_hidden,
                                            const BackwardOptions& options) {
  return BackwardAsync(gradients, grad_hidden, options).Wait();
}

PendingLoss Client::BackwardAsync(const RetainedGradients& gradients, void* grad_hidden,
                                  const BackwardOptions& options, LossCallback callback) {
  auto call = std::make_shared<internal::LossCall>(
      core_.get(), internal::LossWork::Backward(gradients, grad_hidden, options),
      internal::CallOptions{.streams = options.streams,
                            .slice_bytes = 1,  // without effect, because the server cuts the slices
                            .timeout = options.timeout,
                            .max_attempts = options.max_attempts,
                            .short_callback = options.short_callback},
      std::move(callback));
  call->Start();
  return PendingLoss(std::move(call));
}

absl::StatusOr<bool> Client::ReleaseMicrobatch(absl::string_view head, uint64_t id, absl::Duration timeout) {
  v1::ReleaseMicrobatchRequest request;
  request.set_head(std::string(head));
  request.set_microbatch_id(id);
  request.set_run(options().run);
  LOSSD_TRY(auto result, Call(*core_, core_->connections().loss(), &v1::LossService::Stub::ReleaseMicrobatch,
                              request, DeadlineAfter(timeout, options().call_timeout), Repeat::kIfTransient));
  return result.released();
}

void Client::AcknowledgeRestart(absl::string_view head) { core_->head_cache().ForgetAccumulation(head); }

absl::StatusOr<v1::HeadDescription> Client::PlanHead(const v1::CreateHeadRequest& request,
                                                     absl::Duration timeout) {
  return Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::PlanHead, request,
              DeadlineAfter(timeout, options().call_timeout), Repeat::kIfTransient);
}

absl::StatusOr<v1::HeadDescription> Client::DescribeHead(absl::string_view head, absl::Duration timeout) {
  v1::DescribeHeadRequest request;
  request.set_head(std::string(head));
  auto result = Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::DescribeHead, request,
                     DeadlineAfter(timeout, options().call_timeout), Repeat::kIfTransient);
  if (result.ok()) core_->head_cache().Learn(*result);
  return result;
}

absl::StatusOr<std::vector<v1::HeadDescription>> Client::ListHeads(absl::Duration timeout) {
  LOSSD_TRY(auto result, Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::ListHeads,
                              v1::ListHeadsRequest(), DeadlineAfter(timeout, options().call_timeout),
                              Repeat::kIfTransient));
  return std::vector<v1::HeadDescription>(result.heads().begin(), result.heads().end());
}

absl::Status Client::DeleteHead(absl::string_view head, absl::Duration timeout) {
  v1::DeleteHeadRequest request;
  request.set_head(std::string(head));
  LOSSD_TRY(auto result, Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::DeleteHead,
                              request, DeadlineAfter(timeout, options().call_timeout), kNever));
  core_->head_cache().ForgetFacts(head);
  core_->head_cache().ForgetAccumulation(head);
  return absl::OkStatus();
}

namespace {

// Whether two answers are about the same head, not deleted and made again between them. True if the server
// does not tell.
bool SameHead(const v1::HeadState& before, const v1::HeadState& now) {
  if (before.creation() == 0 || now.creation() == 0) return true;
  return before.incarnation() == now.incarnation() && before.creation() == now.creation();
}

}  // namespace

absl::StatusOr<Tensor> Client::ReadTensor(absl::string_view head, v1::Param param, v1::Role role,
                                          absl::Duration timeout) {
  const absl::Time deadline = DeadlineAfter(timeout, options().transfer_timeout);
  LOSSD_TRY(v1::HeadDescription description, DescribeHead(head, deadline - clocks::SteadyNow()));
  LOSSD_TRY(TensorShape shape, internal::ParamShape(description.spec(), param));
  Tensor tensor{shape.rows, shape.cols, std::vector<float>(shape.rows * shape.cols)};
  v1::ReadTensorRequest request;
  request.set_head(std::string(head));
  request.set_param(param);
  request.set_role(role);
  request.mutable_rows()->set_end(shape.rows);
  request.set_dtype(v1::DTYPE_FP32);
  LOSSD_RETURN_IF_ERROR(
      ReadTensor(request, AsBytes(&tensor.values), deadline - clocks::SteadyNow(), &description).status());
  return tensor;
}

absl::StatusOr<TensorShape> Client::ReadTensor(const v1::ReadTensorRequest& request, absl::Span<char> out,
                                               absl::Duration timeout, const v1::HeadDescription* before) {
  const absl::Time deadline = DeadlineAfter(timeout, options().transfer_timeout);
  std::optional<uint64_t> tensor_rows;
  if (before != nullptr) {
    LOSSD_TRY(const TensorShape shape, internal::ParamShape(before->spec(), request.param()));
    tensor_rows = shape.rows;
  }
  auto read = Repeated(*core_, deadline, Repeat::kIfTransientOrAborted,
                       [&] { return internal::ReadTensor(*core_, request, out, deadline, tensor_rows); });
  if (read.ok() || before == nullptr) return read;
  return IfMadeAgain(read.status(), *before, request.param(), deadline);
}

absl::StatusOr<v1::WriteTensorResponse> Client::WriteTensor(absl::string_view head, v1::Param param,
                                                            absl::Span<const float> values,
                                                            absl::Duration timeout) {
  v1::OpenTensor open;
  open.set_head(std::string(head));
  open.set_param(param);
  open.set_role(v1::ROLE_VALUE);
  open.set_dtype(v1::DTYPE_FP32);
  const auto* bytes = reinterpret_cast<const char*>(values.data());
  return WriteTensor(open, absl::MakeConstSpan(bytes, values.size() * sizeof(float)), timeout);
}

absl::StatusOr<v1::WriteTensorResponse> Client::WriteTensor(const v1::OpenTensor& open,
                                                            absl::Span<const char> payload,
                                                            absl::Duration timeout,
                                                            absl::Span<const uint64_t> shape) {
  const absl::Time deadline = DeadlineAfter(timeout, options().transfer_timeout);
  LOSSD_TRY(v1::HeadDescription description, DescribeHead(open.head(), deadline - clocks::SteadyNow()));
  LOSSD_TRY(TensorShape whole, internal::ParamShape(description.spec(), open.param()));
  LOSSD_RETURN_IF_ERROR(internal::CheckShape(open.head(), open.param(),
                                             open.has_rows() ? &open.rows() : nullptr, whole, shape));
  auto written = internal::WriteTensor(*core_, open, whole, payload, deadline);
  if (!written.ok()) return IfMadeAgain(written.status(), description, open.param(), deadline);
  return written;
}

absl::StatusOr<v1::AddGradientResponse> Client::AddGradient(const v1::OpenGradient& open,
                                                            absl::Span<const char> payload,
                                                            absl::Duration timeout,
                                                            absl::Span<const uint64_t> shape) {
  const absl::Time deadline = DeadlineAfter(timeout, options().transfer_timeout);
  internal::HeadCache& cache = core_->head_cache();
  const TrainerStep at = cache.StepOf(open.head(), open.step());
  absl::StatusOr<v1::HeadDescription> description = DescribeHead(open.head(), deadline - clocks::SteadyNow());
  if (!description.ok()) return cache.Interpret(at, description.status());
  LOSSD_TRY(TensorShape whole, internal::ParamShape(description->spec(), open.param()));
  const v1::RowRange* const rows = open.has_contribution_rows() ? &open.contribution_rows() : nullptr;
  LOSSD_RETURN_IF_ERROR(internal::CheckShape(open.head(), open.param(), rows, whole, shape));
  const auto attempt = [&]() -> absl::StatusOr<v1::AddGradientResponse> {
    LOSSD_RETURN_IF_ERROR(cache.CheckCurrent(at));
    v1::OpenGradient meant = open;
    NameRun(options().run, &meant);
    if (!open.has_incarnation()) internal::SetMeant(cache.GradientsOf(at), &meant);
    return internal::AddGradient(*core_, meant, whole, payload, deadline);
  };
  auto result = Repeated(*core_, deadline, Repeat::kIfTransient, attempt);
  if (!result.ok()) {
    const absl::Status error = cache.Interpret(at, result.status());
    return IfMadeAgain(error, *description, open.param(), deadline);
  }
  LOSSD_RETURN_IF_ERROR(cache.NoteAccumulation(at, GradientsId::Of(result->state())));
  return result;
}

absl::Status Client::IfMadeAgain(const absl::Status& error, const v1::HeadDescription& before,
                                 v1::Param param, absl::Time deadline) {
  if (!absl::IsInternal(error) && !absl::IsInvalidArgument(error) && !absl::IsFailedPrecondition(error)) {
    return error;
  }
  const auto now = DescribeHead(before.spec().name(), deadline - clocks::SteadyNow());
  if (absl::IsNotFound(now.status())) return now.status();  // the head is gone
  if (!now.ok()) return error;
  const auto had = internal::ParamShape(before.spec(), param), has = internal::ParamShape(now->spec(), param);
  if (!had.ok() || !has.ok()) return error;
  const std::string again =
      absl::StrCat("head \"", before.spec().name(), "\" was made again during the call");
  if (has->rows != had->rows || has->cols != had->cols) {
    return absl::AbortedError(absl::StrCat(again, ": its tensor has ", has->rows, " x ", has->cols,
                                           " values, and had ", had->rows, " x ", had->cols));
  }
  // A head with the same shape may still be another head. Between the two, a third head of another shape may
  // have caused the error.
  if (SameHead(before.state(), now->state())) return error;
  return absl::AbortedError(absl::StrCat(again, ", which failed with: ", error.message()));
}

absl::StatusOr<v1::GradNormResponse> Client::GradNorm(absl::string_view head, std::optional<uint64_t> step,
                                                      absl::Duration timeout) {
  v1::GradNormRequest request;
  request.set_head(std::string(head));
  request.set_run(options().run);
  if (step.has_value()) request.set_step(*step);
  TrainerStep at = core_->head_cache().StepOf(head, step.value_or(0));
  auto result = Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::GradNorm, request,
                     DeadlineAfter(timeout, options().call_timeout), Repeat::kIfTransient);
  if (!result.ok())
    return step.has_value() ? core_->head_cache().Interpret(at, result.status()) : result.status();
  at.step = result->state().step();
  LOSSD_RETURN_IF_ERROR(core_->head_cache().Check(at, GradientsId::Of(result->state())));
  return result;
}

absl::StatusOr<v1::ApplyStepResponse> Client::ApplyStep(const v1::ApplyStepRequest& request,
                                                        absl::Duration timeout) {
  internal::HeadCache& cache = core_->head_cache();
  const TrainerStep at = cache.StepOf(request.head(), request.step());
  if (absl::Status known = CheckKnowsStep(*this, cache, request, timeout); !known.ok()) {
    return cache.Interpret(at, known);
  }
  v1::ApplyStepRequest meant = request;
  NameRun(options().run, &meant);
  if (!request.has_incarnation()) internal::SetMeant(cache.GradientsOf(at), &meant);
  auto result = Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::ApplyStep, meant,
                     DeadlineAfter(timeout, options().call_timeout), Repeat::kIfTransient);
  if (!result.ok()) return cache.Interpret(at, result.status());
  LOSSD_RETURN_IF_ERROR(cache.Check(at, {.incarnation = result->applied_incarnation()}));
  cache.CloseStep(request.head(), request.step());
  return result;
}

absl::StatusOr<v1::HeadState> Client::ZeroGradients(absl::string_view head, uint64_t step,
                                                    absl::Duration timeout) {
  v1::ZeroGradientsRequest request;
  request.set_head(std::string(head));
  request.set_run(options().run);
  request.set_step(step);
  LOSSD_TRY(auto result, Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::ZeroGradients,
                              request, DeadlineAfter(timeout, options().call_timeout), kNever));
  core_->head_cache().ForgetAccumulation(head);
  return result.state();
}

absl::StatusOr<v1::ServerDescription> Client::GetServer(absl::Duration timeout) {
  return Call(*core_, core_->connections().server(), &v1::ServerService::Stub::GetServer,
              v1::GetServerRequest(), DeadlineAfter(timeout, options().call_timeout), Repeat::kIfTransient);
}

MonitoringCalls Client::monitoring() const { return MonitoringCalls(core_.get()); }

// ---- Calls that make heads, or make them as new ----

namespace {

using google::protobuf::FieldDescriptor;

// The specification with the server's defaults for unspecified values.
v1::HeadSpec WithDefaults(v1::HeadSpec spec) {
  if (spec.norm() == v1::NORM_UNSPECIFIED) spec.set_norm(v1::NORM_NONE);
  if (spec.optimizer_state() == v1::OPTIMIZER_STATE_UNSPECIFIED) {
    spec.set_optimizer_state(v1::OPTIMIZER_STATE_ADAM);
  }
  if (spec.logits() == v1::LOGITS_UNSPECIFIED) spec.set_logits(v1::LOGITS_STORED);
  if (spec.gradients() == v1::GRADIENTS_UNSPECIFIED) spec.set_gradients(v1::GRADIENTS_EXACT);
  if (spec.residency() == v1::RESIDENCY_UNSPECIFIED) spec.set_residency(v1::RESIDENCY_DEVICE);
  return spec;
}

// The word for an enum value: "rmsnorm" for NORM_RMSNORM; "any" for the unspecified value.
std::string WordOf(const google::protobuf::EnumValueDescriptor* value) {
  if (value->number() == 0) return "any";
  const std::string& unspecified = value->type()->value(0)->name();  // "NORM_UNSPECIFIED"
  const size_t prefix = unspecified.rfind('_') + 1;
  return absl::AsciiStrToLower(value->name().substr(prefix));
}

// The value of a field as text: "7", or "[7, 8]" for a list.
std::string ValueOf(const v1::HeadSpec& spec, const FieldDescriptor* field) {
  const auto value = [&](int index) {
    std::string text;
    google::protobuf::TextFormat::PrintFieldValueToString(spec, field, index, &text);
    return text;
  };
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_ENUM) {
    return WordOf(spec.GetReflection()->GetEnum(spec, field));
  }
  if (!field->is_repeated()) return value(-1);
  std::vector<std::string> values;
  for (int i = 0; i < spec.GetReflection()->FieldSize(spec, field); ++i) values.push_back(value(i));
  return absl::StrCat("[", absl::StrJoin(values, ", "), "]");
}

// The value for an error message: long values are cut.
std::string Brief(const std::string& value) {
  constexpr size_t kMost = 200;
  return value.size() <= kMost ? value : absl::StrCat(value.substr(0, kMost), "...");
}

// Whether the specification gives a value for the field. A bool always has one, and so has the split, for
// which "any" is a value.
bool Says(const v1::HeadSpec& spec, const FieldDescriptor* field) {
  if (field->is_repeated()) return spec.GetReflection()->FieldSize(spec, field) > 0;
  return field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL || field->name() == "split" ||
         spec.GetReflection()->HasField(spec, field);
}

// ALREADY_EXISTS if the head `described` differs from what was asked for; the error names every field that
// differs. Fields that the request leaves to the server, such as a dtype, an epsilon or a size, may have any
// value.
absl::Status CheckSame(const v1::HeadSpec& described, const v1::HeadSpec& asked) {
  // An earlier server does not describe fields that it does not know; its head then has their defaults.
  const v1::HeadSpec has = WithDefaults(described), wanted = WithDefaults(asked);
  std::vector<std::string> different;
  std::optional<errors::FieldViolation> first;
  for (int i = 0; i < v1::HeadSpec::descriptor()->field_count(); ++i) {
    const FieldDescriptor* const field = v1::HeadSpec::descriptor()->field(i);
    const std::string is = ValueOf(has, field), wants = ValueOf(wanted, field);
    if (!Says(wanted, field) || is == wants) continue;
    different.push_back(absl::StrCat(field->name(), " ", Brief(is), " instead of ", Brief(wants)));
    if (!first.has_value())
      first = {absl::StrCat("spec.", field->name()), "differs from the head's", Brief(wants)};
  }
  if (different.empty()) return absl::OkStatus();
  return errors::WithViolation(
      absl::AlreadyExistsError(absl::StrCat("head \"", wanted.name(), "\" exists with ",
                                            absl::StrJoin(different, ", "),
                                            ". Give what it has, or another name, or delete it first")),
      *first);
}

v1::ResetHeadRequest ResetTo(const v1::CreateHeadRequest& wanted) {
  v1::ResetHeadRequest reset;
  reset.set_head(wanted.spec().name());
  reset.set_scope(v1::RESET_SCOPE_ALL);
  if (wanted.has_kaiming_uniform()) *reset.mutable_kaiming_uniform() = wanted.kaiming_uniform();
  if (wanted.has_zeros()) *reset.mutable_zeros() = wanted.zeros();
  if (wanted.has_tensor_file()) *reset.mutable_tensor_file() = wanted.tensor_file();
  return reset;
}

}  // namespace

absl::StatusOr<v1::HeadDescription> Client::CreateHead(const v1::CreateHeadRequest& request,
                                                       absl::Duration timeout, IfExists if_exists) {
  const absl::Time deadline = DeadlineAfter(timeout, options().transfer_timeout);
  auto result = Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::CreateHead, request,
                     deadline, kNever);
  if (result.ok()) {
    core_->head_cache().Learn(*result);
    core_->head_cache().ForgetAccumulation(request.spec().name());
  }
  if (!absl::IsAlreadyExists(result.status()) || if_exists == IfExists::kError) return result;
  LOSSD_TRY(v1::HeadDescription found, DescribeHead(request.spec().name(), deadline - clocks::SteadyNow()));
  LOSSD_RETURN_IF_ERROR(CheckSame(found.spec(), request.spec()));
  if (if_exists == IfExists::kKeep) return found;
  v1::ResetHeadRequest reset = ResetTo(request);
  reset.set_incarnation(found.state().incarnation());
  LOSSD_TRY(v1::ResetHeadResponse done, ResetHead(reset, deadline - clocks::SteadyNow()));
  return std::move(*done.mutable_head());
}

namespace {

// The result of a call whose request names a server process: an error with a Restart if another process
// answered, else `result`.
template <typename Response>
absl::StatusOr<Response> OrRestarted(absl::StatusOr<Response> result, absl::string_view head,
                                     uint64_t incarnation) {
  const std::optional<v1::ErrorDetail> detail = ErrorDetailOf(result.status());
  if (detail.has_value() && detail->field() == "incarnation" && detail->incarnation() != 0) {
    return internal::RestartedError(head, incarnation, detail->incarnation(), std::nullopt);
  }
  return result;
}

// Sends a change of a head that has an id, so that the server makes it only once. If the request names no
// server process, it gets the incarnation of the present one. Otherwise a repeat could reach another process,
// and change the head that this process has restored.
template <typename Request, typename Response>
absl::StatusOr<Response> Change(Client& client, internal::Core& core,
                                grpc::Status (v1::HeadService::Stub::*method)(grpc::ClientContext*,
                                                                              const Request&, Response*),
                                Request request, absl::Time deadline) {
  if (!request.has_incarnation()) {
    LOSSD_TRY(const v1::HeadDescription head,
              client.DescribeHead(request.head(), deadline - clocks::SteadyNow()));
    request.set_incarnation(head.state().incarnation());
  }
  auto result = Call(core, core.connections().heads(), method, request, deadline, Repeat::kIfTransient);
  if (result.ok()) core.head_cache().Learn(result->head());
  return OrRestarted(std::move(result), request.head(), request.incarnation());
}

}  // namespace

absl::StatusOr<v1::ResetHeadResponse> Client::ResetHead(const v1::ResetHeadRequest& request,
                                                        absl::Duration timeout) {
  const absl::Time deadline = DeadlineAfter(timeout, options().transfer_timeout);
  v1::ResetHeadRequest meant = request;
  if (meant.reset_id().empty()) meant.set_reset_id(internal::RandomDigits(32));
  auto result = Change(*this, *core_, &v1::HeadService::Stub::ResetHead, std::move(meant), deadline);
  if (result.ok()) core_->head_cache().ForgetAccumulation(request.head());
  return result;
}

absl::StatusOr<v1::SetSharesResponse> Client::SetShares(const v1::SetSharesRequest& request,
                                                        absl::Duration timeout) {
  const absl::Time deadline = DeadlineAfter(timeout, options().transfer_timeout);
  v1::SetSharesRequest meant = request;
  if (meant.change_id().empty()) meant.set_change_id(internal::RandomDigits(32));
  return Change(*this, *core_, &v1::HeadService::Stub::SetShares, std::move(meant), deadline);
}

}  // namespace lossd::client
