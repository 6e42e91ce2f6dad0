// SPDX-License-Identifier: Apache-2.0
// lossd.v1.HeadService: admin::HeadOperations behind gRPC. Methods run on a small pool of workers, because
// they wait for the device or the disk; gRPC's own threads never do.
//
// Thread-safe. Must outlive the gRPC server it is registered with.
#ifndef LOSSD_SERVER_RPC_HEAD_SERVICE_H_
#define LOSSD_SERVER_RPC_HEAD_SERVICE_H_

#include <cstdint>
#include <memory>

#include "server/admin/head_operations.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"
#include "server/regions/regions.h"
#include "server/rpc/access_control.h"
#include "server/rpc/call_timeouts.h"
#include "server/rpc/request_call.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace lossd::rpc {

struct HeadServiceOptions {
  admin::HeadOperationsOptions operations;
  int worker_threads = 8;
  int64_t max_waiting_calls = 256;  // for a worker, and so many for their request
  int64_t max_tensor_calls = 64;    // ReadTensor, WriteTensor and AddGradient, open
  int64_t max_saves = 16;           // SaveCheckpoint: waiting or running
  double peer_share = 0.5;          // of each of the three
  CallTimeouts timeouts;
  regions::Regions* regions = nullptr;  // where tensors that are read may lie; null: in messages only
};

class HeadService {
 public:
  // All that is pointed to outlives the service.
  static std::unique_ptr<HeadService> Create(const HeadServiceOptions& options, engine::Engine* engine,
                                             const AccessControl* access, metrics::Metrics* metrics);
  virtual ~HeadService() = default;

  virtual grpc::Service* service() = 0;
  // As admin::RestoreLatest; before the service has calls.
  virtual absl::Status RestoreLatest() = 0;
  // For the calls of the other services whose clients send one request: one bound for all of them.
  virtual const RequestEnvironment* requests() const = 0;
  // From now on calls that change heads end with UNAVAILABLE; reading and saving still work.
  virtual void Drain() = 0;
  // Has the save that runs, and those that wait, end with CANCELLED soon; for when time is up.
  virtual void CancelSaves() = 0;
  // True if no streaming call is open, no other is being worked on and no save runs, at the latest by
  // `deadline`.
  virtual bool WaitUntilIdle(absl::Time deadline) = 0;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_HEAD_SERVICE_H_
