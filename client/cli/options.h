// SPDX-License-Identifier: Apache-2.0
// Command line options that several commands use: the functions that add them to a CLI11 command, the global
// options, the question that commands ask before they throw something away (Confirm), the checks of values,
// and the words for the protocol's enumerations. At the end stand the functions that add the commands.
//
// Thread-compatible: commands run on the main thread. The checks and words are stateless and thread-safe.
#ifndef LOSSD_CLIENT_CLI_OPTIONS_H_
#define LOSSD_CLIENT_CLI_OPTIONS_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/generated_enum_reflection.h>

#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cli/context.h"
#include "client/cli/live.h"
#include "client/cpp/client.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/types.pb.h"

namespace lossd::cli {

// Adds --yes to a command.
CLI::Option* AddYes(CLI::App* command, bool* yes);

// Whether somebody can be asked: stdin is a terminal.
bool CanAsk();

// A wrong command line unless --yes was given or somebody can be asked. `command`: "delete". To be called
// before the command does anything.
absl::Status CheckMayAsk(bool yes, const std::string& command);

// Asks `question` on stderr, with " [y/N] ". OK if the answer is y or yes, or without asking if --yes was
// given. Else CANCELLED with `otherwise`, e.g. "not deleted".
absl::Status Confirm(bool yes, const std::string& question, const std::string& otherwise);

// Which values a head begins with, for the commands that make or reset one.
struct InitialValues {
  std::optional<uint64_t> seed;
  bool zeros = false;
  v1::TensorFile file;

  bool given() const { return seed.has_value() || zeros || !file.path().empty(); }

  // `request`: a CreateHeadRequest or ResetHeadRequest.
  template <typename Request>
  void SetIn(Request* request) const {
    if (zeros) {
      request->mutable_zeros();
    } else if (!file.path().empty()) {
      *request->mutable_tensor_file() = file;
    } else {
      request->mutable_kaiming_uniform()->set_seed(seed.value_or(0));
    }
  }
};

// --seed, --zeros, or --from with the names of tensors. `values` outlives the command.
void AddInitialValues(CLI::App* command, InitialValues* values);

// Adds the options that every command has.
void AddGlobalOptions(CLI::App* app, Context* context);

// Reads the global options among the words of an unfinished command line.
void ReadGlobalOptions(std::vector<std::string> words, Context* context);

// An option whose value is one of the words; `set` is called with what the word stands for.
template <typename E, typename Set>
CLI::Option* AddWordFunction(CLI::App* command, const std::string& name, Set set,
                             const std::map<std::string, E>& words, const std::string& description) {
  const auto parse = [set, &words](const CLI::results_t& results) {
    const auto it = words.find(results[0]);
    if (it == words.end()) return false;
    set(it->second);
    return true;
  };
  std::string choices =
      absl::StrJoin(words, "|", [](std::string* out, const auto& word) { out->append(word.first); });
  return command->add_option(name, parse, description)
      ->type_name(choices)
      ->check([choices, &words](const std::string& word) {
        return words.count(word) > 0 ? std::string()
                                     : absl::StrCat("must be one of ", choices, ", got \"", word, "\"");
      });
}

// The same, which sets `value`.
template <typename E>
CLI::Option* AddWord(CLI::App* command, const std::string& name, E* value,
                     const std::map<std::string, E>& words, const std::string& description) {
  return AddWordFunction(
      command, name, [value](E word) { *value = word; }, words, description);
}

// A number of bytes with or without a unit, as ParseBytes takes it.
CLI::Option* AddBytes(CLI::App* command, const std::string& name, uint64_t* value,
                      const std::string& description);
CLI::Option* AddBytes(CLI::App* command, const std::string& name, std::optional<uint64_t>* value,
                      const std::string& description);

// Rows "BEGIN:END", half-open; either may be left out.
struct RowsOption {
  std::optional<uint64_t> begin;
  std::optional<uint64_t> end;

  bool given() const { return begin.has_value() || end.has_value(); }
};
CLI::Option* AddRows(CLI::App* command, RowsOption* rows);

// The name of the head, as first positional argument.
CLI::Option* AddHead(CLI::App* command, std::string* head);

// --http, whose description may begin with what the address is for. Empty: not given.
CLI::Option* AddHttp(
    CLI::App* command, std::string* http,
    const std::string& description = "The server's HTTP address [the context's, else where the server says]");

// How often live views look, and how many times.
void AddLiveOptions(CLI::App* command, LiveFlags* flags);

// Connects and runs `action`.
absl::Status WithClient(Context* context, const std::function<absl::Status(client::Client&)>& action);
// Does so when the command is chosen.
void SetClientAction(CLI::App* command, Context* context,
                     std::function<absl::Status(client::Client&)> action);

// The same for a command that asks before it acts: a wrong command line if it cannot ask and --yes was not
// given.
void SetAskingAction(CLI::App* command, Context* context, std::shared_ptr<bool> yes,
                     std::function<absl::Status(client::Client&)> action);

// The step given, else the head's open one.
absl::StatusOr<uint64_t> StepOf(Context* context, const std::string& head, std::optional<uint64_t> step,
                                client::Client& client);

// The options that say which loss is computed and how its rows travel. `options` outlives the command.
void AddLossOptions(CLI::App* command, client::ComputeOptions* options);

// What the value of an option may be: checks of numbers and texts, and the words for the protocol's
// enumerations. Each check returns "" for a value that may stand there, and otherwise what it must be and
// what it is: `must be a whole number from 1 to 64, got "-3"`.
//
// Stateless and thread-safe.

using ValueCheck = std::function<std::string(const std::string&)>;

// A number without a fraction, in [least, most].
ValueCheck WholeNumber(uint64_t least = 0, uint64_t most = std::numeric_limits<uint64_t>::max());
ValueCheck WholeNumberOfAnySign();
// Whatever the field takes: infinite ones and "nan" are left to the field's own rule.
ValueCheck AnyNumber();
// Finite, and in [least, most] or above 0.
ValueCheck NumberFromTo(double least, double most);
ValueCheck NumberAboveZero();

// Any number of bytes that fits: see ParseBytes.
ValueCheck NumberOfBytes();
ValueCheck NotEmpty();

// `rule` is what follows "must", e.g. "be BEGIN:END"; `fits` says whether a value keeps to it.
ValueCheck Rule(std::string rule, std::function<bool(const std::string&)> fits);

// A number, possibly with a fraction, and one of the units B, KiB, MiB, GiB, TiB (1024 each; the "iB" may be
// left out) or KB, MB, GB, TB (1000 each), in any case; without a unit: bytes. lossd's flags take the same,
// but for K, M, G and T. Nullopt for anything else, a negative number, or one from 2^62 on.
std::optional<uint64_t> ParseBytes(absl::string_view text);

// The words for the protocol's enumerations, as printed, as in JSON and as taken by flags: the name of a
// value without what all names of the enumeration begin with, such as "fp32" for DTYPE_FP32 and "norm-gain"
// for PARAM_NORM_GAIN. Words has all but the one for UNSPECIFIED.
std::string WordOf(const google::protobuf::EnumValueDescriptor& value);
template <typename E>
const std::map<std::string, E>& Words() {
  static const auto* const words = [] {
    auto* const all = new std::map<std::string, E>();
    const google::protobuf::EnumDescriptor* const type = google::protobuf::GetEnumDescriptor<E>();
    for (int i = 1; i < type->value_count(); ++i) {
      all->emplace(WordOf(*type->value(i)), static_cast<E>(type->value(i)->number()));
    }
    return all;
  }();
  return *words;
}
const std::map<std::string, v1::Split>& Splits();  // with "any", for UNSPECIFIED

// The word for a value; "unspecified" for one without.
template <typename E>
std::string NameOf(const std::map<std::string, E>& words, E value) {
  for (const auto& [word, meaning] : words) {
    if (meaning == value) return word;
  }
  return "unspecified";
}
template <typename E>
std::string NameOf(E value) {
  return NameOf(Words<E>(), value);
}

// The commands of lossctl, by group, which the sources *_command.cc and *_commands.cc define. Each function
// adds its subcommands to `app`; a chosen subcommand sets context->action. `context` must outlive `app`.

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

#endif  // LOSSD_CLIENT_CLI_OPTIONS_H_
