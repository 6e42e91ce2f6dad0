// SPDX-License-Identifier: Apache-2.0
// The shape of a loss head and the names of its tensors. Plain data; thread-compatible.
#ifndef LOSSD_KERNELS_HEAD_CONFIG_H_
#define LOSSD_KERNELS_HEAD_CONFIG_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/dtype.h"
#include "kernels/loss_options.h"
#include "kernels/optimizer_options.h"

namespace lossd::kernels {

// Normalisation of the hidden state before the classifier.
enum class Norm : uint8_t {
  kNone,
  kLayerNorm,  // gain [D], shift [D]
  kRmsNorm,    // gain [D]
};

// What becomes of a chunk's logits between the loss and the gradients. The results are the same but for
// rounding; memory and time differ.
enum class Logits : uint8_t {
  // The logits stay in device memory: rows of a chunk times V elements of the workspace.
  kStored,
  // Only a block of the logits is in memory at a time, and the gradients compute each block once more. The
  // workspace is a few MiB whatever V is; exact gradients take one product more. A backend may store the
  // logits all the same, and HeadKernels::Describe() then says so.
  kRecomputed,
};

// How a head lies on several devices (docs/scaling.md). On one device it makes no difference.
enum class Split : uint8_t {
  kAny,   // the backend chooses when it creates the head
  kRows,  // every device has all classes and computes other rows
  // Every device has some of the classes, with their gradients and optimizer state, and computes these of all
  // rows.
  kVocabulary,
};

// The most that HeadConfig::replicas may be.
inline constexpr int32_t kMostReplicas = 1 << 16;

struct HeadConfig {
  int64_t hidden_size = 0;  // D in [1, 2^24]
  int64_t vocab_size = 0;   // V in [1, 2^31 - 1]
  bool has_bias = false;
  bool has_class_weights = false;
  Norm norm = Norm::kNone;
  float norm_epsilon = 1e-5f;  // added to the variance (or mean square); >= 0, finite
  // What the GEMMs multiply. A backend may compute more precisely (the CPU's is always fp32),
  // never less; HeadKernels::compute_dtype() says what it does.
  DType compute_dtype = DType::kFloat32;
  OptimizerState optimizer_state = OptimizerState::kAdam;
  bool trainable = true;  // false: no gradient and no optimizer memory; weight gradients are refused
  Logits logits = Logits::kStored;          // of all chunks of the head
  Gradients gradients = Gradients::kExact;  // of requests that do not say
  // Most memory for what is computed of a chunk: MemoryKind::kWorkspace and, unless logits are recomputed,
  // kSlots. 0: the backend's choice.
  int64_t workspace_bytes = 0;
  Split split = Split::kAny;
  // By vocabulary: how much of the classes each device has, relative to the others; each >= 0, their sum in
  // [1, 2^31 - 1]. Empty: the devices have the same. kAny with shares means kVocabulary.
  std::vector<int32_t> shares;
  // By vocabulary: how many copies of the head there are, each on as many of the devices, which divide the
  // classes; the copies divide the rows. 0 and 1: one, on all devices. `shares` are of the devices of one
  // copy. kAny with more than one means kVocabulary.
  int32_t replicas = 0;

  friend bool operator==(const HeadConfig&, const HeadConfig&) = default;
};

// INVALID_ARGUMENT naming the field and its value.
absl::Status Validate(const HeadConfig& config);
// The same for a head that is to lie on so many devices: replicas divide them, and shares are one for each
// device of a replica.
absl::Status ValidateOn(const HeadConfig& config, int devices);

// How many copies there are of a head that is split by vocabulary.
inline int ReplicasOf(const HeadConfig& config) { return config.replicas > 1 ? config.replicas : 1; }

// The parameters of a head.
enum class Param : uint8_t {
  kWeight,        // [V, D]
  kBias,          // [V]
  kNormGain,      // [D]
  kNormShift,     // [D]
  kClassWeights,  // [V]; not trained
};
inline constexpr Param kAllParams[] = {Param::kWeight, Param::kBias, Param::kNormGain, Param::kNormShift,
                                       Param::kClassWeights};
inline constexpr Param kTrainedParams[] = {Param::kWeight, Param::kBias, Param::kNormGain, Param::kNormShift};

// What is stored for a parameter; everything is fp32.
enum class Role : uint8_t {
  kValue,     // the master value
  kGradient,  // the sum accumulated in the open step
  kMoment1,   // SGD momentum buffer or Adam's first moment
  kMoment2,   // Adam's second moment
};
inline bool IsMoment(Role role) { return role == Role::kMoment1 || role == Role::kMoment2; }

struct TensorId {
  Param param = Param::kWeight;
  Role role = Role::kValue;
  friend bool operator==(const TensorId&, const TensorId&) = default;
};

// "weight", "bias", "norm.gain", "norm.shift", "class_weights".
absl::string_view Name(Param param);
// "value", "gradient", "moment1", "moment2".
absl::string_view Name(Role role);
absl::string_view Name(Norm norm);             // "none", "layernorm", "rmsnorm"
absl::string_view Name(Logits logits);         // "stored", "recomputed"
absl::string_view Name(Split split);           // "any", "rows", "vocabulary"
absl::string_view Name(OptimizerState state);  // "none", "momentum", "adam"

// A tensor's shape as a matrix: vectors are [length, 1].
struct TensorShape {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t elements() const { return rows * cols; }
};

// True if a head with this config stores the tensor.
bool HasTensor(const HeadConfig& config, TensorId id);
// The shape of `param` in a head with this config: weight [V, D], bias [V, 1], norm [D, 1].
TensorShape ShapeOf(const HeadConfig& config, Param param);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_HEAD_CONFIG_H_
