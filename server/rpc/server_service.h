// lossd.v1.ServerService: what the server is, has and allows.
//
// Thread-safe. Must outlive the gRPC server it is registered with.
#ifndef LOSSD_SERVER_RPC_SERVER_SERVICE_H_
#define LOSSD_SERVER_RPC_SERVER_SERVICE_H_

#include <grpcpp/server_context.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "kernels/backend.h"
#include "lossd/v1/server.grpc.pb.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"
#include "server/rpc/access_control.h"

namespace lossd::rpc {

struct ServerServiceOptions {
  std::string version;
  absl::Time started;
  int64_t max_message_bytes = 0;
  int64_t max_streams = 0;
};

class ServerService final : public v1::ServerService::CallbackService {
 public:
  // All four outlive the service.
  ServerService(const ServerServiceOptions& options, const engine::Engine* engine,
                const kernels::Backend* backend, const AccessControl* access, metrics::Metrics* metrics)
      : options_(options), engine_(engine), backend_(backend), access_(access), metrics_(metrics) {}

  grpc::ServerUnaryReactor* GetServer(grpc::CallbackServerContext* context,
                                      const v1::GetServerRequest* request,
                                      v1::ServerDescription* response) override;

  void Drain() { draining_ = true; }

 private:
  const ServerServiceOptions options_;
  const engine::Engine* const engine_;
  const kernels::Backend* const backend_;
  const AccessControl* const access_;
  metrics::Metrics* const metrics_;
  std::atomic<bool> draining_{false};
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SERVER_SERVICE_H_
