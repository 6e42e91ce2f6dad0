// SPDX-License-Identifier: Apache-2.0
// Commands that throw something away ask first. Thread-compatible.
#ifndef LOSSD_CLIENT_CLI_CONFIRM_H_
#define LOSSD_CLIENT_CLI_CONFIRM_H_

#include <CLI/App.hpp>
#include <string>

#include "absl/status/status.h"

namespace lossd::cli {

// Adds --yes to a command.
CLI::Option* AddYes(CLI::App* command, bool* yes);

// Whether somebody can be asked: stdin is a terminal.
bool CanAsk();

// A wrong command line unless --yes was given or somebody can be asked. `command`: "delete". To be called
// before the command does anything.
absl::Status CheckMayAsk(bool yes, const std::string& command);

// Asks `question` on stderr, with " [y/N] ". OK if the answer is y or yes, or without asking if --yes was
// given. Else CANCELLED with `otherwise`, e.g. "not deleted".
absl::Status Confirm(bool yes, const std::string& question, const std::string& otherwise);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_CONFIRM_H_
