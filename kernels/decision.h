// Exact or filtered: what the logits of a chunk decide where its options leave that open, and the words for
// it, which all backends share. Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_DECISION_H_
#define LOSSD_KERNELS_DECISION_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/choice.h"
#include "kernels/loss_options.h"

namespace lossd::kernels {

// A device writes it next to its results.
enum class Decision : int32_t {
  kFiltered = 0,
  kTooManyCandidates = 1,  // exact: more classes may reach filter_epsilon than the backend has room for
  kTooMuchMass = 2,        // exact: kAuto, and more than max_dropped_mass would be dropped
};

Gradients GradientsOf(Decision decision);

// How a chunk's gradients are computed, before the logits are known, and after.
Choice GradientsChoice(Gradients gradients, absl::string_view reason);
Choice GradientsChoice(Gradients asked, Decision decision);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DECISION_H_
