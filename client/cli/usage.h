// SPDX-License-Identifier: Apache-2.0
// Command lines that are wrong, said in words: "create has no option --hiden", "--lr must be a number, got
// "fast"". CLI11 finds them; what it says of them differs between its versions and is meant for programmers.
//
// Pure functions; thread-compatible.
#ifndef LOSSD_CLIENT_CLI_USAGE_H_
#define LOSSD_CLIENT_CLI_USAGE_H_

#include <CLI/App.hpp>
#include <CLI/Error.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace lossd::cli {

// Has every option of a number, of all commands, refuse what is none: CLI11 takes "-8" for 2^64 - 8, and
// numbers that are too large for the largest one. Options that have a check of their own keep it.
void CheckNumbers(CLI::App* app);

// Why CLI11 refused `words`, as an error with exit code 2 (errors.h).
absl::Status WhyRefused(const CLI::App& app, absl::Span<const std::string> words,
                        const CLI::ParseError& error);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_USAGE_H_
