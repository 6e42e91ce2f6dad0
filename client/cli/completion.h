// SPDX-License-Identifier: Apache-2.0
// What may follow on a command line of lossctl, for shells that complete words and for messages about words
// that are misspelt. Knows the commands from CLI11's description of them, so nothing is listed twice.
//
// Pure functions; thread-compatible.
#ifndef LOSSD_CLIENT_CLI_COMPLETION_H_
#define LOSSD_CLIENT_CLI_COMPLETION_H_

#include <CLI/App.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::cli {

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

#endif  // LOSSD_CLIENT_CLI_COMPLETION_H_
