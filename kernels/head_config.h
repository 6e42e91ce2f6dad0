// SPDX-License-Identifier: Apache-2.0
// The description of a loss head as plain data: element types (DType), options of the loss (LossOptions),
// hyper-parameters of an optimizer step (OptimizerOptions), shape of the head (HeadConfig), and names and
// shapes of its tensors (TensorId, TensorShape).
//
// The structs are thread-compatible; the functions are stateless and thread-safe. Each Validate returns
// INVALID_ARGUMENT that names the field and its value.
#ifndef LOSSD_KERNELS_HEAD_CONFIG_H_
#define LOSSD_KERNELS_HEAD_CONFIG_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/distillation.h"
#include "kernels/objective.h"
#include "kernels/soft_targets.h"

namespace lossd::kernels {

// Element types of hidden states, weights and gradients.
enum class DType : uint8_t {
  kFloat32,   // IEEE 754 binary32
  kFloat16,   // IEEE 754 binary16
  kBFloat16,  // the upper 16 bits of a binary32
};

// Bytes of one element.
constexpr size_t SizeOf(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Bytes of `elements` >= 0 elements.
constexpr size_t SizeOf(int64_t elements, DType dtype) {
  return static_cast<size_t>(elements) * SizeOf(dtype);
}

// "fp32", "fp16" or "bf16".
constexpr absl::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kFloat16:
      return "fp16";
    case DType::kBFloat16:
      return "bf16";
  }
  return "unknown";
}

// How gradients are computed from the probabilities of the classes. Losses and row results do not depend on
// this choice. A request may ask for any of these values, for any HeadConfig::logits. docs/math.md has the
// formulas under "Filtered gradients" and "Sampled gradients".
enum class Gradients : uint8_t {
  kExact,     // every class contributes
  kFiltered,  // classes whose probability is below filter_epsilon contribute nothing, except the target
  kSampled,   // classes below sample_threshold contribute by chance; the expectation is that of kExact
  kAuto,      // a chunk is kSampled if the error predicted for it is at most max_gradient_error, else kExact
};
absl::string_view Name(Gradients gradients);  // "exact", "filtered", "sampled", "auto"
// Whether classes may contribute by chance: kSampled and kAuto.
constexpr bool MaySample(Gradients gradients) {
  return gradients == Gradients::kSampled || gradients == Gradients::kAuto;
}

// What a chunk does if the weight [V, D] of a head serves as an embedding. Its rows have a token id as their
// target and no loss. backend.h says what a slice brings and gets (Slice::hidden, Slice::grad_hidden).
enum class Embedding : uint8_t {
  kNone,       // the rows have a loss
  kRows,       // each row gets the row of the weight that its target names
  kGradients,  // each row brings a gradient for the weight's row that its target names
};

// The loss of a row. Rows may share a chunk if their head, hidden dtype and LossOptions are equal, even if
// different trainers have sent them. Symbols as in docs/math.md: s = t (W x + b); z = c tanh(s / c) with a
// softcap c, else z = s; lse = log sum_v exp z_v; u are the class weights (all 1 if unused). The loss of a
// row is
//   u_y (1 - alpha) (lse - z_y) + alpha / V * sum_v u_v (lse - z_v) + lambda lse^2.
struct LossOptions {
  float logit_scale = 1.0f;        // t: multiplies W x + b (1 / temperature); finite, not 0
  float softcap = 0.0f;            // c: 0: none; otherwise > 0
  float label_smoothing = 0.0f;    // alpha: in [0, 1]
  float z_loss = 0.0f;             // lambda: >= 0
  bool use_class_weights = false;  // u: multiply losses by the head's class weights [V]

  Gradients gradients = Gradients::kExact;
  float filter_epsilon = 0x1p-12f;  // kFiltered: a probability in [0, 1). With 0 every class contributes.
  // tau, for kSampled and kAuto: a probability in (0, 1]. If a backend has too little memory for the classes
  // that this threshold takes, it uses a larger one, the same for all rows of a chunk.
  float sample_threshold = 0x1p-10f;
  // kAuto: the largest predicted relative error of a chunk's dL/dlogits; >= 0.
  float max_gradient_error = 0.01f;

  // Replaces the cross-entropy, the first two terms above. label_smoothing is then 0 and use_class_weights
  // false.
  Objective objective;
  Distillation distillation;  // for rows with a teacher; `gradients` is then not kFiltered
  // Unless kNoTargets: each row has soft targets (Slice::target_classes), which replace the cross-entropy
  // with its target. There is then neither an objective nor a teacher, label_smoothing is 0 and
  // use_class_weights false.
  Rest rest = Rest::kNoTargets;
  // Unless kNone: the rows have no loss, and all other options have their defaults.
  Embedding embedding = Embedding::kNone;

  bool is_embedding() const { return embedding != Embedding::kNone; }
  bool has_soft_targets() const { return rest != Rest::kNoTargets; }

  friend bool operator==(const LossOptions&, const LossOptions&) = default;
};

// INVALID_ARGUMENT if an option is outside its range.
absl::Status Validate(const LossOptions& options);

// An estimate of the largest derivative of a row's loss with respect to a logit under these options. Backends
// use it to choose units in which gradients neither overflow nor vanish. It is not a bound, because the
// z-loss has none. Objectives and soft targets are left out, because their part depends on the row.
double LargestSlope(const LossOptions& options, double largest_class_weight);

// Decides, before the logits of a chunk are known, whether its gradients must be exact. Returns the reason,
// or "" if the gradients may be computed as the options ask. Filtered gradients require that gradients are
// small where probabilities are small; sampled gradients require nothing. any_grad_entropy: whether some row
// has an upstream gradient of its entropy.
absl::string_view WhyExact(const LossOptions& options, bool any_grad_entropy);

// How a chunk's gradients are planned before its logits are known: kExact if why_exact has a reason, else
// what the options ask for.
Gradients GradientsOf(const LossOptions& options, absl::string_view why_exact);

// The optimizer state that a head reserves for each parameter when it is created.
enum class OptimizerState : uint8_t {
  kNone,      // plain SGD only: no state
  kMomentum,  // one fp32 value a parameter: SGD with momentum
  kAdam,      // two fp32 values a parameter: AdamW, or SGD with momentum
};

// The hyper-parameters of one optimizer step. They come with every step, so the trainer implements
// learning-rate schedules.
//
// The update is that of torch.optim.AdamW (decoupled weight decay, bias correction) or torch.optim.SGD (L2
// weight decay added to the gradient, momentum with optional dampening and Nesterov), on fp32 master weights.
// The update uses grad_multiplier times the accumulated gradient. There is one difference to torch: with
// epsilon 0, AdamW does not change a parameter that never had a gradient, where torch computes 0 / 0. With
// lazy_rows a row of the weight is updated only if it has a gradient, as in torch.optim.SparseAdam.
struct OptimizerOptions {
  enum class Kind : uint8_t { kSgd, kAdamW };

  Kind kind = Kind::kAdamW;
  double learning_rate = 1e-3;   // >= 0, finite
  double weight_decay = 0.0;     // >= 0, finite
  bool decay_vectors = false;    // apply weight decay to bias and norm parameters too
  double grad_multiplier = 1.0;  // finite; gradient clipping and loss scaling
  // AdamW
  double beta1 = 0.9;     // in [0, 1)
  double beta2 = 0.999;   // in [0, 1)
  double epsilon = 1e-8;  // >= 0
  // SGD
  double momentum = 0.0;   // >= 0, finite
  double dampening = 0.0;  // finite; must be 0 with nesterov
  bool nesterov = false;   // needs momentum > 0
  // If true, a row of the weight whose accumulated gradient is 0 in every element (+0 or -0) keeps its values
  // and moments bit for bit: there is no decay of moments and no weight decay. All other rows, bias and norm
  // are updated as usual, with the head's count of updates. The gradient before the multiplication with
  // grad_multiplier decides this, so a multiplier of 0 does not protect rows.
  bool lazy_rows = false;

  friend bool operator==(const OptimizerOptions&, const OptimizerOptions&) = default;
};

// INVALID_ARGUMENT if a hyper-parameter is outside its range.
absl::Status Validate(const OptimizerOptions& options);

// The smallest state that `options` needs.
OptimizerState RequiredState(const OptimizerOptions& options);

// Normalization of the hidden state before the classifier.
enum class Norm : uint8_t {
  kNone,
  kLayerNorm,  // gain [D], shift [D]
  kRmsNorm,    // gain [D]
};

// What happens to a chunk's logits between the loss and the gradients. The results are the same except for
// rounding; memory and time differ.
enum class Logits : uint8_t {
  // The logits are stored in the workspace: as many elements as the chunk has rows, times V.
  kStored,
  // Only a block of the logits is in memory at a time, and the gradients compute each block again. The
  // workspace has a few MiB for any V; exact gradients take one more product. A backend may store the logits
  // nevertheless; HeadKernels::Describe() then says so.
  kRecomputed,
  // There are no logits: all chunks have embedding rows, and the workspace has no memory for a loss.
  kNone,
};

// How a head is divided over several devices (docs/scaling.md). On one device it makes no difference.
enum class Split : uint8_t {
  kAny,   // the backend chooses when it creates the head
  kRows,  // every device has all classes; the devices compute different rows
  // Every device has some of the classes, with their gradients and optimizer state, and computes these
  // classes for all rows.
  kVocabulary,
};

// Where a head keeps its values (docs/training/distillation.md, "Many teachers").
enum class Residency : uint8_t {
  kDevice,
  // In host memory, in the compute dtype. Each device has a pool of memory for all such heads
  // (teacher_pool.h), to which a head's values are copied when rows need them. Only for frozen heads.
  kHost,
};

// The most that HeadConfig::replicas may be.
inline constexpr int32_t kMostReplicas = 1 << 16;

// A draft vocabulary: which classes of a larger vocabulary a head has (lossd.v1.HeadSpec.class_list).
// Backends do not know it: they number classes from 0. Immutable; copies share the list. Thread-safe.
class ClassList {
 public:
  ClassList() = default;  // no list: the head has all classes of its vocabulary
  ClassList(std::vector<int32_t> classes, int64_t full_size)
      : classes_(std::make_shared<const std::vector<int32_t>>(std::move(classes))), full_size_(full_size) {}

  bool empty() const { return classes_ == nullptr; }
  // The numbers of the classes in the larger vocabulary, ascending.
  const std::vector<int32_t>& classes() const { return *classes_; }
  int64_t full_size() const { return full_size_; }  // size of the larger vocabulary
  // The head's class that has this number in the larger vocabulary; -1 if there is none.
  int32_t Find(int32_t number) const {
    const auto found = std::lower_bound(classes_->begin(), classes_->end(), number);
    return found == classes_->end() || *found != number ? -1
                                                        : static_cast<int32_t>(found - classes_->begin());
  }
  // A list with only the sizes, which takes little memory.
  ClassList WithoutClasses() const { return empty() ? ClassList() : ClassList({}, full_size_); }

  friend bool operator==(const ClassList& a, const ClassList& b) {
    if (a.empty() || b.empty()) return a.empty() == b.empty();
    return a.full_size_ == b.full_size_ && (a.classes_ == b.classes_ || *a.classes_ == *b.classes_);
  }

 private:
  std::shared_ptr<const std::vector<int32_t>> classes_;
  int64_t full_size_ = 0;
};
// The most classes of a list; more would not fit into the manifest of a checkpoint.
inline constexpr size_t kMostListedClasses = 65'536;

// The shape of a head, the types in which it is computed, and how it is divided over its devices.
struct HeadConfig {
  int64_t hidden_size = 0;  // D in [1, 2^24]
  int64_t vocab_size = 0;   // V in [1, 2^31 - 1]
  bool has_bias = false;
  bool has_class_weights = false;
  Norm norm = Norm::kNone;
  float norm_epsilon = 1e-5f;  // added to the variance (or mean square); >= 0, finite
  // The dtype of the matrix products. A backend may compute more precisely (the CPU backend always uses
  // fp32), never less precisely; HeadKernels::compute_dtype() says what it uses.
  DType compute_dtype = DType::kFloat32;
  OptimizerState optimizer_state = OptimizerState::kAdam;
  bool trainable = true;  // false: no memory for gradients and optimizer; chunks must not accumulate
  Logits logits = Logits::kStored;          // for all chunks of the head
  Gradients gradients = Gradients::kExact;  // for requests that leave it open
  // The most memory for computing chunks: MemoryKind::kWorkspace and, unless logits are recomputed, kSlots.
  // 0: the backend chooses.
  int64_t workspace_bytes = 0;
  Split split = Split::kAny;
  // Split by vocabulary: the share of the classes that each device has, relative to the other devices; each
  // >= 0, their sum in [1, 2^31 - 1]. Empty: all devices have the same share. kAny with shares means
  // kVocabulary.
  std::vector<int32_t> shares;
  // Split by vocabulary: the number of copies of the head. Each copy has the same number of devices, which
  // divide the classes; the copies divide the rows. 0 and 1: one copy on all devices. `shares` has an entry
  // for each device of one copy. kAny with more than one copy means kVocabulary.
  int32_t replicas = 0;
  // With kHost every device has all classes. The weight is rounded to the compute dtype when it is written;
  // bias, norm and class weights stay fp32.
  Residency residency = Residency::kDevice;
  // The vocab_size classes of a larger vocabulary; empty: none. Only the engine uses it; backends get configs
  // without it.
  ClassList class_list = {};

  friend bool operator==(const HeadConfig&, const HeadConfig&) = default;
};

// INVALID_ARGUMENT if no head can be created with this config.
absl::Status Validate(const HeadConfig& config);
// The same for a head on `devices` devices: also checks that `replicas` divides their number and that
// `shares` has an entry for each device of a replica.
absl::Status ValidateOn(const HeadConfig& config, int devices);

// The number of copies of a head that is split by vocabulary.
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

// Which tensor of a parameter; all are fp32.
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
absl::string_view Name(Logits logits);         // "stored", "recomputed", "none"
absl::string_view Name(Split split);           // "any", "rows", "vocabulary"
absl::string_view Name(OptimizerState state);  // "none", "momentum", "adam"
absl::string_view Name(Residency residency);   // "device", "host"

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
