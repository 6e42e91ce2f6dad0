// SPDX-License-Identifier: Apache-2.0
// The file that says which addresses a server has chosen, for programs that start it on any free port.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_APP_PORT_FILE_H_
#define LOSSD_SERVER_APP_PORT_FILE_H_

#include <string>

#include "absl/status/status.h"

namespace lossd::app {

// Writes {"grpc": ..., "http": ...} to `path`; a reader sees the whole file or none. An error names the path,
// and then no file is left.
absl::Status WritePortFile(const std::string& path, const std::string& grpc, const std::string& http);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_PORT_FILE_H_
