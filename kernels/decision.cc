// SPDX-License-Identifier: Apache-2.0
// The outcome of a chunk's decision, and its description for people (decision.h).
#include "kernels/decision.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

namespace lossd::kernels {
namespace {

absl::string_view Reason(Gradients asked, Decision decision) {
  switch (decision) {
    case Decision::kAsPlanned:
      return asked == Gradients::kAuto ? "max_gradient_error allows it" : "it was asked for";
    case Decision::kTooManyCandidates:
      return "too many candidates";
    case Decision::kTooMuchError:
      return "the predicted error exceeds max_gradient_error";
  }
  return "";
}

}  // namespace

Gradients GradientsOf(Gradients asked, Decision decision) {
  if (decision != Decision::kAsPlanned) return Gradients::kExact;
  return asked == Gradients::kAuto ? Gradients::kSampled : asked;
}

LossOptions AsDecided(LossOptions asked, Gradients gradients, float sample_threshold) {
  if (gradients == Gradients::kExact) asked.gradients = Gradients::kExact;
  if (gradients != Gradients::kSampled) return asked;
  asked.sample_threshold = std::clamp(sample_threshold, asked.sample_threshold, 1.0f);
  // The option stays kAuto, because with kSampled a backend may sample other parts of the gradient
  // (docs/math.md).
  if (asked.gradients == Gradients::kAuto) asked.max_gradient_error = std::numeric_limits<float>::max();
  return asked;
}

Choice GradientsChoice(Gradients gradients, absl::string_view reason) {
  return {.what = "gradients", .choice = std::string(Name(gradients)), .reason = std::string(reason)};
}

Choice GradientsChoice(Gradients asked, Decision decision) {
  return GradientsChoice(GradientsOf(asked, decision), Reason(asked, decision));
}

Choice NoLogitsChoice() {
  return {.what = "logits", .choice = "none", .reason = "the head is an embedding alone"};
}

Choice ThresholdChoice(float asked, float taken) {
  const std::string reason =
      taken > asked ? absl::StrCat("no room for what ", asked, " takes") : "it was asked for";
  return {.what = "sample threshold", .choice = absl::StrCat(taken), .reason = reason};
}

}  // namespace lossd::kernels
