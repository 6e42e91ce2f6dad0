#include "client/cpp/backoff.h"

#include <algorithm>
#include <cmath>

#include "absl/random/random.h"

namespace lossd::client::internal {

absl::Duration Backoff(const RetryOptions& options, int attempt) {
  thread_local absl::BitGen random;
  const double growth = std::pow(4.0, std::clamp(attempt - 1, 0, 16));
  return std::min(options.initial_backoff * growth, options.max_backoff) * absl::Uniform(random, 0.8, 1.2);
}

}  // namespace lossd::client::internal
