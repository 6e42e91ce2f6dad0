// SPDX-License-Identifier: Apache-2.0
// The command plan.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cli/commands.h"
#include "client/cli/options.h"
#include "client/cli/plan_view.h"
#include "client/cli/value_checks.h"
#include "client/plan/measured.h"
#include "client/plan/plan.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {
namespace {

// As the caller gave them: 0 and "" are not given.
struct PlanFlags {
  std::string model;     // a config.json or its folder
  std::string measured;  // a file as bench/plan_data.py writes it
  std::string card;      // a name of plan::CardNames
  int64_t hidden = 0, vocab = 0, layers = 0;
  uint64_t workspace = 0, memory = 0, stage_memory = 0, layer_memory = 0;
  plan::Request request;
  int64_t trainer_gpus = 0;  // 0: the memory of a trainer is not asked for
  std::optional<uint64_t> trainer_memory;
  plan::TrainerShape trainer;
};

absl::StatusOr<plan::Measured> ReadMeasured(const std::string& path) {
  if (path.empty()) return plan::ParseMeasured(plan::BuiltinMeasured());
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read \"", path, "\""));
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return plan::ParseMeasured(text);
}

absl::StatusOr<plan::Model> ModelOf(const PlanFlags& flags) {
  plan::Model model;
  if (!flags.model.empty()) {
    absl::StatusOr<plan::Model> read = plan::ReadModel(flags.model);
    if (!read.ok()) return read;
    model = *std::move(read);
  } else if (flags.hidden == 0 || flags.vocab == 0) {
    return absl::InvalidArgumentError(
        "give a model's config.json (or its folder), or --hidden and --vocab; lossctl plan --help says more");
  }
  // Parameters were counted of the file's sizes.
  const auto replace = [&](int64_t given, int64_t& size) {
    if (given == 0 || given == size) return;
    size = given;
    model.parameters = 0;
  };
  replace(flags.hidden, model.hidden);
  replace(flags.vocab, model.vocab);
  replace(flags.layers, model.layers);
  return model;
}

absl::StatusOr<plan::TrainerShape> TrainerOf(const PlanFlags& flags) {
  plan::TrainerShape trainer = flags.trainer;
  trainer.gpus = flags.trainer_gpus;
  if (flags.trainer_memory.has_value()) {
    if (*flags.trainer_memory == 0) return errors::FieldError("trainer_memory", "be > 0", 0);
    trainer.memory_bytes =
        static_cast<int64_t>(std::min<uint64_t>(*flags.trainer_memory, std::numeric_limits<int64_t>::max()));
  }
  return trainer;
}

absl::Status RunPlan(Context* context, const PlanFlags& flags) {
  absl::StatusOr<plan::Measured> measured = ReadMeasured(flags.measured);
  if (measured.ok() && !flags.card.empty()) measured = plan::OnCard(*std::move(measured), flags.card);
  if (!measured.ok()) return measured.status();
  absl::StatusOr<plan::Model> model = ModelOf(flags);
  if (!model.ok()) return model.status();
  plan::Request request = flags.request;
  request.model = *std::move(model);
  request.workspace_bytes = static_cast<int64_t>(flags.workspace);
  request.memory_bytes = static_cast<int64_t>(flags.memory);
  request.stage_bytes = static_cast<int64_t>(flags.stage_memory);
  request.pipeline.layer_bytes = static_cast<int64_t>(flags.layer_memory);
  request.microbatch = std::min(request.microbatch, request.rows);
  if (flags.trainer_gpus != 0) {
    absl::StatusOr<plan::TrainerShape> trainer = TrainerOf(flags);
    if (!trainer.ok()) return trainer.status();
    request.trainer = *std::move(trainer);
  }
  const absl::StatusOr<plan::Plan> made = plan::MakePlan(request, *measured);
  if (!made.ok()) return made.status();
  if (context->json) {
    context->PrintJson(PlanJson(*made, *measured));
  } else {
    context->Print(PlanText(*made, *measured));
  }
  return absl::OkStatus();
}

const std::map<std::string, kernels::OptimizerState>& States() {
  static const auto* const states =
      new std::map<std::string, kernels::OptimizerState>{{"none", kernels::OptimizerState::kNone},
                                                         {"momentum", kernels::OptimizerState::kMomentum},
                                                         {"adam", kernels::OptimizerState::kAdam}};
  return *states;
}

const std::map<std::string, kernels::Norm>& PlanNorms() {
  static const auto* const norms =
      new std::map<std::string, kernels::Norm>{{"none", kernels::Norm::kNone},
                                               {"layernorm", kernels::Norm::kLayerNorm},
                                               {"rmsnorm", kernels::Norm::kRmsNorm}};
  return *norms;
}

// "8030261248", "8.03B" or "350M".
bool ParseParameters(absl::string_view text, int64_t* parameters) {
  if (absl::SimpleAtoi(text, parameters)) return *parameters > 0;
  const double unit = absl::ConsumeSuffix(&text, "B") ? 1e9 : absl::ConsumeSuffix(&text, "M") ? 1e6 : 0.0;
  double number;
  constexpr double kMost = 9e15;  // exact in double
  if (unit == 0.0 || !absl::SimpleAtod(text, &number)) return false;
  number *= unit;
  if (!(number >= 1.0 && number <= kMost)) return false;
  *parameters = std::llround(number);
  return true;
}

void AddPipelineOptions(CLI::App* command, PlanFlags* flags) {
  constexpr char kGroup[] = "Pipelines; seconds are of a microbatch, alone on one GPU";
  plan::PipelineRequest& pipeline = flags->request.pipeline;
  CLI::Option* const stages =
      command
          ->add_option("--stages", pipeline.stages,
                       "Plan pipelines of so many GPUs, the head local, on a server and colocated; each "
                       "trainer is one")
          ->check(NumberAboveZero())
          ->group(kGroup);
  const auto add = [&](CLI::Option* option) { option->needs(stages)->group(kGroup); };
  add(command
          ->add_option("--layer-seconds", pipeline.layer_seconds,
                       "Of one layer, forward and backward; or of each, with commas")
          ->delimiter(',')
          ->type_name("SECONDS,..."));
  add(command->add_option("--embedding-seconds", pipeline.embedding_seconds,
                          "That the first stage has beside its layers [0]"));
  add(command->add_option("--head-seconds", pipeline.head_seconds,
                          "Of the server's head, exact gradients [by measured rates]"));
  add(command->add_option("--sampled-seconds", pipeline.sampled_seconds,
                          "The same of sampled gradients [by measured rates]"));
  add(command->add_option("--local-head-seconds", pipeline.local_head_seconds,
                          "Of the head on the last stage [by measured rates]"));
  add(AddBytes(command, "--layer-memory", &flags->layer_memory,
               "What a layer keeps of a microbatch for its backward [36 bytes x rows x hidden size, and 16 "
               "bits a parameter]"));
}

void AddTrainerOptions(CLI::App* command, PlanFlags* flags) {
  constexpr char kGroup[] = "Memory of a trainer";
  CLI::Option* const gpus =
      command
          ->add_option(
              "--trainer-gpus", flags->trainer_gpus,
              "Plan the memory of a trainer, too, whose state and rows are divided over so many GPUs")
          ->check(NumberAboveZero())
          ->group(kGroup);
  const auto add = [&](CLI::Option* option) { option->needs(gpus)->group(kGroup); };
  add(AddBytes(command, "--trainer-memory", &flags->trainer_memory,
               "Of each of them, for state, activations and logits [--memory]"));
  add(command
          ->add_option("--trainer-rows", flags->trainer.rows,
                       "Rows that are in memory at one time, on all of them together [--rows]")
          ->check(NumberAboveZero()));
  add(command
          ->add_option(
              "--parameters",
              [flags](const CLI::results_t& results) {
                return ParseParameters(results[0], &flags->trainer.parameters);
              },
              "Of the whole model, e.g. 8.03B [counted from MODEL]")
          ->type_name("COUNT"));
  add(command->add_option("--bytes-per-parameter", flags->trainer.bytes_per_parameter,
                          "Of weight, gradient and optimizer; 8 if all are in 16 bits [16]"));
  add(command
          ->add_option("--activation-bytes", flags->trainer.activation_bytes,
                       "Of a row [2 x layers x hidden size: one hidden state a layer in 16 bits]")
          ->check(NumberAboveZero()));
  add(command->add_option("--logit-bytes", flags->trainer.logit_bytes, "Of a logit that is stored [4]"));
}

}  // namespace

void AddPlanCommand(CLI::App* app, Context* context) {
  CLI::App* command = app->add_subcommand(
      "plan", "Say what a head would take and how fast it would be, without a server or a GPU");
  auto flags = std::make_shared<PlanFlags>();
  plan::Request& request = flags->request;
  command->add_option("MODEL", flags->model, "A Hugging Face model's config.json, or its folder")
      ->type_name("FILE");
  command->add_option("--hidden", flags->hidden, "Hidden size D [the model's]");
  command->add_option("--vocab", flags->vocab, "Vocabulary size V [the model's]");
  command->add_option("--rows", request.rows, "Rows (tokens) of a step of one trainer [65536]");
  command->add_option("--microbatch", request.microbatch, "Rows of a microbatch [8192]");
  command->add_option("--trainers", request.trainers, "Trainers that share the server [1]");
  command->add_option("--trainer-seconds", request.trainer_seconds,
                      "Of a trainer's step without the head: says how many trainers a server feeds");
  command->add_option("--gpus", request.gpus, "GPUs of the server [1]");
  command->add_option("--layers", flags->layers, "Layers of the model [the model's]");
  AddBytes(command, "--memory", &flags->memory, "Memory of a GPU [the card's]");
  AddBytes(command, "--stage-memory", &flags->stage_memory,
           "What layers take on the last stage, beside a head there [0]");
  AddBytes(command, "--workspace", &flags->workspace, "Workspace of the head [the server's default]");
  command->add_option("--data", request.data, "Kind of rows whose times count: real, peaked or flat [real]");
  AddWord(command, "--optimizer-state", &request.optimizer_state, States(), "Optimizer memory [adam]");
  AddWord(command, "--norm", &request.norm, PlanNorms(), "Norm before the classifier [none]");
  command->add_flag("--bias", request.bias, "With a bias [V]");
  command
      ->add_option("--measured", flags->measured,
                   "Rates of another card, as bench/plan_data.py writes them [an H200's]")
      ->type_name("FILE");
  command
      ->add_option("--card", flags->card,
                   "The server's GPU; of one that was not measured, times are bounds by data sheets [h200]")
      ->type_name(absl::StrJoin(plan::CardNames(), "|"));
  AddPipelineOptions(command, flags.get());
  AddTrainerOptions(command, flags.get());
  command->callback(
      [context, flags] { context->action = [context, flags] { return RunPlan(context, *flags); }; });
}

}  // namespace lossd::cli
