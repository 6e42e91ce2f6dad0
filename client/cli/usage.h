// SPDX-License-Identifier: Apache-2.0
// Checks the words of a command line against CLI11's description of the commands, so that commands are listed
// once. It writes the errors ("create has no option --hiden", "--lr must be a number, got "fast""), because
// CLI11's own messages differ between its versions and are meant for programmers. And it tells a shell which
// words may follow, so that the shell can complete them.
//
// Pure functions; thread-compatible.
#ifndef LOSSD_CLIENT_CLI_USAGE_H_
#define LOSSD_CLIENT_CLI_USAGE_H_

#include <CLI/App.hpp>
#include <CLI/Error.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::cli {

// Adds a check to every numeric option of all commands that refuses what is not such a number. CLI11 alone
// takes "-8" for 2^64 - 8, and replaces a number that is too large by the largest one. Options that have a
// check keep it.
void CheckNumbers(CLI::App* app);

// Why CLI11 refused `words`, as an error with exit code kExitUsage (context.h).
absl::Status WhyRefused(const CLI::App& app, absl::Span<const std::string> words,
                        const CLI::ParseError& error);

// The words that may follow on a command line of lossctl, for shells that complete words and for messages
// about misspelt words. All of it comes from CLI11's description of the commands.
//
// Pure functions; thread-compatible.

enum class Wanted : uint8_t {
  kWords,       // one of Completions::words
  kFile,        // the path of a file
  kHead,        // the name of a head of the server
  kCheckpoint,  // the name of a checkpoint of the server
  kContext,     // the name of a server in the file of contexts
  kOther,       // a value that lossctl cannot guess
};

struct Word {
  std::string text;
  std::string description;  // one line, may be empty
};

struct Completions {
  Wanted wanted = Wanted::kWords;
  std::vector<Word> words;  // the words that begin with the last word given, in the order of --help
};

// `words` are the words after "lossctl". The last word is unfinished, and may be empty.
Completions Complete(const CLI::App& app, absl::Span<const std::string> words);

// The first word of a command line that is wrong at its place.
struct Misplaced {
  enum class Kind : uint8_t {
    kCommand,  // there is no such command
    kOption,   // the command has no such option
    kSurplus,  // the command takes fewer arguments
    kValue,    // the last word is an option that wants a value
  };
  Kind kind = Kind::kCommand;
  std::string word;     // without "=VALUE"
  std::string command;  // the command to which it was given, e.g. "context add"; empty: before any command
  std::string meant;    // the command or option that was probably meant, or empty if none is near
  std::string takes;    // if kValue: the type of the missing value, e.g. "SECONDS" or "loss|dx|all"
};
std::optional<Misplaced> FindMisplaced(const CLI::App& app, absl::Span<const std::string> words);

// The command that the words name, e.g. "context add"; empty if they name none.
std::string CommandOf(const CLI::App& app, absl::Span<const std::string> words);

// The script that makes a shell ("bash", "zsh", "fish") complete lossctl's words; "" for any other shell.
absl::string_view CompletionScript(absl::string_view shell);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_USAGE_H_
