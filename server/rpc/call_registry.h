// The ComputeLoss calls that are open: bounds their number, cancels those whose client takes no answers,
// and lets a shutdown wait for the last one.
//
// Thread-safe.
#ifndef LOSSD_SERVER_RPC_CALL_REGISTRY_H_
#define LOSSD_SERVER_RPC_CALL_REGISTRY_H_

#include <cstddef>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::rpc {

// A call as the registry sees it.
class WatchedCall {
 public:
  virtual ~WatchedCall() = default;
  // Cancels the call if it has been waiting for the client since before `limit`, with answers that the client
  // does not take, or holding up other calls. Called on the registry's thread; must not call into the
  // registry.
  virtual void CancelIfStuck(absl::Time limit) = 0;
};

class CallRegistry {
 public:
  // Looks for stuck calls a few times per `send_timeout`.
  CallRegistry(size_t max_calls, absl::Duration send_timeout);
  // All calls must have been removed.
  ~CallRegistry();

  // False if there are max_calls already. After Remove returns, the call is not used any more.
  bool Add(WatchedCall* call) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(WatchedCall* call) ABSL_LOCKS_EXCLUDED(mutex_);
  // True if no call is open, at the latest by `deadline`.
  bool WaitUntilEmpty(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool Empty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return calls_.empty(); }
  void Watch() ABSL_LOCKS_EXCLUDED(mutex_);

  const size_t max_calls_;
  const absl::Duration send_timeout_;
  absl::Mutex mutex_;
  absl::flat_hash_set<WatchedCall*> calls_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watchdog_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALL_REGISTRY_H_
