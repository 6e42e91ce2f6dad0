// SPDX-License-Identifier: Apache-2.0
// How long a call may wait, by what it waits for, and how its clock says that it has waited too long.
#ifndef LOSSD_SERVER_RPC_CALL_TIMEOUTS_H_
#define LOSSD_SERVER_RPC_CALL_TIMEOUTS_H_

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"

namespace lossd::rpc {

// All positive.
struct CallTimeouts {
  absl::Duration open = absl::Seconds(20);  // for the first message of a call
  absl::Duration idle =
      absl::Seconds(60);  // for the next one, while the server has nothing to do for the call
  absl::Duration turn = absl::Minutes(10);  // for memory, a turn or the device, without any progress
  absl::Duration send = absl::Seconds(60);  // for the client to take an answer
};

// Where a call stands. Thread-compatible: guarded by the call's lock.
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

#endif  // LOSSD_SERVER_RPC_CALL_TIMEOUTS_H_
