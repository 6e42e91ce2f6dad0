// SPDX-License-Identifier: Apache-2.0
// Exit codes and error messages: what went wrong and what to do next. Pure functions, thread-safe.
#ifndef LOSSD_CLIENT_CLI_ERRORS_H_
#define LOSSD_CLIENT_CLI_ERRORS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/cli/format.h"

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

// INVALID_ARGUMENT of a command line, with kExitUsage. `help` is the command that describes what is right.
absl::Status UsageError(absl::string_view message, absl::string_view help);

// For stderr: "lossctl: ..." with details and advice, ending in a newline. Large numbers of bytes stand there
// in larger units, too. With `json` one JSON object on one line.
std::string ErrorText(const absl::Status& status, bool json, const Style& style = {});

// "needs 1610612736 bytes; 5 of 8589934592 bytes" as "needs 1610612736 bytes (1.50 GiB); 5 of 8589934592
// bytes (8.00 GiB)".
std::string WithUnits(absl::string_view message);

// With the command line's names for what the client library calls "options.target" and
// "options.credentials.ca", at the beginning of a message.
std::string InTermsOfOptions(absl::string_view message);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_ERRORS_H_
