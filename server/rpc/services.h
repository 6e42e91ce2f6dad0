// SPDX-License-Identifier: Apache-2.0
// The services of lossd.v1 as gRPC serves them: HeadService, LossService and ServerService. A service decides
// who may call, bounds its open calls, and hands each call to the class that carries it out.
//
// All three are thread-safe. Each must outlive the gRPC server that it is registered with.
#ifndef LOSSD_SERVER_RPC_SERVICES_H_
#define LOSSD_SERVER_RPC_SERVICES_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "lossd/v1/head.grpc.pb.h"
#include "lossd/v1/loss.grpc.pb.h"
#include "lossd/v1/server.grpc.pb.h"
#include "lossd/v1/server.pb.h"
#include "server/admin/head_operations.h"
#include "server/engine/engine.h"
#include "server/metrics/metrics.h"
#include "server/regions/regions.h"
#include "server/rpc/access_control.h"
#include "server/rpc/compute_loss_call.h"
#include "server/rpc/request_call.h"
#include "server/rpc/tensor_calls.h"
#include "server/rpc/workers.h"

namespace lossd::rpc {

// The options of a HeadService.
struct HeadServiceOptions {
  admin::HeadOperationsOptions operations;
  int worker_threads = 8;
  int64_t max_waiting_calls = 256;  // that wait for a worker; as many may also wait for their request
  int64_t max_tensor_calls = 64;    // open calls of ReadTensor, WriteTensor and AddGradient
  int64_t max_saves = 16;           // calls of SaveCheckpoint that wait or run
  double peer_share = 0.5;          // the part of each bound above that one peer may have
  CallTimeouts timeouts;
  regions::Regions* regions = nullptr;  // where ReadTensor may put tensors; null: in messages only
};

// lossd.v1.HeadService: heads, their tensors, steps and checkpoints.
class HeadService final : public WithRequestMethods<v1::HeadService::WithRawCallbackMethod_WriteTensor<
                              v1::HeadService::WithRawCallbackMethod_AddGradient<v1::HeadService::Service>>> {
 public:
  // All that is pointed to outlives the service.
  static std::unique_ptr<HeadService> Create(const HeadServiceOptions& options, engine::Engine* engine,
                                             const AccessControl* access, metrics::Metrics* metrics);

  // As admin::RestoreLatest. Call it before the service gets calls.
  absl::Status RestoreLatest() { return admin::RestoreLatest(operations_); }
  // What calls with one request share. The other services use it too, so that one bound holds for such calls
  // of all services.
  const RequestEnvironment* requests() const { return &request_environment_; }
  // From now on calls that change heads end with UNAVAILABLE; reading and saving still work.
  void Drain() { environment_.draining = true; }
  // Makes the save that runs, and the saves that wait, end with CANCELLED soon: for a shutdown that must not
  // wait longer.
  void CancelSaves() { operations_.checkpoints().CancelSaves(); }
  // Waits until no streaming call is open, no other call is worked on and no save runs. False if this is not
  // so at `deadline`.
  bool WaitUntilIdle(absl::Time deadline);

  // To these two methods clients stream tensors. All other methods begin with one request.
  grpc::ServerReadReactor<grpc::ByteBuffer>* WriteTensor(grpc::CallbackServerContext* context,
                                                         grpc::ByteBuffer* response) override;
  grpc::ServerReadReactor<grpc::ByteBuffer>* AddGradient(grpc::CallbackServerContext* context,
                                                         grpc::ByteBuffer* response) override;

 private:
  // A member function of HeadOperations that carries out a request.
  template <typename Request, typename Response>
  using Operation = absl::StatusOr<Response> (admin::HeadOperations::*)(const Request&);

  HeadService(const HeadServiceOptions& options, engine::Engine* engine, const AccessControl* access,
              metrics::Metrics* metrics);

  void ServeMethods();
  void Serve(absl::string_view method, std::function<Reactor*(grpc::CallbackServerContext*)> start);
  // `method` outlives the service.
  template <typename Request, typename Response>
  void Unary(absl::string_view method, AdminKind kind, Operation<Request, Response> operation);
  // Has a worker run `operation` and end the call.
  template <typename Request, typename Response>
  void Run(absl::string_view method, AdminKind kind, Operation<Request, Response> operation, UnaryCall* call,
           const grpc::ByteBuffer& bytes);
  grpc::Status Ended(absl::string_view peer, absl::string_view method, absl::Status status);
  void CountUnfinished(int change) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    unfinished_ += change;
  }
  bool NothingUnfinished() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return unfinished_ == 0; }

  engine::Engine* const engine_;
  const AccessControl* const access_;
  metrics::Metrics* const metrics_;
  absl::Mutex mutex_;
  int unfinished_ ABSL_GUARDED_BY(mutex_) = 0;  // calls being worked on, and saves
  admin::HeadOperations operations_;
  TensorCallEnvironment environment_;
  SaveCallEnvironment save_environment_;
  CallRegistry requests_;  // calls whose request is not complete
  const RequestEnvironment request_environment_;
  CallRegistry registry_;  // calls that move tensors
  CallRegistry saves_;     // calls of SaveCheckpoint; other calls cannot take their places
  // savers_ and workers_ are destroyed first, because their last tasks use the members above.
  WorkerPool savers_;  // one thread: saves run one at a time, and use no thread of workers_
  AdminWorkers workers_;
};

// The options of a LossService.
struct LossServiceOptions {
  int64_t max_streams = 256;                      // opened streams; registry_ bounds open calls by it
  int64_t max_staging_bytes = int64_t{32} << 20;  // per call: slices in the engine or not sent yet
  double peer_share = 0.5;                        // the part that one peer may have
  CallTimeouts timeouts;
  int sender_threads = 2;                               // they write large answers
  absl::Duration retained_timeout = absl::Minutes(10);  // for retained rows that no call uses
  regions::Regions* regions = nullptr;                  // where slices may lie; null: in messages only
};

// lossd.v1.LossService over an engine. Its calls are ComputeLossCalls (compute_loss_call.h).
class LossService final : public WithRequestMethods<
                              v1::LossService::WithRawCallbackMethod_ComputeLoss<v1::LossService::Service>> {
 public:
  // All that is pointed to outlives the service.
  LossService(const LossServiceOptions& options, engine::Engine* engine, const AccessControl* access,
              metrics::Metrics* metrics, const RequestEnvironment* requests);

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ComputeLoss(
      grpc::CallbackServerContext* context) override;

  // A ComputeLoss call of a client in this process (wire::DirectServer::StartFn). For servers that do not ask
  // callers for an identity.
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ComputeLossDirect(wire::CallContext* context,
                                                                                 uint64_t client) {
    return ComputeLossCall::Start(&environment_, DirectCaller(context, client));
  }

  // From now on new calls end with UNAVAILABLE.
  void Drain() { environment_.draining = true; }
  // Ends all open calls with `why`: for calls that wait in vain.
  void EndAll(const absl::Status& why) { registry_.EndAll(why); }
  // The answer of ServerService.ListStreams, without incarnation and time. INVALID_ARGUMENT if the request is
  // wrong.
  absl::StatusOr<v1::ListStreamsResponse> ListStreams(const v1::ListStreamsRequest& request);
  // Waits until no call is open, or until `deadline`; true if no call is open.
  bool WaitUntilIdle(absl::Time deadline) { return registry_.WaitUntilEmpty(deadline); }

 private:
  absl::StatusOr<v1::ReleaseMicrobatchResponse> Release(UnaryCall* call, const grpc::ByteBuffer& bytes);

  ComputeLossEnvironment environment_;
  const RequestEnvironment* const requests_;
  PeerTable peers_;  // outlives the calls
  CallRegistry registry_;
  WorkerPool senders_;  // destroyed before the members above, which its last tasks use
  Periodic expiry_;     // drops retained microbatches that no call uses
};

// Facts about the server that ServerService reports and cannot find out itself.
struct ServerServiceOptions {
  std::string version;
  absl::Time started;
  int64_t max_message_bytes = 0;
  int64_t max_streams = 0;
  metrics::ReadRanks ranks;
  std::string collectives;                  // as ServerDescription.collectives
  std::string region_socket;                // empty: none
  std::vector<std::string> region_devices;  // GPUs whose memory regions may have; empty: none
  // ServerDescription.http; "" until the HTTP server runs.
  std::function<std::string()> http;
};

// lossd.v1.ServerService: describes the server (version, devices, limits) and its open streams.
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

#endif  // LOSSD_SERVER_RPC_SERVICES_H_
