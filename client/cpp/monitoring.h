// SPDX-License-Identifier: Apache-2.0
// What those ask who watch a server rather than train with it: whether it serves, and who uses it.
//
// Thread-safe. A zero timeout means ClientOptions::call_timeout.
#ifndef LOSSD_CLIENT_CPP_MONITORING_H_
#define LOSSD_CLIENT_CPP_MONITORING_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "lossd/v1/server.pb.h"

namespace lossd::client {

enum class Health { kServing, kNotServing, kUnknownService };

namespace internal {
class Core;
}  // namespace internal

// Got from Client::monitoring; shares the client's connections, and ends with the client.
class MonitoringCalls {
 public:
  // Which clients send rows, and the ComputeLoss calls that are open: the oldest `max_streams` of them (0:
  // 1000). INVALID_ARGUMENT above 10000; UNIMPLEMENTED by earlier servers. Repeated like other calls that
  // only read.
  absl::StatusOr<v1::ListStreamsResponse> ListStreams(uint32_t max_streams = 0,
                                                      absl::Duration timeout = absl::ZeroDuration()) const;
  // grpc.health.v1; "" is the whole server. Not repeated.
  absl::StatusOr<Health> CheckHealth(absl::string_view service = "",
                                     absl::Duration timeout = absl::ZeroDuration()) const;

 private:
  friend class Client;
  explicit MonitoringCalls(const internal::Core* core) : core_(core) {}

  const internal::Core* core_;
};

}  // namespace lossd::client

#endif  // LOSSD_CLIENT_CPP_MONITORING_H_
