// Exit codes and error messages: what went wrong and what to do next. Pure functions, thread-safe.
#ifndef LOSSD_CLIENT_CLI_ERRORS_H_
#define LOSSD_CLIENT_CLI_ERRORS_H_

#include <string>

#include "absl/status/status.h"

namespace lossd::cli {

enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,       // the operation failed
  kExitUsage = 2,        // the command line is wrong
  kExitUnreachable = 3,  // no server, or it stopped answering
  kExitRefused = 4,      // bad input, or the server is not in a state for it
  kExitRestarted = 5,    // the server is another process than before; gradients of the open step are gone
};

ExitCode ExitCodeOf(const absl::Status& status);

// For stderr: "lossctl: ..." with details and advice, ending in a newline. With `json` one JSON object.
std::string ErrorText(const absl::Status& status, bool json);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_ERRORS_H_
