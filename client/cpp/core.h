// SPDX-License-Identifier: Apache-2.0
// What the parts of one client share: Core, which holds the options, the connections and the calls under way;
// the Executor that runs the steps of asynchronous calls; and the rules by which calls are sent again.
//
// Executor and Core are thread-safe. Functions are stateless and thread-safe.
#ifndef LOSSD_CLIENT_CPP_CORE_H_
#define LOSSD_CLIENT_CPP_CORE_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/cpp/connections.h"
#include "client/cpp/head_cache.h"
#include "kernels/clocks/clock.h"

namespace lossd::client::internal {

// Runs tasks one after another, at once or at a given time: the steps of asynchronous calls and the callbacks
// of the client's users. The executor has a thread of its own, so that gRPC's few threads never wait for
// either.
//
// Thread-safe. Tasks may post tasks. Tasks must not destroy the executor.
class Executor {
 public:
  using Task = absl::AnyInvocable<void()>;

  Executor();
  // Runs the tasks that are due and drops those that are not.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  void Post(Task task) { PostAt(absl::InfinitePast(), std::move(task)); }
  // Runs `task` on this thread if no task runs and none is due, since waking the other thread takes longer
  // than a short task; posts it otherwise. The task is to take microseconds and must not call users back.
  void RunOrPost(Task task) ABSL_LOCKS_EXCLUDED(mu_);
  // Runs `task` at or after `when`; tasks of the same time run in the order they were posted.
  void PostAt(absl::Time when, Task task);

 private:
  using Key = std::pair<absl::Time, uint64_t>;  // when, order of posting

  void Run();
  bool Ready() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Mutex mu_;
  std::map<Key, Task> tasks_ ABSL_GUARDED_BY(mu_);
  uint64_t posted_ ABSL_GUARDED_BY(mu_) = 0;
  bool elsewhere_ ABSL_GUARDED_BY(mu_) = false;  // a task runs on another thread, by RunOrPost
  bool running_ ABSL_GUARDED_BY(mu_) = false;    // a task runs on thread_
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

class LossCall;

// The state of one client that its calls share. Client owns it. Thread-safe.
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

// The functions below decide whether a call is sent again, and after how long. They are pure arithmetic,
// except Jitter: the caller brings the time that is left and the random factor.
// client/python/src/lossd/_connections.py does the same; tests/client/golden/errors.json holds both to it.

// A random factor in [0.8, 1.2], so that clients that failed together do not come back together.
double Jitter();

// Whether a call that ended with `status` may end otherwise when it is sent again as it was: UNAVAILABLE; or
// RESOURCE_EXHAUSTED that did not come from the server, whose errors have an ErrorDetail, but from the
// transport, for example "Received RST_STREAM with error code 11" of a server that is short of memory for
// messages. Such a call may have taken effect. A message that is too large for the transport stays too large.
bool IsTransient(const absl::Status& status);

// Whether a call that ended with an error may be sent again.
enum class Repeat {
  kIfTransient,
  // The call is restartable: nothing of it stays when it fails, so that it may begin again with what it
  // finds. After ABORTED, too, but for RestartOf and IsStepDiscarded, which are for the trainer to deal with.
  kIfTransientOrAborted,
};

// The wait between attempt number `attempt` (1, 2, ...), which ended with `status`, and the next one:
// initial_backoff, growing fourfold with every attempt up to max_backoff, times `jitter`. Nullopt if there is
// no next attempt: the status may not be repeated, max_attempts were made, or the wait would outlast `left`.
std::optional<absl::Duration> WaitBeforeRepeat(const RetryOptions& options, const absl::Status& status,
                                               int attempt, absl::Duration left, double jitter,
                                               Repeat repeat = Repeat::kIfTransient);

// The status of a call after its last attempt, which says how often it was tried if that was more than once.
// If the call may not be repeated, the status also says that an earlier attempt, which had no answer, may
// have taken effect. Payloads stay.
absl::Status WithAttempts(const absl::Status& status, int attempts);

// The `repeat` of a Call that is not repeated.
inline constexpr std::optional<Repeat> kNever;

// A `timeout` of zero means `fallback`.
inline absl::Time DeadlineAfter(absl::Duration timeout, absl::Duration fallback) {
  return clocks::SteadyNow() + (timeout > absl::ZeroDuration() ? timeout : fallback);
}

// Runs `attempt`, which returns a StatusOr, until it succeeds or may not be repeated, waiting in between.
template <typename Attempt>
auto Repeated(const Core& core, absl::Time deadline, Repeat repeat, Attempt attempt) -> decltype(attempt()) {
  for (int number = 1;; ++number) {
    auto result = attempt();
    if (result.ok()) return result;
    const auto wait = WaitBeforeRepeat(core.options().retry, result.status(), number,
                                       deadline - clocks::SteadyNow(), Jitter(), repeat);
    if (!wait.has_value()) return WithAttempts(result.status(), number);
    absl::SleepFor(*wait);
  }
}

// One unary call, repeated if allowed; nullopt: never.
template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> Call(const Core& core, Stub* stub,
                              grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                              const Request& request, absl::Time deadline, std::optional<Repeat> repeat) {
  const auto attempt = [&]() -> absl::StatusOr<Response> {
    grpc::ClientContext context;
    SetDeadline(deadline, &context);
    Response response;
    absl::Status status =
        CallStatus((stub->*method)(&context, request, &response), core.connections().peer());
    if (!status.ok()) return status;
    return response;
  };
  return repeat.has_value() ? Repeated(core, deadline, *repeat, attempt) : attempt();
}

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CORE_H_
