// SPDX-License-Identifier: Apache-2.0
#include "tests/server/service/standard_services.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/client_unary_call.h>

#include "absl/strings/str_cat.h"
#include "google/protobuf/unknown_field_set.h"
#include "proto/wire/status_details.h"
#include "tests/server/service/byte_calls.h"
#include "tests/server/service/service_client.h"

namespace lossd::app::testing {

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

}  // namespace lossd::app::testing
