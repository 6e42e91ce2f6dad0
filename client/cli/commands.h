// SPDX-License-Identifier: Apache-2.0
// The commands of lossctl, by group, which the sources *_command.cc and *_commands.cc define. Each function
// adds its subcommands to `app`; a chosen subcommand sets context->action. `context` must outlive `app`.
//
// It is shorter than 60 lines because it only names the functions that main.cc calls.
#ifndef LOSSD_CLIENT_CLI_COMMANDS_H_
#define LOSSD_CLIENT_CLI_COMMANDS_H_

#include <CLI/App.hpp>
#include <string>

#include "absl/types/span.h"
#include "client/cli/context.h"

namespace lossd::cli {

void AddServerCommands(CLI::App* app, Context* context);      // health, server, metrics
void AddHeadCommands(CLI::App* app, Context* context);        // heads, describe, create, delete
void AddResetCommand(CLI::App* app, Context* context);        // reset
void AddSharesCommand(CLI::App* app, Context* context);       // shares
void AddStepCommands(CLI::App* app, Context* context);        // grad-norm, step, zero-grad
void AddCheckpointCommands(CLI::App* app, Context* context);  // save, load, checkpoints, checkpoints rm
void AddTensorCommands(CLI::App* app, Context* context);      // read, write
void AddLossCommand(CLI::App* app, Context* context);         // loss
void AddBenchCommand(CLI::App* app, Context* context);        // bench
void AddWatchCommand(CLI::App* app, Context* context);        // watch
void AddTraceCommand(CLI::App* app, Context* context);        // trace
void AddTopCommand(CLI::App* app, Context* context);          // top
void AddContextCommand(CLI::App* app, Context* context);      // context list, use, add, remove, show
void AddEventsCommand(CLI::App* app, Context* context);       // events
void AddPlanCommand(CLI::App* app, Context* context);         // plan
void AddCompletionCommand(CLI::App* app, Context* context);   // completion

// What a completion script asks for: the words that may take the place of the last of `words`, one a line,
// with a tab before a description; or ":file". `context` has the global options that are among `words`.
void PrintCompletions(const CLI::App& app, absl::Span<const std::string> words, Context* context);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_COMMANDS_H_
