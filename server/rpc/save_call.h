// SPDX-License-Identifier: Apache-2.0
// The call HeadService.SaveCheckpoint: progress goes out while the save runs, on a worker that is for saves
// alone, and the result last. The save outlives a client that goes away, unless it asked otherwise.
//
// Thread-safe.
#ifndef LOSSD_SERVER_RPC_SAVE_CALL_H_
#define LOSSD_SERVER_RPC_SAVE_CALL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "lossd/v1/head.pb.h"
#include "server/admin/checkpoints.h"
#include "server/rpc/access_control.h"
#include "server/rpc/call_registry.h"
#include "server/rpc/request_call.h"
#include "server/rpc/worker_pool.h"

namespace lossd::rpc {

// What all calls share; outlives them and the saves they start.
struct SaveCallEnvironment {
  admin::Checkpoints* checkpoints = nullptr;
  const RequestEnvironment* requests = nullptr;
  const AccessControl* access = nullptr;
  CallRegistry* registry = nullptr;
  WorkerPool* workers = nullptr;
  // What a call ends with; counts and logs errors.
  std::function<grpc::Status(absl::string_view peer, absl::Status)> ended;
  std::function<void(int change)> count;  // of saves waiting or running
};

// Lives until both gRPC and the save are done with it.
class SaveCall final : public RequestCall, public WatchedCall {
 public:
  static SaveCall* Start(SaveCallEnvironment* environment, grpc::CallbackServerContext* context);

  void OnWriteDone(bool ok) override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnCancel() override ABSL_LOCKS_EXCLUDED(mutex_);
  void OnDone() override;
  absl::string_view EndIfLate(absl::Time now, const CallTimeouts& timeouts) override
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  SaveCall(SaveCallEnvironment* environment, grpc::CallbackServerContext* context)
      : RequestCall(environment->requests, context, "SaveCheckpoint"), environment_(environment) {}

  void OnRequest(const grpc::ByteBuffer& request) override ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Schedule(const grpc::ByteBuffer& request);
  void Run();
  // Sends the update, or the latest of those that come while one is being sent.
  void Post(v1::SaveCheckpointUpdate update) ABSL_LOCKS_EXCLUDED(mutex_);
  // After what was posted the call ends.
  void End(absl::Status status) ABSL_LOCKS_EXCLUDED(mutex_);
  // Starts what is next, unless a write is under way.
  void Continue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  SaveCallEnvironment* const environment_;
  v1::SaveCheckpointRequest request_;
  std::string peer_;                 // PeerKey; set before it is admitted
  AdmittedCall admitted_;            // set before it runs
  std::vector<std::string> pruned_;  // by the save, before it ends
  std::shared_ptr<SaveCall> self_;   // gRPC's share of it, until OnDone
  std::atomic<bool> gone_{false};    // the client is

  absl::Mutex mutex_;
  bool received_ ABSL_GUARDED_BY(mutex_) = false;     // the request was; before, RequestCall ends the call
  grpc::ByteBuffer message_ ABSL_GUARDED_BY(mutex_);  // being sent
  std::optional<v1::SaveCheckpointUpdate> next_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  CallClock clock_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_SAVE_CALL_H_
