// SPDX-License-Identifier: Apache-2.0
#include "client/cli/global_options.h"

#include <CLI/Config.hpp>
#include <CLI/Error.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "client/cli/options.h"
#include "client/cli/value_checks.h"

namespace lossd::cli {
namespace {

const std::map<std::string, Output>& Outputs() {
  static const auto* const words = new std::map<std::string, Output>{
      {"json", Output::kJson}, {"table", Output::kTable}, {"wide", Output::kWide}, {"yaml", Output::kYaml}};
  return *words;
}

const std::map<std::string, ColorMode>& ColorModes() {
  static const auto* const words = new std::map<std::string, ColorMode>{
      {"always", ColorMode::kAlways}, {"auto", ColorMode::kAuto}, {"never", ColorMode::kNever}};
  return *words;
}

CLI::Option* AddText(CLI::App* app, const std::string& name, std::string* value, const std::string& type,
                     const std::string& description) {
  return app->add_option(name, *value, description)->type_name(type)->check(NotEmpty());
}

// The variables that stand for these options are read by Context::Settle, since a context comes in between.
void AddServerOptions(CLI::App* app, ServerFlags* flags) {
  CLI::Option* server =
      AddText(app, "--server", &flags->server, "HOST:PORT",
              "The server's gRPC address [LOSSD_SERVER, else the context's, else 127.0.0.1:7070]");
  AddText(app, "--context", &flags->context, "CONTEXT",
          "A server with its certificates and token, by its name in `lossctl context list` [LOSSD_CONTEXT, "
          "else the "
          "current one]")
      ->excludes(server);
  // Paths. A token is not an option, because every user of a machine sees the command lines of all programs.
  AddText(app, "--ca", &flags->ca, "FILE",
          "Certificate authority of the server; the connection has TLS then [LOSSD_CA, else the context's]");
  AddText(app, "--cert", &flags->cert, "FILE",
          "Certificate to show to the server [LOSSD_CERT, else the context's]");
  AddText(app, "--key", &flags->key, "FILE", "Key of --cert [LOSSD_KEY, else the context's]");
}

void AddOutputOptions(CLI::App* app, Context* context) {
  const auto set = [context](Output output) {
    context->output = output;
    context->json = output == Output::kJson || output == Output::kYaml;
  };
  CLI::Option* output =
      AddWordFunction(app, "-o,--output", set, Outputs(),
                      "Print a table, one with more columns, or a document for scripts [table]");
  app->add_flag_callback(
         "--json", [set] { set(Output::kJson); }, "The same as -o json")
      ->excludes(output);
  AddWord(
      app, "--color", &context->color, ColorModes(),
      "Whether states and errors have colours [auto: on a terminal, unless NO_COLOR is set or TERM is dumb]");
}

}  // namespace

void AddGlobalOptions(CLI::App* app, Context* context) {
  AddServerOptions(app, &context->flags);
  AddOutputOptions(app, context);
  app->add_option("--timeout", context->timeout_seconds, "Seconds for connecting and for each call")
      ->type_name("SECONDS")
      ->check(NumberAboveZero());
  app->add_option("--attempts", context->attempts,
                  "Of a call whose connection breaks and that may be repeated [3]")
      ->check(WholeNumber(1, 1000));
  const auto parse_incarnation = [context](const CLI::results_t& results) {
    return absl::SimpleHexAtoi(results[0], &context->incarnation);
  };
  app->add_option("--incarnation", parse_incarnation,
                  "Fail with exit code 5 if the server is another process than the one that printed this")
      ->type_name("HEX")
      ->check(Rule("be up to 16 hexadecimal digits, as `lossctl server` prints them", [](const auto& text) {
        uint64_t unused = 0;
        return absl::SimpleHexAtoi(text, &unused);
      }));
}

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

}  // namespace lossd::cli
