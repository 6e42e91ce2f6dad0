// SPDX-License-Identifier: Apache-2.0
// Variables of the process's environment. Thread-safe as long as nothing changes the environment.
#ifndef LOSSD_CLIENT_CLI_ENVIRONMENT_H_
#define LOSSD_CLIENT_CLI_ENVIRONMENT_H_

#include <cstdlib>
#include <string>

namespace lossd::cli {

// The value of a variable; empty if it is not set.
inline std::string EnvironmentVariable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_ENVIRONMENT_H_
