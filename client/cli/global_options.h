// SPDX-License-Identifier: Apache-2.0
// The options that every command has.
#ifndef LOSSD_CLIENT_CLI_GLOBAL_OPTIONS_H_
#define LOSSD_CLIENT_CLI_GLOBAL_OPTIONS_H_

#include <CLI/App.hpp>
#include <string>
#include <vector>

#include "client/cli/context.h"

namespace lossd::cli {

void AddGlobalOptions(CLI::App* app, Context* context);

// Reads them among the words of an unfinished command line.
void ReadGlobalOptions(std::vector<std::string> words, Context* context);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_GLOBAL_OPTIONS_H_
