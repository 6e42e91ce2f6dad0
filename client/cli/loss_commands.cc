// SPDX-License-Identifier: Apache-2.0
// The commands loss and bench (loss_commands.h): their options, rows and reports.
#include "client/cli/loss_commands.h"

#include <CLI/Error.hpp>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "client/cli/describe.h"
#include "client/cli/format.h"
#include "client/cli/live.h"
#include "client/cli/options.h"
#include "client/cli/tensors.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::cli {
namespace {

// The rates and means of a bench run, for its report.
struct Summary {
  explicit Summary(const BenchTotals& totals) : sorted(totals.latencies) {
    std::sort(sorted.begin(), sorted.end());
    if (totals.seconds > 0) {
      rows = static_cast<double>(totals.rows) / totals.seconds;
      sent = static_cast<double>(totals.sent_bytes) / totals.seconds;
      received = static_cast<double>(totals.received_bytes) / totals.seconds;
    }
    if (sorted.empty()) sorted = {0};
    const double count = std::max<double>(1, static_cast<double>(totals.latencies.size()));
    mean = std::accumulate(sorted.begin(), sorted.end(), 0.0) / count;
    queue = totals.queue_seconds / count;
    compute = totals.compute_seconds / count;
    if (totals.squared_gradient > 0) error = std::sqrt(totals.sampling_variance / totals.squared_gradient);
  }

  double rows = 0, sent = 0, received = 0;  // per second
  double mean = 0, queue = 0, compute = 0;  // seconds per microbatch
  double error = 0;                         // predicted relative error of sampled gradients
  std::vector<double> sorted;
};

}  // namespace

double SampleQuantile(absl::Span<const double> sorted, double q) {
  const double rank = std::ceil(q * static_cast<double>(sorted.size()));
  return sorted[static_cast<size_t>(std::clamp(rank, 1.0, static_cast<double>(sorted.size()))) - 1];
}

nlohmann::ordered_json BenchJson(const BenchSetup& setup, const BenchTotals& totals) {
  const Summary summary(totals);
  return {
      {"head", setup.head},
      {"data", setup.data},
      {"what", setup.what},
      {"dtype", setup.dtype},
      {"hidden_size", setup.hidden_size},
      {"rows_per_microbatch", setup.rows},
      {"in_flight", setup.in_flight},
      {"channels", setup.channels},
      {"channels_reason", setup.channels_reason},
      {"streams", totals.streams},
      {"slice_bytes", setup.slice_bytes.has_value() ? nlohmann::ordered_json(*setup.slice_bytes) : nullptr},
      {"transport", setup.transport},
      {"transport_reason", setup.transport_reason},
      {"gpu", setup.gpu.has_value() ? nlohmann::ordered_json(*setup.gpu) : nullptr},
      {"seconds", totals.seconds},
      {"microbatches", totals.latencies.size()},
      {"rows", totals.rows},
      {"rows_per_second", summary.rows},
      {"sent_bytes_per_second", summary.sent},
      {"received_bytes_per_second", summary.received},
      {"latency_seconds",
       {{"mean", summary.mean},
        {"p50", SampleQuantile(summary.sorted, 0.5)},
        {"p90", SampleQuantile(summary.sorted, 0.9)},
        {"p99", SampleQuantile(summary.sorted, 0.99)},
        {"max", summary.sorted.back()}}},
      {"server_seconds_per_microbatch", {{"queue", summary.queue}, {"compute", summary.compute}}},
      {"repeats", totals.repeats},
      {"gradient_error", summary.error}};
}

std::string BenchText(const BenchSetup& setup, const BenchTotals& totals) {
  const Summary summary(totals);
  const auto quantile = [&summary](double q) { return HumanSeconds(SampleQuantile(summary.sorted, q)); };
  FieldList fields;
  fields.Add("head", absl::StrCat(setup.head, ", D = ", HumanCount(setup.hidden_size), ", ", setup.dtype));
  static const auto* const computed =
      new std::map<std::string, std::string>{{"loss", "loss"},
                                             {"dx", "loss and dL/dx"},
                                             {"all", "loss, dL/dx and dL/dW"},
                                             {"rows", "nothing: rows of the weight, as of an embedding"},
                                             {"row-gradients", "sums of gradients of an embedding's rows"}};
  fields.Add("computed", computed->at(setup.what));
  fields.Add(
      "load",
      absl::StrCat(setup.in_flight, " x ", HumanCount(setup.rows), " ", setup.data, " rows in flight, ",
                   totals.streams, " streams over ", setup.channels, " channels",
                   setup.slice_bytes.has_value()
                       ? absl::StrCat(", slices of ", HumanBytes(static_cast<double>(*setup.slice_bytes)))
                       : ""));
  fields.Add("transport", setup.transport_reason.empty()
                              ? setup.transport
                              : absl::StrCat(setup.transport, " (", setup.transport_reason, ")"));
  if (!setup.channels_reason.empty())
    fields.Add("channels", absl::StrCat(setup.channels, " (", setup.channels_reason, ")"));
  fields.Add("ran", absl::StrCat(HumanSeconds(totals.seconds), ", ", HumanCount(totals.latencies.size()),
                                 " microbatches",
                                 totals.repeats > 0 ? absl::StrCat(", ", totals.repeats, " repeats") : ""));
  fields.Add("throughput", absl::StrCat(HumanRate(summary.rows), " rows/s"));
  fields.Add("transfer",
             absl::StrFormat("%.3f GB/s there, %.3f GB/s back", summary.sent / 1e9, summary.received / 1e9));
  fields.Add("latency", absl::StrCat("p50 ", quantile(0.5), ", p90 ", quantile(0.9), ", p99 ", quantile(0.99),
                                     ", max ", quantile(1)));
  fields.Add("server", absl::StrCat("per microbatch, summed over slices: queue ", HumanSeconds(summary.queue),
                                    ", device ", HumanSeconds(summary.compute)));
  if (summary.error > 0) fields.Add("gradients", absl::StrFormat("predicted error %.2g", summary.error));
  return fields.ToString();
}

// The command loss.

namespace {

struct LossFlags {
  std::string head;
  std::string hidden, targets, row_weights;
  std::string advantages, old_logprobs, ref_logprobs;
  std::string teacher_hidden;
  uint64_t random_rows = 0;
  uint64_t seed = 0;
  v1::DType dtype = v1::DTYPE_UNSPECIFIED;
  bool accumulate = false;
  std::optional<uint64_t> step;
  uint64_t microbatch_id = 0;
  std::vector<float> depth_weights;  // one per depth; empty: the rows are not divided into depths
  std::string grad_out, rows_out;
  std::vector<int32_t> classes;
  uint32_t top_k = 0;
  std::string target_classes, target_weights;
  client::ComputeOptions loss;
};

// The results of a microbatch, for each of its N rows.
struct RowResults {
  RowResults(uint64_t rows, std::vector<int32_t> named, uint64_t k)
      : loss(rows),
        lse(rows),
        entropy(rows),
        logprob(rows),
        argmax(rows),
        classes(std::move(named)),
        top_k(k),
        class_logprobs(rows * classes.size()),
        top_logprobs(rows * k),
        top_classes(rows * k) {}

  std::vector<float> loss, lse, entropy, logprob;
  std::vector<int32_t> argmax;
  const std::vector<int32_t> classes;  // [K], the same for all rows
  const uint64_t top_k;
  std::vector<float> class_logprobs;  // [N, K]
  std::vector<float> top_logprobs;    // [N, top_k]
  std::vector<int32_t> top_classes;   // [N, top_k]
};

absl::Status InFile(const std::string& file, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(file, ": ", status.message()));
}

absl::StatusOr<HiddenRows> LoadRows(const LossFlags& flags) {
  LOSSD_TRY(TensorData hidden, LoadTensor(flags.hidden));
  if (hidden.shape.empty()) return absl::InvalidArgumentError(absl::StrCat(flags.hidden, " is a scalar"));
  LOSSD_TRY(const TensorData targets, LoadTensor(flags.targets));

  HiddenRows rows;
  rows.hidden_size = static_cast<uint64_t>(hidden.shape.back());
  rows.rows = rows.hidden_size > 0 ? hidden.elements() / rows.hidden_size : 0;
  rows.dtype = flags.dtype != v1::DTYPE_UNSPECIFIED ? flags.dtype : WireDType(hidden.dtype);
  if (rows.dtype == v1::DTYPE_UNSPECIFIED) rows.dtype = v1::DTYPE_FP32;
  absl::StatusOr<std::vector<uint8_t>> bytes = ConvertTo(rows.dtype, hidden);
  if (!bytes.ok()) return InFile(flags.hidden, bytes.status());
  rows.hidden = *std::move(bytes);
  absl::StatusOr<std::vector<int32_t>> labels = ToInt32(targets);
  if (!labels.ok()) return InFile(flags.targets, labels.status());
  rows.targets = *std::move(labels);
  if (rows.targets.size() != rows.rows) {
    return absl::InvalidArgumentError(absl::StrCat(flags.targets, " has ", rows.targets.size(),
                                                   " targets for ", rows.rows, " rows of ", flags.hidden));
  }
  return rows;
}

// Converts a tensor, which was read from `file`, to floats.
absl::StatusOr<std::vector<float>> ToNumbers(const std::string& file, const TensorData& tensor) {
  const absl::StatusOr<std::vector<uint8_t>> bytes = ConvertTo(v1::DTYPE_FP32, tensor);
  if (!bytes.ok()) return InFile(file, bytes.status());
  const auto* values = reinterpret_cast<const float*>(bytes->data());
  return std::vector<float>(values, values + bytes->size() / sizeof(float));
}

// Reads a file with one number per row. Empty if no file is named.
absl::StatusOr<std::vector<float>> LoadNumbers(const std::string& file) {
  if (file.empty()) return std::vector<float>();
  LOSSD_TRY(const TensorData tensor, LoadTensor(file));
  return ToNumbers(file, tensor);
}

// The soft targets that were read from two files, --target-classes and --target-weights.
struct SoftTargets {
  std::vector<int32_t> classes;  // [rows, count]
  std::vector<float> weights;    // [rows, count]
  uint32_t count = 0;
};

absl::StatusOr<SoftTargets> LoadSoftTargets(const LossFlags& flags, uint64_t rows) {
  SoftTargets soft;
  if (flags.target_classes.empty()) return soft;
  LOSSD_TRY(const TensorData classes, LoadTensor(flags.target_classes));
  LOSSD_TRY(const TensorData weights, LoadTensor(flags.target_weights));
  std::vector<int64_t> of_weights = weights.shape;
  if (of_weights.size() == 1) of_weights.push_back(1);  // a vector is one column
  if (of_weights != classes.shape || classes.shape.size() != 2 ||
      classes.shape.front() != static_cast<int64_t>(rows)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.target_classes, " has shape [", absl::StrJoin(classes.shape, ", "), "] and ",
                     flags.target_weights, " [", absl::StrJoin(weights.shape, ", "),
                     "]; both must have [N, K], with N ", rows));
  }
  LOSSD_TRY(soft.weights, ToNumbers(flags.target_weights, weights));
  absl::StatusOr<std::vector<int32_t>> places = ToInt32(classes);
  if (!places.ok()) return InFile(flags.target_classes, places.status());
  soft.classes = *std::move(places);
  soft.count = static_cast<uint32_t>(classes.shape.back());
  return soft;
}

// A tensor of `values`: a vector [N], or with `columns` a matrix [N / columns, columns].
template <typename T>
NamedTensor AsTensor(const std::string& name, formats::DType dtype, const std::vector<T>& values,
                     std::optional<uint64_t> columns = std::nullopt) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  std::vector<int64_t> shape = {static_cast<int64_t>(values.size() / columns.value_or(1))};
  if (columns.has_value()) shape.push_back(static_cast<int64_t>(*columns));
  return {name, {dtype, std::move(shape), std::vector<uint8_t>(bytes, bytes + values.size() * sizeof(T))}};
}

absl::Status SaveCsv(const std::string& path, const std::vector<int32_t>& targets,
                     const RowResults& results) {
  std::ofstream file(path);
  const size_t named = results.classes.size(), k = results.top_k;
  file << "row,target,loss,lse,entropy,logprob,argmax";
  for (const int32_t place : results.classes) file << ",logprob_" << place;
  for (size_t i = 1; i <= k; ++i) file << ",top_class_" << i << ",top_logprob_" << i;
  file << "\n";
  for (size_t row = 0; row < targets.size(); ++row) {
    file << absl::StreamFormat("%d,%d,%.9g,%.9g,%.9g,%.9g,%d", row, targets[row], results.loss[row],
                               results.lse[row], results.entropy[row], results.logprob[row],
                               results.argmax[row]);
    for (size_t i = row * named; i < (row + 1) * named; ++i) {
      file << absl::StreamFormat(",%.9g", results.class_logprobs[i]);
    }
    for (size_t i = row * k; i < (row + 1) * k; ++i) {
      file << absl::StreamFormat(",%d,%.9g", results.top_classes[i], results.top_logprobs[i]);
    }
    file << "\n";
  }
  file.close();
  return file ? absl::OkStatus() : absl::InternalError(absl::StrCat("cannot write ", path));
}

absl::Status SaveRows(const std::string& path, const std::vector<int32_t>& targets,
                      const RowResults& results) {
  if (absl::EndsWith(path, ".csv")) return SaveCsv(path, targets, results);
  using formats::DType;
  std::vector<NamedTensor> tensors = {AsTensor("row_loss", DType::kFloat32, results.loss),
                                      AsTensor("row_lse", DType::kFloat32, results.lse),
                                      AsTensor("row_entropy", DType::kFloat32, results.entropy),
                                      AsTensor("row_logprob", DType::kFloat32, results.logprob),
                                      AsTensor("row_argmax", DType::kInt32, results.argmax)};
  if (!results.classes.empty()) {
    tensors.push_back(
        AsTensor("class_logprobs", DType::kFloat32, results.class_logprobs, results.classes.size()));
  }
  if (results.top_k > 0) {
    tensors.push_back(AsTensor("top_classes", DType::kInt32, results.top_classes, results.top_k));
    tensors.push_back(AsTensor("top_logprobs", DType::kFloat32, results.top_logprobs, results.top_k));
  }
  return SaveTensors(path, tensors);
}

absl::Status CheckOutputs(const LossFlags& flags) {
  if (!flags.grad_out.empty()) LOSSD_RETURN_IF_ERROR(CheckOutputPath(flags.grad_out, 1));
  if (flags.rows_out.empty() || absl::EndsWith(flags.rows_out, ".csv")) return absl::OkStatus();
  return CheckOutputPath(flags.rows_out, 5);
}

nlohmann::ordered_json DepthsJson(const LossFlags& flags, const client::LossResult& result) {
  auto depths = nlohmann::ordered_json::array();
  for (size_t i = 0; i < result.depths.size(); ++i) {
    const client::DepthResult& depth = result.depths[i];
    depths.push_back({{"weight", flags.depth_weights[i]},
                      {"loss", depth.loss},
                      {"loss_sum", depth.loss_sum},
                      {"normalizer", depth.normalizer},
                      {"valid_rows", depth.valid_rows},
                      {"correct_rows", depth.correct_rows},
                      {"accumulated_rows", depth.accumulated_rows},
                      {"repeated_rows", depth.repeated_rows}});
  }
  return depths;
}

void AddDepths(const LossFlags& flags, const client::LossResult& result, FieldList& fields) {
  for (size_t i = 0; i < result.depths.size(); ++i) {
    const client::DepthResult& depth = result.depths[i];
    fields.Add(
        absl::StrCat("depth ", i),
        absl::StrFormat("loss %.9g, weight %g, %s valid rows, %s correct", depth.loss, flags.depth_weights[i],
                        HumanCount(depth.valid_rows), HumanCount(depth.correct_rows)));
  }
}

// One depth for each weight in --depth-weights. All depths have equally many rows.
absl::StatusOr<std::vector<client::Depth>> DepthsOf(const LossFlags& flags, uint64_t rows) {
  const uint64_t count = flags.depth_weights.size();
  if (count > 0 && rows % count != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--depth-weights: ", rows, " rows cannot be divided into ",
                                                   count, " depths with as many rows each"));
  }
  std::vector<client::Depth> depths;
  for (const float weight : flags.depth_weights) depths.push_back({.rows = rows / count, .weight = weight});
  return depths;
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
                       {"objective",
                        {{"rows", result.objective.rows()},
                         {"clipped_rows", result.objective.clipped_rows()},
                         {"ratio", result.objective.ratio()},
                         {"old_kl", result.objective.old_kl()},
                         {"ref_kl", result.objective.ref_kl()}}},
                       {"divergence_sum", result.divergence_sum},
                       {"target_loss_sum", result.target_loss_sum},
                       {"valid_rows", result.valid_rows},
                       {"unlisted_rows", result.unlisted_rows},
                       {"correct_rows", result.correct_rows},
                       {"accumulated_rows", result.accumulated_rows},
                       {"repeated_rows", result.repeated_rows},
                       {"queue_seconds", result.queue_seconds},
                       {"compute_seconds", result.compute_seconds},
                       {"wall_seconds", result.wall_seconds},
                       {"sent_bytes", result.sent_bytes},
                       {"received_bytes", result.received_bytes},
                       {"streams", result.streams},
                       {"repeats", result.repeats},
                       {"depths", DepthsJson(flags, result)}});
    return;
  }
  const double valid = static_cast<double>(result.valid_rows);
  FieldList fields;
  fields.Add("loss", absl::StrFormat("%.9g", result.loss));
  AddDepths(flags, result, fields);
  if (result.z_loss_sum != 0 && result.depths.empty()) {
    fields.Add("of it z-loss", absl::StrFormat("%.9g", result.z_loss_sum / result.normalizer));
  }
  if (flags.loss.loss.has_distillation()) {
    fields.Add("divergence",
               absl::StrFormat("%.9g, loss with targets %.9g", result.divergence_sum / result.normalizer,
                               result.target_loss_sum / result.normalizer));
  }
  fields.Add("rows", absl::StrCat(HumanCount(rows), ", ", HumanCount(result.valid_rows), " valid"));
  if (result.unlisted_rows > 0) {
    fields.Add("unlisted", absl::StrCat(HumanCount(result.unlisted_rows),
                                        " rows, ignored: the head does not have their class"));
  }
  fields.Add("correct",
             absl::StrFormat("%s (%.2f %%)", HumanCount(result.correct_rows),
                             valid > 0 ? 100.0 * static_cast<double>(result.correct_rows) / valid : 0.0));
  if (result.dropped_mass > 0) {
    fields.Add("dropped mass", absl::StrFormat("%.4g per valid row", result.dropped_mass / valid));
  }
  if (result.squared_gradient > 0) {
    fields.Add("gradient error", absl::StrFormat("%.2g predicted", result.gradient_error()));
  }
  if (const v1::ObjectiveSums& sums = result.objective; sums.rows() > 0) {
    const double rows_of_objective = static_cast<double>(sums.rows());
    fields.Add("objective",
               absl::StrFormat("ratio %.4g, %.2f %% clipped, KL from old %.4g, from reference %.4g",
                               sums.ratio() / rows_of_objective,
                               100.0 * static_cast<double>(sums.clipped_rows()) / rows_of_objective,
                               sums.old_kl() / rows_of_objective, sums.ref_kl() / rows_of_objective));
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
  LOSSD_RETURN_IF_ERROR(CheckRoom("--random", flags.random_rows, spec.hidden_size(), dtype, copies));
  return RandomRows(flags.random_rows, spec.hidden_size(), spec.vocab_size(), dtype, flags.seed);
}

// Adds the options for the objective and for the values that it takes with each row.
void AddObjective(CLI::App* command, const std::string& files, LossFlags& flags) {
  const std::string group = "Objective in the place of the cross-entropy";
  const auto numbers = [&](const std::string& name, std::string* file, const std::string& description) {
    command->add_option(name, *file, description)->type_name(files)->group(group);
  };
  numbers("--advantages", &flags.advantages, "One per row");
  numbers("--old-logprobs", &flags.old_logprobs, "Of the policy that sampled the targets, one per row");
  numbers("--ref-logprobs", &flags.ref_logprobs, "Of the reference, one per row");
  v1::LossOptions* const loss = &flags.loss.loss;
  AddWordFunction(
      command, "--objective", [loss](v1::ObjectiveKind kind) { loss->mutable_objective()->set_kind(kind); },
      Words<v1::ObjectiveKind>(), "What takes the place [nothing]")
      ->group(group);
  AddWordFunction(
      command, "--kl", [loss](v1::KlEstimator kl) { loss->mutable_objective()->set_kl(kl); },
      Words<v1::KlEstimator>(), "How the divergence from the reference is estimated [k3]")
      ->group(group);
  const auto number = [&](const std::string& name, void (v1::Objective::*set)(float),
                          const std::string& description) {
    command
        ->add_option_function<float>(
            name, [loss, set](const float& value) { (loss->mutable_objective()->*set)(value); }, description)
        ->group(group);
  };
  using Objective = v1::Objective;
  number("--clip-low", &Objective::set_clip_low,
         "ppo, cispo: the ratio is at least 1 less this [0.2; cispo: 1]");
  number("--clip-high", &Objective::set_clip_high, "ppo, cispo: it is at most 1 and this [0.2; cispo: 4]");
  number("--dual-clip", &Objective::set_dual_clip,
         "ppo: its largest size with a negative advantage; 0: none [0]");
  number("--kl-coef", &Objective::set_kl_coef, "Weight of the divergence from the reference [0]");
  number("--entropy-bonus", &Objective::set_entropy_bonus, "Weight of the entropy, which is subtracted [0]");
}

// Adds the options for distillation: the teacher, and how its softmax and the head's are compared.
void AddDistillation(CLI::App* command, const std::string& files, LossFlags& flags) {
  const std::string group = "Distillation: the divergence from the softmax of a teacher";
  v1::LossOptions* const loss = &flags.loss.loss;
  CLI::Option* const teacher = command
                                   ->add_option_function<std::string>(
                                       "--teacher",
                                       [loss](const std::string& name) {
                                         v1::Distillation& distillation = *loss->mutable_distillation();
                                         distillation.set_teacher(name);
                                         if (distillation.divergence() == v1::DIVERGENCE_UNSPECIFIED) {
                                           distillation.set_divergence(v1::DIVERGENCE_FORWARD_KL);
                                         }
                                       },
                                       "A frozen head of the server with the same classes")
                                   ->type_name("HEAD")
                                   ->group(group);
  command->add_option("--teacher-hidden", flags.teacher_hidden, "Its hidden states of the rows [..., D]")
      ->type_name(files)
      ->needs(teacher)
      ->group(group);
  AddWordFunction(
      command, "--divergence",
      [loss](v1::Divergence divergence) { loss->mutable_distillation()->set_divergence(divergence); },
      Words<v1::Divergence>(), "What is compared [forward-kl]")
      ->needs(teacher)
      ->group(group);
  const auto number = [&](const std::string& name, void (v1::Distillation::*set)(float),
                          const std::string& description) {
    command
        ->add_option_function<float>(
            name, [loss, set](const float& value) { (loss->mutable_distillation()->*set)(value); },
            description)
        ->needs(teacher)
        ->group(group);
  };
  using Distillation = v1::Distillation;
  number("--beta", &Distillation::set_beta, "jensen-shannon: the teacher's part of the mixture [0.5]");
  number("--temperature", &Distillation::set_temperature, "Divides the logits of both [1]");
  number("--divergence-weight", &Distillation::set_weight, "Of the divergence in the loss [1]");
  number("--target-weight", &Distillation::set_target_weight, "Of the loss with the targets [0]");
  number("--teacher-logit-scale", &Distillation::set_teacher_logit_scale,
         "As --logit-scale, of the teacher [1]");
  number("--teacher-softcap", &Distillation::set_teacher_softcap,
         "As --softcap, of the teacher; 0: none [0]");
}

// The teacher's hidden states for `rows`: read from --teacher-hidden, or random.
absl::StatusOr<HiddenRows> MakeTeacherRows(const Context& context, const LossFlags& flags,
                                           const HiddenRows& rows, client::Client& client) {
  if (!flags.loss.loss.has_distillation()) return HiddenRows();
  if (flags.teacher_hidden.empty() != flags.hidden.empty()) {
    return absl::InvalidArgumentError(flags.hidden.empty()
                                          ? "--teacher-hidden goes with --hidden"
                                          : "--teacher with --hidden needs --teacher-hidden");
  }
  if (flags.hidden.empty()) {
    const std::string& name = flags.loss.loss.distillation().teacher();
    LOSSD_TRY(const v1::HeadDescription head, client.DescribeHead(name, context.timeout()));
    LOSSD_RETURN_IF_ERROR(CheckRoom("--random", rows.rows, head.spec().hidden_size(), rows.dtype, 1));
    return RandomRows(rows.rows, head.spec().hidden_size(), head.spec().vocab_size(), rows.dtype,
                      flags.seed + 1);
  }
  LOSSD_TRY(const TensorData hidden, LoadTensor(flags.teacher_hidden));
  HiddenRows teacher;
  teacher.hidden_size = hidden.shape.empty() ? 0 : static_cast<uint64_t>(hidden.shape.back());
  teacher.rows = teacher.hidden_size > 0 ? hidden.elements() / teacher.hidden_size : 0;
  if (teacher.rows != rows.rows) {
    return absl::InvalidArgumentError(absl::StrCat(flags.teacher_hidden, " has ", teacher.rows, " rows; ",
                                                   flags.hidden, " has ", rows.rows));
  }
  absl::StatusOr<std::vector<uint8_t>> bytes = ConvertTo(rows.dtype, hidden);
  if (!bytes.ok()) return InFile(flags.teacher_hidden, bytes.status());
  teacher.hidden = *std::move(bytes);
  return teacher;
}

// Adds the options for soft targets, which replace the one target of a row.
void AddSoftTargets(CLI::App* command, const std::string& files, LossFlags& flags) {
  const std::string group = "Soft targets in the place of one target";
  v1::LossOptions* const loss = &flags.loss.loss;
  CLI::Option* const rest = AddWordFunction(
      command, "--rest", [loss](v1::Rest value) { loss->set_rest(value); }, Words<v1::Rest>(),
      "What becomes of the probability that a row's weights leave over [rows have one target]");
  CLI::Option* const classes =
      command->add_option("--target-classes", flags.target_classes, "Classes [N, K]; -1: none");
  CLI::Option* const weights =
      command->add_option("--target-weights", flags.target_weights, "Their weights [N, K]");
  for (CLI::Option* const option : {rest, classes, weights}) option->group(group);
  for (CLI::Option* const option : {classes, weights}) option->type_name(files);
  rest->needs(classes)->needs(weights);
  classes->needs(rest);
  weights->needs(rest);
}

absl::Status RunLoss(Context* context, const LossFlags& flags, client::Client& client) {
  LOSSD_RETURN_IF_ERROR(CheckOutputs(flags));
  LOSSD_TRY(const v1::HeadDescription head, client.DescribeHead(flags.head, context->timeout()));
  const absl::StatusOr<HiddenRows> rows = MakeLossRows(flags, head.spec());
  if (!rows.ok()) return rows.status();
  LOSSD_TRY(const HiddenRows teacher, MakeTeacherRows(*context, flags, *rows, client));
  LOSSD_TRY(const std::vector<float> row_weights, LoadNumbers(flags.row_weights));
  LOSSD_TRY(const std::vector<float> advantages, LoadNumbers(flags.advantages));
  LOSSD_TRY(const std::vector<float> old_logprobs, LoadNumbers(flags.old_logprobs));
  LOSSD_TRY(const std::vector<float> ref_logprobs, LoadNumbers(flags.ref_logprobs));

  LOSSD_TRY(const SoftTargets soft, LoadSoftTargets(flags, rows->rows));

  client::Microbatch microbatch;
  microbatch.target_classes = soft.classes;
  microbatch.target_weights = soft.weights;
  microbatch.target_count = soft.count;
  microbatch.head = flags.head;
  microbatch.step = flags.step;
  if (flags.accumulate && !flags.step.has_value()) microbatch.step = head.state().step();
  microbatch.id = flags.microbatch_id;
  microbatch.hidden_size = rows->hidden_size;
  microbatch.hidden_dtype = rows->dtype;
  microbatch.hidden = rows->hidden.data();
  microbatch.targets = rows->targets;
  if (teacher.rows > 0) {
    microbatch.teacher_hidden = teacher.hidden.data();
    microbatch.teacher_hidden_size = teacher.hidden_size;
  }
  microbatch.row_weights = row_weights;
  microbatch.advantages = advantages;
  microbatch.old_logprobs = old_logprobs;
  microbatch.ref_logprobs = ref_logprobs;
  LOSSD_TRY(microbatch.depths, DepthsOf(flags, rows->rows));

  client::LossOutputs outputs;
  std::vector<uint8_t> gradient(flags.grad_out.empty() ? 0 : rows->hidden.size());
  if (!flags.grad_out.empty()) outputs.grad_hidden = gradient.data();
  RowResults results(flags.rows_out.empty() ? 0 : rows->rows, flags.classes, flags.top_k);
  microbatch.classes = results.classes;
  outputs.row_loss = absl::MakeSpan(results.loss);
  outputs.row_lse = absl::MakeSpan(results.lse);
  outputs.row_entropy = absl::MakeSpan(results.entropy);
  outputs.row_logprob = absl::MakeSpan(results.logprob);
  outputs.row_argmax = absl::MakeSpan(results.argmax);
  outputs.class_logprobs = absl::MakeSpan(results.class_logprobs);
  outputs.class_count = static_cast<uint32_t>(results.classes.size());
  outputs.top_logprobs = absl::MakeSpan(results.top_logprobs);
  outputs.top_classes = absl::MakeSpan(results.top_classes);
  outputs.top_k = flags.top_k;

  client::ComputeOptions options = flags.loss;
  options.accumulate_gradients = flags.accumulate;
  options.timeout = context->timeout();
  LOSSD_TRY(const client::LossResult result, client.ComputeLoss(microbatch, outputs, options));

  if (!flags.grad_out.empty()) {
    const std::vector<int64_t> shape = {static_cast<int64_t>(rows->rows),
                                        static_cast<int64_t>(rows->hidden_size)};
    LOSSD_RETURN_IF_ERROR(
        SaveTensors(flags.grad_out, {{"grad_hidden", {FileDType(rows->dtype), shape, std::move(gradient)}}}));
  }
  if (!flags.rows_out.empty()) LOSSD_RETURN_IF_ERROR(SaveRows(flags.rows_out, rows->targets, results));
  PrintResult(*context, flags, rows->rows, result);
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
  AddWord(loss, "--dtype", &flags->dtype, Words<v1::DType>(),
          "Element type to transfer [the file's; random: bf16]")
      ->group(rows);

  loss->add_option("--depth-weights", flags->depth_weights,
                   "Divide the rows into as many depths, of equal rows, with these weights")
      ->delimiter(',')
      ->type_name("WEIGHT,...")
      ->group(rows);

  AddLossOptions(loss, &flags->loss);
  AddObjective(loss, files, *flags);
  AddDistillation(loss, files, *flags);
  AddSoftTargets(loss, files, *flags);

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
  CLI::Option* rows_out =
      loss->add_option("--rows-out", flags->rows_out, "Write results per row: .safetensors or .csv")
          ->type_name("FILE")
          ->group(results);
  loss->add_option("--classes", flags->classes, "There also log-probabilities of these classes")
      ->delimiter(',')
      ->type_name("CLASS,...")
      ->needs(rows_out)
      ->group(results);
  loss->add_option("--top-k", flags->top_k, "There also so many of the most probable classes")
      ->type_name("K")
      ->check(WholeNumber(1))
      ->needs(rows_out)
      ->group(results);
  loss->parse_complete_callback([flags] {
    if (flags->hidden.empty() && flags->random_rows == 0)
      throw CLI::RequiredError("--hidden and --targets, or --random");
  });
  SetClientAction(loss, context, [=](client::Client& client) { return RunLoss(context, *flags, client); });
}

// The command bench.

namespace {

enum class What { kLoss, kDx, kAll, kRows, kRowGradients };

bool Accumulates(What what) { return what == What::kAll || what == What::kRowGradients; }
bool HasRowsBack(What what) { return what != What::kLoss && what != What::kRowGradients; }

const std::map<std::string, What>& Whats() {
  static const auto* words = new std::map<std::string, What>{{"loss", What::kLoss},
                                                             {"dx", What::kDx},
                                                             {"all", What::kAll},
                                                             {"rows", What::kRows},
                                                             {"row-gradients", What::kRowGradients}};
  return *words;
}

enum class Data { kRandom, kReal };

const std::map<std::string, Data>& DataKinds() {
  static const auto* words =
      new std::map<std::string, Data>{{"random", Data::kRandom}, {"real", Data::kReal}};
  return *words;
}

const std::map<std::string, std::string>& Transports() {
  static const auto* words = new std::map<std::string, std::string>{
      {"auto", "auto"}, {"cuda_ipc", "cuda_ipc"}, {"grpc", "grpc"}, {"shared_memory", "shared_memory"}};
  return *words;
}

struct BenchFlags {
  std::string head;
  Data data = Data::kRandom;
  bool overwrite_weight = false;
  What what = What::kAll;
  uint64_t rows = 4096;
  v1::DType dtype = v1::DTYPE_BF16;
  int in_flight = 1;
  double seconds = 10;
  uint64_t microbatches = 0;  // 0: the run ends after `seconds`
  uint64_t warmup = 2;
  uint64_t seed = 0;
  bool force = false;
  client::ClientOptions connection;
  std::optional<uint64_t> shared_memory_bytes;
  std::optional<int> gpu;  // the GPU for the rows, by the driver's number; nullopt: PlaceOfRows chooses
  client::ComputeOptions loss;
};

// Sends microbatches from `in_flight` threads and sums up what they took. Each thread waits for its
// microbatch before it sends the next. Hidden states and gradients lie on GPU `gpu`, or on the host
// (nullopt).
class Bench {
 public:
  Bench(const BenchFlags& flags, const HiddenRows& rows, RowBuffer hidden, std::optional<int> gpu,
        const v1::HeadDescription& head, client::Client* client)
      : flags_(flags),
        rows_(rows),
        hidden_(std::move(hidden)),
        gpu_(gpu),
        step_(head.state().step()),
        client_(client) {
    // A deterministic server expects microbatch ids from 0. Otherwise random ids avoid those that another run
    // uses in the same step.
    if (head.slice_limits().row_grid() == 0) first_id_ = uint64_t{std::random_device()()} << 32;
  }

  absl::StatusOr<BenchTotals> Run() {
    for (uint64_t i = 0; i < flags_.warmup; ++i) {
      LOSSD_TRY(RowBuffer dx, MakeGradient());
      LOSSD_RETURN_IF_ERROR(ComputeOne(dx).status());
    }
    start_ = clocks::SteadyNow();
    started_ = 0;
    std::vector<std::thread> threads;
    threads.reserve(static_cast<size_t>(flags_.in_flight));
    for (int i = 0; i < flags_.in_flight; ++i) threads.emplace_back([this] { Work(); });
    ShowProgress();
    for (std::thread& thread : threads) thread.join();
    absl::MutexLock lock(&mu_);
    totals_.seconds = absl::ToDoubleSeconds(last_end_ - start_);
    if (!error_.ok()) return error_;
    return totals_;
  }

 private:
  absl::StatusOr<RowBuffer> MakeGradient() const {
    return RowBuffer::Create(HasRowsBack(flags_.what) ? rows_.hidden.size() : 0, gpu_);
  }

  absl::StatusOr<client::LossResult> ComputeOne(RowBuffer& dx) {
    client::Microbatch microbatch;
    microbatch.head = flags_.head;
    if (Accumulates(flags_.what)) microbatch.step = step_;
    microbatch.id = first_id_ + next_id_++;
    microbatch.hidden_size = rows_.hidden_size;
    microbatch.hidden_dtype = rows_.dtype;
    if (flags_.what != What::kRows) microbatch.hidden = hidden_.data();
    if (flags_.what == What::kRows) microbatch.embedding = v1::EMBEDDING_ROWS;
    if (flags_.what == What::kRowGradients) microbatch.embedding = v1::EMBEDDING_GRADIENTS;
    microbatch.memory = hidden_.memory();
    microbatch.targets = rows_.targets;
    client::LossOutputs outputs;
    if (HasRowsBack(flags_.what)) outputs.grad_hidden = dx.data();
    client::ComputeOptions options = flags_.loss;
    options.accumulate_gradients = Accumulates(flags_.what);
    return client_->ComputeLoss(microbatch, outputs, options);
  }

  bool Over() {
    if (interrupt_.received()) return true;
    {
      absl::MutexLock lock(&mu_);
      if (!error_.ok()) return true;
    }
    if (flags_.microbatches > 0) return started_++ >= flags_.microbatches;
    return clocks::SteadyNow() - start_ >= absl::Seconds(flags_.seconds);
  }

  void Work() {
    absl::StatusOr<RowBuffer> dx = MakeGradient();
    if (!dx.ok()) Record(dx.status());
    while (!Over()) Record(ComputeOne(*dx));
    absl::MutexLock lock(&mu_);
    ++ended_;
  }

  void Record(const absl::StatusOr<client::LossResult>& result) {
    absl::MutexLock lock(&mu_);
    if (!result.ok()) {
      error_.Update(result.status());
      return;
    }
    last_end_ = clocks::SteadyNow();
    totals_.rows += rows_.rows;
    totals_.sent_bytes += result->sent_bytes;
    totals_.received_bytes += result->received_bytes;
    totals_.repeats += result->repeats;
    totals_.streams = result->streams;
    totals_.queue_seconds += result->queue_seconds;
    totals_.compute_seconds += result->compute_seconds;
    totals_.sampling_variance += result->sampling_variance;
    totals_.squared_gradient += result->squared_gradient;
    totals_.latencies.push_back(result->wall_seconds);
  }

  // Prints the progress until all threads have ended.
  void ShowProgress() {
    if (!ShowsProgress()) return;
    auto all_ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return ended_ == flags_.in_flight; };
    absl::MutexLock lock(&mu_);
    while (!clocks::AwaitFor(mu_, absl::Condition(&all_ended), absl::Milliseconds(500))) {
      const double seconds = absl::ToDoubleSeconds(clocks::SteadyNow() - start_);
      std::fprintf(stderr, "\r\033[K%5.1f s  %s microbatches  %s rows/s", seconds,
                   HumanCount(totals_.latencies.size()).c_str(),
                   HumanRate(static_cast<double>(totals_.rows) / seconds).c_str());
    }
    std::fputs("\r\033[K", stderr);
  }

  const BenchFlags& flags_;
  const HiddenRows& rows_;
  RowBuffer hidden_;  // all threads read it
  const std::optional<int> gpu_;
  const uint64_t step_;
  client::Client* const client_;
  uint64_t first_id_ = 0;
  Interrupt interrupt_;
  absl::Time start_;
  std::atomic<uint64_t> next_id_{0};
  std::atomic<uint64_t> started_{0};

  absl::Mutex mu_;
  BenchTotals totals_ ABSL_GUARDED_BY(mu_);
  absl::Time last_end_ ABSL_GUARDED_BY(mu_) = clocks::SteadyNow();
  absl::Status error_ ABSL_GUARDED_BY(mu_);
  int ended_ ABSL_GUARDED_BY(mu_) = 0;
};

absl::Status CheckHead(const BenchFlags& flags, const v1::HeadDescription& head) {
  if (!Accumulates(flags.what) || flags.force) return absl::OkStatus();
  std::vector<std::string> held;
  const auto add = [&held](uint64_t count, absl::string_view what) {
    if (count > 0) held.push_back(absl::StrCat(count, " ", what));
  };
  add(head.step_rows(), "rows");
  add(head.step_contributions(), "contributions (AddGradient)");
  add(head.retained_microbatches(), "retained microbatches");
  if (held.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("head \"", flags.head, "\" holds gradients of ", absl::StrJoin(held, " and "),
                   ", which the benchmark would mix with its own and discard; use --what dx, or --force"));
}

// Real rows need their own weight, which is written over the head's. The user must allow that with
// --overwrite-weight.
absl::StatusOr<HiddenRows> MakeBenchRows(const BenchFlags& flags, const v1::HeadSpec& spec,
                                         client::Client& client) {
  if (flags.data == Data::kRandom) {
    return RandomRows(flags.rows, spec.hidden_size(), spec.vocab_size(), flags.dtype, flags.seed);
  }
  if (!flags.overwrite_weight) {
    return absl::InvalidArgumentError(absl::StrCat("--data real replaces the weight of head \"", flags.head,
                                                   "\"; say so with --overwrite-weight"));
  }
  LOSSD_RETURN_IF_ERROR(CheckTakesRealRows(spec));
  LOSSD_TRY(const auto real,
            data::RealRows::Create(static_cast<int64_t>(flags.rows), static_cast<int64_t>(spec.hidden_size()),
                                   static_cast<int64_t>(spec.vocab_size()), flags.seed));
  LOSSD_RETURN_IF_ERROR(WriteRealWeight(real, flags.head, client));
  return MakeRealRows(real, flags.dtype);
}

BenchSetup SetupOf(const BenchFlags& flags, const HiddenRows& rows,
                   const client::ConnectionChoice& connections) {
  return {flags.head,
          NameOf(DataKinds(), flags.data),
          NameOf(Whats(), flags.what),
          NameOf(rows.dtype),
          rows.hidden_size,
          rows.rows,
          flags.in_flight,
          connections.connections,
          flags.loss.slice_bytes};
}

client::ClientOptions OptionsOf(const BenchFlags& flags) {
  client::ClientOptions options = flags.connection;
  if (flags.shared_memory_bytes.has_value())
    options.shared_memory_bytes = static_cast<int64_t>(*flags.shared_memory_bytes);
  return options;
}

// Where to put the rows. If --gpu names a GPU: there. Otherwise, with CUDA IPC: on the first GPU of the
// server that this process sees. With other transports: on the host (nullopt).
absl::StatusOr<std::optional<int>> PlaceOfRows(const BenchFlags& flags, client::Client& client,
                                               absl::Duration timeout) {
  if (flags.gpu.has_value()) {
    LOSSD_RETURN_IF_ERROR(CheckGpu("--gpu", *flags.gpu));
    return flags.gpu;
  }
  if (flags.connection.transport != "cuda_ipc") return std::nullopt;
  LOSSD_TRY(const v1::ServerDescription server, client.GetServer(timeout));
  absl::StatusOr<int> gpu = FindGpu(server.region_device());
  for (int i = 1; !gpu.ok() && i < server.region_devices_size(); ++i) {
    const absl::StatusOr<int> next = FindGpu(server.region_devices(i));
    if (next.ok()) gpu = next;
  }
  if (!gpu.ok()) return gpu.status();
  return *gpu;
}

absl::Status RunBench(Context* context, const BenchFlags& flags) {
  const absl::StatusOr<std::unique_ptr<client::Client>> client = context->Connect(OptionsOf(flags));
  if (!client.ok()) return client.status();
  LOSSD_TRY(const v1::HeadDescription head, (*client)->DescribeHead(flags.head, context->timeout()));
  LOSSD_RETURN_IF_ERROR(CheckHead(flags, head));
  // Memory for the rows themselves and for a gradient of each thread.
  const int copies = HasRowsBack(flags.what) ? 1 + flags.in_flight : 1;
  LOSSD_RETURN_IF_ERROR(CheckRoom("--rows", flags.rows, head.spec().hidden_size(), flags.dtype, copies));
  LOSSD_TRY(const HiddenRows rows, MakeBenchRows(flags, head.spec(), **client));

  LOSSD_TRY(const std::optional<int> gpu, PlaceOfRows(flags, **client, context->timeout()));
  LOSSD_TRY(RowBuffer hidden, RowBuffer::Copy(rows.hidden, gpu));

  const absl::StatusOr<BenchTotals> totals =
      Bench(flags, rows, std::move(hidden), gpu, head, client->get()).Run();
  if (Accumulates(flags.what)) {
    const auto zeroed = (*client)->ZeroGradients(flags.head, head.state().step(), context->timeout());
    if (totals.ok() && !zeroed.ok()) return zeroed.status();
  }
  if (!totals.ok()) return totals.status();
  const client::TransportChoice choice = (*client)->transport();
  BenchSetup setup = SetupOf(flags, rows, choice.connections);
  setup.channels_reason = choice.connections.reason;
  setup.transport = gpu.has_value() ? choice.device.transport : choice.transport;
  setup.gpu = gpu;
  setup.transport_reason = gpu.has_value() ? choice.device.reason : choice.reason;
  if (context->json) {
    context->PrintJson(BenchJson(setup, *totals));
  } else {
    context->Print(BenchText(setup, *totals));
  }
  return absl::OkStatus();
}

}  // namespace

void AddBenchCommand(CLI::App* app, Context* context) {
  CLI::App* bench = app->add_subcommand("bench", "Measure throughput and latency with made-up rows");
  auto flags = std::make_shared<BenchFlags>();
  AddHead(bench, &flags->head);
  AddWord(
      bench, "--what", &flags->what, Whats(),
      "loss only, with dL/dx, or all: also accumulate dL/dW, discarded afterwards; rows of the weight as of "
      "an embedding, or gradients of them, discarded [all]");
  AddWord(bench, "--data", &flags->data, DataKinds(),
          "Rows: random, or real, with the softmax of a trained model (needs --overwrite-weight) [random]");
  bench->add_flag("--overwrite-weight", flags->overwrite_weight,
                  "Replace the head's weight by the one that real rows need");
  bench->add_option("--rows", flags->rows, "Rows per microbatch [4096]")->check(WholeNumber(1));
  AddWord(bench, "--dtype", &flags->dtype, Words<v1::DType>(), "Element type to transfer [bf16]");
  bench
      ->add_option("--in-flight", flags->in_flight,
                   "Microbatches under way at once, 1 to 1024; 1: closed loop [1]")
      ->check(WholeNumber(1, 1024));
  bench->add_option("--channels", flags->connection.channels, "Connections, 1 to 64 [as many as help]")
      ->check(WholeNumber(1, 64));
  AddWord(bench, "--transport", &flags->connection.transport, Transports(),
          "How rows travel: auto takes memory of the server's GPUs for rows that are on one of them (--gpu), "
          "and shared memory if the server is on this host; cuda_ipc has the rows on the server's GPU, and "
          "takes memory of that [auto]");
  bench
      ->add_option("--gpu", flags->gpu,
                   "The GPU that has the rows, by its number [none; with cuda_ipc the server's first]")
      ->check(WholeNumber(0, 1023));
  AddBytes(bench, "--shared-memory-bytes", &flags->shared_memory_bytes,
           "Memory to share with the server; it may give less [what the calls need, up to 256MiB]");
  CLI::Option* seconds =
      bench->add_option("--seconds", flags->seconds, "Run for so long [10]")->check(NumberAboveZero());
  bench->add_option("--microbatches", flags->microbatches, "Run for so many instead")
      ->check(WholeNumber(1))
      ->excludes(seconds);
  bench->add_option("--warmup", flags->warmup, "Microbatches before the clock starts [2]");
  bench->add_option("--seed", flags->seed, "Of the rows [0]");
  bench->add_flag("--force", flags->force, "Even if the open step holds gradients");
  AddLossOptions(bench, &flags->loss);
  bench->callback([=] { context->action = [=] { return RunBench(context, *flags); }; });
}

}  // namespace lossd::cli
