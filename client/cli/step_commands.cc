// SPDX-License-Identifier: Apache-2.0
// The commands grad-norm, step and zero-grad.
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/describe.h"
#include "client/cli/format.h"
#include "client/cli/json.h"
#include "client/cli/options.h"

namespace lossd::cli {
namespace {

absl::Status RunGradNorm(Context* context, const std::string& head, std::optional<uint64_t> step,
                         client::Client& client) {
  const absl::StatusOr<v1::GradNormResponse> response = client.GradNorm(head, step, context->timeout());
  if (!response.ok()) return response.status();
  if (context->json) {
    Json json = ToJson(response->state());
    json["grad_norm"] = response->grad_norm();
    context->PrintJson(json);
  } else {
    context->Print(absl::StrFormat("%.9g\n", response->grad_norm()));
  }
  return absl::OkStatus();
}

struct StepFlags {
  std::string head;
  std::optional<uint64_t> step;
  bool sgd = false;
  double learning_rate = 0;
  double weight_decay = 0;
  std::optional<double> beta1, beta2, epsilon;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  std::optional<double> grad_multiplier;
  bool decay_vectors = false;
  std::optional<uint64_t> expected_rows;
  std::vector<uint64_t> expected_microbatches;
  bool skip_non_finite = false;

  v1::ApplyStepRequest ToRequest(uint64_t open_step) const {
    v1::ApplyStepRequest request;
    request.set_head(head);
    request.set_step(open_step);
    v1::Optimizer* optimizer = request.mutable_optimizer();
    if (sgd) {
      v1::Sgd* options = optimizer->mutable_sgd();
      options->set_learning_rate(learning_rate);
      options->set_momentum(momentum);
      options->set_dampening(dampening);
      options->set_nesterov(nesterov);
      options->set_weight_decay(weight_decay);
    } else {
      v1::AdamW* options = optimizer->mutable_adamw();
      options->set_learning_rate(learning_rate);
      if (beta1.has_value()) options->set_beta1(*beta1);
      if (beta2.has_value()) options->set_beta2(*beta2);
      if (epsilon.has_value()) options->set_epsilon(*epsilon);
      options->set_weight_decay(weight_decay);
    }
    if (grad_multiplier.has_value()) optimizer->set_grad_multiplier(*grad_multiplier);
    optimizer->set_decay_vectors(decay_vectors);
    if (expected_rows.has_value()) request.set_expected_rows(*expected_rows);
    request.mutable_expected_microbatches()->Add(expected_microbatches.begin(), expected_microbatches.end());
    request.set_skip_non_finite(skip_non_finite);
    return request;
  }
};

absl::Status RunStep(Context* context, const StepFlags& flags, client::Client& client) {
  const absl::StatusOr<uint64_t> step = StepOf(context, flags.head, flags.step, client);
  if (!step.ok()) return step.status();
  const absl::StatusOr<v1::ApplyStepResponse> response =
      client.ApplyStep(flags.ToRequest(*step), context->timeout());
  if (!response.ok()) return response.status();
  if (context->json) {
    context->PrintJson({{"applied_step", *step},
                        {"incarnation", HumanIncarnation(response->state().incarnation())},
                        {"step", response->state().step()},
                        {"grad_norm", response->grad_norm()},
                        {"microbatches", response->microbatches()},
                        {"rows", response->rows()},
                        {"contributions", response->contributions()},
                        {"skipped", response->skipped()},
                        {"repeated_call", response->repeated_call()}});
    return absl::OkStatus();
  }
  const std::string verb = absl::StrCat(response->repeated_call() ? "had already " : "",
                                        response->skipped() ? "skipped" : "applied");
  std::string rows = absl::StrCat(HumanCount(response->rows()), " rows of ",
                                  HumanCount(response->microbatches()), " microbatches");
  if (response->contributions() > 0)
    absl::StrAppend(&rows, ", ", HumanCount(response->contributions()), " contributions");
  context->Print(absl::StrFormat("%s step %s: gradient norm %.6g, %s; step %s is open\n", verb,
                                 HumanCount(*step), response->grad_norm(), rows,
                                 HumanCount(response->state().step())));
  return absl::OkStatus();
}

absl::Status RunZeroGrad(Context* context, const std::string& head, std::optional<uint64_t> given,
                         client::Client& client) {
  const absl::StatusOr<uint64_t> step = StepOf(context, head, given, client);
  if (!step.ok()) return step.status();
  const absl::StatusOr<v1::HeadState> state = client.ZeroGradients(head, *step, context->timeout());
  if (!state.ok()) return state.status();
  if (context->json) {
    context->PrintJson(ToJson(*state));
  } else {
    context->Print(absl::StrCat("discarded the gradients of step ", HumanCount(state->step()), "\n"));
  }
  return absl::OkStatus();
}

void AddStep(CLI::App* app, Context* context) {
  CLI::App* step = app->add_subcommand("step", "Apply an optimizer step to the accumulated gradients");
  auto flags = std::make_shared<StepFlags>();
  AddHead(step, &flags->head);
  step->add_option("--step", flags->step, "The step to close [the open one]");
  step->add_option("--lr", flags->learning_rate, "Learning rate")->required();
  step->add_option("--weight-decay", flags->weight_decay, "[0]");
  step->add_option("--grad-multiplier", flags->grad_multiplier, "Multiplies the gradients first [1]");
  step->add_flag("--decay-vectors", flags->decay_vectors, "Let weight decay act on bias and norm, too");
  const std::string adamw = "AdamW (the default)", sgd = "SGD";
  CLI::Option* use_adamw = step->add_flag("--adamw")->description("Use AdamW")->group(adamw);
  CLI::Option* use_sgd = step->add_flag("--sgd", flags->sgd, "Use SGD")->group(sgd)->excludes(use_adamw);
  step->add_option("--beta1", flags->beta1, "[0.9]")->group(adamw)->excludes(use_sgd);
  step->add_option("--beta2", flags->beta2, "[0.999]")->group(adamw)->excludes(use_sgd);
  step->add_option("--epsilon", flags->epsilon, "[1e-8]")->group(adamw)->excludes(use_sgd);
  step->add_option("--momentum", flags->momentum, "[0]")->group(sgd)->needs(use_sgd);
  step->add_option("--dampening", flags->dampening, "[0]")->group(sgd)->needs(use_sgd);
  step->add_flag("--nesterov", flags->nesterov, "Nesterov momentum")->group(sgd)->needs(use_sgd);
  step->add_flag(
      "--skip-non-finite", flags->skip_non_finite,
      "Close the step without an update if the gradient norm is not finite, rather than refuse it");
  const std::string guard = "Refuse the step unless";
  step->add_option("--expect-rows", flags->expected_rows, "so many valid rows were accumulated")
      ->group(guard);
  step->add_option("--expect-microbatches", flags->expected_microbatches,
                   "these and these contributions were accumulated (ids, by comma)")
      ->delimiter(',')
      ->group(guard);
  SetClientAction(step, context, [=](client::Client& client) { return RunStep(context, *flags, client); });
}

}  // namespace

void AddStepCommands(CLI::App* app, Context* context) {
  auto head = std::make_shared<std::string>();
  auto step = std::make_shared<std::optional<uint64_t>>();

  CLI::App* grad_norm = app->add_subcommand("grad-norm", "Print the norm of the accumulated gradients");
  AddHead(grad_norm, head.get());
  grad_norm->add_option("--step", *step, "Must be open [whichever is]");
  SetClientAction(grad_norm, context,
                  [=](client::Client& client) { return RunGradNorm(context, *head, *step, client); });

  AddStep(app, context);

  CLI::App* zero_grad =
      app->add_subcommand("zero-grad", "Discard the accumulated gradients of the open step");
  AddHead(zero_grad, head.get());
  zero_grad->add_option("--step", *step, "Must be open [whichever is]");
  SetClientAction(zero_grad, context,
                  [=](client::Client& client) { return RunZeroGrad(context, *head, *step, client); });
}

}  // namespace lossd::cli
