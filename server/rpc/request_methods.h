// SPDX-License-Identifier: Apache-2.0
// Registers methods of a generated service whose calls are RequestCalls (request_call.h).
//
// Thread-compatible: for the constructors of services.
#ifndef LOSSD_SERVER_RPC_REQUEST_METHODS_H_
#define LOSSD_SERVER_RPC_REQUEST_METHODS_H_

#include <google/protobuf/descriptor.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <functional>
#include <string>

#include "absl/strings/string_view.h"

namespace lossd::rpc {

// `Service` is generated, or derived from what is.
template <typename Service>
class WithRequestMethods : public Service {
 protected:
  using Reactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

  // Has calls of the method begin with `start`. `service` describes the service in the protocol.
  void Serve(const google::protobuf::ServiceDescriptor* service, absl::string_view method,
             std::function<Reactor*(grpc::CallbackServerContext*)> start) {
    const int index = service->FindMethodByName(std::string(method))->index();
    // Streamed: the server sees the call before its request.
    this->MarkMethodStreamed(index, nullptr);
    this->MarkMethodRawCallback(
        index, new grpc::internal::CallbackBidiHandler<grpc::ByteBuffer, grpc::ByteBuffer>(std::move(start)));
  }
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REQUEST_METHODS_H_
