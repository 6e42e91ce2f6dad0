// SPDX-License-Identifier: Apache-2.0
// The commands that change or read a head's state: grad-norm, step, zero-grad, save, load, checkpoints,
// checkpoints rm, read, write and add-grad.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "client/cli/describe.h"
#include "client/cli/format.h"
#include "client/cli/options.h"
#include "client/cli/tensors.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::cli {
namespace {

absl::Status RunGradNorm(Context* context, const std::string& head, std::optional<uint64_t> step,
                         client::Client& client) {
  LOSSD_TRY(const v1::GradNormResponse response, client.GradNorm(head, step, context->timeout()));
  if (context->json) {
    Json json = FieldsJson(response.state());
    json["grad_norm"] = response.grad_norm();
    context->PrintJson(json);
  } else {
    context->Print(absl::StrFormat("%.9g\n", response.grad_norm()));
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
  bool lazy_rows = false;
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
    optimizer->set_lazy_rows(lazy_rows);
    if (expected_rows.has_value()) request.set_expected_rows(*expected_rows);
    request.mutable_expected_microbatches()->Add(expected_microbatches.begin(), expected_microbatches.end());
    request.set_skip_non_finite(skip_non_finite);
    return request;
  }
};

absl::Status RunStep(Context* context, const StepFlags& flags, client::Client& client) {
  LOSSD_TRY(const uint64_t step, StepOf(context, flags.head, flags.step, client));
  LOSSD_TRY(const v1::ApplyStepResponse response,
            client.ApplyStep(flags.ToRequest(step), context->timeout()));
  if (context->json) {
    context->PrintJson({{"applied_step", step},
                        {"incarnation", HumanIncarnation(response.state().incarnation())},
                        {"step", response.state().step()},
                        {"grad_norm", response.grad_norm()},
                        {"microbatches", response.microbatches()},
                        {"rows", response.rows()},
                        {"contributions", response.contributions()},
                        {"skipped", response.skipped()},
                        {"repeated_call", response.repeated_call()}});
    return absl::OkStatus();
  }
  const std::string verb = absl::StrCat(response.repeated_call() ? "had already " : "",
                                        response.skipped() ? "skipped" : "applied");
  std::string rows = absl::StrCat(HumanCount(response.rows()), " rows of ",
                                  HumanCount(response.microbatches()), " microbatches");
  if (response.contributions() > 0)
    absl::StrAppend(&rows, ", ", HumanCount(response.contributions()), " contributions");
  context->Print(absl::StrFormat("%s step %s: gradient norm %.6g, %s; step %s is open\n", verb,
                                 HumanCount(step), response.grad_norm(), rows,
                                 HumanCount(response.state().step())));
  return absl::OkStatus();
}

absl::Status RunZeroGrad(Context* context, const std::string& head, std::optional<uint64_t> given,
                         client::Client& client) {
  LOSSD_TRY(const uint64_t step, StepOf(context, head, given, client));
  LOSSD_TRY(const v1::HeadState state, client.ZeroGradients(head, step, context->timeout()));
  if (context->json) {
    context->PrintJson(FieldsJson(state));
  } else {
    context->Print(absl::StrCat("discarded the gradients of step ", HumanCount(state.step()), "\n"));
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
  step->add_flag("--lazy-rows", flags->lazy_rows,
                 "Leave rows of the weight alone, moments too, whose gradient is 0 in every element");
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

// The commands save, load, checkpoints and checkpoints rm.

namespace {

struct SaveFlags {
  std::string head;
  std::string name;
  std::optional<uint32_t> keep;
  bool cancel_with_call = false;

  v1::SaveCheckpointRequest ToRequest() const {
    v1::SaveCheckpointRequest request;
    request.set_head(head);
    request.set_name(name);
    if (keep.has_value()) request.set_keep(*keep);
    request.set_cancel_with_call(cancel_with_call);
    return request;
  }
};

// Prints the progress on stderr, over the line before.
void ShowProgress(const v1::SaveProgress& progress) {
  const auto bytes = [](uint64_t count) { return HumanBytes(static_cast<double>(count)); };
  std::string text = "waiting for its turn";
  if (progress.total_bytes() > 0) {
    text = absl::StrCat("saving ", bytes(progress.written_bytes()), " of ", bytes(progress.total_bytes()),
                        progress.phase() == v1::SAVE_PHASE_READING ? ", steps wait" : ", steps go on");
  }
  std::fprintf(stderr, "\r\033[K%s", text.c_str());
}

absl::Status RunSave(Context* context, const SaveFlags& flags, client::Client& client) {
  const bool shows_progress = ShowsProgress();
  const absl::StatusOr<v1::SaveCheckpointResponse> saved = client.SaveCheckpoint(
      flags.ToRequest(),
      [&](const v1::SaveProgress& progress) {
        if (shows_progress) ShowProgress(progress);
      },
      context->timeout());
  if (shows_progress) std::fputs("\r\033[K", stderr);
  if (!saved.ok()) return saved.status();
  if (context->json) {
    context->PrintJson(
        {{"checkpoint", saved->checkpoint()},
         {"incarnation", HumanIncarnation(saved->state().incarnation())},
         {"step", saved->state().step()},
         {"bytes", saved->bytes()},
         {"seconds", saved->seconds()},
         {"read_seconds", saved->read_seconds()},
         {"pruned", std::vector<std::string>(saved->pruned().begin(), saved->pruned().end())}});
    return absl::OkStatus();
  }
  context->Print(absl::StrCat("saved ", saved->checkpoint(), " (step ", HumanCount(saved->state().step()),
                              ", ", HumanBytes(static_cast<double>(saved->bytes())), ") in ",
                              HumanSeconds(saved->seconds()), "\n"));
  for (const std::string& pruned : saved->pruned()) context->Print(absl::StrCat("removed ", pruned, "\n"));
  return absl::OkStatus();
}

nlohmann::ordered_json InfoJson(const v1::CheckpointInfo& info) {
  if (!info.error().empty()) return {{"checkpoint", info.checkpoint()}, {"error", info.error()}};
  return {{"checkpoint", info.checkpoint()},
          {"step", info.step()},
          {"hidden_size", info.spec().hidden_size()},
          {"vocab_size", info.spec().vocab_size()},
          {"bytes", info.bytes()},
          {"saved_unix_seconds", info.saved_unix_seconds()},
          {"automatic", info.automatic()},
          {"run", info.run()},
          {"incarnation", HumanIncarnation(info.incarnation())}};
}

absl::Status RunListCheckpoints(Context* context, const std::string& head, client::Client& client) {
  LOSSD_TRY(const v1::ListCheckpointsResponse list, client.ListCheckpoints(head, context->timeout()));
  if (context->json) {
    nlohmann::ordered_json checkpoints = nlohmann::ordered_json::array();
    for (const v1::CheckpointInfo& info : list.checkpoints()) checkpoints.push_back(InfoJson(info));
    context->PrintJson({{"checkpoints", checkpoints}, {"left_out", list.left_out()}});
    return absl::OkStatus();
  }
  if (list.checkpoints().empty() && list.left_out() == 0) {
    context->Print(head.empty() ? "no checkpoints on this server\n"
                                : absl::StrCat("no checkpoints of head \"", head, "\"\n"));
    return absl::OkStatus();
  }
  const Style style = context->style();
  std::vector<Column> columns = {
      {"CHECKPOINT"}, {"STEP", Align::kRight}, {"SIZE", Align::kRight}, {"SAVED"}, {"NAMED BY"}};
  if (style.wide) columns.insert(columns.end(), {{"RUN"}, {"HIDDEN x VOCAB"}, {"INCARNATION"}});
  Table table(columns);
  for (const v1::CheckpointInfo& info : list.checkpoints()) {
    std::vector<std::string> cells = {info.checkpoint(), "", "", style.Paint(Tone::kBad, info.error())};
    if (info.error().empty()) {
      cells = {info.checkpoint(), HumanCount(info.step()), HumanBytes(static_cast<double>(info.bytes())),
               UtcText(info.saved_unix_seconds()), info.automatic() ? "server" : "client"};
      if (style.wide) {
        cells.insert(cells.end(),
                     {Printable(info.run()), Shape(info.spec()), HumanIncarnation(info.incarnation())});
      }
    }
    cells.resize(columns.size());
    table.AddRow(std::move(cells));
  }
  context->Print(table.ToString(style));
  if (list.left_out() > 0) context->Print(absl::StrCat("and ", HumanCount(list.left_out()), " more\n"));
  return absl::OkStatus();
}

// The first names and how many more there are: "lm/a, lm/b and 3 more".
std::string Named(const std::vector<std::string>& names) {
  constexpr size_t kMostNamed = 5;
  const size_t named = std::min(names.size(), kMostNamed);
  std::string text = absl::StrJoin(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(named), ", ");
  if (names.size() > named) absl::StrAppend(&text, " and ", HumanCount(names.size() - named), " more");
  return Printable(text);
}

// Removes as many of the checkpoints as it can. Returns the first error.
absl::Status RunRemove(Context* context, const std::vector<std::string>& names, bool yes,
                       client::Client& client) {
  std::vector<std::string> once;
  for (const std::string& name : names) {
    if (std::find(once.begin(), once.end(), name) == once.end()) once.push_back(name);
  }
  const std::string question = absl::StrCat(
      "Remove ", once.size() == 1 ? "checkpoint " : absl::StrCat(HumanCount(once.size()), " checkpoints: "),
      Named(once), "?");
  LOSSD_RETURN_IF_ERROR(Confirm(yes, question, "not removed"));
  absl::Status first_error;
  nlohmann::ordered_json removed = nlohmann::ordered_json::array();
  for (const std::string& name : once) {
    const absl::StatusOr<v1::DeleteCheckpointResponse> deleted =
        client.DeleteCheckpoint(name, context->timeout());
    first_error.Update(deleted.status());
    if (!deleted.ok()) continue;
    removed.push_back({{"checkpoint", name}, {"bytes", deleted->bytes()}});
    if (!context->json) {
      context->Print(absl::StrCat("removed ", Printable(name), " (",
                                  HumanBytes(static_cast<double>(deleted->bytes())), ")\n"));
    }
  }
  if (context->json) context->PrintJson({{"removed", removed}});
  return first_error;
}

// Asks the user before a load replaces a head that has steps or rows which no checkpoint has. Does not ask if
// stdin is not a terminal.
absl::Status AskBeforeLoad(Context* context, const std::string& checkpoint, const std::string& head,
                           client::Client& client) {
  if (!CanAsk()) return absl::OkStatus();
  const std::string name = head.empty() ? checkpoint.substr(0, checkpoint.find('/')) : head;
  const absl::StatusOr<v1::HeadDescription> there = client.DescribeHead(name, context->timeout());
  if (!there.ok()) return absl::OkStatus();  // the load creates the head, or reports what is wrong
  const std::optional<uint64_t> since = StepsSinceSave(*there);
  const bool is_saved = since.has_value() ? *since == 0 : there->state().step() == 0;
  if (is_saved && there->step_rows() == 0) return absl::OkStatus();
  return Confirm(false, absl::StrCat(WhatIsLost(*there), ". Load ", Printable(checkpoint), " over it?"),
                 "not loaded");
}

absl::Status RunLoad(Context* context, const std::string& checkpoint, const std::string& head, bool yes,
                     client::Client& client) {
  if (!yes) LOSSD_RETURN_IF_ERROR(AskBeforeLoad(context, checkpoint, head, client));
  LOSSD_TRY(const v1::HeadDescription loaded, client.LoadCheckpoint(checkpoint, head, context->timeout()));
  if (context->json) {
    context->PrintJson(ToJson(loaded));
  } else {
    context->Print(absl::StrCat("loaded ", checkpoint, " into head \"", loaded.spec().name(), "\", step ",
                                HumanCount(loaded.state().step()), "\n"));
  }
  return absl::OkStatus();
}

}  // namespace

void AddCheckpointCommands(CLI::App* app, Context* context) {
  auto flags = std::make_shared<SaveFlags>();
  CLI::App* save = app->add_subcommand("save", "Write a checkpoint on the server");
  AddHead(save, &flags->head);
  save->add_option("--name", flags->name, "Name of the checkpoint [step-<number>]")->check(NotEmpty());
  save->add_option("--keep", flags->keep,
                   "Afterwards keep so many checkpoints that the server named, 0: all [the server's "
                   "--keep_checkpoints]");
  save->add_flag("--cancel-with-call", flags->cancel_with_call,
                 "End the save when lossctl ends; else it goes on");
  SetClientAction(save, context, [=](client::Client& client) { return RunSave(context, *flags, client); });

  auto head = std::make_shared<std::string>();
  auto name = std::make_shared<std::string>();
  auto yes = std::make_shared<bool>(false);
  const auto is_name = Rule("be HEAD/NAME, as `lossctl checkpoints` prints it", [](const std::string& text) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('/', 1));
    return !parts.first.empty() && !parts.second.empty();
  });
  CLI::App* load = app->add_subcommand("load", "Restore a head from a checkpoint");
  load->add_option("CHECKPOINT", *name, "As printed by save: HEAD/NAME")
      ->required()
      ->type_name("")
      ->check(is_name);
  load->add_flag("-y,--yes", *yes,
                 "On a terminal: do not ask where the head has steps that no checkpoint has");
  load->add_option("--head", *head, "The head to restore into or to make [the checkpoint's own]")
      ->check(NotEmpty());
  SetClientAction(load, context,
                  [=](client::Client& client) { return RunLoad(context, *name, *head, *yes, client); });

  CLI::App* list = app->add_subcommand("checkpoints", "List the checkpoints on the server, or remove some");
  list->add_option("HEAD", *head, "Of this head alone")->type_name("");
  list->fallthrough();
  auto names = std::make_shared<std::vector<std::string>>();
  CLI::App* remove = list->add_subcommand("rm", "Remove checkpoints");
  remove->add_option("CHECKPOINT", *names, "As printed by save: HEAD/NAME")
      ->required()
      ->type_name("")
      ->check(is_name);
  AddYes(remove, yes.get());
  SetAskingAction(remove, context, yes,
                  [=](client::Client& client) { return RunRemove(context, *names, *yes, client); });
  list->callback([=] {
    if (list->got_subcommand(remove)) return;
    context->action = [=] {
      return WithClient(context,
                        [=](client::Client& client) { return RunListCheckpoints(context, *head, client); });
    };
  });
}

// The commands read, write and add-grad.

namespace {

struct TensorFlags {
  std::string head;
  v1::Param param = v1::PARAM_WEIGHT;
  v1::Role role = v1::ROLE_VALUE;
  RowsOption rows;
  v1::DType dtype = v1::DTYPE_FP32;
  std::string out;   // of `read`
  std::string file;  // of `write` and `add-grad`
  // Of `add-grad`.
  std::optional<uint64_t> step;
  uint64_t id = 0;
  std::optional<float> scale;
};

// The columns of a tensor, and the range of its rows that the command is about.
struct Extent {
  uint64_t cols = 1;
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t rows() const { return end - begin; }
  std::vector<int64_t> Shape(v1::Param param) const {
    std::vector<int64_t> shape = {static_cast<int64_t>(rows())};
    if (param == v1::PARAM_WEIGHT) shape.push_back(static_cast<int64_t>(cols));
    return shape;
  }
};

absl::StatusOr<Extent> ExtentOf(const TensorFlags& flags, client::Client& client, absl::Duration timeout) {
  LOSSD_TRY(const v1::HeadDescription head, client.DescribeHead(flags.head, timeout));
  const v1::HeadSpec& spec = head.spec();
  const bool by_class = flags.param == v1::PARAM_WEIGHT || flags.param == v1::PARAM_BIAS ||
                        flags.param == v1::PARAM_CLASS_WEIGHTS;
  const uint64_t rows = by_class ? spec.vocab_size() : spec.hidden_size();
  Extent extent{flags.param == v1::PARAM_WEIGHT ? spec.hidden_size() : 1, flags.rows.begin.value_or(0),
                flags.rows.end.value_or(rows)};
  if (extent.begin > extent.end || extent.end > rows) {
    const std::string given = absl::StrCat(extent.begin, ":", extent.end);
    const std::string problem = absl::StrCat("is outside the tensor's ", rows, " rows");
    return errors::WithViolation(absl::InvalidArgumentError(absl::StrCat("--rows ", given, " ", problem)),
                                 {"--rows", problem, given});
  }
  return extent;
}

struct Statistics {
  double smallest = 0, largest = 0, mean = 0, norm = 0;
  uint64_t not_finite = 0;
};

Statistics StatisticsOf(absl::Span<const float> values) {
  Statistics statistics;
  double sum = 0, squares = 0;
  uint64_t finite = 0;
  for (double value : values) {
    if (!std::isfinite(value)) {
      ++statistics.not_finite;
      continue;
    }
    statistics.smallest = finite == 0 ? value : std::min(statistics.smallest, value);
    statistics.largest = finite == 0 ? value : std::max(statistics.largest, value);
    sum += value;
    squares += value * value;
    ++finite;
  }
  statistics.mean = finite > 0 ? sum / static_cast<double>(finite) : 0;
  statistics.norm = std::sqrt(squares);
  return statistics;
}

void PrintRead(const Context& context, const TensorFlags& flags, const Extent& extent,
               const Statistics& statistics) {
  const std::vector<int64_t> shape = extent.Shape(flags.param);
  if (context.json) {
    nlohmann::ordered_json json = {{"head", flags.head},
                                   {"param", NameOf(flags.param)},
                                   {"role", NameOf(flags.role)},
                                   {"rows", {{"begin", extent.begin}, {"end", extent.end}}},
                                   {"shape", shape},
                                   {"min", statistics.smallest},
                                   {"max", statistics.largest},
                                   {"mean", statistics.mean},
                                   {"norm", statistics.norm},
                                   {"not_finite", statistics.not_finite}};
    if (!flags.out.empty()) json["file"] = flags.out;
    context.PrintJson(json);
    return;
  }
  FieldList fields;
  fields.Add("tensor", absl::StrCat(flags.head, " ", NameOf(flags.param), " ", NameOf(flags.role)));
  fields.Add("shape", absl::StrJoin(shape, " x "));
  fields.Add("smallest", absl::StrFormat("%.6g", statistics.smallest));
  fields.Add("largest", absl::StrFormat("%.6g", statistics.largest));
  fields.Add("mean", absl::StrFormat("%.6g", statistics.mean));
  fields.Add("2-norm", absl::StrFormat("%.6g", statistics.norm));
  if (statistics.not_finite > 0) fields.Add("not finite", HumanCount(statistics.not_finite));
  if (!flags.out.empty()) fields.Add("written to", flags.out);
  context.Print(fields.ToString());
}

absl::Status RunRead(Context* context, const TensorFlags& flags, client::Client& client) {
  if (!flags.out.empty()) LOSSD_RETURN_IF_ERROR(CheckOutputPath(flags.out, 1));
  LOSSD_TRY(const Extent extent, ExtentOf(flags, client, context->timeout()));
  v1::ReadTensorRequest request;
  request.set_head(flags.head);
  request.set_param(flags.param);
  request.set_role(flags.role);
  request.mutable_rows()->set_begin(extent.begin);
  request.mutable_rows()->set_end(extent.end);
  request.set_dtype(flags.dtype);
  TensorData tensor{FileDType(flags.dtype), extent.Shape(flags.param), {}};
  tensor.bytes.resize(extent.rows() * extent.cols * client::ElementSize(flags.dtype));
  const auto bytes = absl::MakeSpan(reinterpret_cast<char*>(tensor.bytes.data()), tensor.bytes.size());
  LOSSD_RETURN_IF_ERROR(client.ReadTensor(request, bytes, context->timeout()).status());
  LOSSD_TRY(const std::vector<uint8_t> values, ConvertTo(v1::DTYPE_FP32, tensor));
  const Statistics statistics = StatisticsOf(
      absl::MakeConstSpan(reinterpret_cast<const float*>(values.data()), values.size() / sizeof(float)));
  if (!flags.out.empty()) {
    const std::string name =
        absl::StrCat(NameOf(flags.param), flags.role == v1::ROLE_VALUE ? "" : "." + NameOf(flags.role));
    LOSSD_RETURN_IF_ERROR(SaveTensors(flags.out, {{name, std::move(tensor)}}));
  }
  PrintRead(*context, flags, extent, statistics);
  return absl::OkStatus();
}

// The rows of a file in the form in which they are sent.
struct Payload {
  v1::DType dtype = v1::DTYPE_FP32;
  std::vector<uint8_t> bytes;

  absl::Span<const char> span() const { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }
};

// Reads the file, which must have exactly the rows of `extent`.
absl::StatusOr<Payload> LoadPayload(const TensorFlags& flags, const Extent& extent) {
  LOSSD_TRY(const TensorData tensor, LoadTensor(flags.file));
  if (tensor.shape != extent.Shape(flags.param)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.file, " has the shape [", absl::StrJoin(tensor.shape, ", "),
                     "], but the rows have [", absl::StrJoin(extent.Shape(flags.param), ", "), "]"));
  }
  Payload payload;
  const v1::DType stored = WireDType(tensor.dtype);
  if (stored != v1::DTYPE_UNSPECIFIED) payload.dtype = stored;
  absl::StatusOr<std::vector<uint8_t>> bytes = ConvertTo(payload.dtype, tensor);
  if (!bytes.ok())
    return absl::InvalidArgumentError(absl::StrCat(flags.file, ": ", bytes.status().message()));
  payload.bytes = *std::move(bytes);
  return payload;
}

absl::Status RunWrite(Context* context, const TensorFlags& flags, client::Client& client) {
  LOSSD_TRY(const Extent extent, ExtentOf(flags, client, context->timeout()));
  LOSSD_TRY(const Payload payload, LoadPayload(flags, extent));
  v1::OpenTensor open;
  open.set_head(flags.head);
  open.set_param(flags.param);
  open.set_role(flags.role);
  open.mutable_rows()->set_begin(extent.begin);
  open.mutable_rows()->set_end(extent.end);
  open.set_dtype(payload.dtype);
  LOSSD_TRY(const v1::WriteTensorResponse written,
            client.WriteTensor(open, payload.span(), context->timeout()));
  if (context->json) {
    nlohmann::ordered_json json = FieldsJson(written.state());
    json["rows"] = {{"begin", written.rows().begin()}, {"end", written.rows().end()}};
    context->PrintJson(json);
    return absl::OkStatus();
  }
  context->Print(absl::StrCat("wrote rows [", written.rows().begin(), ", ", written.rows().end(), ") of ",
                              flags.head, " ", NameOf(flags.param), " ", NameOf(flags.role), "\n"));
  return absl::OkStatus();
}

absl::Status RunAddGradient(Context* context, const TensorFlags& flags, client::Client& client) {
  LOSSD_TRY(const Extent extent, ExtentOf(flags, client, context->timeout()));
  LOSSD_TRY(const Payload payload, LoadPayload(flags, extent));
  LOSSD_TRY(const uint64_t step, StepOf(context, flags.head, flags.step, client));
  v1::OpenGradient open;
  open.set_head(flags.head);
  open.set_step(step);
  open.set_contribution_id(flags.id);
  open.set_param(flags.param);
  open.mutable_rows()->set_begin(extent.begin);
  open.mutable_rows()->set_end(extent.end);
  open.set_dtype(payload.dtype);
  if (flags.scale.has_value()) open.set_scale(*flags.scale);
  LOSSD_TRY(const v1::AddGradientResponse added,
            client.AddGradient(open, payload.span(), context->timeout()));
  if (context->json) {
    nlohmann::ordered_json json = FieldsJson(added.state());
    json["rows"] = {{"begin", added.rows().begin()}, {"end", added.rows().end()}};
    json["added_rows"] = added.added_rows();
    json["repeated_rows"] = added.repeated_rows();
    context->PrintJson(json);
    return absl::OkStatus();
  }
  context->Print(absl::StrCat("added ", HumanCount(added.added_rows()), " rows to the gradient of ",
                              flags.head, " ", NameOf(flags.param), " in step ",
                              HumanCount(added.state().step()), ", ", HumanCount(added.repeated_rows()),
                              " were there before\n"));
  return absl::OkStatus();
}

void AddCommonOptions(CLI::App* command, TensorFlags* flags) {
  AddHead(command, &flags->head);
  AddWord(command, "PARAM", &flags->param, Words<v1::Param>(), "Which parameter")->required();
  AddRows(command, &flags->rows);
}

void AddRole(CLI::App* command, TensorFlags* flags) {
  AddWord(command, "--role", &flags->role, Words<v1::Role>(), "What is stored of it [value]");
}

void AddFile(CLI::App* command, TensorFlags* flags) {
  command->add_option("FILE", flags->file, "FILE.npy, FILE.safetensors or FILE.safetensors:TENSOR")
      ->required()
      ->type_name("");
}

}  // namespace

void AddTensorCommands(CLI::App* app, Context* context) {
  auto flags = std::make_shared<TensorFlags>();
  CLI::App* read = app->add_subcommand("read", "Sum up a tensor, or write it to a file");
  AddCommonOptions(read, flags.get());
  AddRole(read, flags.get());
  AddWord(read, "--dtype", &flags->dtype, Words<v1::DType>(), "Element type to transfer [fp32]");
  read->add_option("--out", flags->out, "File to write: .npy or .safetensors")->type_name("FILE");
  SetClientAction(read, context, [=](client::Client& client) { return RunRead(context, *flags, client); });

  CLI::App* write = app->add_subcommand("write", "Replace a tensor's values by those of a file");
  AddCommonOptions(write, flags.get());
  AddRole(write, flags.get());
  AddFile(write, flags.get());
  SetClientAction(write, context, [=](client::Client& client) { return RunWrite(context, *flags, client); });

  CLI::App* add =
      app->add_subcommand("add-grad", "Add a file's values to the gradient of the open step, once");
  AddCommonOptions(add, flags.get());
  AddFile(add, flags.get());
  add->add_option("--id", flags->id, "Names the contribution; no microbatch of the step has it")->required();
  add->add_option("--step", flags->step, "Must be open [whichever is]");
  add->add_option("--scale", flags->scale, "Multiplies the values [1]");
  SetClientAction(add, context,
                  [=](client::Client& client) { return RunAddGradient(context, *flags, client); });
}

}  // namespace lossd::cli
