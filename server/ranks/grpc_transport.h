// SPDX-License-Identifier: Apache-2.0
// A worker's stream to the leader, over gRPC. Thread-safety as WorkerTransport.
#ifndef LOSSD_SERVER_RANKS_GRPC_TRANSPORT_H_
#define LOSSD_SERVER_RANKS_GRPC_TRANSPORT_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/sync_stream.h>

#include "lossd/ranks/v1/ranks.pb.h"
#include "server/ranks/worker_stream.h"

namespace lossd::ranks {

class GrpcTransport final : public WorkerTransport {
 public:
  using Stream = grpc::ServerReaderWriter<v1::ToWorker, v1::FromWorker>;
  GrpcTransport(grpc::ServerContext* context, Stream* stream) : context_(context), stream_(stream) {}
  bool Read(v1::FromWorker* message) override { return stream_->Read(message); }
  bool Write(const v1::ToWorker& message) override { return stream_->Write(message); }
  void Cancel() override { context_->TryCancel(); }

 private:
  grpc::ServerContext* const context_;
  Stream* const stream_;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_GRPC_TRANSPORT_H_
