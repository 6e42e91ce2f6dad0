// How long to wait before a call is repeated.
#ifndef LOSSD_CLIENT_CPP_BACKOFF_H_
#define LOSSD_CLIENT_CPP_BACKOFF_H_

#include "absl/time/time.h"
#include "client/cpp/client.h"

namespace lossd::client::internal {

// The wait after attempt number `attempt` (1, 2, ...): initial_backoff, growing fourfold up to max_backoff,
// times a random factor in [0.8, 1.2]. Thread-safe.
absl::Duration Backoff(const RetryOptions& options, int attempt);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_BACKOFF_H_
