// SPDX-License-Identifier: Apache-2.0
// Distillation: a row's loss is a divergence between the softmax of a frozen head, the teacher, and that of
// the head that is trained, the student. docs/math.md has the formulas under "Distillation".
//
// A row has two hidden states then: one of the student's hidden size, and one of the teacher's. Both heads
// have the same classes. The gradient goes to the student alone.
//
// Plain data; the functions are stateless and thread-safe.
#ifndef LOSSD_KERNELS_DISTILLATION_H_
#define LOSSD_KERNELS_DISTILLATION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace lossd::kernels {

// p is the teacher's softmax and q the student's, both at the temperature.
enum class Divergence : uint8_t {
  kNone,            // the loss knows no teacher
  kForwardKl,       // KL(p || q)
  kReverseKl,       // KL(q || p)
  kJensenShannon,   // beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q
  kTotalVariation,  // half the sum of |p - q|
};
absl::string_view Name(Divergence divergence);  // "none", "forward_kl", "reverse_kl", "jensen_shannon", ...

// The loss of a row is weight * divergence + target_weight * (the loss that the other options describe). The
// divergence is not multiplied by the square of the temperature.
struct Distillation {
  Divergence divergence = Divergence::kNone;
  float beta = 0.5f;                 // kJensenShannon: in (0, 1)
  float temperature = 1.0f;          // divides the logits of both; finite, > 0
  float weight = 1.0f;               // of the divergence; finite, >= 0
  float target_weight = 0.0f;        // of the loss with the targets; finite, >= 0
  float teacher_logit_scale = 1.0f;  // as LossOptions::logit_scale
  float teacher_softcap = 0.0f;      // as LossOptions::softcap
  // Names the teacher for whoever has several: rows may share a chunk when it is equal. The kernels do not
  // look at it.
  uint64_t teacher = 0;

  bool used() const { return divergence != Divergence::kNone; }
  friend bool operator==(const Distillation&, const Distillation&) = default;
};

// INVALID_ARGUMENT with the field, "distillation.beta", and its value. Without a divergence all is right.
absl::Status Validate(const Distillation& distillation);

// What chunks that are distilled need of a pair of heads: INVALID_ARGUMENT with the field `field`, unless the
// teacher has the same number of classes and is not trainable; UNIMPLEMENTED if both live in host memory.
struct HeadConfig;
absl::Status ValidateTeacher(const HeadConfig& student, const HeadConfig& teacher, absl::string_view field);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DISTILLATION_H_
