// SPDX-License-Identifier: Apache-2.0
// The command plan: prints a plan (client/plan/plan.h), the layouts of a pipeline, and the memory of a
// trainer (client/plan/model.h), as text for people or as JSON for scripts.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cli/format.h"
#include "client/cli/options.h"
#include "client/plan/measured.h"
#include "client/plan/model.h"
#include "client/plan/plan.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::cli {

namespace {

// ---- Memory of a trainer ----

using plan::HeadMemory;
using plan::TrainerMemory;

std::string Count(int64_t count) { return HumanCount(static_cast<uint64_t>(count)); }

// The remark for one way to have the head: its largest batch as a multiple of the batch with stored logits,
// and whether the batch that the user gave fits.
std::string RemarkText(const TrainerMemory& memory, const HeadMemory& head) {
  const HeadMemory& stored = memory.heads.front();
  std::string text;
  if (head.head != stored.head && stored.largest_batch > 0) {
    text = absl::StrFormat(
        "%.2f times", static_cast<double>(head.largest_batch) / static_cast<double>(stored.largest_batch));
  }
  if (!memory.Fits(head)) absl::StrAppend(&text, text.empty() ? "" : ", ", "the batch does not fit");
  return text;
}

// The section about a trainer's memory: a title, a table, and an explanation of its columns.
std::string TrainerMemoryText(const TrainerMemory& memory, const plan::Model& model) {
  const plan::TrainerShape& shape = memory.shape;
  const bool several = shape.gpus > 1;
  std::vector<Column> columns = {{"HEAD"},
                                 {"STATE", Align::kRight},
                                 {"ACTIVATIONS", Align::kRight},
                                 {"LOGITS", Align::kRight},
                                 {"TOTAL", Align::kRight}};
  if (several) columns.push_back({"A GPU", Align::kRight});
  columns.push_back({"LARGEST BATCH", Align::kRight});
  columns.push_back({""});
  Table table(columns);
  for (const HeadMemory& head : memory.heads) {
    std::vector<std::string> row = {
        head.head == plan::TrainerHead::kServer ? "on the server" : std::string(Name(head.head)),
        HumanBytes(head.state_bytes), HumanBytes(head.activation_bytes), HumanBytes(head.logit_bytes),
        HumanBytes(head.TotalBytes())};
    if (several) row.push_back(HumanBytes(head.TotalBytes() / shape.gpus));
    row.push_back(absl::StrCat(Count(head.largest_batch), " rows"));
    row.push_back(RemarkText(memory, head));
    table.AddRow(std::move(row));
  }
  std::string text = absl::StrCat(
      "Memory of a trainer with ", Count(shape.gpus), several ? " GPUs of " : " GPU of ",
      HumanBytes(shape.memory_bytes), " for a batch of ", Count(shape.rows), " rows\n", table.ToString(),
      "State: ", Count(shape.parameters), " parameters of ", absl::StrFormat("%g", shape.bytes_per_parameter),
      " bytes; activations: ", Count(shape.activation_bytes), " bytes a row; logits: ", shape.logit_bytes,
      " bytes each.\n");
  if (several) text += "State and batch are divided evenly over the GPUs.\n";
  if (model.tied) {
    text += "The classifier is the embedding, whose state is counted as the trainer's with a server, too.\n";
  }
  return text;
}

// The same as JSON, in bytes and rows.
Json TrainerMemoryJson(const TrainerMemory& memory) {
  const plan::TrainerShape& shape = memory.shape;
  Json json = {{"gpus", shape.gpus},
               {"gpu_memory_bytes", shape.memory_bytes},
               {"rows", shape.rows},
               {"parameters", shape.parameters},
               {"bytes_per_parameter", shape.bytes_per_parameter},
               {"activation_bytes_per_row", shape.activation_bytes},
               {"bytes_per_logit", shape.logit_bytes}};
  json["heads"] = Json::array();
  for (const HeadMemory& head : memory.heads) {
    json["heads"].push_back({{"head", Name(head.head)},
                             {"state_bytes", head.state_bytes},
                             {"activation_bytes", head.activation_bytes},
                             {"logit_bytes", head.logit_bytes},
                             {"total_bytes", head.TotalBytes()},
                             {"fits", memory.Fits(head)},
                             {"largest_batch", head.largest_batch}});
  }
  return json;
}

// ---- Pipelines ----

using plan::Pipeline;
using plan::PipelineKind;

// The layers of each stage: "4, 4, 3", or "8 x 4, 3" if stages in a row have equally many.
std::string LayersText(const std::vector<int64_t>& layers) {
  std::string text;
  for (size_t i = 0; i < layers.size();) {
    size_t end = i;
    while (end < layers.size() && layers[end] == layers[i]) ++end;
    absl::StrAppend(&text, text.empty() ? "" : ", ", end - i > 1 ? absl::StrCat(end - i, " x ") : "",
                    layers[i]);
    i = end;
  }
  return text;
}

std::string HeadText(const Pipeline& pipeline) {
  if (pipeline.kind == PipelineKind::kLocal) {
    return absl::StrCat("local", pipeline.local.has_value() ? ", " : "",
                        pipeline.local.has_value() ? Name(*pipeline.local) : "");
  }
  const bool in_turns = pipeline.kind == PipelineKind::kColocated && !pipeline.mps;
  return absl::StrCat(Name(pipeline.kind), ", ", Name(pipeline.gradients), in_turns ? ", no MPS" : "");
}

// The least and the largest memory that a GPU of the pipeline needs: "18.2 to 40.1 GiB".
std::string MemoryText(const Pipeline& pipeline) {
  auto [least, most] = std::minmax_element(pipeline.stage_bytes.begin(), pipeline.stage_bytes.end());
  const int64_t low = std::min(*least, pipeline.server_bytes.value_or(*least));
  const int64_t high = std::max(*most, pipeline.server_bytes.value_or(*most));
  return absl::StrCat(HumanBytes(static_cast<double>(low)), " to ", HumanBytes(static_cast<double>(high)));
}

std::string RemarkText(const Pipeline& pipeline) {
  std::vector<std::string> remarks;
  if (!pipeline.layout.shares.empty()) {
    remarks.push_back(absl::StrCat("--shares ", absl::StrJoin(pipeline.layout.shares, ",")));
  }
  if (pipeline.layout.server_bound) remarks.emplace_back("held up by the server");
  if (!pipeline.fits) remarks.emplace_back("does not fit");
  return absl::StrJoin(remarks, "; ");
}

// The indices of Measured::sources from which the factors of the predictions come, ascending.
std::vector<size_t> StepSources(const plan::Measured& measured) {
  std::vector<size_t> sources;
  for (const plan::PipelineStep& step : measured.steps) sources.push_back(step.source);
  std::sort(sources.begin(), sources.end());
  sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  return sources;
}

// A paragraph with a table. `basis` is the text that names StepSources().
std::string PipelinesText(const plan::Plan& plan, const plan::Measured& measured, const std::string& basis) {
  Table table({{"HEAD"},
               {"LAYERS OF STAGES"},
               {"GPUS", Align::kRight},
               {"SLOWEST STAGE", Align::kRight},
               {"STEP", Align::kRight},
               {"AT LEAST", Align::kRight},
               {"ROWS/S A GPU", Align::kRight},
               {"OVER LOCAL", Align::kRight},
               {"MEMORY OF A GPU", Align::kRight},
               {""}});
  for (const Pipeline& pipeline : plan.pipelines.known) {
    const plan::PipelineLayout& layout = pipeline.layout;
    table.AddRow({HeadText(pipeline), LayersText(layout.layers),
                  HumanCount(static_cast<uint64_t>(layout.gpus)), HumanSeconds(layout.slowest_stage_seconds),
                  HumanSeconds(layout.step_seconds), HumanSeconds(layout.least_step_seconds),
                  HumanRate(layout.rows_per_second_and_gpu),
                  pipeline.over_local > 0.0 ? absl::StrFormat("%.2f", pipeline.over_local) : "?",
                  MemoryText(pipeline), RemarkText(pipeline)});
  }
  std::string text = "Pipelines\n";
  if (!plan.pipelines.known.empty()) {
    absl::StrAppend(&text, table.ToString(), "Steps are predicted by ", measured.steps.size(),
                    " measured ones, from which they are at most ",
                    absl::StrFormat("%.0f", std::ceil(measured.factors.worst_error * 100.0)), " % apart ",
                    basis, "; at least: without gaps.\n");
  }
  for (const std::string& sentence : plan.pipelines.left_out) absl::StrAppend(&text, sentence, "\n");
  return text;
}

Json PipelinesJson(const plan::Plan& plan) {
  Json json = Json::array();
  for (const Pipeline& pipeline : plan.pipelines.known) {
    const plan::PipelineLayout& layout = pipeline.layout;
    const bool local = pipeline.kind == PipelineKind::kLocal;
    Json entry = {{"kind", Name(pipeline.kind)},
                  {"head", !local                       ? Json("server")
                           : pipeline.local.has_value() ? Json(Name(*pipeline.local))
                                                        : Json()},
                  {"gradients", local ? Json() : Json(Name(pipeline.gradients))},
                  {"layers", layout.layers},
                  {"gpus", layout.gpus},
                  {"slowest_stage_seconds", layout.slowest_stage_seconds},
                  {"step_seconds", layout.step_seconds},
                  {"least_step_seconds", layout.least_step_seconds},
                  {"rows_per_second_and_gpu", layout.rows_per_second_and_gpu},
                  {"over_local", pipeline.over_local > 0.0 ? Json(pipeline.over_local) : Json()},
                  {"server_bound", layout.server_bound},
                  {"stage_bytes", pipeline.stage_bytes},
                  {"fits", pipeline.fits}};
    if (pipeline.server_bytes.has_value()) entry["server_bytes"] = *pipeline.server_bytes;
    if (pipeline.kind == PipelineKind::kColocated) {
      entry["mps"] = pipeline.mps;
      entry["shares"] = layout.shares;
      entry["head_seconds"] = pipeline.head_seconds;
      entry["least_share"] = pipeline.least_share;
    }
    json.push_back(std::move(entry));
  }
  return json;
}

// ---- The whole plan ----

using kernels::MemoryKind;
using plan::Estimate;

// Numbers the sources in the order in which the text names them.
class Footnotes {
 public:
  explicit Footnotes(const plan::Measured& measured) : measured_(measured) {}

  // The footnotes for these sources: "[1]", "[2, 3]"; "" for none.
  std::string Of(const std::vector<size_t>& sources) {
    std::string text;
    for (const size_t source : sources) {
      auto it = std::find(named_.begin(), named_.end(), source);
      if (it == named_.end()) it = named_.insert(named_.end(), source);
      absl::StrAppend(&text, text.empty() ? "[" : ", ", it - named_.begin() + 1);
    }
    return text.empty() ? text : text + "]";
  }

  std::string ToString() const {
    std::string text;
    for (size_t i = 0; i < named_.size(); ++i) {
      const plan::Source& source = measured_.sources[named_[i]];
      absl::StrAppend(&text, "[", i + 1, "] ", source.file, ", ", source.date);
      if (!source.commit.empty()) absl::StrAppend(&text, ", ", source.commit);
      text += '\n';
    }
    return text;
  }

 private:
  const plan::Measured& measured_;
  std::vector<size_t> named_;
};

// "38.2 ms", or "16.0 ms to 20.4 ms".
std::string Range(const std::string& low, const std::string& high) {
  return low == high ? low : absl::StrCat(low, " to ", high);
}

std::string TimeText(const Estimate& estimate) {
  if (!estimate.known()) return "?";
  return Range(HumanSeconds(estimate.low_seconds), HumanSeconds(estimate.high_seconds));
}

std::string BasisText(const Estimate& estimate, Footnotes& notes) {
  if (!estimate.known()) return estimate.why_none;
  return absl::StrCat(Name(estimate.basis), " ", notes.Of(estimate.sources));
}

std::string Heading(const plan::Plan& plan, const plan::Measured& measured) {
  const plan::Request& r = plan.request;
  std::string text = absl::StrCat(
      r.model.name.empty() ? "A head" : r.model.name, " of hidden size ", HumanCount(r.model.hidden),
      " and vocabulary ", HumanCount(r.model.vocab), ", bf16\n", HumanCount(r.trainers),
      r.trainers == 1 ? " trainer" : " trainers", " with ", HumanCount(r.rows),
      " rows a step, in microbatches of ", HumanCount(r.microbatch), " rows\nServer: ", r.gpus, " ",
      measured.card.name, " with ", HumanBytes(static_cast<double>(r.memory_bytes)), "; ",
      measured.bounds.has_value() ? absl::StrCat("not measured: bounds by data sheets, from times on an ",
                                                 measured.bounds->measured_on, " of ")
                                  : std::string("times of "),
      r.data, " rows (bench/results/README.md)\n");
  if (r.model.tied) {
    absl::StrAppend(
        &text,
        "The model ties its classifier to the embedding: the gradient of the embedding goes to the\n"
        "server once a step (AddGradient), and the weights come back.\n");
  }
  return text;
}

std::string ServerMemoryText(const plan::Plan& plan) {
  const bool several = plan.request.gpus > 1;
  std::vector<Column> columns = {{"LOGITS"}};
  if (several) columns.push_back({"SPLIT"});
  for (const char* title : {"WEIGHTS", "GRADIENTS", "OPTIMIZER", "WORKSPACE", "SLOTS", "LIBRARY", "TOTAL"}) {
    columns.push_back({title, Align::kRight});
  }
  columns.push_back({"CHUNK", Align::kRight});
  columns.push_back({""});
  Table table(columns);
  for (const plan::DeviceMemory& device : plan.server) {
    std::vector<std::string> row = {std::string(Name(device.logits))};
    if (several) row.emplace_back(Name(device.split));
    for (const MemoryKind kind : {MemoryKind::kWeights, MemoryKind::kGradients, MemoryKind::kOptimizer,
                                  MemoryKind::kWorkspace, MemoryKind::kSlots}) {
      row.push_back(HumanBytes(static_cast<double>(device.memory[kind])));
    }
    row.push_back(HumanBytes(static_cast<double>(device.library_bytes)));
    row.push_back(HumanBytes(static_cast<double>(device.device_bytes)));
    row.push_back(absl::StrCat(HumanCount(device.chunk_rows), " rows"));
    row.emplace_back(device.fits ? "" : "does not fit");
    table.AddRow(std::move(row));
  }
  return absl::StrCat(
      several ? "Memory of each GPU of the server\n" : "Memory of the server's GPU\n", table.ToString(),
      "Exact, filtered and sampled gradients take the same memory: a head keeps room for each.\n"
      "Microbatches may be of any size; the server computes them chunk by chunk.\n");
}

std::string SpeedText(const plan::Plan& plan, Footnotes& notes) {
  const bool feeds = plan.request.trainer_seconds > 0.0;
  std::vector<Column> columns = {{"LOGITS"},
                                 {"GRADIENTS"},
                                 {"MICROBATCH", Align::kRight},
                                 {"ROWS/S", Align::kRight},
                                 {"GB/S EACH WAY", Align::kRight},
                                 {"STEP", Align::kRight}};
  if (feeds) columns.push_back({"TRAINERS FED", Align::kRight});
  columns.push_back({"BASIS"});
  Table table(columns);
  for (const plan::ServerSpeed& speed : plan.speeds) {
    std::vector<std::string> row = {std::string(Name(speed.logits)), std::string(Name(speed.gradients)),
                                    TimeText(speed.microbatch)};
    if (speed.microbatch.known()) {
      row.push_back(Range(HumanRate(speed.low_rows_per_second), HumanRate(speed.high_rows_per_second)));
      row.push_back(Range(absl::StrFormat("%.2f", speed.low_gigabytes_per_second),
                          absl::StrFormat("%.2f", speed.high_gigabytes_per_second)));
      row.push_back(HumanSeconds(speed.step_seconds));
      if (feeds) row.push_back(HumanCount(static_cast<uint64_t>(speed.trainers_fed.value_or(0))));
    } else {
      row.insert(row.end(), feeds ? 4 : 3, "?");
    }
    row.push_back(BasisText(speed.microbatch, notes));
    table.AddRow(std::move(row));
  }
  std::string text = absl::StrCat("Time on the server\n", table.ToString());
  absl::StrAppend(&text, "A step is the rows of all trainers and then the update, ",
                  plan.update.seconds.has_value()
                      ? HumanSeconds(*plan.update.seconds) + " " + notes.Of(plan.update.sources)
                      : std::string("not measured on this card"),
                  "; at the slower end of what is predicted.\n");
  if (plan.rows_speedup.has_value() && plan.vocabulary_speedup.has_value()) {
    absl::StrAppend(&text, plan.request.gpus, " GPUs compute ",
                    absl::StrFormat("%.2f times the rows of one divided by rows, and %.2f by vocabulary, at "
                                    "least ",
                                    *plan.rows_speedup, *plan.vocabulary_speedup),
                    notes.Of(plan.speedup_sources), ".\n");
  }
  return text;
}

std::string LinksText(const plan::Plan& plan, Footnotes& notes) {
  if (plan.links.empty()) return "Link: not measured on this card\n";
  Table table({{"TRANSPORT"},
               {"CONNECTIONS", Align::kRight},
               {"GB/S EACH WAY", Align::kRight},
               {"ROWS/S OF THIS HEAD", Align::kRight},
               {"SERVER'S CORES", Align::kRight},
               {"BASIS"}});
  for (const plan::Link& link : plan.links) {
    table.AddRow({link.transport, absl::StrCat(link.connections),
                  absl::StrFormat("%.2f", link.most_gigabytes_per_second),
                  absl::StrCat("up to ", HumanRate(link.most_rows_per_second)),
                  absl::StrFormat("%.1f", link.server_cores),
                  absl::StrCat("measured ", notes.Of({link.source}))});
  }
  return absl::StrCat("Link: the most that one host's programs moved\n", table.ToString());
}

std::string LastStageText(const plan::Plan& plan, Footnotes& notes) {
  const auto bytes = [](int64_t n) { return HumanBytes(static_cast<double>(n)); };
  Table table({{"HEAD"},
               {"MICROBATCH", Align::kRight},
               {"ITS MEMORY", Align::kRight},
               {"WEIGHTS AND OPTIMIZER", Align::kRight},
               {"LARGEST MICROBATCH", Align::kRight},
               {"BASIS OF THE TIME"}});
  for (const plan::LastStage& stage : plan.last_stage) {
    table.AddRow({std::string(Name(stage.method)), TimeText(stage.microbatch), bytes(stage.peak_bytes),
                  bytes(stage.state_bytes),
                  stage.largest_microbatch == 0
                      ? "does not fit"
                      : absl::StrCat(HumanCount(static_cast<uint64_t>(stage.largest_microbatch)), " rows"),
                  BasisText(stage.microbatch, notes)});
  }
  table.AddRow({"on the server", "", bytes(plan.trainer_bytes), "0 B", "", "hidden states and gradients"});
  return absl::StrCat("The same head on the last stage, beside ", bytes(plan.request.stage_bytes), " of ",
                      bytes(plan.request.memory_bytes), " that its layers take\n", table.ToString());
}

Json EstimateJson(const Estimate& estimate) {
  Json json = {{"basis", Name(estimate.basis)}};
  if (estimate.known()) {
    json["low_seconds"] = estimate.low_seconds;
    json["high_seconds"] = estimate.high_seconds;
    json["sources"] = estimate.sources;
  } else {
    json["reason"] = estimate.why_none;
  }
  return json;
}

Json DeviceJson(const plan::DeviceMemory& device) {
  Json json = {{"logits", Name(device.logits)}, {"split", Name(device.split)}};
  for (size_t i = 0; i < kernels::kMemoryKinds; ++i) {
    json["memory"][std::string(Name(static_cast<MemoryKind>(i)))] = device.memory.by_kind[i];
  }
  json["memory"]["library"] = device.library_bytes;
  json["device_bytes"] = device.device_bytes;
  json["chunk_rows"] = device.chunk_rows;
  json["fits"] = device.fits;
  json["choices"] = Json::array();
  for (const kernels::Choice& choice : device.choices) {
    json["choices"].push_back({{"what", choice.what}, {"choice", choice.choice}, {"reason", choice.reason}});
  }
  return json;
}

Json SpeedJson(const plan::ServerSpeed& speed) {
  Json json = {{"logits", Name(speed.logits)},
               {"gradients", Name(speed.gradients)},
               {"microbatch", EstimateJson(speed.microbatch)}};
  if (!speed.microbatch.known()) return json;
  json["rows_per_second"] = {speed.low_rows_per_second, speed.high_rows_per_second};
  json["gigabytes_per_second_each_way"] = {speed.low_gigabytes_per_second, speed.high_gigabytes_per_second};
  json["step_seconds"] = speed.step_seconds;
  if (speed.trainers_fed.has_value()) json["trainers_fed"] = *speed.trainers_fed;
  return json;
}

// The plan as text. Every number has its basis, and measured numbers have their sources.
std::string PlanText(const plan::Plan& plan, const plan::Measured& measured) {
  Footnotes notes(measured);
  std::string text = absl::StrCat(Heading(plan, measured), "\n");
  if (plan.trainer_memory.has_value()) {
    absl::StrAppend(&text, TrainerMemoryText(*plan.trainer_memory, plan.request.model), "\n");
  }
  absl::StrAppend(&text, ServerMemoryText(plan), "\n");
  absl::StrAppend(&text, SpeedText(plan, notes), "\n");  // footnotes are numbered in the order of these calls
  absl::StrAppend(&text, LinksText(plan, notes), "\n");
  absl::StrAppend(&text, LastStageText(plan, notes), "\n");
  if (plan.request.pipeline.stages > 0) {
    absl::StrAppend(&text, PipelinesText(plan, measured, notes.Of(StepSources(measured))), "\n");
  }
  return absl::StrCat(text, "Measured\n", notes.ToString());
}

// The plan as JSON, in bytes, seconds and rows per second. docs/plan.md describes the document.
Json PlanJson(const plan::Plan& plan, const plan::Measured& measured) {
  const plan::Request& r = plan.request;
  Json json = {{"model",
                {{"name", r.model.name},
                 {"hidden_size", r.model.hidden},
                 {"vocab_size", r.model.vocab},
                 {"layers", r.model.layers},
                 {"tied", r.model.tied},
                 {"parameters", r.model.parameters == 0 ? Json() : Json(r.model.parameters)}}},
               {"card", measured.card.name},
               {"memory_bytes", r.memory_bytes},
               {"gpus", r.gpus},
               {"rows", r.rows},
               {"microbatch", r.microbatch},
               {"trainers", r.trainers},
               {"data", r.data}};
  if (measured.bounds.has_value()) json["measured_on"] = measured.bounds->measured_on;
  if (plan.trainer_memory.has_value()) json["trainer_memory"] = TrainerMemoryJson(*plan.trainer_memory);
  json["server"] = Json::array();
  for (const plan::DeviceMemory& device : plan.server) json["server"].push_back(DeviceJson(device));
  json["times"] = Json::array();
  for (const plan::ServerSpeed& speed : plan.speeds) json["times"].push_back(SpeedJson(speed));
  json["update_seconds"] = plan.update.seconds.has_value() ? Json(*plan.update.seconds) : Json();
  if (plan.rows_speedup.has_value()) json["speedup"]["rows"] = *plan.rows_speedup;
  if (plan.vocabulary_speedup.has_value()) json["speedup"]["vocabulary"] = *plan.vocabulary_speedup;
  json["links"] = Json::array();
  for (const plan::Link& link : plan.links) {
    json["links"].push_back({{"transport", link.transport},
                             {"connections", link.connections},
                             {"gigabytes_per_second_each_way", link.most_gigabytes_per_second},
                             {"rows_per_second", link.most_rows_per_second},
                             {"server_cores", link.server_cores},
                             {"source", link.source}});
  }
  json["last_stage"] = Json::array();
  for (const plan::LastStage& stage : plan.last_stage) {
    json["last_stage"].push_back({{"head", Name(stage.method)},
                                  {"microbatch", EstimateJson(stage.microbatch)},
                                  {"microbatch_bytes", stage.peak_bytes},
                                  {"state_bytes", stage.state_bytes},
                                  {"largest_microbatch", stage.largest_microbatch}});
  }
  json["pipelines"] = PipelinesJson(plan);
  json["pipelines_left_out"] = plan.pipelines.left_out;
  json["trainer_bytes"] = plan.trainer_bytes;
  json["sources"] = Json::array();
  for (const plan::Source& source : measured.sources) {
    json["sources"].push_back({{"file", source.file}, {"date", source.date}, {"commit", source.commit}});
  }
  return json;
}

// The options as the user gave them. 0 and "" mean: not given.
struct PlanFlags {
  std::string model;     // a config.json or its folder
  std::string measured;  // a file as bench/plan_data.py writes it
  std::string card;      // a name of plan::CardNames
  int64_t hidden = 0, vocab = 0, layers = 0;
  uint64_t workspace = 0, memory = 0, stage_memory = 0, layer_memory = 0;
  plan::Request request;
  int64_t trainer_gpus = 0;  // 0: the user did not ask for the memory of a trainer
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
  // If a size replaces the one in the file, the number of parameters, which was counted from the file, is no
  // longer known.
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
  LOSSD_TRY(plan::Model model, ModelOf(flags));
  plan::Request request = flags.request;
  request.model = std::move(model);
  request.workspace_bytes = static_cast<int64_t>(flags.workspace);
  request.memory_bytes = static_cast<int64_t>(flags.memory);
  request.stage_bytes = static_cast<int64_t>(flags.stage_memory);
  request.pipeline.layer_bytes = static_cast<int64_t>(flags.layer_memory);
  request.microbatch = std::min(request.microbatch, request.rows);
  if (flags.trainer_gpus != 0) {
    LOSSD_TRY(request.trainer, TrainerOf(flags));
  }
  LOSSD_TRY(const plan::Plan made, plan::MakePlan(request, *measured));
  if (context->json) {
    context->PrintJson(PlanJson(made, *measured));
  } else {
    context->Print(PlanText(made, *measured));
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

// Parses "8030261248", "8.03B" or "350M".
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
