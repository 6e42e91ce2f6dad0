// SPDX-License-Identifier: Apache-2.0
#include "client/cli/options.h"

#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/confirm.h"
#include "client/cli/http_address.h"
#include "client/cli/names.h"
#include "client/cli/value_checks.h"

namespace lossd::cli {
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

// An option that sets one field of the message.
template <typename T>
void AddField(CLI::App* command, v1::LossOptions* loss, const std::string& name,
              void (v1::LossOptions::*set)(T), const std::string& description) {
  command
      ->add_option_function<T>(
          name, [loss, set](const T& value) { (loss->*set)(value); }, description)
      ->group(kLossGroup);
}

// A line for each field of the message; one that is not given is left unset.
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
  AddWordFunction(
      command, "--gradients", [loss](v1::Gradients gradients) { loss->set_gradients(gradients); },
      GradientsWords(), "How gradients are computed [as the head says]")
      ->group(kLossGroup);
  AddField(command, loss, "--filter-epsilon", &Loss::set_filter_epsilon,
           "filtered: smaller probabilities add nothing to the gradients [2^-12]");
  AddField(command, loss, "--sample-threshold", &Loss::set_sample_threshold,
           "sampled, auto: smaller probabilities add to the gradients by chance [2^-10]");
  AddField(command, loss, "--max-gradient-error", &Loss::set_max_gradient_error,
           "auto: the largest predicted relative error of sampled gradients [0.01]");
}

// `T`: what a number of bytes can be assigned to.
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

// "checkpoints rm"; without the program's own name.
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
  absl::StatusOr<std::unique_ptr<client::Client>> client = context->Connect();
  if (!client.ok()) return client.status();
  return action(**client);
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
  const absl::StatusOr<v1::HeadDescription> description = client.DescribeHead(head, context->timeout());
  if (!description.ok()) return description.status();
  return description->state().step();
}

void AddLossOptions(CLI::App* command, client::ComputeOptions* options) {
  AddLossFields(command, &options->loss);
  AddWord(command, "--reduction", &options->reduction, Reductions(), "[mean]")->group(kLossGroup);
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

}  // namespace lossd::cli
