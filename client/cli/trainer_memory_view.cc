// SPDX-License-Identifier: Apache-2.0
#include "client/cli/trainer_memory_view.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/format.h"
#include "client/cli/json.h"

namespace lossd::cli {
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

}  // namespace lossd::cli
