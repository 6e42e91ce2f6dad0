// SPDX-License-Identifier: Apache-2.0
#include "client/plan/trainer_memory.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "client/plan/local_head.h"
#include "client/plan/model.h"
#include "kernels/errors/field_error.h"

namespace lossd::plan {
namespace {

absl::Status Range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return errors::FieldError(name, absl::StrCat("be from ", least, " to ", most), value);
}

// No sum or product of what passes overflows.
absl::Status CheckShape(const Model& model, const TrainerShape& shape) {
  constexpr int64_t kMostGpus = int64_t{1} << 20, kMostMemory = int64_t{1} << 42;
  constexpr int64_t kMostParameters = int64_t{1} << 50, kMostActivations = int64_t{1} << 44;
  constexpr int64_t kMostLogit = 64, kMostLayers = int64_t{1} << 16;
  constexpr double kMostPerParameter = 1024.0;
  if (absl::Status status = Validate(model); !status.ok()) return status;
  if (shape.parameters == 0) {
    return errors::FieldError("parameters",
                              absl::StrCat("be given (only a config.json of ", CountedModelTypes(),
                                           ", with its own sizes, says them)"),
                              shape.parameters);
  }
  for (const absl::Status& status : {Range("trainer_gpus", shape.gpus, 1, kMostGpus),
                                     Range("trainer_memory", shape.memory_bytes, 1, kMostMemory),
                                     Range("parameters", shape.parameters, 0, kMostParameters),
                                     Range("activation_bytes", shape.activation_bytes, 0, kMostActivations),
                                     Range("logit_bytes", shape.logit_bytes, 1, kMostLogit)}) {
    if (!status.ok()) return status;
  }
  if (const int64_t head = model.hidden * model.vocab; shape.parameters < head) {
    return errors::FieldError("parameters", absl::StrCat("be at least the ", head, " of the head"),
                              shape.parameters);
  }
  if (!(shape.bytes_per_parameter > 0.0 && shape.bytes_per_parameter <= kMostPerParameter)) {
    return errors::FieldError("bytes_per_parameter", absl::StrCat("be > 0 and at most ", kMostPerParameter),
                              shape.bytes_per_parameter);
  }
  if (absl::Status status = Range("head_parameters", shape.head_parameters, 0, shape.parameters);
      !status.ok()) {
    return status;
  }
  if (shape.activation_bytes > 0) return absl::OkStatus();
  return Range("layers", model.layers, 1, kMostLayers);
}

// Rows whose bytes do not overflow beside the state.
absl::Status CheckRows(const TrainerShape& shape, int64_t row_bytes) {
  return Range("trainer_rows", shape.rows, 1, (int64_t{1} << 61) / row_bytes);
}

int64_t ModelStateBytes(const TrainerShape& shape, int64_t parameters) {
  return std::llround(static_cast<double>(parameters) * shape.bytes_per_parameter);
}

HeadMemory HeadMemoryOf(const Model& model, const TrainerShape& shape, TrainerHead head) {
  const bool on_server = head == TrainerHead::kServer;
  const int64_t row_logits = head == TrainerHead::kStoredLogits ? model.vocab * shape.logit_bytes : 0;
  HeadMemory memory;
  memory.head = head;
  memory.state_bytes = ModelStateBytes(shape, shape.parameters - (on_server ? shape.head_parameters : 0));
  memory.activation_bytes = shape.rows * shape.activation_bytes;
  memory.logit_bytes = shape.rows * row_logits;
  const int64_t room = shape.gpus * shape.memory_bytes - memory.state_bytes;
  memory.largest_batch = std::max<int64_t>(room, 0) / (shape.activation_bytes + row_logits);
  return memory;
}

}  // namespace

absl::string_view Name(TrainerHead head) {
  switch (head) {
    case TrainerHead::kStoredLogits:
      return "stored logits";
    case TrainerHead::kFusedLoss:
      return "fused loss";
    case TrainerHead::kServer:
      return "server";
  }
  return "";
}

absl::StatusOr<TrainerMemory> MemoryOfTrainer(const Model& model, const TrainerShape& shape) {
  if (absl::Status status = CheckShape(model, shape); !status.ok()) return status;
  TrainerMemory memory;
  memory.shape = shape;
  TrainerShape& settled = memory.shape;
  if (settled.activation_bytes == 0) settled.activation_bytes = model.layers * model.hidden * kHalf;
  const int64_t row_bytes = settled.activation_bytes + model.vocab * settled.logit_bytes;
  if (absl::Status status = CheckRows(settled, row_bytes); !status.ok()) return status;
  std::transform(kTrainerHeads.begin(), kTrainerHeads.end(), memory.heads.begin(),
                 [&](TrainerHead head) { return HeadMemoryOf(model, settled, head); });
  return memory;
}

}  // namespace lossd::plan
