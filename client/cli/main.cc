// SPDX-License-Identifier: Apache-2.0
// The main function of lossctl, which controls and watches a lossd server from a terminal. `lossctl --help`
// is its manual.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "client/cli/context.h"
#include "client/cli/options.h"
#include "client/cli/usage.h"
#include "kernels/clocks/clock.h"

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

// The command that completion scripts call. It is not listed by --help.
constexpr char kCompleteCommand[] = "__complete";

// Opens /dev/null for each of the descriptors 0 to 2 that is closed. Otherwise the first file or connection
// would get that descriptor, and lossctl would print into it. Now printing fails instead.
void OccupyStandardStreams() {
  for (int descriptor = 0; descriptor <= 2; ++descriptor) {
    if (fcntl(descriptor, F_GETFD) == -1) static_cast<void>(open("/dev/null", O_RDONLY));
  }
}

int Fail(const absl::Status& status, const Context& context) {
  const Style style{.color = context.ColorsOn(STDERR_FILENO)};
  std::fputs(ErrorText(status, context.json, style).c_str(), stderr);
  return ExitCodeOf(status);
}

int Refuse(const CLI::App& app, absl::Span<const std::string> words, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) {  // --help, --version
    app.exit(error);
    return std::fflush(stdout) == 0 ? kExitOk : kExitFailed;
  }
  Context context;  // has only the options that say how to print
  ReadGlobalOptions({words.begin(), words.end()}, &context);
  return Fail(WhyRefused(app, words, error), context);
}

// Runs the chosen command. Running out of memory for rows, tensors or answers is reported like any other
// error.
absl::Status Act(const Context& context) {
  try {
    absl::Status status = context.action();
    status.Update(context.Printed());
    return status;
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("this machine has not enough memory for that");
  } catch (const std::length_error&) {
    return absl::ResourceExhaustedError("that is more than the memory of any machine");
  }
}

int Main(int argc, char** argv) {
  OccupyStandardStreams();
  clocks::TakeLocksWithoutSearch();
  // gRPC's log lines about failed handshakes say less than lossctl's own errors, and would be printed before
  // them.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  const std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  Context context;
  CLI::App app("Talks to lossd, the loss head server.", "lossctl");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.fallthrough();  // global options may be given after the command, too
  app.set_help_all_flag("--help-all", "Print the help of every command and exit");
  app.set_version_flag("--version", "lossctl " LOSSD_VERSION, "Print the version and exit");
  AddGlobalOptions(&app, &context);
  AddServerCommands(&app, &context);
  AddHeadCommands(&app, &context);
  AddResetCommand(&app, &context);
  AddSharesCommand(&app, &context);
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
  CheckNumbers(&app);
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
  const absl::Status status = Act(context);
  if (status.ok()) return context.bad_news ? kExitFailed : kExitOk;
  return Fail(status, context);
}

}  // namespace
}  // namespace lossd::cli

int main(int argc, char** argv) { return lossd::cli::Main(argc, argv); }
