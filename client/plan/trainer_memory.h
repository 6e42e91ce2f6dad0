// SPDX-License-Identifier: Apache-2.0
// The memory that training a whole model takes on a trainer's GPUs, by part, and the largest batch that fits
// there: with logits in memory, with a fused loss, and with the head on a server. Pure functions;
// thread-safe.
//
//   state         = parameters x bytes_per_parameter
//   activations   = rows x layers x hidden x 2     (one hidden state a layer, 16 bits; others are recomputed)
//   logits        = rows x vocab x logit_bytes
//   largest batch = (gpus x memory_bytes - state) / (activations and logits of a row)
//
// This is the arithmetic of Table A3 and Figure 1 of "Cut Your Losses in Large-Vocabulary Language Models"
// (Wijmans and others, ICLR 2025), with 16 GPUs of 75 GiB, 8 bytes a parameter and 4 a logit;
// tests/client/plan/plan_test.cc compares all models of that table. It is a bound, which no real
// run reaches: docs/plan.md says what it leaves out.
#ifndef LOSSD_CLIENT_PLAN_TRAINER_MEMORY_H_
#define LOSSD_CLIENT_PLAN_TRAINER_MEMORY_H_

#include <array>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/plan/model.h"

namespace lossd::plan {

// One trainer, whose state and rows are divided evenly over its GPUs.
struct TrainerShape {
  int64_t gpus = 1;
  int64_t memory_bytes = 0;  // of each GPU, for state, activations and logits
  int64_t rows = 0;          // that are in memory at one time, on all GPUs together
  int64_t parameters = 0;    // of the whole model, as Model::parameters
  // Of weight, gradient and optimizer. 16: all of them in fp32, or in 16 bits beside fp32 weights and
  // moments; 8: all in 16 bits.
  double bytes_per_parameter = 16.0;
  int64_t activation_bytes = 0;  // of a row; 0: from the model's layers
  int64_t logit_bytes = 4;       // fp32
  int64_t head_parameters = 0;   // that leave with a head on a server; 0 of a model with a tied classifier
};

enum class TrainerHead : uint8_t {
  kStoredLogits,  // linear, then cross_entropy
  kFusedLoss,     // in the trainer, without logits in memory
  kServer,        // no logits, and the head's state elsewhere
};
inline constexpr std::array kTrainerHeads = {TrainerHead::kStoredLogits, TrainerHead::kFusedLoss,
                                             TrainerHead::kServer};
absl::string_view Name(TrainerHead head);  // "stored logits", "fused loss", "server"

// Of all GPUs together.
struct HeadMemory {
  TrainerHead head = TrainerHead::kStoredLogits;
  int64_t state_bytes = 0;
  int64_t activation_bytes = 0;
  int64_t logit_bytes = 0;
  int64_t largest_batch = 0;  // rows at one time; 0: not even one fits

  int64_t TotalBytes() const { return state_bytes + activation_bytes + logit_bytes; }
};

struct TrainerMemory {
  TrainerShape shape;  // with activation_bytes set
  std::array<HeadMemory, kTrainerHeads.size()> heads;

  bool Fits(const HeadMemory& head) const { return head.TotalBytes() <= shape.gpus * shape.memory_bytes; }
};

// INVALID_ARGUMENT naming the field: of the shape, or "layers" of the model.
absl::StatusOr<TrainerMemory> MemoryOfTrainer(const Model& model, const TrainerShape& shape);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_TRAINER_MEMORY_H_
