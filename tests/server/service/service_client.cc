// SPDX-License-Identifier: Apache-2.0
#include "tests/server/service/service_client.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/client_unary_call.h>
#include <grpcpp/support/sync_stream.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "google/protobuf/unknown_field_set.h"
#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "lossd/v1/server.grpc.pb.h"
#include "proto/wire/status_details.h"

namespace lossd::app::testing {
namespace {

// ---- Calls that send and receive bytes instead of messages ----

using ByteStream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

grpc::ByteBuffer ToBuffer(absl::string_view bytes) {
  const grpc::Slice slice(bytes.data(), bytes.size());
  return grpc::ByteBuffer(&slice, 1);
}

std::string ToText(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (!buffer.Dump(&slices).ok()) return text;
  for (const grpc::Slice& slice : slices)
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return text;
}

// The call fails at once if there is no connection. Zero: no deadline.
void SetDeadline(grpc::ClientContext* context, absl::Duration deadline) {
  context->set_wait_for_ready(false);
  if (deadline > absl::ZeroDuration())
    context->set_deadline(std::chrono::system_clock::now() + absl::ToChronoMicroseconds(deadline));
}

// Starts a call of a bidirectional method, such as "/lossd.v1.LossService/ComputeLoss".
std::unique_ptr<ByteStream> OpenByteStream(const std::shared_ptr<grpc::Channel>& channel, const char* method,
                                           grpc::ClientContext* context) {
  return std::unique_ptr<ByteStream>(
      grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
          channel.get(), {method, grpc::internal::RpcMethod::BIDI_STREAMING, channel}, context));
}

// ---- gRPC's own services: grpc.health.v1 and grpc.reflection.v1alpha ----
// They are not generated here; their messages are small enough to write and read by hand.

// HealthCheckRequest { string service = 1 }, HealthCheckResponse { enum status = 1 }.
absl::StatusOr<std::string> CheckHealth(const std::shared_ptr<grpc::Channel>& channel,
                                        const std::string& service) {
  const std::string request =
      absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())), service);
  grpc::ClientContext context;
  SetDeadline(&context, kTestDeadline);
  const grpc::internal::RpcMethod method("/grpc.health.v1.Health/Check",
                                         grpc::internal::RpcMethod::NORMAL_RPC, channel);
  grpc::ByteBuffer response;
  const grpc::Status status =
      grpc::internal::BlockingUnaryCall(channel.get(), method, &context, ToBuffer(request), &response);
  if (!status.ok()) return wire::FromGrpcStatus(status);
  const std::string bytes = ToText(response);
  if (bytes == std::string("\x08\x01", 2)) return "SERVING";
  if (bytes == std::string("\x08\x02", 2)) return "NOT_SERVING";
  return absl::StrCat("unexpected answer of ", bytes.size(), " bytes");
}

// ServerReflectionRequest { string list_services = 7 }; ServerReflectionResponse {
// ListServiceResponse list_services_response = 6 { repeated ServiceResponse service = 1 { string name = 1 } }
// }.
absl::StatusOr<std::vector<std::string>> ListServices(const std::shared_ptr<grpc::Channel>& channel) {
  grpc::ClientContext context;
  SetDeadline(&context, kTestDeadline);
  const std::unique_ptr<ByteStream> stream =
      OpenByteStream(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &context);
  stream->Write(ToBuffer(absl::string_view("\x3a\x01*", 3)));
  grpc::ByteBuffer buffer;
  std::vector<std::string> names;
  if (stream->Read(&buffer)) {
    google::protobuf::UnknownFieldSet response;
    response.ParseFromString(ToText(buffer));
    for (int i = 0; i < response.field_count(); ++i) {
      if (response.field(i).number() != 6) continue;
      google::protobuf::UnknownFieldSet list;
      list.ParseFromString(response.field(i).length_delimited());
      for (int j = 0; j < list.field_count(); ++j) {
        google::protobuf::UnknownFieldSet service;
        service.ParseFromString(list.field(j).length_delimited());
        names.push_back(service.field(0).length_delimited());
      }
    }
  }
  stream->WritesDone();
  while (stream->Read(&buffer)) {
  }
  const grpc::Status status = stream->Finish();
  if (!status.ok()) return wire::FromGrpcStatus(status);
  return names;
}

// ---- The client ----

class WriteStreamImpl final : public WriteStream {
 public:
  explicit WriteStreamImpl(v1::HeadService::Stub* heads) {
    SetDeadline(&context_, kTestDeadline);
    writer_ = heads->WriteTensor(&context_, &response_);
  }
  ~WriteStreamImpl() override {
    if (finished_) return;
    context_.TryCancel();
    writer_->Finish();
  }

  bool Send(const v1::OpenTensor* open, absl::string_view payload) override {
    v1::WriteTensorRequest request;
    if (open != nullptr) *request.mutable_open() = *open;
    request.set_payload(std::string(payload));
    return writer_->Write(request);
  }
  absl::StatusOr<v1::WriteTensorResponse> Finish() override {
    finished_ = true;
    writer_->WritesDone();
    const grpc::Status status = writer_->Finish();
    if (!status.ok()) return wire::FromGrpcStatus(status);
    return response_;
  }

 private:
  grpc::ClientContext context_;
  v1::WriteTensorResponse response_;
  std::unique_ptr<grpc::ClientWriter<v1::WriteTensorRequest>> writer_;
  bool finished_ = false;
};

class LossStreamImpl final : public LossStream {
 public:
  LossStreamImpl(const std::shared_ptr<grpc::Channel>& channel, absl::Duration deadline) {
    SetDeadline(&context_, deadline);
    stream_ = OpenByteStream(channel, "/lossd.v1.LossService/ComputeLoss", &context_);
  }
  ~LossStreamImpl() override {
    if (finished_) return;
    context_.TryCancel();
    Finish();
  }

  bool Send(const v1::ComputeLossRequest& request) override { return SendRaw(request.SerializeAsString()); }
  bool SendRaw(absl::string_view bytes) override { return stream_->Write(ToBuffer(bytes)); }
  bool SendOpen(const v1::OpenMicrobatch& open) override {
    v1::ComputeLossRequest request;
    *request.mutable_open() = open;
    return Send(request);
  }
  bool SendSlice(int64_t begin, int64_t end, absl::string_view payload) override {
    v1::ComputeLossRequest request;
    request.mutable_slice()->mutable_rows()->set_begin(static_cast<uint64_t>(begin));
    request.mutable_slice()->mutable_rows()->set_end(static_cast<uint64_t>(end));
    request.set_payload(std::string(payload));
    return Send(request);
  }
  void HalfClose() override {
    if (!half_closed_) stream_->WritesDone();
    half_closed_ = true;
  }

  bool ReadOne() override {
    grpc::ByteBuffer buffer;
    if (!stream_->Read(&buffer)) return false;
    v1::ComputeLossResponse response;
    if (!response.ParseFromString(ToText(buffer))) {
      answers_.order.push_back("garbage");
    } else if (response.has_accepted()) {
      answers_.order.push_back("accepted");
      answers_.accepted = response.accepted();
    } else if (response.has_slice()) {
      answers_.order.push_back("slice");
      answers_.slices.push_back({response.slice(), response.payload()});
    } else {
      answers_.order.push_back("summary");
      answers_.summary = response.summary();
    }
    return true;
  }

  LossAnswers Finish() override {
    HalfClose();
    while (ReadOne()) {
    }
    answers_.status = wire::FromGrpcStatus(stream_->Finish());
    finished_ = true;
    return answers_;
  }

  void Cancel() override { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<ByteStream> stream_;
  LossAnswers answers_;
  bool half_closed_ = false;
  bool finished_ = false;
};

class TestClientImpl final : public TestClient {
 public:
  explicit TestClientImpl(std::shared_ptr<grpc::Channel> channel)
      : channel_(std::move(channel)),
        heads_(v1::HeadService::NewStub(channel_)),
        server_(v1::ServerService::NewStub(channel_)) {}

  std::unique_ptr<LossStream> StartLoss(absl::Duration deadline) override {
    return std::make_unique<LossStreamImpl>(channel_, deadline);
  }

  std::unique_ptr<WriteStream> OpenWrite() override {
    return std::make_unique<WriteStreamImpl>(heads_.get());
  }

  absl::StatusOr<v1::HeadDescription> CreateHead(const v1::CreateHeadRequest& request) override {
    return Call<v1::HeadDescription>(&v1::HeadService::Stub::CreateHead, request);
  }
  absl::StatusOr<v1::HeadDescription> DescribeHead(const std::string& head) override {
    v1::DescribeHeadRequest request;
    request.set_head(head);
    return Call<v1::HeadDescription>(&v1::HeadService::Stub::DescribeHead, request);
  }
  absl::StatusOr<v1::ListHeadsResponse> ListHeads() override {
    return Call<v1::ListHeadsResponse>(&v1::HeadService::Stub::ListHeads, v1::ListHeadsRequest());
  }
  absl::Status DeleteHead(const std::string& head) override {
    v1::DeleteHeadRequest request;
    request.set_head(head);
    return Call<v1::DeleteHeadResponse>(&v1::HeadService::Stub::DeleteHead, request).status();
  }
  absl::Status SetShares(const v1::SetSharesRequest& request) override {
    return Call<v1::SetSharesResponse>(&v1::HeadService::Stub::SetShares, request).status();
  }
  absl::StatusOr<double> GradNorm(const std::string& head) override {
    v1::GradNormRequest request;
    request.set_head(head);
    auto response = Call<v1::GradNormResponse>(&v1::HeadService::Stub::GradNorm, request);
    if (!response.ok()) return response.status();
    return response->grad_norm();
  }
  absl::StatusOr<v1::ApplyStepResponse> ApplyStep(const v1::ApplyStepRequest& request) override {
    return Call<v1::ApplyStepResponse>(&v1::HeadService::Stub::ApplyStep, request);
  }
  absl::Status ZeroGradients(const std::string& head, uint64_t step) override {
    v1::ZeroGradientsRequest request;
    request.set_head(head);
    request.set_step(step);
    return Call<v1::ZeroGradientsResponse>(&v1::HeadService::Stub::ZeroGradients, request).status();
  }
  absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(const std::string& head,
                                                            const std::string& name) override {
    v1::SaveCheckpointRequest request;
    request.set_head(head);
    request.set_name(name);
    return SaveCheckpoint(request, [](const v1::SaveProgress&) { return true; });
  }
  absl::StatusOr<v1::SaveCheckpointResponse> SaveCheckpoint(
      const v1::SaveCheckpointRequest& request,
      const std::function<bool(const v1::SaveProgress&)>& on_progress) override {
    grpc::ClientContext context;
    SetDeadline(&context, kTestDeadline);
    const auto reader = heads_->SaveCheckpoint(&context, request);
    v1::SaveCheckpointUpdate update;
    v1::SaveCheckpointResponse saved;
    while (reader->Read(&update)) {
      if (update.has_saved()) saved = update.saved();
      if (update.has_progress() && !on_progress(update.progress())) context.TryCancel();
    }
    const grpc::Status status = reader->Finish();
    if (!status.ok()) return wire::FromGrpcStatus(status);
    return saved;
  }
  absl::StatusOr<v1::ListCheckpointsResponse> ListCheckpoints(const std::string& head) override {
    v1::ListCheckpointsRequest request;
    request.set_head(head);
    return Call<v1::ListCheckpointsResponse>(&v1::HeadService::Stub::ListCheckpoints, request);
  }
  absl::StatusOr<v1::DeleteCheckpointResponse> DeleteCheckpoint(const std::string& checkpoint,
                                                                const std::string& deletion_id) override {
    v1::DeleteCheckpointRequest request;
    request.set_checkpoint(checkpoint);
    request.set_deletion_id(deletion_id);
    return Call<v1::DeleteCheckpointResponse>(&v1::HeadService::Stub::DeleteCheckpoint, request);
  }
  absl::StatusOr<v1::HeadDescription> LoadCheckpoint(const std::string& checkpoint,
                                                     const std::string& head) override {
    v1::LoadCheckpointRequest request;
    request.set_checkpoint(checkpoint);
    request.set_head(head);
    return Call<v1::HeadDescription>(&v1::HeadService::Stub::LoadCheckpoint, request);
  }
  absl::StatusOr<v1::ServerDescription> GetServer() override {
    grpc::ClientContext context;
    SetDeadline(&context, kTestDeadline);
    v1::ServerDescription response;
    const grpc::Status status = server_->GetServer(&context, v1::GetServerRequest(), &response);
    if (!status.ok()) return wire::FromGrpcStatus(status);
    return response;
  }

  absl::StatusOr<v1::ListStreamsResponse> ListStreams(uint32_t max_streams) override {
    grpc::ClientContext context;
    SetDeadline(&context, kTestDeadline);
    v1::ListStreamsRequest request;
    request.set_max_streams(max_streams);
    v1::ListStreamsResponse response;
    const grpc::Status status = server_->ListStreams(&context, request, &response);
    if (!status.ok()) return wire::FromGrpcStatus(status);
    return response;
  }

  absl::StatusOr<std::string> Health(const std::string& service) override {
    return CheckHealth(channel_, service);
  }
  absl::StatusOr<std::vector<std::string>> ReflectedServices() override { return ListServices(channel_); }
  absl::StatusOr<std::string> ReadTensor(const v1::ReadTensorRequest& request) override;
  absl::Status SendTensor(const v1::OpenTensor& open, absl::string_view payload,
                          size_t message_bytes) override;
  absl::StatusOr<v1::AddGradientResponse> SendGradient(const v1::OpenGradient& open,
                                                       absl::string_view payload, size_t message_bytes,
                                                       absl::Duration deadline) override;

 private:
  template <typename Response, typename Request>
  absl::StatusOr<Response> Call(grpc::Status (v1::HeadService::Stub::*method)(grpc::ClientContext*,
                                                                              const Request&, Response*),
                                const Request& request) {
    grpc::ClientContext context;
    SetDeadline(&context, kTestDeadline);
    Response response;
    const grpc::Status status = (heads_.get()->*method)(&context, request, &response);
    if (!status.ok()) return wire::FromGrpcStatus(status);
    return response;
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::HeadService::Stub> heads_;
  const std::unique_ptr<v1::ServerService::Stub> server_;
};

absl::StatusOr<std::string> TestClientImpl::ReadTensor(const v1::ReadTensorRequest& request) {
  grpc::ClientContext context;
  SetDeadline(&context, kTestDeadline);
  const std::unique_ptr<grpc::ClientReader<v1::TensorSlice>> reader = heads_->ReadTensor(&context, request);
  v1::TensorSlice slice;
  std::string bytes;
  uint64_t next_row = request.has_rows() ? request.rows().begin() : 0;
  bool in_order = true;
  bool as_asked = true;
  const v1::DType dtype = request.dtype() == v1::DTYPE_UNSPECIFIED ? v1::DTYPE_FP32 : request.dtype();
  while (reader->Read(&slice)) {
    in_order = in_order && slice.rows().begin() == next_row;
    as_asked = as_asked && slice.dtype() == dtype;
    next_row = slice.rows().end();
    bytes += slice.payload();
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) return wire::FromGrpcStatus(status);
  if (!in_order) return absl::DataLossError("slices out of order");
  if (!as_asked) return absl::DataLossError("slices of another dtype than was asked for");
  return bytes;
}

// Sends `payload` in messages, the first of which has `open`.
template <typename Request, typename Open>
grpc::Status SendRows(grpc::ClientWriter<Request>* writer, const Open& open, absl::string_view payload,
                      size_t message_bytes) {
  Request request;
  *request.mutable_open() = open;
  do {
    request.set_payload(std::string(payload.substr(0, message_bytes)));
    payload.remove_prefix(std::min(message_bytes, payload.size()));
    if (!writer->Write(request)) break;
    request.Clear();
  } while (!payload.empty());
  writer->WritesDone();
  return writer->Finish();
}

absl::Status TestClientImpl::SendTensor(const v1::OpenTensor& open, absl::string_view payload,
                                        size_t message_bytes) {
  grpc::ClientContext context;
  SetDeadline(&context, kTestDeadline);
  v1::WriteTensorResponse response;
  const auto writer = heads_->WriteTensor(&context, &response);
  return wire::FromGrpcStatus(SendRows(writer.get(), open, payload, message_bytes));
}

absl::StatusOr<v1::AddGradientResponse> TestClientImpl::SendGradient(const v1::OpenGradient& open,
                                                                     absl::string_view payload,
                                                                     size_t message_bytes,
                                                                     absl::Duration deadline) {
  grpc::ClientContext context;
  SetDeadline(&context, deadline);
  v1::AddGradientResponse response;
  const auto writer = heads_->AddGradient(&context, &response);
  const grpc::Status status = SendRows(writer.get(), open, payload, message_bytes);
  if (!status.ok()) return wire::FromGrpcStatus(status);
  return response;
}

}  // namespace

std::unique_ptr<TestClient> TestClient::Connect(const std::string& target) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  return Over(grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments));
}

std::unique_ptr<TestClient> TestClient::Over(std::shared_ptr<grpc::Channel> channel) {
  return std::make_unique<TestClientImpl>(std::move(channel));
}

absl::StatusOr<std::vector<float>> TestClient::Read(const std::string& head, v1::Param param, v1::Role role) {
  v1::ReadTensorRequest request;
  request.set_head(head);
  request.set_param(param);
  request.set_role(role);
  const absl::StatusOr<std::string> bytes = ReadTensor(request);
  if (!bytes.ok()) return bytes.status();
  std::vector<float> values(bytes->size() / sizeof(float));
  std::memcpy(values.data(), bytes->data(), values.size() * sizeof(float));
  return values;
}

absl::Status TestClient::Write(const std::string& head, v1::Param param, absl::Span<const float> values) {
  v1::OpenTensor open;
  open.set_head(head);
  open.set_param(param);
  return WriteTensor(
      open, absl::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)),
      /*message_bytes=*/SIZE_MAX);
}

}  // namespace lossd::app::testing
