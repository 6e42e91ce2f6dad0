// SPDX-License-Identifier: Apache-2.0
#include "client/cli/confirm.h"

#include <unistd.h>

#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdio>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/cli/errors.h"

namespace lossd::cli {
namespace {

// The next line of stdin, up to a few characters of it. Empty at its end.
std::string ReadAnswer() {
  constexpr size_t kMostCharacters = 80;
  std::string answer;
  for (int c = std::getchar(); c != EOF && c != '\n'; c = std::getchar()) {
    if (answer.size() < kMostCharacters) answer.push_back(static_cast<char>(c));
  }
  return absl::AsciiStrToLower(absl::StripAsciiWhitespace(answer));
}

}  // namespace

CLI::Option* AddYes(CLI::App* command, bool* yes) {
  return command->add_flag("-y,--yes", *yes, "Do it without asking; needed where stdin is no terminal");
}

bool CanAsk() { return isatty(STDIN_FILENO) == 1; }

absl::Status CheckMayAsk(bool yes, const std::string& command) {
  if (yes || CanAsk()) return absl::OkStatus();
  return UsageError(
      absl::StrCat(command, " asks before it does anything, and stdin is no terminal: give --yes"),
      absl::StrCat("lossctl ", command, " --help"));
}

absl::Status Confirm(bool yes, const std::string& question, const std::string& otherwise) {
  if (yes) return absl::OkStatus();
  std::fprintf(stderr, "%s [y/N] ", question.c_str());
  std::fflush(stderr);
  const std::string answer = ReadAnswer();
  if (answer == "y" || answer == "yes") return absl::OkStatus();
  return absl::CancelledError(otherwise);
}

}  // namespace lossd::cli
