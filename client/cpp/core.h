// SPDX-License-Identifier: Apache-2.0
// What the parts of one client share.
#ifndef LOSSD_CLIENT_CPP_CORE_H_
#define LOSSD_CLIENT_CPP_CORE_H_

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/client.h"
#include "client/cpp/connections.h"
#include "client/cpp/executor.h"
#include "client/cpp/head_cache.h"

namespace lossd::client::internal {

class LossCall;

// Thread-safe.
class Core {
 public:
  Core(ClientOptions options, std::unique_ptr<Connections> connections)
      : options_(std::move(options)),
        connections_(std::move(connections)),
        head_cache_(options_.expected_incarnation) {}
  // Cancels the loss calls under way and waits for them.
  ~Core();

  const ClientOptions& options() const { return options_; }
  Connections& connections() const { return *connections_; }
  HeadCache& head_cache() { return head_cache_; }
  const HeadCache& head_cache() const { return head_cache_; }
  Executor& executor() { return executor_; }

  // Keeps a call alive while it runs.
  void Add(std::shared_ptr<LossCall> call);
  void Remove(const std::shared_ptr<LossCall>& call);

 private:
  const ClientOptions options_;
  const std::unique_ptr<Connections> connections_;
  HeadCache head_cache_;

  absl::Mutex mu_;
  absl::flat_hash_set<std::shared_ptr<LossCall>> calls_ ABSL_GUARDED_BY(mu_);

  Executor executor_;  // last: its thread ends before anything it uses goes
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CORE_H_
