// SPDX-License-Identifier: Apache-2.0
// What may follow on a command line of lossctl, for shells that complete words and for messages about words
// that are misspelt. Knows the commands from CLI11's description of them, so nothing is listed twice.
//
// Pure functions; thread-compatible.
#ifndef LOSSD_CLIENT_CLI_COMPLETION_H_
#define LOSSD_CLIENT_CLI_COMPLETION_H_

#include <CLI/App.hpp>
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

// The command or the option that was probably meant by the first word that is neither, or "" if none is near.
std::string ProbablyMeant(const CLI::App& app, absl::Span<const std::string> words);

// The script that makes a shell ("bash", "zsh", "fish") complete lossctl's words; "" for any other shell.
absl::string_view CompletionScript(absl::string_view shell);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_COMPLETION_H_
