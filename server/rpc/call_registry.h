// SPDX-License-Identifier: Apache-2.0
// A CallRegistry holds the open calls of one kind. It bounds their number, in all and per peer, ends calls
// that wait too long for their client or for their turn, and lets a shutdown wait for the last call.
// CallTimeouts says how long a call may wait, and CallClock measures how long one call has waited.
//
// The registry is thread-safe; it does not own the calls.
#ifndef LOSSD_SERVER_RPC_CALL_REGISTRY_H_
#define LOSSD_SERVER_RPC_CALL_REGISTRY_H_

#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "server/engine/staging.h"

namespace lossd::rpc {

// How long a call may wait, by what it waits for. All times are positive.
struct CallTimeouts {
  absl::Duration open = absl::Seconds(20);  // for the first message of a call
  absl::Duration idle =
      absl::Seconds(60);  // for the next one, while the server has nothing to do for the call
  absl::Duration turn = absl::Minutes(10);  // for memory, a turn or the device, without any progress
  absl::Duration send = absl::Seconds(60);  // for the client to take an answer
};

// What a call waits for, and since when. Thread-compatible: the lock of the call guards it.
class CallClock {
 public:
  enum class Waits { kNothing, kOpen, kMessage, kTurn, kSend };

  // From now on the call waits for `what`; that is progress.
  void Set(Waits what, absl::Time now = clocks::SteadyNow()) {
    what_ = what;
    since_ = now;
  }
  Waits what() const { return what_; }
  absl::Time since() const { return since_; }

  // DEADLINE_EXCEEDED naming the limit's flag (in `*limit` too) if the call has waited too long, else OK.
  absl::Status Check(absl::Time now, const CallTimeouts& timeouts, absl::string_view* limit) const {
    switch (what_) {
      case Waits::kNothing:
        return absl::OkStatus();
      case Waits::kOpen:
        return Late(now, timeouts.open, "the client did not send its first message", "open_timeout", limit);
      case Waits::kMessage:
        return Late(now, timeouts.idle, "the client sent nothing and took nothing", "idle_timeout", limit);
      case Waits::kTurn:
        return Late(now, timeouts.turn, "the call made no progress", "turn_timeout", limit);
      case Waits::kSend:
        return Late(now, timeouts.send, "the client did not take an answer", "send_timeout", limit);
    }
    return absl::OkStatus();
  }

  // For a call that is only cancelled when it is late: the limit's flag if the call has waited too long, and
  // then it waits for nothing any more, so that this is told once; else "".
  absl::string_view StopIfLate(absl::Time now, const CallTimeouts& timeouts) {
    absl::string_view limit;
    if (!Check(now, timeouts, &limit).ok()) Set(Waits::kNothing);
    return limit;
  }

 private:
  absl::Status Late(absl::Time now, absl::Duration most, absl::string_view what, absl::string_view flag,
                    absl::string_view* limit) const {
    if (now - since_ < most) return absl::OkStatus();
    *limit = flag;
    return absl::DeadlineExceededError(
        absl::StrCat(what, " for ", absl::FormatDuration(most), " (--", flag, ")"));
  }

  Waits what_ = Waits::kNothing;
  absl::Time since_ = absl::InfiniteFuture();
};

}  // namespace lossd::rpc

namespace lossd::v1 {
class StreamDescription;
}  // namespace lossd::v1

namespace lossd::rpc {

// A call as the registry sees it.
class WatchedCall {
 public:
  virtual ~WatchedCall() = default;
  // Ends the call if it has waited too long, as CallClock says; the limit's name, or "". Called on the
  // registry's thread; must not call into the registry.
  virtual absl::string_view EndIfLate(absl::Time now, const CallTimeouts& timeouts) = 0;
  // Ends the call with `why`: its place goes to another one (CallRegistryOptions::end_oldest). Called on any
  // thread; must not call into the registry, which knows the call no more.
  virtual void GiveUpPlace(absl::Status why) {}
  // Ends the call with `why`, unless it is ending. Called on any thread; must not call into the registry.
  virtual void EndWith(absl::Status why) {}
  // What the call is doing, but for its number and its peer. Called on any thread; must not call into the
  // registry.
  virtual void Describe(absl::Time now, v1::StreamDescription* description) {}

  // When the caller's certificate ends, and the call with it (EndWith). Set before the registry has the call.
  void set_until(absl::Time until) { until_ = until; }
  absl::Time until() const { return until_; }

 private:
  absl::Time until_ = absl::InfiniteFuture();
};

struct CallRegistryOptions {
  int64_t max_calls = 256;
  std::string flag = "max_streams";  // what sets max_calls
  double peer_share = 0.5;           // of max_calls, as engine::FairShare
  // When all places are taken, a peer that has none gets that of the call that has waited longest. For calls
  // that have done nothing yet: they only wait for their client.
  bool end_oldest = false;
  CallTimeouts timeouts;
  std::function<void(absl::string_view limit)> on_limit = [](absl::string_view) {};  // a limit was reached
};

// Thread-safe.
class CallRegistry {
 public:
  // Looks for late calls a few times per shortest timeout.
  explicit CallRegistry(const CallRegistryOptions& options);
  // All calls must have been removed.
  ~CallRegistry();

  // RESOURCE_EXHAUSTED naming the limit and its flag if there are too many calls, or too many of the peer;
  // such a call may be removed but need not. After Remove returns, the call is not used any more.
  absl::Status Add(WatchedCall* call, const std::string& peer) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(WatchedCall* call) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends all calls that are open.
  void EndAll(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // Calls `look` with each call that is open, from the oldest to the youngest. They stay open meanwhile;
  // `look` must not call into the registry.
  void ForEach(absl::FunctionRef<void(WatchedCall& call, const std::string& peer, uint64_t number)> look)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // True if no call is open, at the latest by `deadline`.
  bool WaitUntilEmpty(absl::Time deadline) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  bool Empty() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return calls_.empty(); }
  struct Entry {
    std::string peer;
    uint64_t number = 0;  // in the order of their coming
  };

  // Ends the oldest call for the sake of `peer`, if it may be.
  bool MakeRoom(const std::string& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Refusal(engine::FairShare::Answer answer, const std::string& peer) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Watch() ABSL_LOCKS_EXCLUDED(mutex_);

  const CallRegistryOptions options_;
  absl::Mutex mutex_;
  engine::FairShare shares_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<WatchedCall*, Entry> calls_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watchdog_;
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_CALL_REGISTRY_H_
