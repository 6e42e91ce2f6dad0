// SPDX-License-Identifier: Apache-2.0
// Reads a model's configuration, counts its parameters, and computes the memory of training (model.h).
#include "client/plan/model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "kernels/head_config.h"

namespace lossd::plan {

// ---- Sizes in a config.json ----

absl::StatusOr<int64_t> ConfigNumber(const nlohmann::json& config, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const auto it = config.find(name);
    if (it == config.end() || it->is_null()) continue;
    if (!it->is_number_integer() || it->get<int64_t>() < 1) {
      return errors::FieldError(name, "be a whole number >= 1", it->dump());
    }
    return it->get<int64_t>();
  }
  return 0;
}

// ---- Numbers of parameters ----

namespace {

using Json = nlohmann::json;

enum class Bias : uint8_t { kNo, kYes, kOption };  // kOption: what the configuration says, by default no

// The parts of the layers of one model_type.
struct Family {
  absl::string_view type;
  bool tied = false;                 // whether the classifier is tied if the configuration does not say it
  bool gated = true;                 // three matrices in the MLP, else two
  Bias projection_bias = Bias::kNo;  // of queries, keys and values; kOption: attention_bias
  Bias output_bias = Bias::kNo;      // of the attention's output; kOption: attention_bias
  Bias mlp_bias = Bias::kNo;         // kOption: mlp_bias
  int norms = 2;                     // the number of norms of a layer
  bool shifted_norms = false;        // norms have a shift in addition to the gain
  bool head_norms = false;           // norms of queries and keys, over the size of an attention head
  bool experts = false;              // a layer has num_local_experts MLPs and a router
  bool positions = false;            // learned embeddings of positions
  bool classifier_bias = false;
  bool shared_keys = true;      // has num_key_value_heads
  bool needs_keys = true;       // it must be given: its default is not the number of attention heads
  bool needs_head_dim = false;  // head_dim must be given: it is not hidden size / attention heads by default
};

// Sorted by type.
constexpr std::array kFamilies = {
    Family{.type = "gemma",
           .tied = true,
           .projection_bias = Bias::kOption,
           .output_bias = Bias::kOption,
           .needs_head_dim = true},
    Family{.type = "gemma2",
           .tied = true,
           .projection_bias = Bias::kOption,
           .output_bias = Bias::kOption,
           .norms = 4,
           .needs_head_dim = true},
    Family{.type = "gpt2",
           .tied = true,
           .gated = false,
           .projection_bias = Bias::kYes,
           .output_bias = Bias::kYes,
           .mlp_bias = Bias::kYes,
           .shifted_norms = true,
           .positions = true,
           .shared_keys = false},
    Family{.type = "gpt_neo",
           .tied = true,
           .gated = false,
           .output_bias = Bias::kYes,
           .mlp_bias = Bias::kYes,
           .shifted_norms = true,
           .positions = true,
           .shared_keys = false},
    Family{.type = "llama",
           .projection_bias = Bias::kOption,
           .output_bias = Bias::kOption,
           .mlp_bias = Bias::kOption,
           .needs_keys = false},
    Family{.type = "mistral"},
    Family{.type = "mixtral", .experts = true},
    Family{.type = "phi",
           .gated = false,
           .projection_bias = Bias::kYes,
           .output_bias = Bias::kYes,
           .mlp_bias = Bias::kYes,
           .norms = 1,
           .shifted_norms = true,
           .classifier_bias = true,
           .needs_keys = false},
    Family{.type = "phi3", .needs_keys = false},
    Family{.type = "qwen2", .projection_bias = Bias::kYes},
    Family{.type = "qwen3",
           .projection_bias = Bias::kOption,
           .output_bias = Bias::kOption,
           .head_norms = true,
           .needs_head_dim = true},
};

const Family* FamilyOf(absl::string_view model_type) {
  const auto* const it = std::find_if(kFamilies.begin(), kFamilies.end(),
                                      [&](const Family& family) { return family.type == model_type; });
  return it == kFamilies.end() ? nullptr : it;
}

bool Option(const Json& config, const char* name) {
  const auto it = config.find(name);
  return it != config.end() && it->is_boolean() && it->get<bool>();
}

double Has(Bias bias, const Json& config, const char* option) {
  return bias == Bias::kYes || (bias == Bias::kOption && Option(config, option)) ? 1.0 : 0.0;
}

// The sizes in a configuration. They are double so that the sizes of a strange file cannot overflow. Whole
// numbers up to 2^53 are exact.
struct Sizes {
  double hidden = 0, vocab = 0, layers = 0, intermediate = 0, positions = 0, experts = 0;
  double queries = 0, keys = 0, head_dim = 0;  // queries, keys: of all attention heads of a layer together
  bool complete = false;
};

absl::StatusOr<Sizes> ReadSizes(const Json& config, const Family& family) {
  absl::Status bad;
  const auto number = [&](std::initializer_list<const char*> names) -> int64_t {
    const absl::StatusOr<int64_t> read = ConfigNumber(config, names);
    if (!read.ok()) bad.Update(read.status());
    return read.value_or(0);
  };
  const int64_t hidden = number({"hidden_size", "n_embd"});
  const int64_t heads = number({"num_attention_heads", "num_heads", "n_head"});
  const int64_t given_head_dim = number({"head_dim"});
  const int64_t given_intermediate = number({"intermediate_size", "n_inner"});
  const int64_t given_keys = family.shared_keys ? number({"num_key_value_heads"}) : 0;
  const int64_t positions = family.positions ? number({"max_position_embeddings", "n_positions"}) : 0;
  const int64_t experts = family.experts ? number({"num_local_experts"}) : 0;
  const int64_t vocab = number({"vocab_size"});
  const int64_t layers = number({"num_hidden_layers", "n_layer", "num_layers"});
  if (!bad.ok()) return bad;

  Sizes sizes;
  int64_t head_dim = given_head_dim, keys = given_keys, intermediate = given_intermediate;
  if (head_dim == 0 && !family.needs_head_dim && heads > 0) head_dim = hidden / heads;
  if (keys == 0 && !(family.shared_keys && family.needs_keys)) keys = heads;
  if (intermediate == 0 && family.positions)
    intermediate = hidden <= int64_t{1} << 32 ? 4 * hidden : 0;  // GPT
  sizes.complete = hidden > 0 && vocab > 0 && layers > 0 && heads > 0 && head_dim > 0 && keys > 0 &&
                   intermediate > 0 && (positions > 0 || !family.positions) &&
                   (experts > 0 || !family.experts);
  const auto d = [](int64_t n) { return static_cast<double>(n); };
  sizes.hidden = d(hidden);
  sizes.vocab = d(vocab);
  sizes.layers = d(layers);
  sizes.intermediate = d(intermediate);
  sizes.positions = d(positions);
  sizes.experts = d(experts);
  sizes.head_dim = d(head_dim);
  sizes.queries = d(heads) * d(head_dim);
  sizes.keys = d(keys) * d(head_dim);
  return sizes;
}

double LayerParameters(const Json& config, const Family& family, const Sizes& s) {
  double attention = s.hidden * (2 * s.queries + 2 * s.keys);  // queries, output; keys, values
  attention += Has(family.projection_bias, config, "attention_bias") * (s.queries + 2 * s.keys);
  attention += Has(family.output_bias, config, "attention_bias") * s.hidden;
  if (family.head_norms) attention += 2 * s.head_dim;
  const double into = family.gated ? 2 : 1;  // matrices into the MLP
  double mlp = (into + 1) * s.hidden * s.intermediate;
  mlp += Has(family.mlp_bias, config, "mlp_bias") * (into * s.intermediate + s.hidden);
  if (family.experts) mlp = s.experts * (mlp + s.hidden);
  return attention + mlp + family.norms * (family.shifted_norms ? 2 : 1) * s.hidden;
}

}  // namespace

absl::StatusOr<int64_t> CountParameters(const Json& config, bool tied) {
  constexpr int64_t kMost = int64_t{1} << 50;
  const auto type = config.find("model_type");
  if (type == config.end() || !type->is_string()) return 0;
  const Family* const family = FamilyOf(type->get<std::string>());
  if (family == nullptr || Option(config, "qk_layernorm") || Option(config, "add_cross_attention")) return 0;
  LOSSD_TRY(const Sizes sizes, ReadSizes(config, *family));
  if (!sizes.complete) return 0;
  double count = sizes.layers * LayerParameters(config, *family, sizes);
  count += (tied ? 1 : 2) * sizes.vocab * sizes.hidden + sizes.positions * sizes.hidden;
  count += (family->shifted_norms ? 2 : 1) * sizes.hidden;  // the norm before the head
  if (family->classifier_bias) count += sizes.vocab;
  if (count > static_cast<double>(kMost)) {
    return errors::FieldError("parameters", absl::StrCat("be at most ", kMost), count);
  }
  return static_cast<int64_t>(count);
}

std::string CountedModelTypes() {
  return absl::StrJoin(kFamilies, ", ",
                       [](std::string* out, const Family& family) { absl::StrAppend(out, family.type); });
}

bool TiedByDefault(absl::string_view model_type) {
  const Family* const family = FamilyOf(model_type);
  return family != nullptr && family->tied;
}

// ---- Models ----

namespace {

using Json = nlohmann::json;

// A larger file is not the configuration of a model.
constexpr std::streamsize kMostConfigBytes = 4 << 20;

absl::StatusOr<int64_t> RequiredNumber(const Json& config, std::initializer_list<const char*> names) {
  absl::StatusOr<int64_t> number = ConfigNumber(config, names);
  if (number.ok() && *number == 0) {
    return absl::InvalidArgumentError(absl::StrCat("the model's configuration has no ", *names.begin()));
  }
  return number;
}

}  // namespace

absl::Status Validate(const Model& model) {
  constexpr int64_t kMostHidden = int64_t{1} << 24, kMostVocab = (int64_t{1} << 31) - 1;
  if (model.hidden < 1 || model.hidden > kMostHidden) {
    return errors::FieldError("hidden", absl::StrCat("be from 1 to ", kMostHidden), model.hidden);
  }
  if (model.vocab < 1 || model.vocab > kMostVocab) {
    return errors::FieldError("vocab", absl::StrCat("be from 1 to ", kMostVocab), model.vocab);
  }
  return absl::OkStatus();
}

absl::StatusOr<Model> ParseModel(absl::string_view config_json) {
  Json config = Json::parse(config_json.begin(), config_json.end(), nullptr, /*allow_exceptions=*/false);
  if (!config.is_object())
    return absl::InvalidArgumentError("the model's configuration is not a JSON object");
  Model model;
  if (const auto type = config.find("model_type"); type != config.end() && type->is_string()) {
    model.name = type->get<std::string>();
  }
  const auto tied = config.find("tie_word_embeddings");
  model.tied = tied != config.end() && tied->is_boolean() ? tied->get<bool>() : TiedByDefault(model.name);
  bool has_other_parts = false;  // parts for images or sound
  if (const auto text = config.find("text_config"); text != config.end() && text->is_object()) {
    const Json inner = *text;
    config = inner;
    has_other_parts = true;
  }
  LOSSD_TRY(const int64_t hidden, RequiredNumber(config, {"hidden_size", "n_embd", "d_model"}));
  LOSSD_TRY(const int64_t vocab, RequiredNumber(config, {"vocab_size"}));
  LOSSD_TRY(const int64_t layers, ConfigNumber(config, {"num_hidden_layers", "n_layer", "num_layers"}));
  model.hidden = hidden;
  model.vocab = vocab;
  model.layers = layers;
  LOSSD_RETURN_IF_ERROR(Validate(model));
  if (has_other_parts) return model;
  LOSSD_TRY(model.parameters, CountParameters(config, model.tied));
  return model;
}

absl::StatusOr<Model> ReadModel(const std::string& path) {
  std::error_code error;
  std::filesystem::path file = path;
  if (std::filesystem::is_directory(file, error)) file /= "config.json";
  std::ifstream in(file, std::ios::binary);
  if (!in || !std::filesystem::is_regular_file(file, error)) {
    return absl::NotFoundError(absl::StrCat("no model's configuration at \"", file.string(), "\""));
  }
  std::string text;
  text.resize(kMostConfigBytes);
  in.read(text.data(), kMostConfigBytes);
  text.resize(static_cast<size_t>(in.gcount()));
  absl::StatusOr<Model> model = ParseModel(text);
  if (!model.ok()) {
    return absl::Status(model.status().code(), absl::StrCat(file.string(), ": ", model.status().message()));
  }
  return model;
}

namespace {

// The rows of one of Liger's blocks. Liger divides the rows so that the logits of a block take about as much
// memory as the hidden states.
int64_t LigerRows(int64_t hidden, int64_t vocab, int64_t rows) {
  const int64_t each = CeilDiv(rows, CeilDiv(vocab, hidden));
  return std::min(rows, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(each))));
}

}  // namespace

absl::string_view Name(LocalMethod method) {
  switch (method) {
    case LocalMethod::kTorch:
      return "torch";
    case LocalMethod::kCompiled:
      return "compiled";
    case LocalMethod::kLiger:
      return "liger";
    case LocalMethod::kCce:
      return "cce";
  }
  return "";
}

int64_t PeakBytes(LocalMethod method, int64_t hidden, int64_t vocab, int64_t rows) {
  const int64_t gradients = kHalf * (vocab * hidden + rows * hidden);  // dW and dx
  switch (method) {
    case LocalMethod::kTorch:
      // At 12 bytes a logit: logits in 16 bits, their copy in fp32 and its softmax, or gradients of these. dW
      // and dx are allocated when most of that is free again.
      return std::max(12 * rows * vocab, kHalf * rows * vocab + gradients);
    case LocalMethod::kCompiled:
      return kHalf * rows * vocab + gradients;  // the gradient takes the place of the logits
    case LocalMethod::kLiger:
      return kHalf * LigerRows(hidden, vocab, rows) * vocab + gradients;
    case LocalMethod::kCce:
      return gradients;
  }
  return 0;
}

int64_t StateBytes(int64_t hidden, int64_t vocab) { return 4 * int64_t{sizeof(float)} * hidden * vocab; }

int64_t LargestMicrobatch(LocalMethod method, int64_t hidden, int64_t vocab, int64_t bytes) {
  const auto fits = [&](int64_t rows) {
    // PeakBytes includes the gradients of the hidden states.
    return StateBytes(hidden, vocab) + kHalf * rows * hidden + PeakBytes(method, hidden, vocab, rows) <=
           bytes;
  };
  if (!fits(1)) return 0;
  int64_t most = 1, fails = 2;
  while (fits(fails) && fails < int64_t{1} << 32) {
    most = fails;
    fails *= 2;
  }
  while (fails - most > 1) {
    const int64_t middle = most + (fails - most) / 2;
    (fits(middle) ? most : fails) = middle;
  }
  return most;
}

namespace {

absl::Status Range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return errors::FieldError(name, absl::StrCat("be from ", least, " to ", most), value);
}

// Checks the ranges of the shape, so that no later sum or product overflows.
absl::Status CheckShape(const Model& model, const TrainerShape& shape) {
  constexpr int64_t kMostGpus = int64_t{1} << 20, kMostMemory = int64_t{1} << 42;
  constexpr int64_t kMostParameters = int64_t{1} << 50, kMostActivations = int64_t{1} << 44;
  constexpr int64_t kMostLogit = 64, kMostLayers = int64_t{1} << 16;
  constexpr double kMostPerParameter = 1024.0;
  LOSSD_RETURN_IF_ERROR(Validate(model));
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
  LOSSD_RETURN_IF_ERROR(Range("head_parameters", shape.head_parameters, 0, shape.parameters));
  if (shape.activation_bytes > 0) return absl::OkStatus();
  return Range("layers", model.layers, 1, kMostLayers);
}

// Checks that the bytes of the rows do not overflow.
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
  LOSSD_RETURN_IF_ERROR(CheckShape(model, shape));
  TrainerMemory memory;
  memory.shape = shape;
  TrainerShape& settled = memory.shape;
  if (settled.activation_bytes == 0) settled.activation_bytes = model.layers * model.hidden * kHalf;
  const int64_t row_bytes = settled.activation_bytes + model.vocab * settled.logit_bytes;
  LOSSD_RETURN_IF_ERROR(CheckRows(settled, row_bytes));
  std::transform(kTrainerHeads.begin(), kTrainerHeads.end(), memory.heads.begin(),
                 [&](TrainerHead head) { return HeadMemoryOf(model, settled, head); });
  return memory;
}

}  // namespace lossd::plan
