// SPDX-License-Identifier: Apache-2.0
// gRPC's own services of a server, for tests: grpc.health.v1 and grpc.reflection.v1alpha. They are not
// generated here; their messages are small enough to write and read by hand.
#ifndef LOSSD_TESTS_SERVER_SERVICE_STANDARD_SERVICES_H_
#define LOSSD_TESTS_SERVER_SERVICE_STANDARD_SERVICES_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace lossd::app::testing {

// As TestClient::Health and ReflectedServices.
absl::StatusOr<std::string> CheckHealth(const std::shared_ptr<grpc::Channel>& channel,
                                        const std::string& service);
absl::StatusOr<std::vector<std::string>> ListServices(const std::shared_ptr<grpc::Channel>& channel);

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_SERVICE_STANDARD_SERVICES_H_
