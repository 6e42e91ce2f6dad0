// lossctl: lossd from a terminal. `lossctl --help` is its manual.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/completion.h"
#include "client/cli/context.h"
#include "client/cli/errors.h"

namespace lossd::cli {
namespace {

constexpr char kFooter[] =
    "Exit codes: 0 done, 1 the operation failed, 2 wrong command line, 3 no server or no answer,\n"
    "4 refused (bad input, or the server is not in a state for it), 5 the server was restarted: gradients\n"
    "of the open step are gone.\n"
    "A token for the server comes from the environment variable LOSSD_TOKEN.\n"
    "`lossctl COMMAND --help` describes a command.";

// For completion scripts, so not among the commands of --help.
constexpr char kCompleteCommand[] = "__complete";

void AddGlobalOptions(CLI::App* app, Context* context) {
  app->add_option("--server", context->server, "The server's gRPC address [127.0.0.1:7070]")
      ->type_name("HOST:PORT")
      ->envname("LOSSD_SERVER");
  // Paths. A token is not an option, because every user of a machine sees the command lines of all programs.
  context->credentials.token = client::Credentials::OptionsFromEnvironment().token;
  app->add_option("--ca", context->credentials.ca,
                  "Certificate authority of the server; the connection has TLS then")
      ->type_name("FILE")
      ->envname("LOSSD_CA");
  app->add_option("--cert", context->credentials.cert, "Certificate to show to the server")
      ->type_name("FILE")
      ->envname("LOSSD_CERT");
  app->add_option("--key", context->credentials.key, "Key of --cert")
      ->type_name("FILE")
      ->envname("LOSSD_KEY");
  app->add_flag("--json", context->json, "Print JSON, for scripts");
  app->add_option("--timeout", context->timeout_seconds, "Seconds for connecting and for each call")
      ->type_name("SECONDS")
      ->check(CLI::PositiveNumber);
  app->add_option("--attempts", context->attempts,
                  "Of a call whose connection breaks and that may be repeated [3]")
      ->check(CLI::PositiveNumber);
  const auto parse_incarnation = [context](const CLI::results_t& results) {
    return absl::SimpleHexAtoi(results[0], &context->incarnation);
  };
  app->add_option("--incarnation", parse_incarnation,
                  "Fail with exit code 5 if the server is another process than the one that printed this")
      ->type_name("HEX");
}

// Reads the global options among the words of an unfinished command line.
void ReadGlobalOptions(std::vector<std::string> words, Context* context) {
  CLI::App globals;
  globals.allow_extras();
  AddGlobalOptions(&globals, context);
  std::reverse(words.begin(), words.end());  // as CLI11 wants them
  try {
    globals.parse(std::move(words));
  } catch (const CLI::ParseError&) {
    // The rest of the words is as good as it is.
  }
}

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
  std::fputs(ErrorText(status, context.json).c_str(), stderr);
  return ExitCodeOf(status);
}

}  // namespace
}  // namespace lossd::cli

int main(int argc, char** argv) { return lossd::cli::Main(argc, argv); }
