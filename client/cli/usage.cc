// SPDX-License-Identifier: Apache-2.0
#include "client/cli/usage.h"

#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "client/cli/completion.h"
#include "client/cli/errors.h"
#include "client/cli/value_checks.h"

namespace lossd::cli {
namespace {

std::string Quoted(absl::string_view text) { return absl::StrCat("\"", text, "\""); }

// "context add has no option --foo. Did you mean --for?"
std::string Say(const Misplaced& found) {
  using Kind = Misplaced::Kind;
  const std::string meant = found.meant.empty() ? "" : absl::StrCat(". Did you mean ", found.meant, "?");
  const std::string where = found.command.empty() ? "lossctl" : found.command;
  switch (found.kind) {
    case Kind::kCommand:
      return absl::StrCat(
          found.command.empty() ? "there is no command " : absl::StrCat(where, " has no command "),
          Quoted(found.word), meant);
    case Kind::kOption:
      return absl::StrCat(where, " has no option ", found.word, meant);
    case Kind::kSurplus:
      return absl::StrCat(where, " takes no further argument, got ", Quoted(found.word));
    case Kind::kValue:
      return absl::StrCat(found.word, " wants a value", found.takes.empty() ? "" : ": ", found.takes);
  }
  return "";
}

// CLI11's words for what is left: a check's (`--lr: must be ...`), an option that is missing, excluded or
// given twice, a number that its variable does not hold.
std::string InOurWords(const std::string& text) {
  constexpr absl::string_view kNoFit = "Could not convert: ";
  if (absl::StartsWith(text, kNoFit)) {
    const std::pair<absl::string_view, absl::string_view> sides =
        absl::StrSplit(absl::StripPrefix(text, kNoFit), absl::MaxSplits(" = ", 1));
    return absl::StrCat(sides.first, " cannot be ", Quoted(sides.second));
  }
  return absl::StrReplaceAll(text,
                             {{": must ", " must "}, {" excludes ", " cannot be given together with "}});
}

std::string Message(const CLI::App& app, absl::Span<const std::string> words, const CLI::ParseError& error,
                    const std::optional<Misplaced>& found) {
  if (found.has_value()) return Say(*found);
  const std::string command = CommandOf(app, words);
  const bool wants_command =
      error.get_name() == "RequiredError" && absl::StrContains(error.what(), "subcommand");
  if (wants_command) {
    return command.empty() ? "a command is missing, such as `lossctl heads`"
                           : absl::StrCat(command, " wants a command of its own");
  }
  return InOurWords(error.what());
}

}  // namespace

void CheckNumbers(CLI::App* app) {
  for (CLI::Option* option : app->get_options()) {
    const std::string type = option->get_type_name();  // names a check, too, if it has one
    if (type == "UINT") option->check(WholeNumber());
    if (type == "INT") option->check(WholeNumberOfAnySign());
    if (type == "FLOAT") option->check(AnyNumber());
  }
  for (CLI::App* command : app->get_subcommands([](const CLI::App*) { return true; })) CheckNumbers(command);
}

absl::Status WhyRefused(const CLI::App& app, absl::Span<const std::string> words,
                        const CLI::ParseError& error) {
  const std::optional<Misplaced> found = FindMisplaced(app, words);
  const std::string command = CommandOf(app, words);
  return UsageError(Message(app, words, error, found),
                    absl::StrCat("lossctl ", command, command.empty() ? "" : " ", "--help"));
}

}  // namespace lossd::cli
