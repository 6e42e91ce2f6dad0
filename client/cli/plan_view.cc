// SPDX-License-Identifier: Apache-2.0
#include "client/cli/plan_view.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/format.h"
#include "client/cli/json.h"

namespace lossd::cli {

// ---- Memory of a trainer ----

namespace {

using plan::HeadMemory;
using plan::TrainerMemory;

std::string Count(int64_t count) { return HumanCount(static_cast<uint64_t>(count)); }

// What fits, as a multiple of what fits beside stored logits, and whether the batch that was asked for does.
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

}  // namespace

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

namespace {

using plan::Pipeline;
using plan::PipelineKind;

// "4, 4, 3", or "8 x 4, 3" for many.
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

// "18.2 to 40.1 GiB": of the GPU with the least and of that with the most.
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

}  // namespace

std::vector<size_t> StepSources(const plan::Measured& measured) {
  std::vector<size_t> sources;
  for (const plan::PipelineStep& step : measured.steps) sources.push_back(step.source);
  std::sort(sources.begin(), sources.end());
  sources.erase(std::unique(sources.begin(), sources.end()), sources.end());
  return sources;
}

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

namespace {

using kernels::MemoryKind;
using plan::Estimate;

// Numbers the sources as they are named, for people.
class Footnotes {
 public:
  explicit Footnotes(const plan::Measured& measured) : measured_(measured) {}

  // "[1]", "[2, 3]"; "" for none.
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

}  // namespace

std::string PlanText(const plan::Plan& plan, const plan::Measured& measured) {
  Footnotes notes(measured);
  std::string text = absl::StrCat(Heading(plan, measured), "\n");
  if (plan.trainer_memory.has_value()) {
    absl::StrAppend(&text, TrainerMemoryText(*plan.trainer_memory, plan.request.model), "\n");
  }
  absl::StrAppend(&text, ServerMemoryText(plan), "\n");
  absl::StrAppend(&text, SpeedText(plan, notes), "\n");  // sources are numbered in this order
  absl::StrAppend(&text, LinksText(plan, notes), "\n");
  absl::StrAppend(&text, LastStageText(plan, notes), "\n");
  if (plan.request.pipeline.stages > 0) {
    absl::StrAppend(&text, PipelinesText(plan, measured, notes.Of(StepSources(measured))), "\n");
  }
  return absl::StrCat(text, "Measured\n", notes.ToString());
}

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

}  // namespace lossd::cli
