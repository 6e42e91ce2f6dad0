// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/completion.h"
#include "client/cli/contexts.h"
#include "client/cli/value_checks.h"

namespace lossd::cli {
namespace {

// A shell waits for it while somebody types.
constexpr double kPatienceSeconds = 1.0;

// The names that the server knows, or the file of contexts; none if it does not answer.
std::vector<std::string> Names(Context* context, Wanted wanted) {
  std::vector<std::string> names;
  if (wanted == Wanted::kContext) {
    const absl::StatusOr<Contexts> contexts = ReadContexts(ContextsPath());
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
