// SPDX-License-Identifier: Apache-2.0
// The words of a command line, judged by CLI11's description of the commands, so that nothing is listed
// twice: what is wrong with a line ("create has no option --hiden", "--lr must be a number, got "fast""),
// since CLI11's own messages differ between its versions and are meant for programmers; and what may follow,
// for shells that complete words.
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

// Has every option of a number, of all commands, refuse what is none: CLI11 takes "-8" for 2^64 - 8, and
// numbers that are too large for the largest one. Options that have a check of their own keep it.
void CheckNumbers(CLI::App* app);

// Why CLI11 refused `words`, as an error with exit code 2 (context.h).
absl::Status WhyRefused(const CLI::App& app, absl::Span<const std::string> words,
                        const CLI::ParseError& error);

// What may follow on a command line of lossctl, for shells that complete words and for messages about words
// that are misspelt. Knows the commands from CLI11's description of them, so nothing is listed twice.
//
// Pure functions; thread-compatible.

enum class Wanted : uint8_t {
  kWords,       // one of Completions::words
  kFile,        // a path
  kHead,        // a head of the server
  kCheckpoint,  // a checkpoint of the server
  kContext,     // a server with a name, out of the file of contexts
  kOther,       // a value that nobody can know
};

struct Word {
  std::string text;
  std::string description;  // one line, may be empty
};

struct Completions {
  Wanted wanted = Wanted::kWords;
  std::vector<Word> words;  // those that begin with the last word, in the order of --help
};

// `words`: what follows "lossctl", the last one unfinished (it may be empty).
Completions Complete(const CLI::App& app, absl::Span<const std::string> words);

// The first word of a command line that cannot stand where it stands.
struct Misplaced {
  enum class Kind : uint8_t {
    kCommand,  // there is no such command
    kOption,   // the command has no such option
    kSurplus,  // the command takes fewer arguments
    kValue,    // the last word is an option that wants a value
  };
  Kind kind = Kind::kCommand;
  std::string word;     // without "=VALUE"
  std::string command;  // where it stands, e.g. "context add"; empty: before any command
  std::string meant;    // the command or option that was probably meant, or empty if none is near
  std::string takes;    // of kValue: the value's type, e.g. "SECONDS" or "loss|dx|all"
};
std::optional<Misplaced> FindMisplaced(const CLI::App& app, absl::Span<const std::string> words);

// The command that the words name, e.g. "context add"; empty if they name none.
std::string CommandOf(const CLI::App& app, absl::Span<const std::string> words);

// The script that makes a shell ("bash", "zsh", "fish") complete lossctl's words; "" for any other shell.
absl::string_view CompletionScript(absl::string_view shell);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_USAGE_H_
