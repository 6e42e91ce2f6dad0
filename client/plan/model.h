// SPDX-License-Identifier: Apache-2.0
// What a plan knows of a language model, with three parts:
// - Model: the sizes that the loss head depends on, and the number of parameters, read from the config.json
//   that Hugging Face keeps with a model.
// - PeakBytes and others: the memory of a head in the trainer's own process.
// - MemoryOfTrainer: the memory that training the whole model takes.
//
// Plain data and pure functions; thread-safe.
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

// ---- The model ----

// Looks up `names` in the object in turn and returns the first value that is not null, which must be a whole
// number >= 1. 0 if the object has none of the names. INVALID_ARGUMENT naming the field.
absl::StatusOr<int64_t> ConfigNumber(const nlohmann::json& config, std::initializer_list<const char*> names);

// The number of trained parameters of the whole model, with embedding and head: exactly the parameters that
// `transformers` creates from the configuration. A tied classifier counts once. Masks and other constants
// that some files store with the parameters do not count. 0 means that the number is not known, because the
// model_type is not one of CountedModelTypes(), a size is missing, or an option is set that this function
// does not know. INVALID_ARGUMENT naming a size that is not a whole number >= 1, or "parameters" if there are
// more than 2^50.
absl::StatusOr<int64_t> CountParameters(const nlohmann::json& config, bool tied);

// The names of the model types that CountParameters knows, for people: "gemma, gemma2, ...".
std::string CountedModelTypes();

// The value of tie_word_embeddings if a configuration of this model_type has none. False for unknown types.
bool TiedByDefault(absl::string_view model_type);

// The shape of one language model.
struct Model {
  std::string name;        // a name for people; may be empty
  int64_t hidden = 0;      // D
  int64_t vocab = 0;       // V
  int64_t layers = 0;      // 0: not known
  bool tied = false;       // the classifier is the embedding
  int64_t parameters = 0;  // of the whole model; a tied classifier counts once; 0: not known
};

// INVALID_ARGUMENT naming "hidden" or "vocab" if a head cannot have that size.
absl::Status Validate(const Model& model);

// Reads hidden_size (n_embd, d_model), vocab_size, num_hidden_layers (n_layer, num_layers) and
// tie_word_embeddings (default: TiedByDefault) from the document or from its text_config. CountParameters
// gives the parameters, but only of a document without text_config. INVALID_ARGUMENT naming the field.
absl::StatusOr<Model> ParseModel(absl::string_view config_json);

// Reads a config.json; `path` is the file or its folder. NOT_FOUND if there is none.
absl::StatusOr<Model> ReadModel(const std::string& path);

// ---- A head in the trainer's own process ----
//
// The memory that the last stage of a pipeline would need without a server, for several implementations of
// the loss. It is computed from the shapes; tests/client/plan compares it with measurements. Pure functions;
// thread-safe.

// Bytes of a 16-bit number: hidden states, logits and their gradients are bf16.
inline constexpr int64_t kHalf = 2;

// a / b, rounded up. a >= 0, b > 0.
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

// The peak memory of loss, dx and dW of one microbatch in bf16, without hidden states, weight and targets.
int64_t PeakBytes(LocalMethod method, int64_t hidden, int64_t vocab, int64_t rows);

// The memory that stays allocated for the classifier between microbatches: weight, gradient and two moments,
// in fp32.
int64_t StateBytes(int64_t hidden, int64_t vocab);

// The largest number of rows of a microbatch such that peak memory, state, hidden states and their gradients
// fit into `bytes`. 0: not even one row fits.
int64_t LargestMicrobatch(LocalMethod method, int64_t hidden, int64_t vocab, int64_t bytes);

// ---- The memory of a trainer ----
//
// The memory that training a whole model takes on the GPUs of a trainer, by part, and the largest batch that
// fits: with logits in memory, with a fused loss, and with the head on a server. Pure functions; thread-safe.
//
//   state         = parameters x bytes_per_parameter
//   activations   = rows x layers x hidden x 2     (one hidden state a layer, 16 bits; others are recomputed)
//   logits        = rows x vocab x logit_bytes
//   largest batch = (gpus x memory_bytes - state) / (activations and logits of a row)
//
// This is the arithmetic of Table A3 and Figure 1 of "Cut Your Losses in Large-Vocabulary Language Models"
// (Wijmans and others, ICLR 2025), with 16 GPUs of 75 GiB, 8 bytes a parameter and 4 a logit;
// tests/client/plan/plan_test.cc compares all models of that table. It is a bound that no real run reaches:
// docs/plan.md says what it leaves out.

// One trainer. Its state and its rows are divided evenly over its GPUs.
struct TrainerShape {
  int64_t gpus = 1;
  int64_t memory_bytes = 0;  // of each GPU, for state, activations and logits
  int64_t rows = 0;          // in memory at one time, on all GPUs together
  int64_t parameters = 0;    // see Model::parameters
  // Bytes of weight, gradient and optimizer state for each parameter. 16: all of them in fp32, or 16-bit
  // weights and gradients with fp32 master weights and moments; 8: all in 16 bits.
  double bytes_per_parameter = 16.0;
  int64_t activation_bytes = 0;  // for each row; 0: computed from the model's layers
  int64_t logit_bytes = 4;       // fp32
  int64_t head_parameters = 0;   // those that move to a server with the head; 0 if the classifier is tied
};

enum class TrainerHead : uint8_t {
  kStoredLogits,  // linear, then cross_entropy
  kFusedLoss,     // in the trainer, without logits in memory
  kServer,        // no logits in the trainer, and the head's state is on the server
};
inline constexpr std::array kTrainerHeads = {TrainerHead::kStoredLogits, TrainerHead::kFusedLoss,
                                             TrainerHead::kServer};
absl::string_view Name(TrainerHead head);  // "stored logits", "fused loss", "server"

// The memory of all GPUs together, with one kind of head.
struct HeadMemory {
  TrainerHead head = TrainerHead::kStoredLogits;
  int64_t state_bytes = 0;
  int64_t activation_bytes = 0;
  int64_t logit_bytes = 0;
  int64_t largest_batch = 0;  // rows in memory at one time; 0: not even one fits

  int64_t TotalBytes() const { return state_bytes + activation_bytes + logit_bytes; }
};

struct TrainerMemory {
  TrainerShape shape;  // with activation_bytes set
  std::array<HeadMemory, kTrainerHeads.size()> heads;

  bool Fits(const HeadMemory& head) const { return head.TotalBytes() <= shape.gpus * shape.memory_bytes; }
};

// INVALID_ARGUMENT naming a field of the shape, or "layers" of the model.
absl::StatusOr<TrainerMemory> MemoryOfTrainer(const Model& model, const TrainerShape& shape);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_MODEL_H_
