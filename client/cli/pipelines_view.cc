// SPDX-License-Identifier: Apache-2.0
#include "client/cli/pipelines_view.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/format.h"

namespace lossd::cli {
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
  for (const Pipeline& pipeline : plan.pipelines) {
    const plan::PipelineLayout& layout = pipeline.layout;
    table.AddRow({HeadText(pipeline), LayersText(layout.layers),
                  HumanCount(static_cast<uint64_t>(layout.gpus)), HumanSeconds(layout.slowest_stage_seconds),
                  HumanSeconds(layout.step_seconds), HumanSeconds(layout.least_step_seconds),
                  HumanRate(layout.rows_per_second_and_gpu),
                  pipeline.over_local > 0.0 ? absl::StrFormat("%.2f", pipeline.over_local) : "?",
                  MemoryText(pipeline), RemarkText(pipeline)});
  }
  return absl::StrCat("Pipelines\n", table.ToString(), "Steps are predicted by ", measured.steps.size(),
                      " measured ones, from which they are at most ",
                      absl::StrFormat("%.0f", std::ceil(measured.factors.worst_error * 100.0)),
                      " % apart ", basis, "; at least: without gaps.\n");
}

Json PipelinesJson(const plan::Plan& plan) {
  Json json = Json::array();
  for (const Pipeline& pipeline : plan.pipelines) {
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

}  // namespace lossd::cli
