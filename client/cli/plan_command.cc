// SPDX-License-Identifier: Apache-2.0
// plan
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/options.h"
#include "client/cli/plan_view.h"
#include "client/plan/measured.h"
#include "client/plan/plan.h"
#include "kernels/errors/field_error.h"

namespace lossd::cli {
namespace {

// As the caller gave them: 0 and "" are not given.
struct PlanFlags {
  std::string model;     // a config.json or its folder
  std::string measured;  // a file as bench/plan_data.py writes it
  int64_t hidden = 0, vocab = 0, layers = 0;
  uint64_t workspace = 0, memory = 0, stage_memory = 0;
  plan::Request request;
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
  if (flags.hidden != 0) model.hidden = flags.hidden;
  if (flags.vocab != 0) model.vocab = flags.vocab;
  if (flags.layers != 0) model.layers = flags.layers;
  return model;
}

absl::Status RunPlan(Context* context, const PlanFlags& flags) {
  const absl::StatusOr<plan::Measured> measured = ReadMeasured(flags.measured);
  if (!measured.ok()) return measured.status();
  absl::StatusOr<plan::Model> model = ModelOf(flags);
  if (!model.ok()) return model.status();
  plan::Request request = flags.request;
  request.model = *std::move(model);
  request.workspace_bytes = static_cast<int64_t>(flags.workspace);
  request.memory_bytes = static_cast<int64_t>(flags.memory);
  request.stage_bytes = static_cast<int64_t>(flags.stage_memory);
  request.microbatch = std::min(request.microbatch, request.rows);
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
  command->add_option("--stages", request.stages, "Plan pipelines of so many stages; each trainer is one")
      ->check(CLI::PositiveNumber);
  command->add_option("--layer-seconds", request.layer_seconds,
                      "Of one layer, forward and backward, for a microbatch: for --stages");
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
  command->callback(
      [context, flags] { context->action = [context, flags] { return RunPlan(context, *flags); }; });
}

}  // namespace lossd::cli
