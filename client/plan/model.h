// SPDX-License-Identifier: Apache-2.0
// A language model as a plan sees it: the parts of its shape that its loss head depends on and the number of
// its parameters, from the config.json that Hugging Face keeps beside a model; the memory of a head in the
// trainer's own process; and the memory that training the whole model takes. Plain data and pure functions;
// thread-safe.
#ifndef LOSSD_CLIENT_PLAN_MODEL_H_
#define LOSSD_CLIENT_PLAN_MODEL_H_

#include <array>
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::plan {

// The parts of a language model's shape that its loss head depends on, and the number of its parameters, from
// the config.json that Hugging Face keeps beside a model. Plain data and pure functions; thread-safe.

// The first of the names that the object has with a value other than null: a whole number >= 1, or 0 if it
// has none of them. INVALID_ARGUMENT naming the field.
absl::StatusOr<int64_t> ConfigNumber(const nlohmann::json& config, std::initializer_list<const char*> names);

// The number of parameters of the whole model that are trained, embedding and head included: exactly what
// `transformers` makes of the configuration. Masks and other constants that some files hold beside the
// parameters are not counted. A tied classifier counts once. 0: not known, because the model_type is none of
// CountedModelTypes(), a size is missing, or an option is set of which nothing is known here.
// INVALID_ARGUMENT naming a size that is no whole number >= 1, or "parameters" if there are more than 2^50.
absl::StatusOr<int64_t> CountParameters(const nlohmann::json& config, bool tied);

// "gemma, gemma2, ...": for people.
std::string CountedModelTypes();

// What tie_word_embeddings is where a configuration of this model_type does not say. False for other types.
bool TiedByDefault(absl::string_view model_type);

// The shape of one language model.
struct Model {
  std::string name;        // for people; may be empty
  int64_t hidden = 0;      // D
  int64_t vocab = 0;       // V
  int64_t layers = 0;      // 0: not known
  bool tied = false;       // the classifier is the embedding
  int64_t parameters = 0;  // of the whole model, a tied classifier once; 0: not known
};

// INVALID_ARGUMENT naming "hidden" or "vocab" if a head cannot have it.
absl::Status Validate(const Model& model);

// hidden_size (n_embd, d_model), vocab_size, num_hidden_layers (n_layer, num_layers) and tie_word_embeddings
// (by default as the model_type has it), of the document or of its text_config; parameters as
// CountParameters counts them, of a document without text_config. INVALID_ARGUMENT naming the field.
absl::StatusOr<Model> ParseModel(absl::string_view config_json);

// From a config.json, or the folder it is in. NOT_FOUND if there is none.
absl::StatusOr<Model> ReadModel(const std::string& path);

// The memory of a head in the trainer's own process, by implementation: what the last stage of a pipeline
// would need without a server. It is arithmetic of shapes, which tests/client/plan compares with
// measurements. Pure functions; thread-safe.

// Bytes of a 16-bit number: hidden states, logits and their gradients are bf16.
inline constexpr int64_t kHalf = 2;

// The number of parts of size b, the last of which may be smaller, that a is divided into. a >= 0, b > 0.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class LocalMethod : uint8_t {
  kTorch,     // linear, then cross_entropy
  kCompiled,  // the same under torch.compile
  kLiger,     // Liger's fused linear cross-entropy: a block of rows at a time
  kCce,       // Cut Cross-Entropy: no logits in memory
};
inline constexpr std::array kLocalMethods = {LocalMethod::kTorch, LocalMethod::kCompiled, LocalMethod::kLiger,
                                             LocalMethod::kCce};
absl::string_view Name(
    LocalMethod method);  // "torch", "compiled", "liger", "cce": as LastStageTiming::method

// In bf16, of loss, dx and dW of one microbatch: bytes above hidden states, weight and targets at the peak.
int64_t PeakBytes(LocalMethod method, int64_t hidden, int64_t vocab, int64_t rows);

// What training keeps of the classifier between microbatches: weight, gradient and two moments, in fp32.
int64_t StateBytes(int64_t hidden, int64_t vocab);

// The most rows of a microbatch whose peak, state, hidden states and their gradients fit `bytes`; 0: not even
// one.
int64_t LargestMicrobatch(LocalMethod method, int64_t hidden, int64_t vocab, int64_t bytes);

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

#endif  // LOSSD_CLIENT_PLAN_MODEL_H_
