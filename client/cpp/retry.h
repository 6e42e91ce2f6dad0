// SPDX-License-Identifier: Apache-2.0
// When a call is sent again, and after how long. Pure arithmetic but for Jitter: the caller brings the time
// that is left and the random factor.
//
// Functions are stateless and thread-safe. client/python/src/lossd/_retry.py does the same;
// tests/client/golden/waits.json holds both to it.
#ifndef LOSSD_CLIENT_CPP_RETRY_H_
#define LOSSD_CLIENT_CPP_RETRY_H_

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"

namespace lossd::client::internal {

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
// One that may not be repeated says besides that an attempt before it, which had no answer, may have taken
// effect. Payloads stay.
absl::Status WithAttempts(const absl::Status& status, int attempts);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_RETRY_H_
