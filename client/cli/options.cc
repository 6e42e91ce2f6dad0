#include "client/cli/options.h"

#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/names.h"

namespace lossd::cli {
namespace {

std::optional<uint64_t> ParseBytes(absl::string_view text) {
  uint64_t unit = 1;
  text = absl::StripTrailingAsciiWhitespace(text);
  if (absl::ConsumeSuffix(&text, "iB") || absl::ConsumeSuffix(&text, "B")) {
  }
  if (absl::ConsumeSuffix(&text, "K")) unit = uint64_t{1} << 10;
  if (absl::ConsumeSuffix(&text, "M")) unit = uint64_t{1} << 20;
  if (absl::ConsumeSuffix(&text, "G")) unit = uint64_t{1} << 30;
  uint64_t number;
  if (!absl::SimpleAtoi(text, &number) || number > ~uint64_t{0} / unit) return std::nullopt;
  return number * unit;
}

bool ParseBound(absl::string_view text, std::optional<uint64_t>* bound) {
  bound->reset();
  if (text.empty()) return true;
  uint64_t number;
  if (!absl::SimpleAtoi(text, &number)) return false;
  *bound = number;
  return true;
}

}  // namespace

CLI::Option* AddBytes(CLI::App* command, const std::string& name, uint64_t* value,
                      const std::string& description) {
  const auto parse = [value](const CLI::results_t& results) {
    const std::optional<uint64_t> bytes = ParseBytes(results[0]);
    if (bytes.has_value()) *value = *bytes;
    return bytes.has_value();
  };
  return command->add_option(name, parse, description)->type_name("BYTES");
}

CLI::Option* AddRows(CLI::App* command, RowsOption* rows) {
  const auto parse = [rows](const CLI::results_t& results) {
    const std::vector<std::string> bounds = absl::StrSplit(results[0], ':');
    return bounds.size() == 2 && ParseBound(bounds[0], &rows->begin) && ParseBound(bounds[1], &rows->end);
  };
  return command->add_option("--rows", parse, "Rows of the tensor, half-open; default: all")
      ->type_name("BEGIN:END");
}

CLI::Option* AddHead(CLI::App* command, std::string* head) {
  return command->add_option("HEAD", *head, "Name of the head")->required()->type_name("");
}

void SetClientAction(CLI::App* command, Context* context,
                     std::function<absl::Status(client::Client&)> action) {
  command->callback([context, action = std::move(action)] {
    context->action = [context, action]() -> absl::Status {
      absl::StatusOr<std::unique_ptr<client::Client>> client = context->Connect();
      if (!client.ok()) return client.status();
      return action(**client);
    };
  });
}

absl::StatusOr<uint64_t> StepOf(Context* context, const std::string& head, std::optional<uint64_t> step,
                                client::Client& client) {
  if (step.has_value()) return *step;
  const absl::StatusOr<v1::HeadDescription> description = client.DescribeHead(head, context->timeout());
  if (!description.ok()) return description.status();
  return description->state().step();
}

void LossFlags::AddTo(CLI::App* command) {
  const std::string group = "Loss";
  command->add_option("--ignore-index", ignore_index, "Target of rows to be left out [-100]")->group(group);
  command->add_option("--label-smoothing", label_smoothing, "In [0, 1] [0]")->group(group);
  command->add_option("--z-loss", z_loss, "Weight of the squared log-sum-exp [0]")->group(group);
  command->add_option("--softcap", softcap, "Soft cap of the logits; 0: none [0]")->group(group);
  command->add_option("--logit-scale", logit_scale, "Multiplies the logits (1 / temperature) [1]")
      ->group(group);
  command->add_flag("--use-class-weights", use_class_weights, "Use the head's class weights")->group(group);
  AddWord(command, "--algorithm", &algorithm, Algorithms(), "How gradients are computed [as the head says]")
      ->group(group);
  command
      ->add_option("--filter-epsilon", filter_epsilon,
                   "filtered, auto, cut: smaller probabilities add nothing to the gradients [2^-12; cut: 0]")
      ->group(group);
  command
      ->add_option("--max-dropped-mass", max_dropped_mass,
                   "auto: the probability a row, on average, that may be left out [0.05]")
      ->group(group);
  AddWord(command, "--reduction", &reduction, Reductions(), "[mean]")->group(group);
  command->add_option("--normalizer", normalizer, "Divides the sum for the mean [number of valid rows]")
      ->group(group);
  command->add_option("--grad-output", grad_output, "Multiplies every gradient [1]")->group(group);
  command->add_option("--streams", streams, "Concurrent streams per microbatch; 0: one per channel [0]")
      ->check(CLI::NonNegativeNumber)
      ->group("Transport");
  AddBytes(command, "--slice-bytes", &slice_bytes, "Hidden states per message, at most [1MiB]")
      ->group("Transport");
}

client::ComputeOptions LossFlags::ToOptions() const {
  client::ComputeOptions options;
  if (ignore_index.has_value()) options.loss.set_ignore_index(*ignore_index);
  options.loss.set_label_smoothing(label_smoothing);
  options.loss.set_z_loss(z_loss);
  options.loss.set_softcap(softcap);
  if (logit_scale.has_value()) options.loss.set_logit_scale(*logit_scale);
  options.loss.set_use_class_weights(use_class_weights);
  options.loss.set_algorithm(algorithm);
  if (filter_epsilon.has_value()) options.loss.set_filter_epsilon(*filter_epsilon);
  if (max_dropped_mass.has_value()) options.loss.set_max_dropped_mass(*max_dropped_mass);
  options.reduction = reduction;
  options.normalizer = normalizer;
  options.grad_output = grad_output;
  options.streams = streams;
  options.slice_bytes = slice_bytes;
  return options;
}

}  // namespace lossd::cli
