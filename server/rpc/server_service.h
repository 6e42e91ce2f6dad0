// SPDX-License-Identifier: Apache-2.0
// lossd.v1.ServerService: what the server is, has and allows.
//
// Thread-safe. Must outlive the gRPC server it is registered with.
#ifndef LOSSD_SERVER_RPC_SERVER_SERVICE_H_
#define LOSSD_SERVER_RPC_SERVER_SERVICE_H_

#include <grpcpp/server_context.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "lossd/v1/server.grpc.pb.h"
#include "server/engine/engine.h"
#include "server/metrics/rank_metrics.h"
#include "server/rpc/access_control.h"
#include "server/rpc/loss_service.h"
#include "server/rpc/request_call.h"
#include "server/rpc/request_methods.h"

namespace lossd::rpc {

struct ServerServiceOptions {
  std::string version;
  absl::Time started;
  int64_t max_message_bytes = 0;
  int64_t max_streams = 0;
  metrics::ReadRanks ranks;
  std::string collectives;    // as ServerDescription.collectives
  std::string region_socket;  // empty: none
  std::vector<std::string> region_devices;  // whose memory regions may be of; empty: none
  // ServerDescription.http: "" until HTTP is there.
  std::function<std::string()> http;
};

class ServerService final : public WithRequestMethods<v1::ServerService::Service> {
 public:
  // All that is pointed to outlives the service.
  ServerService(const ServerServiceOptions& options, const engine::Engine* engine,
                const kernels::Backend* backend, LossService* losses, const AccessControl* access,
                const RequestEnvironment* requests);

  void Drain() { draining_ = true; }

 private:
  absl::StatusOr<v1::ServerDescription> Describe(UnaryCall* call) const;
  absl::StatusOr<v1::ListStreamsResponse> DescribeStreams(UnaryCall* call,
                                                          const grpc::ByteBuffer& bytes) const;

  const ServerServiceOptions options_;
  const engine::Engine* const engine_;
  const kernels::Backend* const backend_;
  LossService* const losses_;
  const AccessControl* const access_;
  std::atomic<bool> draining_{false};
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVER_SERVICE_H_
