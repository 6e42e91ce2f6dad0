// SPDX-License-Identifier: Apache-2.0
// Command line options that several commands use: functions that add them to a CLI11 command, the global
// options, the question before a command throws something away (Confirm), checks of values, and the words for
// the protocol's enumerations. At the end of the header are the functions that add the commands.
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

// Whether lossctl can ask the user: stdin is a terminal.
bool CanAsk();

// An error for a wrong command line, unless --yes was given or lossctl can ask the user. `command` is its
// name, such as "delete". A command calls this before it does anything.
absl::Status CheckMayAsk(bool yes, const std::string& command);

// Asks `question` on stderr, followed by " [y/N] ". OK if the answer is y or yes; with `yes` (--yes) OK
// without asking. Otherwise CANCELLED with the message `otherwise`, such as "not deleted".
absl::Status Confirm(bool yes, const std::string& question, const std::string& otherwise);

// The initial values of a head's tensors, for the commands that create or reset a head.
struct InitialValues {
  std::optional<uint64_t> seed;
  bool zeros = false;
  v1::TensorFile file;

  bool given() const { return seed.has_value() || zeros || !file.path().empty(); }

  // `request` is a CreateHeadRequest or a ResetHeadRequest.
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

// Adds --seed, --zeros and --from with its names of tensors. `values` must outlive the command.
void AddInitialValues(CLI::App* command, InitialValues* values);

// Adds the options that every command has.
void AddGlobalOptions(CLI::App* app, Context* context);

// Reads the global options from the words of an unfinished command line.
void ReadGlobalOptions(std::vector<std::string> words, Context* context);

// Adds an option whose value is one of `words`. `set` is called with the value that the given word stands
// for.
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

// The same; the value is stored in `value`.
template <typename E>
CLI::Option* AddWord(CLI::App* command, const std::string& name, E* value,
                     const std::map<std::string, E>& words, const std::string& description) {
  return AddWordFunction(
      command, name, [value](E word) { *value = word; }, words, description);
}

// Adds an option whose value is a number of bytes, with or without a unit, as ParseBytes reads it.
CLI::Option* AddBytes(CLI::App* command, const std::string& name, uint64_t* value,
                      const std::string& description);
CLI::Option* AddBytes(CLI::App* command, const std::string& name, std::optional<uint64_t>* value,
                      const std::string& description);

// A half-open range of rows, "BEGIN:END". Either bound may be left out.
struct RowsOption {
  std::optional<uint64_t> begin;
  std::optional<uint64_t> end;

  bool given() const { return begin.has_value() || end.has_value(); }
};
CLI::Option* AddRows(CLI::App* command, RowsOption* rows);

// Adds the first positional argument, the name of the head.
CLI::Option* AddHead(CLI::App* command, std::string* head);

// Adds --http. Its description may begin with what the address is for. Empty if the option is not given.
CLI::Option* AddHttp(
    CLI::App* command, std::string* http,
    const std::string& description = "The server's HTTP address [the context's, else where the server says]");

// Adds --interval and --count of the live views.
void AddLiveOptions(CLI::App* command, LiveFlags* flags);

// Connects and runs `action`.
absl::Status WithClient(Context* context, const std::function<absl::Status(client::Client&)>& action);
// The same when the command is chosen.
void SetClientAction(CLI::App* command, Context* context,
                     std::function<absl::Status(client::Client&)> action);

// The same for a command that asks the user before it acts. It is a wrong command line if lossctl cannot ask
// and --yes was not given.
void SetAskingAction(CLI::App* command, Context* context, std::shared_ptr<bool> yes,
                     std::function<absl::Status(client::Client&)> action);

// `step` if it is given, else the head's open step.
absl::StatusOr<uint64_t> StepOf(Context* context, const std::string& head, std::optional<uint64_t> step,
                                client::Client& client);

// Adds the options that say which loss is computed and how its rows travel. `options` must outlive the
// command.
void AddLossOptions(CLI::App* command, client::ComputeOptions* options);

// Checks of option values, and the words for the protocol's enumerations. A check returns "" for a good
// value. For a bad value it returns what the value must be, and what it is: `must be a whole number from 1 to
// 64, got "-3"`.
//
// Stateless and thread-safe.

using ValueCheck = std::function<std::string(const std::string&)>;

// A whole number in [least, most].
ValueCheck WholeNumber(uint64_t least = 0, uint64_t most = std::numeric_limits<uint64_t>::max());
ValueCheck WholeNumberOfAnySign();
// Any number, also "inf" and "nan", because the field that it sets has its own rule for them.
ValueCheck AnyNumber();
// A finite number, in [least, most] or above 0.
ValueCheck NumberFromTo(double least, double most);
ValueCheck NumberAboveZero();

// A number of bytes that ParseBytes can read.
ValueCheck NumberOfBytes();
ValueCheck NotEmpty();

// A check of your own: `rule` is what follows "must" in the message, such as "be BEGIN:END"; `fits` says
// whether a value is good.
ValueCheck Rule(std::string rule, std::function<bool(const std::string&)> fits);

// Parses a number of bytes: a number, possibly with a fraction, and an optional unit. Units are B, KiB, MiB,
// GiB, TiB (powers of 1024; the "iB" may be left out) and KB, MB, GB, TB (powers of 1000), in any case. The
// flags of lossd take the same, except K, M, G and T. Nullopt for any other text, a negative number, or one
// of 2^62 and more.
std::optional<uint64_t> ParseBytes(absl::string_view text);

// The words for the values of the protocol's enumerations, which lossctl prints, writes into JSON and takes
// in flags. A word is the name of the value without the prefix that all values of the enumeration share, such
// as "fp32" for DTYPE_FP32 and "norm-gain" for PARAM_NORM_GAIN. Words has every value except UNSPECIFIED.
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
const std::map<std::string, v1::Split>& Splits();  // also "any", which stands for UNSPECIFIED

// The word for a value; "unspecified" if the value has none.
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

// The functions that add lossctl's commands, each a group of subcommands, to `app`. The sources *_command.cc
// and *_commands.cc define them. A chosen subcommand sets context->action. `context` must outlive `app`.

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

// Prints the answer for a completion script: the words that may take the place of the last one of `words`,
// one a line, each with a tab and a description if it has one; or ":file", for a path. `context` has the
// global options that are among `words`.
void PrintCompletions(const CLI::App& app, absl::Span<const std::string> words, Context* context);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_OPTIONS_H_
