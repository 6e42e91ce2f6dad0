// SPDX-License-Identifier: Apache-2.0
// What the calls of one Client (client.h) share. Core holds the options, the connections and the calls under
// way. HeadCache remembers what the client knows of heads and steps, and AnswerCheck compares answers with
// it. Executor runs the steps of asynchronous calls. WaitBeforeRepeat and Repeated decide whether a call is
// sent again.
//
// HeadCache, Executor and Core are thread-safe. Functions are stateless and thread-safe.
#ifndef LOSSD_CLIENT_CPP_CORE_H_
#define LOSSD_CLIENT_CPP_CORE_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client_options.h"
#include "client/cpp/connections.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/status_macros.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::client::internal {

// HeadCache is what the client remembers of heads between calls: the limits on slices, and to which
// accumulated gradients the rows of the open step were added. AnswerCheck compares the answers to one call
// with it.
//
// Thread-safe. Memory is bounded by the number of heads that the client has used.
// tests/client/golden/incarnations.json has cases.

// What the server has told about a head.
struct HeadInfo {
  uint64_t hidden_size = 0;  // D
  int64_t vocab_size = 0;    // targets are below this: V, or the full size of a draft vocabulary
  v1::SliceLimits limits;
  bool histories = false;  // the server describes histories, so it also knows begin_optimizer
  // HeadSpec.class_list of a head with a draft vocabulary, ascending; null: the head has no such list.
  std::shared_ptr<const std::vector<int32_t>> classes = nullptr;

  static HeadInfo Of(const v1::HeadDescription& description);
};

// Names the gradients that a server process has accumulated for a head since they were last zero.
struct GradientsId {
  uint64_t incarnation = 0;
  uint64_t generation = 0;  // 0: not known; some servers do not send it

  static GradientsId Of(const v1::HeadState& state) { return {state.incarnation(), state.generation()}; }
};

// Writes into an opening message which accumulated gradients it is meant for. Nullopt: any; nothing is
// written.
template <typename Message>
void SetMeant(const std::optional<GradientsId>& meant, Message* message) {
  if (!meant.has_value()) return;
  message->set_incarnation(meant->incarnation);
  if (meant->generation != 0) message->set_generation(meant->generation);
}

// A step of a head as a call found it when it began.
struct TrainerStep {
  std::string head;
  uint64_t step = 0;
  uint64_t starts = 0;  // how often this client had started a step of the head again by then
};

// What the client remembers of all heads. Thread-safe.
class HeadCache {
 public:
  // `expected_incarnation` is ClientOptions::expected_incarnation.
  explicit HeadCache(uint64_t expected_incarnation) : expected_incarnation_(expected_incarnation) {}

  // Nullopt if nothing is known of the head.
  std::optional<HeadInfo> Facts(absl::string_view head) const;
  void Learn(const v1::HeadDescription& description);
  // Forgets the facts of the head, so that the next call asks for them. What was accumulated stays
  // remembered.
  void ForgetFacts(absl::string_view head);

  // The step for a call that begins now.
  TrainerStep StepOf(absl::string_view head, uint64_t step) const;
  // ABORTED (IsStepDiscarded) if this client has started the step again since the call began.
  absl::Status CheckCurrent(const TrainerStep& at) const;

  // Notes that rows of the step are being added to `gradients`. ABORTED (RestartOf, IsStepDiscarded) if
  // earlier rows of the step were added to other gradients, or if another server process is expected; then
  // nothing is noted.
  absl::Status NoteAccumulation(const TrainerStep& at, const GradientsId& gradients);
  // The gradients that rows of the step must be added to: those of the step's earlier rows, or those of the
  // expected server process. Nullopt: any.
  std::optional<GradientsId> GradientsOf(const TrainerStep& at) const;
  // Checks as NoteAccumulation does, for an answer that tells the head's gradients, and notes nothing. OK if
  // this client has started the step again meanwhile.
  absl::Status Check(const TrainerStep& at, const GradientsId& gradients) const;
  // Returns `status`, the error of a call. If the error shows that gradients are lost, returns ABORTED
  // (RestartOf, IsStepDiscarded) instead.
  absl::Status Interpret(const TrainerStep& at, const absl::Status& status) const;

  // The step has been applied, so its gradients are not outstanding any more. Gradients of a later step stay
  // outstanding.
  void CloseStep(absl::string_view head, uint64_t step);
  // This client starts the step of the head again, so no gradients of the head are outstanding any more.
  // Calls of the step that are under way are not repeated.
  void ForgetAccumulation(absl::string_view head);

 private:
  struct Accumulation {
    uint64_t step = 0;
    GradientsId gradients;
  };

  bool IsCurrent(const TrainerStep& at) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  std::optional<GradientsId> Meant(const TrainerStep& at) const ABSL_SHARED_LOCKS_REQUIRED(mu_);
  absl::Status CheckLocked(const TrainerStep& at, const GradientsId& now) const
      ABSL_SHARED_LOCKS_REQUIRED(mu_);

  const uint64_t expected_incarnation_;
  mutable absl::Mutex mu_;
  absl::flat_hash_set<std::string> acknowledged_ ABSL_GUARDED_BY(mu_);  // heads without an expected process
  absl::flat_hash_map<std::string, HeadInfo> facts_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, Accumulation> accumulations_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, uint64_t> starts_ ABSL_GUARDED_BY(mu_);  // TrainerStep::starts
};

// Checks that all answers to one loss call are about one state of a head, and that this state has the earlier
// rows of the step. Thread-safe.
class AnswerCheck {
 public:
  // `head_cache` must outlive this object. `accumulates`: the call adds gradients to `step`, which must have
  // a value. `in_step`: the effect of the call ends with the gradients of the step, because the call
  // accumulates, retains rows, or uses retained rows.
  AnswerCheck(HeadCache* head_cache, std::string head, std::optional<uint64_t> step, bool accumulates,
              bool in_step);

  // Checks and notes the state that the server sends when it accepts a stream. ABORTED (RestartOf,
  // IsStepDiscarded) if process or gradients are not those of the call's earlier answers or of the step's
  // earlier rows. ABORTED if step or weights have changed during the call. INTERNAL if the answer cannot be
  // right.
  absl::Status Accept(const v1::HeadState& state);
  // The error as the caller should see it: as HeadCache::Interpret, and also if the server was restarted
  // during this call.
  absl::Status Interpret(const absl::Status& status) const;
  // The gradients that the next stream is meant for: those that earlier rows of the step, or of this call,
  // were added to. Nullopt: any. The generation is 0 for a call that does not belong to a step. ABORTED
  // (IsStepDiscarded) if this client has started the step again since the call began.
  absl::StatusOr<std::optional<GradientsId>> Meant() const;
  // The call begins again, and forgets the state that earlier streams found. Only for calls that do not
  // belong to a step.
  void BeginAgain();

 private:
  absl::Status CheckStep(const v1::HeadState& state);
  absl::Status Restarted(uint64_t before, uint64_t now) const;

  HeadCache* const head_cache_;
  const std::string head_;
  const bool accumulates_;
  const bool in_step_;
  const std::optional<TrainerStep> at_;  // the step that the call belongs to

  mutable absl::Mutex mu_;
  std::optional<v1::HeadState> state_ ABSL_GUARDED_BY(mu_);  // what the server sent to the first stream
};

// Runs tasks one after another, at once or at a given time: the steps of asynchronous calls and the callbacks
// of the client's users. The executor has a thread of its own, so that gRPC's few threads wait neither for
// steps nor for callbacks.
//
// Thread-safe. Tasks may post tasks. Tasks must not destroy the executor.
class Executor {
 public:
  using Task = absl::AnyInvocable<void()>;

  Executor();
  // Runs the tasks that are due, and drops the tasks that are not due yet.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  void Post(Task task) { PostAt(absl::InfinitePast(), std::move(task)); }
  // Runs `task` on this thread if no task runs and none is due, because waking the executor's thread takes
  // longer than a short task. Posts it otherwise. The task must take microseconds only, and must not call
  // users' callbacks.
  void RunOrPost(Task task) ABSL_LOCKS_EXCLUDED(mu_);
  // Runs `task` at or after `when`; tasks of the same time run in the order in which they were posted.
  void PostAt(absl::Time when, Task task);

 private:
  using Key = std::pair<absl::Time, uint64_t>;  // when, order of posting

  void Run();
  bool Ready() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::Mutex mu_;
  std::map<Key, Task> tasks_ ABSL_GUARDED_BY(mu_);
  uint64_t posted_ ABSL_GUARDED_BY(mu_) = 0;
  bool elsewhere_ ABSL_GUARDED_BY(mu_) = false;  // RunOrPost runs a task on its caller's thread
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

  // How many spare streams a loss computation gets beyond its first one: at most `wanted`, and fewer if other
  // computations have the rest. Give them back by GiveStreamsBack. Every computation has its first stream in
  // any case, because a deterministic server may need the microbatch that begins last before all others. The
  // spare streams are few, because the server takes a limited number of streams.
  int LendStreams(int wanted) ABSL_LOCKS_EXCLUDED(mu_);
  void GiveStreamsBack(int count) ABSL_LOCKS_EXCLUDED(mu_);

  // Keeps a call alive while it runs.
  void Add(std::shared_ptr<LossCall> call);
  void Remove(const std::shared_ptr<LossCall>& call);

 private:
  const ClientOptions options_;
  const std::unique_ptr<Connections> connections_;
  HeadCache head_cache_;

  static constexpr int kSpareStreams = 64;

  absl::Mutex mu_;
  absl::flat_hash_set<std::shared_ptr<LossCall>> calls_ ABSL_GUARDED_BY(mu_);
  int spare_streams_ ABSL_GUARDED_BY(mu_) = kSpareStreams;

  Executor executor_;  // last, so that its thread ends before the members that it uses
};

// The functions below decide whether a call is sent again, and after which wait. They are pure arithmetic,
// except Jitter: the caller passes the time that is left and the random factor.
// tests/client/golden/errors.json has cases.

// A random factor in [0.8, 1.2], so that clients that failed together do not come back together.
double Jitter();

// Whether a call that ended with an error may be sent again.
enum class Repeat {
  kIfTransient,
  // Also after ABORTED. For calls that leave nothing in the server when they fail, so they may begin again
  // with the present state. Not after an ABORTED with RestartOf or IsStepDiscarded, which the trainer must
  // handle.
  kIfTransientOrAborted,
};

// The wait between attempt number `attempt` (1, 2, ...), which ended with `status`, and the next attempt:
// initial_backoff, times 4 for every attempt after the first, at most max_backoff, and then times `jitter`.
// Nullopt if there is no next attempt: the status does not allow it, max_attempts were made, or the wait
// would outlast `left`.
std::optional<absl::Duration> WaitBeforeRepeat(const RetryOptions& options, const absl::Status& status,
                                               int attempt, absl::Duration left, double jitter,
                                               Repeat repeat = Repeat::kIfTransient);

// The status of a call after its last attempt. If there were several attempts, the message says how many. If
// the status does not allow a repeat, the message also says that an earlier attempt, which had no answer, may
// have taken effect. Payloads stay.
absl::Status WithAttempts(const absl::Status& status, int attempts);

// The `repeat` of a Call that is not repeated.
inline constexpr std::optional<Repeat> kNever;

// A `timeout` of zero means `fallback`.
inline absl::Time DeadlineAfter(absl::Duration timeout, absl::Duration fallback) {
  return clocks::SteadyNow() + (timeout > absl::ZeroDuration() ? timeout : fallback);
}

// Calls `attempt`, which returns a StatusOr, until it succeeds or may not be repeated. Waits between
// attempts.
template <typename Attempt>
auto Repeated(const Core& core, absl::Time deadline, Repeat repeat, Attempt attempt) -> decltype(attempt()) {
  for (int number = 1;; ++number) {
    auto result = attempt();
    if (result.ok()) return result;
    const auto wait = WaitBeforeRepeat(core.options().retry, result.status(), number,
                                       deadline - clocks::SteadyNow(), Jitter(), repeat);
    if (!wait.has_value()) return WithAttempts(result.status(), number);
    if (absl::Status slept = Cancellation::Sleep(*wait); !slept.ok()) return slept;
  }
}

// Makes one unary call, and repeats it as `repeat` allows; nullopt: never.
template <typename Stub, typename Request, typename Response>
absl::StatusOr<Response> Call(const Core& core, Stub* stub,
                              grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                              const Request& request, absl::Time deadline, std::optional<Repeat> repeat) {
  const auto attempt = [&]() -> absl::StatusOr<Response> {
    grpc::ClientContext context;
    const CancellableContext cancellable(&context);
    SetDeadline(deadline, &context);
    Response response;
    LOSSD_RETURN_IF_ERROR(
        CallStatus((stub->*method)(&context, request, &response), core.connections().peer()));
    return response;
  };
  return repeat.has_value() ? Repeated(core, deadline, *repeat, attempt) : attempt();
}

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CORE_H_
