// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/client.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/connections.h"
#include "client/cpp/core.h"
#include "client/cpp/loss_call.h"
#include "client/cpp/retry.h"
#include "client/cpp/step_errors.h"
#include "client/cpp/tensor_transfer.h"
#include "client/cpp/unary_call.h"
#include "kernels/clocks/clock.h"

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

template <typename T>
absl::Span<char> AsBytes(std::vector<T>* values) {
  return absl::MakeSpan(reinterpret_cast<char*>(values->data()), values->size() * sizeof(T));
}

// Unless the caller has named another one.
template <typename Request>
void NameRun(const std::string& run, Request* request) {
  if (request->run().empty()) request->set_run(run);
}

// UNIMPLEMENTED if the server would apply a step and pass begin_optimizer over. A new head has nothing to
// begin.
absl::Status CheckBegins(Client& client, const internal::HeadCache& cache, absl::string_view head,
                         absl::Duration timeout) {
  const std::optional<internal::HeadInfo> facts = cache.Facts(head);
  if (facts.has_value() && facts->histories) return absl::OkStatus();
  const absl::StatusOr<v1::HeadDescription> found = client.DescribeHead(head, timeout);
  if (!found.ok()) return found.status();
  if (found->has_history() || (found->updates() == 0 && found->state().step() == 0)) return absl::OkStatus();
  return absl::UnimplementedError("the server does not know begin_optimizer: it is of an earlier version");
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

double LossResult::gradient_error() const {
  return squared_gradient > 0 ? std::sqrt(sampling_variance / squared_gradient) : 0.0;
}

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(const ClientOptions& options) {
  absl::StatusOr<std::unique_ptr<internal::Connections>> connections = internal::Connections::Open(options);
  if (!connections.ok()) return connections.status();
  const uint64_t expected = options.expected_incarnation, found = (*connections)->incarnation();
  if (expected != 0 && expected != found) return internal::RestartedError(expected, found);
  return std::unique_ptr<Client>(new Client(std::make_unique<Core>(options, *std::move(connections))));
}

const ClientOptions& Client::options() const { return core_->options(); }

absl::StatusOr<LossResult> Client::ComputeLoss(const Microbatch& microbatch, const LossOutputs& outputs,
                                               const ComputeOptions& options) {
  return ComputeLossAsync(microbatch, outputs, options).Wait();
}

TransportChoice Client::transport() const { return core_->connections().transport(); }

PendingLoss Client::ComputeLossAsync(const Microbatch& microbatch, const LossOutputs& outputs,
                                     const ComputeOptions& options, LossCallback callback) {
  auto call = std::make_shared<internal::LossCall>(
      core_.get(), internal::LossWork::Forward(microbatch, outputs, options),
      internal::CallOptions{options.streams, options.slice_bytes, options.timeout, options.max_attempts},
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
                            .slice_bytes = 1,  // the server cuts, and other limits change nothing
                            .timeout = options.timeout,
                            .max_attempts = options.max_attempts},
      std::move(callback));
  call->Start();
  return PendingLoss(std::move(call));
}

absl::StatusOr<bool> Client::ReleaseMicrobatch(absl::string_view head, uint64_t id, absl::Duration timeout) {
  v1::ReleaseMicrobatchRequest request;
  request.set_head(std::string(head));
  request.set_microbatch_id(id);
  request.set_run(options().run);
  auto result = Call(*core_, core_->connections().loss(), &v1::LossService::Stub::ReleaseMicrobatch, request,
                     DeadlineAfter(timeout, options().call_timeout), Repeat::kIfTransient);
  if (!result.ok()) return result.status();
  return result->released();
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
  auto result =
      Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::ListHeads, v1::ListHeadsRequest(),
           DeadlineAfter(timeout, options().call_timeout), Repeat::kIfTransient);
  if (!result.ok()) return result.status();
  return std::vector<v1::HeadDescription>(result->heads().begin(), result->heads().end());
}

absl::Status Client::DeleteHead(absl::string_view head, absl::Duration timeout) {
  v1::DeleteHeadRequest request;
  request.set_head(std::string(head));
  auto result = Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::DeleteHead, request,
                     DeadlineAfter(timeout, options().call_timeout), kNever);
  if (!result.ok()) return result.status();
  core_->head_cache().ForgetFacts(head);
  core_->head_cache().ForgetAccumulation(head);
  return absl::OkStatus();
}

absl::StatusOr<Tensor> Client::ReadTensor(absl::string_view head, v1::Param param, v1::Role role,
                                          absl::Duration timeout) {
  const absl::Time deadline = DeadlineAfter(timeout, options().transfer_timeout);
  absl::StatusOr<v1::HeadDescription> description = DescribeHead(head, deadline - clocks::SteadyNow());
  if (!description.ok()) return description.status();
  absl::StatusOr<TensorShape> shape = internal::ParamShape(description->spec(), param);
  if (!shape.ok()) return shape.status();
  Tensor tensor{shape->rows, shape->cols, std::vector<float>(shape->rows * shape->cols)};
  v1::ReadTensorRequest request;
  request.set_head(std::string(head));
  request.set_param(param);
  request.set_role(role);
  request.mutable_rows()->set_end(shape->rows);
  request.set_dtype(v1::DTYPE_FP32);
  const absl::StatusOr<TensorShape> read = Repeated(*core_, deadline, Repeat::kIfTransientOrAborted, [&] {
    return internal::ReadTensor(*core_, request, AsBytes(&tensor.values), deadline, shape->rows);
  });
  if (!read.ok()) return IfMadeAgain(read.status(), head, param, *shape, deadline);
  return tensor;
}

absl::StatusOr<TensorShape> Client::ReadTensor(const v1::ReadTensorRequest& request, absl::Span<char> out,
                                               absl::Duration timeout) {
  const absl::Time deadline = DeadlineAfter(timeout, options().transfer_timeout);
  return Repeated(*core_, deadline, Repeat::kIfTransientOrAborted,
                  [&] { return internal::ReadTensor(*core_, request, out, deadline); });
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
                                                            absl::Duration timeout) {
  const absl::Time deadline = DeadlineAfter(timeout, options().transfer_timeout);
  absl::StatusOr<v1::HeadDescription> description = DescribeHead(open.head(), deadline - clocks::SteadyNow());
  if (!description.ok()) return description.status();
  absl::StatusOr<TensorShape> shape = internal::ParamShape(description->spec(), open.param());
  if (!shape.ok()) return shape.status();
  auto written = internal::WriteTensor(*core_, open, *shape, payload, deadline);
  if (!written.ok()) return IfMadeAgain(written.status(), open.head(), open.param(), *shape, deadline);
  return written;
}

absl::StatusOr<v1::AddGradientResponse> Client::AddGradient(const v1::OpenGradient& open,
                                                            absl::Span<const char> payload,
                                                            absl::Duration timeout) {
  const absl::Time deadline = DeadlineAfter(timeout, options().transfer_timeout);
  internal::HeadCache& cache = core_->head_cache();
  const TrainerStep at = cache.StepOf(open.head(), open.step());
  absl::StatusOr<v1::HeadDescription> description = DescribeHead(open.head(), deadline - clocks::SteadyNow());
  if (!description.ok()) return cache.Interpret(at, description.status());
  absl::StatusOr<TensorShape> shape = internal::ParamShape(description->spec(), open.param());
  if (!shape.ok()) return shape.status();
  const auto attempt = [&]() -> absl::StatusOr<v1::AddGradientResponse> {
    if (absl::Status status = cache.CheckCurrent(at); !status.ok()) return status;
    v1::OpenGradient meant = open;
    NameRun(options().run, &meant);
    if (!open.has_incarnation()) internal::SetMeant(cache.GradientsOf(at), &meant);
    return internal::AddGradient(*core_, meant, *shape, payload, deadline);
  };
  auto result = Repeated(*core_, deadline, Repeat::kIfTransient, attempt);
  if (!result.ok()) {
    const absl::Status error = cache.Interpret(at, result.status());
    return IfMadeAgain(error, open.head(), open.param(), *shape, deadline);
  }
  absl::Status noted = cache.NoteAccumulation(at, GradientsId::Of(result->state()));
  if (!noted.ok()) return noted;
  return result;
}

absl::Status Client::IfMadeAgain(const absl::Status& error, absl::string_view head, v1::Param param,
                                 const TensorShape& shape, absl::Time deadline) {
  if (!absl::IsInternal(error) && !absl::IsInvalidArgument(error) && !absl::IsFailedPrecondition(error)) {
    return error;
  }
  const auto description = DescribeHead(head, deadline - clocks::SteadyNow());
  if (absl::IsNotFound(description.status())) return description.status();  // it is not there at all
  if (!description.ok()) return error;
  const auto now = internal::ParamShape(description->spec(), param);
  if (!now.ok() || (now->rows == shape.rows && now->cols == shape.cols)) return error;
  return absl::AbortedError(
      absl::StrCat("head \"", head, "\" was made again during the call: its tensor has ", now->rows, " x ",
                   now->cols, " values, and had ", shape.rows, " x ", shape.cols));
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
  absl::Status checked = core_->head_cache().Check(at, GradientsId::Of(result->state()));
  if (!checked.ok()) return checked;
  return result;
}

absl::StatusOr<v1::ApplyStepResponse> Client::ApplyStep(const v1::ApplyStepRequest& request,
                                                        absl::Duration timeout) {
  internal::HeadCache& cache = core_->head_cache();
  const TrainerStep at = cache.StepOf(request.head(), request.step());
  if (request.begin_optimizer()) {
    if (absl::Status begins = CheckBegins(*this, cache, request.head(), timeout); !begins.ok()) {
      return cache.Interpret(at, begins);
    }
  }
  v1::ApplyStepRequest meant = request;
  NameRun(options().run, &meant);
  if (!request.has_incarnation()) internal::SetMeant(cache.GradientsOf(at), &meant);
  auto result = Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::ApplyStep, meant,
                     DeadlineAfter(timeout, options().call_timeout), Repeat::kIfTransient);
  if (!result.ok()) return cache.Interpret(at, result.status());
  absl::Status checked = cache.Check(at, {.incarnation = result->applied_incarnation()});
  if (!checked.ok()) return checked;
  cache.CloseStep(request.head(), request.step());
  return result;
}

absl::StatusOr<v1::HeadState> Client::ZeroGradients(absl::string_view head, uint64_t step,
                                                    absl::Duration timeout) {
  v1::ZeroGradientsRequest request;
  request.set_head(std::string(head));
  request.set_run(options().run);
  request.set_step(step);
  auto result = Call(*core_, core_->connections().heads(), &v1::HeadService::Stub::ZeroGradients, request,
                     DeadlineAfter(timeout, options().call_timeout), kNever);
  if (!result.ok()) return result.status();
  core_->head_cache().ForgetAccumulation(head);
  return result->state();
}

absl::StatusOr<v1::ServerDescription> Client::GetServer(absl::Duration timeout) {
  return Call(*core_, core_->connections().server(), &v1::ServerService::Stub::GetServer,
              v1::GetServerRequest(), DeadlineAfter(timeout, options().call_timeout), Repeat::kIfTransient);
}

MonitoringCalls Client::monitoring() const { return MonitoringCalls(core_.get()); }

size_t ElementSize(v1::DType dtype) {
  if (dtype == v1::DTYPE_FP32) return 4;
  return dtype == v1::DTYPE_FP16 || dtype == v1::DTYPE_BF16 ? 2 : 0;
}

}  // namespace lossd::client
