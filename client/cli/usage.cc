// SPDX-License-Identifier: Apache-2.0
// Errors about wrong command lines, and completion of words (usage.h). Also the command completion.
#include "client/cli/usage.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/context.h"
#include "client/cli/options.h"
#include "client/cpp/contexts.h"

namespace lossd::cli {
namespace {

std::string Quoted(absl::string_view text) { return absl::StrCat("\"", text, "\""); }

// The error message for a misplaced word: "context add has no option --foo. Did you mean --for?"
std::string MessageFor(const Misplaced& found) {
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

// Rewords CLI11's messages for the other errors: a failed check (`--lr: must be ...`), an option that is
// missing, excluded or given twice, a number that does not fit its variable.
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
  if (found.has_value()) return MessageFor(*found);
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
    const std::string type = option->get_type_name();  // has also the name of the option's check, if any
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

// ---- Words that may follow ----

namespace {

bool IsOption(absl::string_view word) { return word.size() > 1 && word[0] == '-'; }

// The option that the word names, of the command or of one of its parents: an option may be given after any
// subcommand. The value of a short option may follow its letter directly: "-ojson".
const CLI::Option* FindOption(const CLI::App* app, absl::string_view word) {
  const bool is_short = word.size() > 2 && word[1] != '-';
  const std::string name(is_short ? word.substr(0, 2) : word.substr(0, word.find('=')));
  for (; app != nullptr; app = app->get_parent()) {
    if (const CLI::Option* option = app->get_option_no_throw(name); option != nullptr) return option;
  }
  return nullptr;
}

bool TakesValue(const CLI::Option& option) { return option.get_items_expected_max() > 0; }

bool TakesMany(const CLI::Option& option) { return option.get_items_expected_max() > 1; }

// Whether the value of the option is the next word, and not a part of this one.
bool Waits(const CLI::Option& option, absl::string_view word) {
  const bool has_value = absl::StrContains(word, '=') || (word.size() > 2 && word[1] != '-');
  return TakesValue(option) && !has_value;
}

std::vector<const CLI::App*> Commands(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App* command) { return !command->get_group().empty(); });
}

std::vector<const CLI::Option*> Options(const CLI::App& app) {
  return app.get_options([](const CLI::Option* option) { return !option->get_group().empty(); });
}

const CLI::App* FindCommand(const CLI::App& app, absl::string_view word) {
  for (const CLI::App* command : Commands(app)) {
    if (command->get_name() == word) return command;
  }
  return nullptr;
}

// The state of a command line after some of its words.
struct Place {
  const CLI::App* app = nullptr;
  const CLI::Option* waits = nullptr;  // the option whose value comes next, or null
  size_t positionals = 0;              // the number of positional arguments that the command has got
  bool many = false;                   // the next words may be further values of an option
};

Place After(const CLI::App& app, absl::Span<const std::string> words) {
  Place place = {.app = &app};
  for (const std::string& word : words) {
    if (place.waits != nullptr) {
      place.waits = nullptr;
    } else if (IsOption(word)) {
      const CLI::Option* option = FindOption(place.app, word);
      if (option != nullptr && Waits(*option, word)) place.waits = option;
      place.many = option != nullptr && TakesMany(*option);
    } else if (const CLI::App* command = FindCommand(*place.app, word); command != nullptr) {
      place.app = command;
      place.positionals = 0;
    } else {
      ++place.positionals;
    }
  }
  return place;
}

std::string FirstLine(absl::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

void AddIf(absl::string_view prefix, std::string text, absl::string_view description, Completions* found) {
  if (absl::StartsWith(text, prefix)) found->words.push_back({std::move(text), FirstLine(description)});
}

// The values that an option takes, from the name of its type: "all|dx|loss", "FILE".
Completions ValuesOf(const CLI::Option& option, absl::string_view prefix) {
  const std::string name = option.get_name(/*positional=*/true);
  const std::string type = option.get_type_name();
  if (name == "HEAD") return {.wanted = Wanted::kHead};
  if (name == "CHECKPOINT") return {.wanted = Wanted::kCheckpoint};
  if (name == "CONTEXT" || type == "CONTEXT") return {.wanted = Wanted::kContext};
  if (absl::StrContains(type, "FILE") || absl::StrContains(type, "PATH") || absl::StrContains(type, ".npy")) {
    return {.wanted = Wanted::kFile};
  }
  Completions found;
  if (!absl::StrContains(type, '|')) {
    found.wanted = Wanted::kOther;
    return found;
  }
  for (absl::string_view word : absl::StrSplit(type, '|')) AddIf(prefix, std::string(word), "", &found);
  return found;
}

Completions OptionsFrom(const CLI::App* app, absl::string_view prefix) {
  Completions found;
  for (; app != nullptr; app = app->get_parent()) {
    for (const CLI::Option* option : Options(*app)) {
      for (const std::string& name : option->get_lnames()) {
        AddIf(prefix, "--" + name, option->get_description(), &found);
      }
    }
  }
  return found;
}

// The edit distance: how many letters must be inserted, removed, replaced, or swapped with the next letter.
size_t Distance(absl::string_view a, absl::string_view b) {
  std::vector<std::vector<size_t>> cost(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        cost[i][j] = i + j;
        continue;
      }
      const size_t replaced = cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      cost[i][j] = std::min({cost[i - 1][j] + 1, cost[i][j - 1] + 1, replaced});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
    }
  }
  return cost[a.size()][b.size()];
}

// The word that was probably meant, or "". At most a third of the letters may be wrong. If no word is that
// near, the result is the first word of which `word` is a part, such as "--compute-dtype" for "--compute" or
// "--dtype".
std::string Nearest(absl::string_view word, const std::vector<Word>& words) {
  std::string nearest;
  size_t least = std::max<size_t>(1, word.size() / 3) + 1;
  for (const Word& each : words) {
    const size_t distance = Distance(absl::AsciiStrToLower(word), each.text);
    if (distance >= least) continue;
    least = distance;
    nearest = each.text;
  }
  if (!nearest.empty()) return nearest;
  const absl::string_view part = absl::StripPrefix(word, "--");
  for (const Word& each : words) {
    const std::vector<absl::string_view> parts = absl::StrSplit(absl::StripPrefix(each.text, "--"), '-');
    if (parts.size() > 1 && std::find(parts.begin(), parts.end(), part) != parts.end()) return each.text;
  }
  return "";
}

// The name of the command with its parents, but without the program: "context add".
std::string PathOf(const CLI::App* app) {
  std::string path;
  for (; app != nullptr && app->get_parent() != nullptr; app = app->get_parent()) {
    path = path.empty() ? app->get_name() : absl::StrCat(app->get_name(), " ", path);
  }
  return path;
}

// The option that takes the positional argument with this number; null if there is none.
const CLI::Option* PositionalAt(const CLI::App& app, size_t number) {
  for (const CLI::Option* option : Options(app)) {
    if (!option->get_positional()) continue;
    const auto most = static_cast<size_t>(option->get_items_expected_max());
    if (number < most) return option;
    number -= most;
  }
  return nullptr;
}

size_t MostPositionals(const CLI::App& app) {
  size_t most = 0;
  for (const CLI::Option* option : Options(app)) {
    if (option->get_positional()) most += static_cast<size_t>(option->get_items_expected_max());
  }
  return most;
}

std::vector<Word> CommandWords(const CLI::App& app) {
  std::vector<Word> words;
  for (const CLI::App* command : Commands(app))
    words.push_back({command->get_name(), command->get_description()});
  return words;
}

constexpr absl::string_view kBash = R"(# lossctl's words for bash: source <(lossctl completion bash)
_lossctl() {
  local IFS=$'\n' words
  words=$(lossctl __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null) || return 0
  if [ "$words" = :file ]; then
    compopt -o filenames 2>/dev/null
    COMPREPLY=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}"))
    return 0
  fi
  COMPREPLY=($(cut -f1 <<<"$words"))
}
complete -F _lossctl lossctl
)";

constexpr absl::string_view kZsh = R"zsh(#compdef lossctl
# lossctl's words for zsh: source <(lossctl completion zsh)
_lossctl() {
  local -a found described
  found=(${(f)"$(lossctl __complete "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  if [[ "${found[1]}" == :file ]]; then
    _files
    return
  fi
  described=("${(@)${(@)found//:/\\:}//$'\t'/:}")
  _describe lossctl described
}
compdef _lossctl lossctl
)zsh";

constexpr absl::string_view kFish = R"(# lossctl's words for fish: lossctl completion fish | source
function __lossctl
  set -l tokens (commandline -opc) (commandline -ct)
  set -l words (lossctl __complete $tokens[2..] 2>/dev/null)
  if test "$words[1]" = :file
    __fish_complete_path (commandline -ct)
    return
  end
  printf '%s\n' $words
end
complete -c lossctl -f -a '(__lossctl)'
)";

}  // namespace

Completions Complete(const CLI::App& app, absl::Span<const std::string> words) {
  const std::string last = words.empty() ? "" : words.back();
  const Place place = After(app, words.subspan(0, words.empty() ? 0 : words.size() - 1));
  if (place.waits != nullptr) return ValuesOf(*place.waits, last);
  if (IsOption(last) || last == "-") return OptionsFrom(place.app, last);
  const CLI::Option* const positional = PositionalAt(*place.app, place.positionals);
  if (!Commands(*place.app).empty() && place.positionals == 0) {
    Completions found;
    if (positional != nullptr) found = ValuesOf(*positional, last);
    for (const Word& word : CommandWords(*place.app)) AddIf(last, word.text, word.description, &found);
    return found;
  }
  return positional != nullptr ? ValuesOf(*positional, last) : OptionsFrom(place.app, "--");
}

std::optional<Misplaced> FindMisplaced(const CLI::App& app, absl::Span<const std::string> words) {
  using Kind = Misplaced::Kind;
  for (size_t i = 0; i < words.size(); ++i) {
    const Place place = After(app, words.subspan(0, i));
    if (place.waits != nullptr) continue;
    if (IsOption(words[i])) {
      if (FindOption(place.app, words[i]) != nullptr) continue;
      const std::string word = words[i].substr(0, words[i].find('='));
      return Misplaced{Kind::kOption, word, PathOf(place.app),
                       Nearest(word, OptionsFrom(place.app, "--").words), ""};
    }
    if (Commands(*place.app).empty() || MostPositionals(*place.app) > 0) {
      if (FindCommand(*place.app, words[i]) != nullptr) continue;
      if (place.many || place.positionals < MostPositionals(*place.app)) continue;
      return Misplaced{Kind::kSurplus, words[i], PathOf(place.app), "", ""};
    }
    if (FindCommand(*place.app, words[i]) == nullptr) {
      return Misplaced{Kind::kCommand, words[i], PathOf(place.app),
                       Nearest(words[i], CommandWords(*place.app)), ""};
    }
  }
  const Place end = After(app, words);
  if (end.waits == nullptr) return std::nullopt;
  return Misplaced{Kind::kValue, words.back(), PathOf(end.app), "", end.waits->get_type_name()};
}

std::string CommandOf(const CLI::App& app, absl::Span<const std::string> words) {
  return PathOf(After(app, words).app);
}

absl::string_view CompletionScript(absl::string_view shell) {
  if (shell == "bash") return kBash;
  if (shell == "zsh") return kZsh;
  return shell == "fish" ? kFish : "";
}

// ---- The command completion ----

namespace {

// The limit for an answer of the server, because the shell waits for it while the user types.
constexpr double kPatienceSeconds = 1.0;

// The names that the server, or the file of contexts, has. None if it does not answer.
std::vector<std::string> Names(Context* context, Wanted wanted) {
  std::vector<std::string> names;
  if (wanted == Wanted::kContext) {
    const absl::StatusOr<client::Contexts> contexts = client::ReadContexts(client::ContextsPath());
    for (const auto& [name, server] : contexts.ok() ? contexts->by_name : decltype(contexts->by_name)())
      names.push_back(name);
    return names;
  }
  const absl::StatusOr<std::unique_ptr<client::Client>> client = context->Connect();
  if (!client.ok()) return names;
  if (wanted == Wanted::kHead) {
    const auto heads = (*client)->ListHeads(context->timeout());
    if (!heads.ok()) return names;
    for (const v1::HeadDescription& head : *heads) names.push_back(head.spec().name());
    return names;
  }
  const auto checkpoints = (*client)->ListCheckpoints("", context->timeout());
  if (!checkpoints.ok()) return names;
  for (const auto& checkpoint : checkpoints->checkpoints()) names.push_back(checkpoint.checkpoint());
  return names;
}

}  // namespace

void AddCompletionCommand(CLI::App* app, Context* context) {
  CLI::App* completion =
      app->add_subcommand("completion", "Print what makes a shell complete lossctl's words, heads included");
  auto shell = std::make_shared<std::string>();
  completion->add_option("SHELL", *shell, "In bash and zsh: source <(lossctl completion bash)")
      ->required()
      ->type_name("bash|fish|zsh")
      ->check(Rule("be one of bash, fish, zsh",
                   [](const std::string& name) { return !CompletionScript(name).empty(); }));
  completion->callback([=] {
    context->action = [=] {
      context->Print(CompletionScript(*shell));
      return absl::OkStatus();
    };
  });
}

void PrintCompletions(const CLI::App& app, absl::Span<const std::string> words, Context* context) {
  const Completions found = Complete(app, words);
  if (found.wanted == Wanted::kFile) context->Print(":file\n");
  for (const Word& word : found.words) {
    context->Print(word.description.empty() ? absl::StrCat(word.text, "\n")
                                            : absl::StrCat(word.text, "\t", word.description, "\n"));
  }
  if (found.wanted == Wanted::kWords || found.wanted == Wanted::kFile || found.wanted == Wanted::kOther)
    return;
  if (context->timeout_seconds == 0) context->timeout_seconds = kPatienceSeconds;
  context->attempts = 1;
  for (const std::string& name : Names(context, found.wanted)) {
    if (absl::StartsWith(name, words.back())) context->Print(absl::StrCat(name, "\n"));
  }
}

}  // namespace lossd::cli
