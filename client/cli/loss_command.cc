// SPDX-License-Identifier: Apache-2.0
// The command loss.
#include <CLI/Error.hpp>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/describe.h"
#include "client/cli/format.h"
#include "client/cli/options.h"
#include "client/cli/random_rows.h"
#include "client/cli/tensor_io.h"
#include "client/cli/value_checks.h"

namespace lossd::cli {
namespace {

struct LossFlags {
  std::string head;
  std::string hidden, targets, row_weights;
  uint64_t random_rows = 0;
  uint64_t seed = 0;
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  bool accumulate = false;
  std::optional<uint64_t> step;
  uint64_t microbatch_id = 0;
  std::string grad_out, rows_out;
  client::ComputeOptions loss;
};

// Per-row results of a microbatch.
struct RowResults {
  explicit RowResults(uint64_t rows) : loss(rows), lse(rows), entropy(rows), logprob(rows), argmax(rows) {}

  std::vector<float> loss, lse, entropy, logprob;
  std::vector<int32_t> argmax;
};

absl::Status InFile(const std::string& file, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(file, ": ", status.message()));
}

absl::StatusOr<HiddenRows> LoadRows(const LossFlags& flags) {
  absl::StatusOr<TensorData> hidden = LoadTensor(flags.hidden);
  if (!hidden.ok()) return hidden.status();
  if (hidden->shape.empty()) return absl::InvalidArgumentError(absl::StrCat(flags.hidden, " is a scalar"));
  const absl::StatusOr<TensorData> targets = LoadTensor(flags.targets);
  if (!targets.ok()) return targets.status();

  HiddenRows rows;
  rows.hidden_size = static_cast<uint64_t>(hidden->shape.back());
  rows.rows = rows.hidden_size > 0 ? hidden->elements() / rows.hidden_size : 0;
  rows.dtype = flags.dtype != v1::DTYPE_UNSPECIFIED ? flags.dtype : WireDType(hidden->dtype);
  if (rows.dtype == v1::DTYPE_UNSPECIFIED) rows.dtype = v1::DTYPE_FP32;
  absl::StatusOr<std::vector<uint8_t>> bytes = ConvertTo(rows.dtype, *hidden);
  if (!bytes.ok()) return InFile(flags.hidden, bytes.status());
  rows.hidden = *std::move(bytes);
  absl::StatusOr<std::vector<int32_t>> labels = ToInt32(*targets);
  if (!labels.ok()) return InFile(flags.targets, labels.status());
  rows.targets = *std::move(labels);
  if (rows.targets.size() != rows.rows) {
    return absl::InvalidArgumentError(absl::StrCat(flags.targets, " has ", rows.targets.size(),
                                                   " targets for ", rows.rows, " rows of ", flags.hidden));
  }
  return rows;
}

absl::StatusOr<std::vector<float>> LoadRowWeights(const std::string& file) {
  if (file.empty()) return std::vector<float>();
  const absl::StatusOr<TensorData> tensor = LoadTensor(file);
  if (!tensor.ok()) return tensor.status();
  const absl::StatusOr<std::vector<uint8_t>> bytes = ConvertTo(v1::DTYPE_FP32, *tensor);
  if (!bytes.ok()) return InFile(file, bytes.status());
  const auto* values = reinterpret_cast<const float*>(bytes->data());
  return std::vector<float>(values, values + bytes->size() / sizeof(float));
}

template <typename T>
NamedTensor AsTensor(const std::string& name, formats::DType dtype, const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  return {name,
          {dtype,
           {static_cast<int64_t>(values.size())},
           std::vector<uint8_t>(bytes, bytes + values.size() * sizeof(T))}};
}

absl::Status SaveCsv(const std::string& path, const std::vector<int32_t>& targets,
                     const RowResults& results) {
  std::ofstream file(path);
  file << "row,target,loss,lse,entropy,logprob,argmax\n";
  for (size_t row = 0; row < targets.size(); ++row) {
    file << absl::StreamFormat("%d,%d,%.9g,%.9g,%.9g,%.9g,%d\n", row, targets[row], results.loss[row],
                               results.lse[row], results.entropy[row], results.logprob[row],
                               results.argmax[row]);
  }
  file.close();
  return file ? absl::OkStatus() : absl::InternalError(absl::StrCat("cannot write ", path));
}

absl::Status SaveRows(const std::string& path, const std::vector<int32_t>& targets,
                      const RowResults& results) {
  if (absl::EndsWith(path, ".csv")) return SaveCsv(path, targets, results);
  using formats::DType;
  return SaveTensors(path, {AsTensor("row_loss", DType::kFloat32, results.loss),
                            AsTensor("row_lse", DType::kFloat32, results.lse),
                            AsTensor("row_entropy", DType::kFloat32, results.entropy),
                            AsTensor("row_logprob", DType::kFloat32, results.logprob),
                            AsTensor("row_argmax", DType::kInt32, results.argmax)});
}

absl::Status CheckOutputs(const LossFlags& flags) {
  if (!flags.grad_out.empty()) {
    absl::Status status = CheckOutputPath(flags.grad_out, 1);
    if (!status.ok()) return status;
  }
  if (flags.rows_out.empty() || absl::EndsWith(flags.rows_out, ".csv")) return absl::OkStatus();
  return CheckOutputPath(flags.rows_out, 5);
}

void PrintResult(const Context& context, const LossFlags& flags, uint64_t rows,
                 const client::LossResult& result) {
  if (context.json) {
    context.PrintJson({{"head", flags.head},
                       {"incarnation", HumanIncarnation(result.incarnation)},
                       {"step", result.step},
                       {"rows", rows},
                       {"loss", result.loss},
                       {"loss_sum", result.loss_sum},
                       {"z_loss_sum", result.z_loss_sum},
                       {"entropy_sum", result.entropy_sum},
                       {"normalizer", result.normalizer},
                       {"dropped_mass", result.dropped_mass},
                       {"gradient_error", result.gradient_error()},
                       {"valid_rows", result.valid_rows},
                       {"correct_rows", result.correct_rows},
                       {"accumulated_rows", result.accumulated_rows},
                       {"repeated_rows", result.repeated_rows},
                       {"queue_seconds", result.queue_seconds},
                       {"compute_seconds", result.compute_seconds},
                       {"wall_seconds", result.wall_seconds},
                       {"sent_bytes", result.sent_bytes},
                       {"received_bytes", result.received_bytes},
                       {"streams", result.streams},
                       {"repeats", result.repeats}});
    return;
  }
  const double valid = static_cast<double>(result.valid_rows);
  FieldList fields;
  fields.Add("loss", absl::StrFormat("%.9g", result.loss));
  if (result.z_loss_sum != 0) {
    fields.Add("of it z-loss", absl::StrFormat("%.9g", result.z_loss_sum / result.normalizer));
  }
  fields.Add("rows", absl::StrCat(HumanCount(rows), ", ", HumanCount(result.valid_rows), " valid"));
  fields.Add("correct",
             absl::StrFormat("%s (%.2f %%)", HumanCount(result.correct_rows),
                             valid > 0 ? 100.0 * static_cast<double>(result.correct_rows) / valid : 0.0));
  if (result.dropped_mass > 0) {
    fields.Add("dropped mass", absl::StrFormat("%.4g per valid row", result.dropped_mass / valid));
  }
  if (result.squared_gradient > 0) {
    fields.Add("gradient error", absl::StrFormat("%.2g predicted", result.gradient_error()));
  }
  if (flags.accumulate) {
    fields.Add("accumulated",
               absl::StrCat(HumanCount(result.accumulated_rows), " rows into step ", HumanCount(result.step),
                            ", ", HumanCount(result.repeated_rows), " were there before"));
  }
  fields.Add("time", absl::StrCat(HumanSeconds(result.wall_seconds), " (device ",
                                  HumanSeconds(result.compute_seconds), ", queue ",
                                  HumanSeconds(result.queue_seconds), ")"));
  fields.Add("transferred", absl::StrCat(HumanBytes(static_cast<double>(result.sent_bytes)), " there, ",
                                         HumanBytes(static_cast<double>(result.received_bytes)), " back"));
  if (!flags.grad_out.empty()) fields.Add("gradient in", flags.grad_out);
  if (!flags.rows_out.empty()) fields.Add("rows in", flags.rows_out);
  context.Print(fields.ToString());
}

absl::StatusOr<HiddenRows> MakeLossRows(const LossFlags& flags, const v1::HeadSpec& spec) {
  if (!flags.hidden.empty()) return LoadRows(flags);
  const v1::DType dtype = flags.dtype != v1::DTYPE_UNSPECIFIED ? flags.dtype : v1::DTYPE_BF16;
  const int copies = flags.grad_out.empty() ? 1 : 2;
  absl::Status room = CheckRoom("--random", flags.random_rows, spec.hidden_size(), dtype, copies);
  if (!room.ok()) return room;
  return RandomRows(flags.random_rows, spec.hidden_size(), spec.vocab_size(), dtype, flags.seed);
}

absl::Status RunLoss(Context* context, const LossFlags& flags, client::Client& client) {
  if (absl::Status status = CheckOutputs(flags); !status.ok()) return status;
  const absl::StatusOr<v1::HeadDescription> head = client.DescribeHead(flags.head, context->timeout());
  if (!head.ok()) return head.status();
  const absl::StatusOr<HiddenRows> rows = MakeLossRows(flags, head->spec());
  if (!rows.ok()) return rows.status();
  const absl::StatusOr<std::vector<float>> row_weights = LoadRowWeights(flags.row_weights);
  if (!row_weights.ok()) return row_weights.status();

  client::Microbatch microbatch;
  microbatch.head = flags.head;
  microbatch.step = flags.step;
  if (flags.accumulate && !flags.step.has_value()) microbatch.step = head->state().step();
  microbatch.id = flags.microbatch_id;
  microbatch.hidden_size = rows->hidden_size;
  microbatch.hidden_dtype = rows->dtype;
  microbatch.hidden = rows->hidden.data();
  microbatch.targets = rows->targets;
  microbatch.row_weights = *row_weights;

  client::LossOutputs outputs;
  std::vector<uint8_t> gradient(flags.grad_out.empty() ? 0 : rows->hidden.size());
  if (!flags.grad_out.empty()) outputs.grad_hidden = gradient.data();
  RowResults results(flags.rows_out.empty() ? 0 : rows->rows);
  outputs.row_loss = absl::MakeSpan(results.loss);
  outputs.row_lse = absl::MakeSpan(results.lse);
  outputs.row_entropy = absl::MakeSpan(results.entropy);
  outputs.row_logprob = absl::MakeSpan(results.logprob);
  outputs.row_argmax = absl::MakeSpan(results.argmax);

  client::ComputeOptions options = flags.loss;
  options.accumulate_gradients = flags.accumulate;
  options.timeout = context->timeout();
  const absl::StatusOr<client::LossResult> result = client.ComputeLoss(microbatch, outputs, options);
  if (!result.ok()) return result.status();

  if (!flags.grad_out.empty()) {
    const std::vector<int64_t> shape = {static_cast<int64_t>(rows->rows),
                                        static_cast<int64_t>(rows->hidden_size)};
    absl::Status status =
        SaveTensors(flags.grad_out, {{"grad_hidden", {FileDType(rows->dtype), shape, std::move(gradient)}}});
    if (!status.ok()) return status;
  }
  if (!flags.rows_out.empty()) {
    absl::Status status = SaveRows(flags.rows_out, rows->targets, results);
    if (!status.ok()) return status;
  }
  PrintResult(*context, flags, rows->rows, *result);
  return absl::OkStatus();
}

}  // namespace

void AddLossCommand(CLI::App* app, Context* context) {
  CLI::App* loss = app->add_subcommand("loss", "Compute the loss of rows");
  auto flags = std::make_shared<LossFlags>();
  AddHead(loss, &flags->head);
  const std::string files = "FILE.npy|FILE.safetensors[:TENSOR]";
  const std::string rows = "Rows";
  CLI::Option* hidden =
      loss->add_option("--hidden", flags->hidden, "Hidden states [..., D]")->type_name(files)->group(rows);
  CLI::Option* targets =
      loss->add_option("--targets", flags->targets, "Integers, one per row")->type_name(files)->group(rows);
  hidden->needs(targets);
  targets->needs(hidden);
  CLI::Option* random = loss->add_option("--random", flags->random_rows, "Instead: so many random rows")
                            ->type_name("ROWS")
                            ->check(WholeNumber(1))
                            ->excludes(hidden)
                            ->group(rows);
  loss->add_option("--seed", flags->seed, "Of the random rows [0]")->needs(random)->group(rows);
  loss->add_option("--row-weights", flags->row_weights, "Weights, one per row")
      ->type_name(files)
      ->group(rows);
  AddWord(loss, "--dtype", &flags->dtype, DTypes(), "Element type to transfer [the file's; random: bf16]")
      ->group(rows);

  AddLossOptions(loss, &flags->loss);

  const std::string training = "Training";
  loss->add_flag("--accumulate", flags->accumulate, "Add the gradients of the head to its accumulators")
      ->group(training);
  loss->add_option("--step", flags->step, "Must be open [whichever is]")->group(training);
  loss->add_option("--microbatch-id", flags->microbatch_id, "The same id is accumulated once [0]")
      ->group(training);

  const std::string results = "Results";
  loss->add_option("--grad-out", flags->grad_out, "Write dL/dx: .npy or .safetensors")
      ->type_name("FILE")
      ->group(results);
  loss->add_option("--rows-out", flags->rows_out, "Write results per row: .safetensors or .csv")
      ->type_name("FILE")
      ->group(results);
  loss->parse_complete_callback([flags] {
    if (flags->hidden.empty() && flags->random_rows == 0)
      throw CLI::RequiredError("--hidden and --targets, or --random");
  });
  SetClientAction(loss, context, [=](client::Client& client) { return RunLoss(context, *flags, client); });
}

}  // namespace lossd::cli
