// SPDX-License-Identifier: Apache-2.0
// Distillation: the loss of a row is a divergence between the softmax of a frozen head, the teacher, and the
// softmax of the head that is trained, the student. docs/math.md has the formulas under "Distillation".
//
// Such a row has two hidden states, one for each head, with that head's hidden size. Both heads have the same
// classes. Only the student gets gradients.
//
// Plain data; the functions are stateless and thread-safe.
#ifndef LOSSD_KERNELS_DISTILLATION_H_
#define LOSSD_KERNELS_DISTILLATION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace lossd::kernels {

// The divergence. p is the teacher's softmax and q the student's, both with the temperature.
enum class Divergence : uint8_t {
  kNone,            // the rows have no teacher
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
  float weight = 1.0f;               // factor of the divergence; finite, >= 0
  float target_weight = 0.0f;        // factor of the loss with the targets; finite, >= 0
  float teacher_logit_scale = 1.0f;  // as LossOptions::logit_scale
  float teacher_softcap = 0.0f;      // as LossOptions::softcap
  // A number that identifies the teacher: rows may share a chunk if it is equal. The kernels ignore it.
  uint64_t teacher = 0;

  bool used() const { return divergence != Divergence::kNone; }
  friend bool operator==(const Distillation&, const Distillation&) = default;
};

// INVALID_ARGUMENT names the field, e.g. "distillation.beta", and its value. Without a divergence always OK.
absl::Status Validate(const Distillation& distillation);

// Checks whether two heads may be student and teacher. INVALID_ARGUMENT, which names `field`, unless the
// teacher has the student's number of classes, has logits and is frozen. UNIMPLEMENTED if both live in host
// memory.
struct HeadConfig;
absl::Status ValidateTeacher(const HeadConfig& student, const HeadConfig& teacher, absl::string_view field);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DISTILLATION_H_
