// SPDX-License-Identifier: Apache-2.0
// Exact or not: what a chunk itself decides where its options leave that open, and the words for it, which
// all backends share. Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_DECISION_H_
#define LOSSD_KERNELS_DECISION_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/choice.h"
#include "kernels/loss_options.h"

namespace lossd::kernels {

// A device writes it next to its results.
enum class Decision : int32_t {
  kAsPlanned = 0,          // filtered or sampled
  kTooManyCandidates = 1,  // exact: more classes may reach filter_epsilon than the backend has room for
  kTooMuchError = 2,       // exact: kAuto, and the predicted error exceeds max_gradient_error
};

// What becomes of gradients that were asked for (not kExact).
Gradients GradientsOf(Gradients asked, Decision decision);

// Options with which some of the rows of a chunk are computed again as the whole chunk was: `gradients` and
// `sample_threshold` are what became of its gradients (Chunk).
LossOptions AsDecided(LossOptions asked, Gradients gradients, float sample_threshold);

// How a chunk's gradients are computed, before the logits are known, and after.
Choice GradientsChoice(Gradients gradients, absl::string_view reason);
Choice GradientsChoice(Gradients asked, Decision decision);
// The threshold of sampled gradients: what was asked for, or a larger one for want of room.
Choice ThresholdChoice(float asked, float taken);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DECISION_H_
