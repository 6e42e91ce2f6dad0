// SPDX-License-Identifier: Apache-2.0
// lossctl: lossd from a terminal. `lossctl --help` is its manual.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/completion.h"
#include "client/cli/context.h"
#include "client/cli/errors.h"
#include "client/cli/global_options.h"

namespace lossd::cli {
namespace {

constexpr char kFooter[] =
    "Exit codes: 0 done, 1 the operation failed, 2 wrong command line, 3 no server or no answer,\n"
    "4 refused (bad input, or the server is not in a state for it), 5 the server was restarted: gradients\n"
    "of the open step are gone.\n"
    "The server is that of --server, --context, LOSSD_SERVER, LOSSD_CONTEXT, or of the current context. Its\n"
    "certificates come from options, the environment or that context, its token from LOSSD_TOKEN or that\n"
    "context's token file.\n"
    "`lossctl COMMAND --help` describes a command.";

// For completion scripts, so not among the commands of --help.
constexpr char kCompleteCommand[] = "__complete";

int Refuse(const CLI::App& app, absl::Span<const std::string> words, const CLI::ParseError& error) {
  const int code = app.exit(error);
  if (code == 0) return kExitOk;
  if (const std::string meant = ProbablyMeant(app, words); !meant.empty()) {
    std::fputs(absl::StrCat("Did you mean ", meant, "?\n").c_str(), stderr);
  }
  return kExitUsage;
}

int Main(int argc, char** argv) {
  const std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  Context context;
  CLI::App app("Talks to lossd, the loss head server.", "lossctl");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();  // global options may follow the command
  app.set_help_all_flag("--help-all", "Print the help of every command and exit");
  app.set_version_flag("--version", "lossctl " LOSSD_VERSION, "Print the version and exit");
  AddGlobalOptions(&app, &context);
  AddServerCommands(&app, &context);
  AddHeadCommands(&app, &context);
  AddTensorCommands(&app, &context);
  AddLossCommand(&app, &context);
  AddStepCommands(&app, &context);
  AddCheckpointCommands(&app, &context);
  AddBenchCommand(&app, &context);
  AddWatchCommand(&app, &context);
  AddTopCommand(&app, &context);
  AddContextCommand(&app, &context);
  AddEventsCommand(&app, &context);
  AddTraceCommand(&app, &context);
  AddPlanCommand(&app, &context);
  AddCompletionCommand(&app, &context);
  if (!words.empty() && words.front() == kCompleteCommand) {
    const std::vector<std::string> unfinished(words.begin() + 1, words.end());
    ReadGlobalOptions(unfinished, &context);
    PrintCompletions(app, unfinished, &context);
    return kExitOk;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return Refuse(app, words, error);
  }
  const absl::Status status = context.action();
  if (status.ok()) return context.bad_news ? kExitFailed : kExitOk;
  const Style style{.color = context.ColorsOn(STDERR_FILENO)};
  std::fputs(ErrorText(status, context.json, style).c_str(), stderr);
  return ExitCodeOf(status);
}

}  // namespace
}  // namespace lossd::cli

int main(int argc, char** argv) { return lossd::cli::Main(argc, argv); }
