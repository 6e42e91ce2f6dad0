// SPDX-License-Identifier: Apache-2.0
// The sockets at which a process listens, as the kernel has them. Stateless; thread-safe.
#ifndef LOSSD_TESTS_SERVER_STRANGERS_LISTENERS_H_
#define LOSSD_TESTS_SERVER_STRANGERS_LISTENERS_H_

#include <string>
#include <vector>

namespace lossd::app::testing {

// As stranger_process takes them: "tcp:127.0.0.1:7070", "stream:/run/lossd/grpc", "packets:@lossd-0123".
std::vector<std::string> ListenersOf(int process);

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_STRANGERS_LISTENERS_H_
