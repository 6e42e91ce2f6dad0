// SPDX-License-Identifier: Apache-2.0
// Options, checks of values and words that several commands use (options.h).
#include "client/cli/options.h"

#include <unistd.h>

#include <CLI/Config.hpp>
#include <CLI/Error.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/http.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::cli {

// ---- The question before a command (Confirm) ----

namespace {

// Reads a line from stdin and returns it in lower case, cut off after kMostCharacters. Empty at the end of
// stdin.
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

// ---- Initial values ----

void AddInitialValues(CLI::App* command, InitialValues* values) {
  v1::TensorFile* const file = &values->file;
  const std::string group = "Initial values (default: --seed 0)";
  CLI::Option* seed =
      command->add_option("--seed", values->seed, "Uniform, as torch.nn.Linear's")->group(group);
  CLI::Option* zeros = command->add_flag("--zeros", values->zeros, "All zero")->group(group);
  CLI::Option* from = command
                          ->add_option("--from", *file->mutable_path(),
                                       "safetensors file, index (.json) or model folder below the server's "
                                       "checkpoint directory")
                          ->type_name("PATH")
                          ->group(group);
  seed->excludes(zeros)->excludes(from);
  zeros->excludes(from);
  const auto add_tensor = [&](const std::string& name, std::string* tensor, const std::string& description) {
    return command->add_option(name, *tensor, description)->type_name("TENSOR")->needs(from)->group(group);
  };
  from->needs(add_tensor("--weight", file->mutable_weight(),
                         "Tensor [V, D], e.g. lm_head.weight; if tied, the embedding's name"));
  add_tensor("--bias-tensor", file->mutable_bias(), "Tensor [V] in the file");
  add_tensor("--norm-gain-tensor", file->mutable_norm_gain(), "Tensor [D] in the file");
  add_tensor("--norm-shift-tensor", file->mutable_norm_shift(), "Tensor [D] in the file");
  add_tensor("--class-weights-tensor", file->mutable_class_weights(), "Tensor [V] in the file");
  command
      ->add_flag_function(
          "--allow-non-finite", [file](int64_t count) { file->set_allow_non_finite(count > 0); },
          "Take NaN and infinities that the file holds")
      ->needs(from)
      ->group(group);
}

// ---- Global options ----

namespace {

const std::map<std::string, Output>& Outputs() {
  static const auto* const words = new std::map<std::string, Output>{
      {"json", Output::kJson}, {"table", Output::kTable}, {"wide", Output::kWide}};
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

// These options do not use CLI11's environment variables, because LOSSD_SERVER ranks after --context.
// Context::Settle reads them.
void AddServerOptions(CLI::App* app, ServerFlags* flags) {
  CLI::Option* server =
      AddText(app, "--server", &flags->server, "HOST:PORT",
              "The server's gRPC address [LOSSD_SERVER, else the context's, else 127.0.0.1:7070]");
  AddText(app, "--context", &flags->context, "CONTEXT",
          "A server with its certificates and token, by its name in `lossctl context list` [LOSSD_CONTEXT, "
          "else the "
          "current one]")
      ->excludes(server);
  // The options name files. The token is not an option, because every user of a machine sees the command
  // lines of all programs.
  AddText(app, "--ca", &flags->ca, "FILE",
          "Certificate authority of the server; the connection has TLS then [LOSSD_CA, else the context's]");
  AddText(app, "--cert", &flags->cert, "FILE",
          "Certificate to show to the server [LOSSD_CERT, else the context's]");
  AddText(app, "--key", &flags->key, "FILE", "Key of --cert [LOSSD_KEY, else the context's]");
}

void AddOutputOptions(CLI::App* app, Context* context) {
  const auto set = [context](Output output) {
    context->output = output;
    context->json = output == Output::kJson;
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
  std::reverse(words.begin(), words.end());  // CLI11 takes the words in reverse order
  try {
    globals.parse(std::move(words));
  } catch (const CLI::ParseError&) {
    // The command line is wrong or unfinished. The options that were read before the error are kept.
  }
}

// ---- Options and actions of several commands ----

namespace {

bool ParseBound(absl::string_view text, std::optional<uint64_t>* bound) {
  bound->reset();
  if (text.empty()) return true;
  uint64_t number;
  if (!absl::SimpleAtoi(text, &number)) return false;
  *bound = number;
  return true;
}

bool ParseRows(absl::string_view text, RowsOption* rows) {
  const std::vector<std::string> bounds = absl::StrSplit(text, ':');
  return bounds.size() == 2 && ParseBound(bounds[0], &rows->begin) && ParseBound(bounds[1], &rows->end);
}

constexpr char kLossGroup[] = "Loss";

// Adds an option that sets one field of the message.
template <typename T>
void AddField(CLI::App* command, v1::LossOptions* loss, const std::string& name,
              void (v1::LossOptions::*set)(T), const std::string& description) {
  command
      ->add_option_function<T>(
          name, [loss, set](const T& value) { (loss->*set)(value); }, description)
      ->group(kLossGroup);
}

// Adds an option for each field of the message. A field whose option is not given stays unset.
void AddLossFields(CLI::App* command, v1::LossOptions* loss) {
  using Loss = v1::LossOptions;
  AddField(command, loss, "--ignore-index", &Loss::set_ignore_index, "Target of rows to be left out [-100]");
  AddField(command, loss, "--label-smoothing", &Loss::set_label_smoothing, "In [0, 1] [0]");
  AddField(command, loss, "--z-loss", &Loss::set_z_loss, "Weight of the squared log-sum-exp [0]");
  AddField(command, loss, "--softcap", &Loss::set_softcap, "Soft cap of the logits; 0: none [0]");
  AddField(command, loss, "--logit-scale", &Loss::set_logit_scale,
           "Multiplies the logits (1 / temperature) [1]");
  command
      ->add_flag_function(
          "--use-class-weights", [loss](int64_t count) { loss->set_use_class_weights(count > 0); },
          "Use the head's class weights")
      ->group(kLossGroup);
  command
      ->add_flag_function(
          "--refuse-unlisted", [loss](int64_t count) { loss->set_refuse_unlisted(count > 0); },
          "Refuse targets that are not in the head's class list [their rows are ignored]")
      ->group(kLossGroup);
  AddWordFunction(
      command, "--gradients", [loss](v1::Gradients gradients) { loss->set_gradients(gradients); },
      Words<v1::Gradients>(), "How gradients are computed [as the head says]")
      ->group(kLossGroup);
  AddField(command, loss, "--filter-epsilon", &Loss::set_filter_epsilon,
           "filtered: smaller probabilities add nothing to the gradients [2^-12]");
  AddField(command, loss, "--sample-threshold", &Loss::set_sample_threshold,
           "sampled, auto: smaller probabilities add to the gradients by chance [2^-10]");
  AddField(command, loss, "--max-gradient-error", &Loss::set_max_gradient_error,
           "auto: the largest predicted relative error of sampled gradients [0.01]");
}

// `T` is a type to which a number of bytes can be assigned.
template <typename T>
CLI::Option* AddBytesTo(CLI::App* command, const std::string& name, T* value,
                        const std::string& description) {
  const auto parse = [value](const CLI::results_t& results) {
    const std::optional<uint64_t> bytes = ParseBytes(results[0]);
    if (bytes.has_value()) *value = *bytes;
    return bytes.has_value();
  };
  return command->add_option(name, parse, description)->type_name("BYTES")->check(NumberOfBytes());
}

// The name of the command with its parents, but without the program: "checkpoints rm".
std::string CommandPath(const CLI::App& command) {
  const CLI::App* const parent = command.get_parent();
  if (parent == nullptr) return "";
  const std::string above = CommandPath(*parent);
  return above.empty() ? command.get_name() : absl::StrCat(above, " ", command.get_name());
}

}  // namespace

CLI::Option* AddBytes(CLI::App* command, const std::string& name, uint64_t* value,
                      const std::string& description) {
  return AddBytesTo(command, name, value, description);
}

CLI::Option* AddBytes(CLI::App* command, const std::string& name, std::optional<uint64_t>* value,
                      const std::string& description) {
  return AddBytesTo(command, name, value, description);
}

CLI::Option* AddRows(CLI::App* command, RowsOption* rows) {
  const auto parse = [rows](const CLI::results_t& results) { return ParseRows(results[0], rows); };
  return command->add_option("--rows", parse, "Rows of the tensor, half-open; default: all")
      ->type_name("BEGIN:END")
      ->check(Rule("be BEGIN:END, such as 0:16 or 16:", [](const std::string& text) {
        RowsOption unused;
        return ParseRows(text, &unused);
      }));
}

CLI::Option* AddHead(CLI::App* command, std::string* head) {
  return command->add_option("HEAD", *head, "Name of the head")->required()->type_name("");
}

CLI::Option* AddHttp(CLI::App* command, std::string* http, const std::string& description) {
  return command->add_option("--http", *http, description)
      ->type_name("HOST:PORT")
      ->check(Rule("be HOST:PORT, http://HOST:PORT or https://HOST:PORT",
                   [](const std::string& text) { return text.empty() || IsHttpAddress(text); }));
}

absl::Status WithClient(Context* context, const std::function<absl::Status(client::Client&)>& action) {
  LOSSD_TRY(std::unique_ptr<client::Client> client, context->Connect());
  return action(*client);
}

void AddLiveOptions(CLI::App* command, LiveFlags* flags) {
  command->add_option("--interval", flags->interval_seconds, "Seconds between looks, 0.05 to 3600 [1]")
      ->check(NumberFromTo(0.05, 3600));
  command->add_option("--count", flags->count, "Leave after so many looks; 0: never [0]");
}

void SetClientAction(CLI::App* command, Context* context,
                     std::function<absl::Status(client::Client&)> action) {
  command->callback([context, action = std::move(action)] {
    context->action = [context, action] { return WithClient(context, action); };
  });
}

void SetAskingAction(CLI::App* command, Context* context, std::shared_ptr<bool> yes,
                     std::function<absl::Status(client::Client&)> action) {
  const auto act = [command, context, yes = std::move(yes), action = std::move(action)] {
    absl::Status may_ask = CheckMayAsk(*yes, CommandPath(*command));
    return may_ask.ok() ? WithClient(context, action) : may_ask;
  };
  command->callback([context, act] { context->action = act; });
}

absl::StatusOr<uint64_t> StepOf(Context* context, const std::string& head, std::optional<uint64_t> step,
                                client::Client& client) {
  if (step.has_value()) return *step;
  LOSSD_TRY(const v1::HeadDescription description, client.DescribeHead(head, context->timeout()));
  return description.state().step();
}

void AddLossOptions(CLI::App* command, client::ComputeOptions* options) {
  AddLossFields(command, &options->loss);
  AddWord(command, "--reduction", &options->reduction, Words<v1::Reduction>(), "[mean]")->group(kLossGroup);
  command
      ->add_option("--normalizer", options->normalizer, "Divides the sum for the mean [number of valid rows]")
      ->group(kLossGroup);
  command->add_option("--grad-output", options->grad_output, "Multiplies every gradient [1]")
      ->group(kLossGroup);
  command
      ->add_option("--streams", options->streams, "Concurrent streams per microbatch; 0: as many as help [0]")
      ->check(WholeNumber(0, 1024))
      ->group("Transport");
  AddBytes(command, "--slice-bytes", &options->slice_bytes,
           "Hidden states sent at once, at most [1MiB; 4MiB in shared memory]")
      ->group("Transport");
}

// ---- Checks of values ----

namespace {

// SimpleAtoi accepts spaces around a number. This function does not accept one before it.
template <typename T>
bool IsWhole(const std::string& text, T* number) {
  return !text.empty() && !absl::ascii_isspace(static_cast<unsigned char>(text.front())) &&
         absl::SimpleAtoi(text, number);
}

}  // namespace

ValueCheck Rule(std::string rule, std::function<bool(const std::string&)> fits) {
  return [rule = std::move(rule), fits = std::move(fits)](const std::string& text) {
    return fits(text) ? std::string() : absl::StrCat("must ", rule, ", got \"", text, "\"");
  };
}

ValueCheck WholeNumberOfAnySign() {
  return Rule("be a whole number", [](const std::string& text) {
    int64_t number = 0;
    return IsWhole(text, &number);
  });
}

ValueCheck WholeNumber(uint64_t least, uint64_t most) {
  const bool bounded = most != std::numeric_limits<uint64_t>::max();
  const std::string rule = bounded ? absl::StrCat("be a whole number from ", least, " to ", most)
                                   : absl::StrCat("be a whole number from ", least, " to 2^64 - 1");
  return Rule(rule, [least, most](const std::string& text) {
    uint64_t number = 0;
    return IsWhole(text, &number) && number >= least && number <= most;
  });
}

ValueCheck AnyNumber() {
  return Rule("be a number", [](const std::string& text) {
    double number = 0;
    return absl::SimpleAtod(text, &number);
  });
}

ValueCheck NumberFromTo(double least, double most) {
  return Rule(absl::StrFormat("be a number from %g to %g", least, most), [least, most](const auto& text) {
    double number = 0;
    return absl::SimpleAtod(text, &number) && number >= least && number <= most;
  });
}

ValueCheck NumberAboveZero() {
  return Rule("be a number above 0", [](const std::string& text) {
    double number = 0;
    return absl::SimpleAtod(text, &number) && number > 0 && std::isfinite(number);
  });
}

ValueCheck NumberOfBytes() {
  return Rule("be a number of bytes such as 4096, 64KiB or 2GiB",
              [](const std::string& text) { return ParseBytes(text).has_value(); });
}

ValueCheck NotEmpty() {
  return [](const std::string& text) { return text.empty() ? "must not be empty" : std::string(); };
}

std::optional<uint64_t> ParseBytes(absl::string_view text) {
  // lossctl also accepts "64K" for 64 KiB.
  const bool is_short = !text.empty() && absl::StrContains("KMGTkmgt", text.substr(text.size() - 1));
  return errors::ParseBytes(is_short ? absl::StrCat(text, "iB") : std::string(text));
}

// ---- Words of enumerations ----

std::string WordOf(const google::protobuf::EnumValueDescriptor& value) {
  const absl::string_view prefix = absl::StripSuffix(value.type()->value(0)->name(), "UNSPECIFIED");
  return absl::StrReplaceAll(absl::AsciiStrToLower(absl::StripPrefix(value.name(), prefix)), {{"_", "-"}});
}

const std::map<std::string, v1::Split>& Splits() {
  static const auto* const words = [] {
    auto* const all = new auto(Words<v1::Split>());
    all->emplace("any", v1::SPLIT_UNSPECIFIED);
    return all;
  }();
  return *words;
}

}  // namespace lossd::cli
