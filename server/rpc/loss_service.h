// SPDX-License-Identifier: Apache-2.0
// lossd.v1.LossService over an engine. The calls themselves are in compute_loss_call.h.
//
// Thread-safe. Must outlive the gRPC server it is registered with.
#ifndef LOSSD_SERVER_RPC_LOSS_SERVICE_H_
#define LOSSD_SERVER_RPC_LOSS_SERVICE_H_

#include <grpcpp/support/server_callback.h>

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "lossd/v1/server.pb.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"
#include "server/regions/regions.h"
#include "server/rpc/access_control.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/compute_loss_call.h"
#include "server/rpc/peer_table.h"
#include "server/rpc/periodic.h"
#include "server/rpc/request_call.h"
#include "server/rpc/request_methods.h"
#include "server/rpc/worker_pool.h"

namespace lossd::rpc {

struct LossServiceOptions {
  int64_t max_streams = 256;                      // open calls; the engine bounds opened streams alike
  int64_t max_staging_bytes = int64_t{32} << 20;  // per call: of slices computed or waiting to be sent
  double peer_share = 0.5;                        // of open calls
  CallTimeouts timeouts;
  int sender_threads = 2;                               // write answers to the transport
  absl::Duration retained_timeout = absl::Minutes(10);  // of retained microbatches that no call uses
  regions::Regions* regions = nullptr;                  // where slices may lie; null: in messages only
};

class LossService final : public WithRequestMethods<
                              v1::LossService::WithRawCallbackMethod_ComputeLoss<v1::LossService::Service>> {
 public:
  // All that is pointed to outlives the service.
  LossService(const LossServiceOptions& options, engine::Engine* engine, const AccessControl* access,
              metrics::Metrics* metrics, const RequestEnvironment* requests);

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ComputeLoss(
      grpc::CallbackServerContext* context) override;

  // From now on new calls end with UNAVAILABLE.
  void Drain() { environment_.draining = true; }
  // Ends all calls that are open: what they wait for does not come.
  void EndAll(const absl::Status& why) { registry_.EndAll(why); }
  // As ServerService.ListStreams, but for incarnation and time. INVALID_ARGUMENT.
  absl::StatusOr<v1::ListStreamsResponse> ListStreams(const v1::ListStreamsRequest& request);
  // True if no call is open, at the latest by `deadline`.
  bool WaitUntilIdle(absl::Time deadline) { return registry_.WaitUntilEmpty(deadline); }

 private:
  absl::StatusOr<v1::ReleaseMicrobatchResponse> Release(UnaryCall* call, const grpc::ByteBuffer& bytes);

  ComputeLossEnvironment environment_;
  const RequestEnvironment* const requests_;
  PeerTable peers_;  // outlives the calls
  CallRegistry registry_;
  WorkerPool senders_;  // first to go but one: its last turns use the others
  Periodic expiry_;     // of retained microbatches
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_LOSS_SERVICE_H_
