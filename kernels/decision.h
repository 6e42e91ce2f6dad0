// SPDX-License-Identifier: Apache-2.0
// The decision whether the gradients of a chunk are exact, filtered or sampled (Decision), and the random
// numbers of sampled gradients (SampleOf, SystematicSampler). All backends use these functions, so all of
// them make the same decisions and sample the same classes.
//
// All functions are pure and thread-safe. SampleOf and SystematicSampler also compile as device code.
#ifndef LOSSD_KERNELS_DECISION_H_
#define LOSSD_KERNELS_DECISION_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"

namespace lossd::kernels {

// The decision of a chunk. A device writes it next to its results.
enum class Decision : int32_t {
  kAsPlanned = 0,          // filtered or sampled, as planned
  kTooManyCandidates = 1,  // exact: more classes may reach filter_epsilon than the backend has room for
  kTooMuchError = 2,       // exact: kAuto, and the predicted error exceeds max_gradient_error
};

// How gradients are computed after a decision, if the request asked for `asked`, which is not kExact.
Gradients GradientsOf(Gradients asked, Decision decision);

// Options with which some rows of a chunk are computed again in the same way as the whole chunk was.
// `gradients` and `sample_threshold`: the values that the backend has set in the Chunk.
LossOptions AsDecided(LossOptions asked, Gradients gradients, float sample_threshold);

// Both functions describe how a chunk's gradients are computed: the first one before the logits are known,
// the second one after the decision.
Choice GradientsChoice(Gradients gradients, absl::string_view reason);
Choice GradientsChoice(Gradients asked, Decision decision);
// The description for a head without logits (Logits::kNone).
Choice NoLogitsChoice();
// Describes the threshold of sampled gradients: the requested threshold, or a larger one if there was not
// enough memory.
Choice ThresholdChoice(float asked, float taken);

// A bijection of 64-bit numbers that maps neighboring inputs to unrelated outputs (the finalizer of
// splitmix64).
constexpr uint64_t MixBits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// omega of a row, a multiple of 2^-24 in [0, 1): the random number of its sampled gradient (docs/math.md,
// "Sampled gradients"). `seed`: the seed of the microbatch; `row`: the number of the row in the microbatch.
// So omega does not depend on the chunk, the slice or the time in which the row is computed. If the classes
// are divided over several devices, each part has its own omega; `first_class`: the first class of the part.
constexpr float SampleOf(uint64_t seed, uint64_t row, uint64_t first_class = 0) {
  uint64_t bits = MixBits(MixBits(seed) + (row + 1) * 0x9e3779b97f4a7c15u);
  if (first_class != 0) bits = MixBits(bits + first_class * 0xd1342543de82ef95u);
  return static_cast<float>(bits >> 40) * 0x1p-24f;
}

// Systematic sampling. Imagine the classes of a row side by side in their order, each as wide as its size but
// at most 1. The classes that contain one of the points omega, omega + 1, omega + 2, ... are taken. So a
// class is taken with probability min(size, 1); sizes are in units of the threshold. T: float or double.
// Thread-compatible.
template <typename T>
class SystematicSampler {
 public:
  // `begin`: the sum of the widths of all classes before the first class.
  LOSSD_HOST_DEVICE SystematicSampler(T omega, T begin = 0) : passed_(begin + 1 - omega) {
    passed_ -= static_cast<T>(static_cast<int64_t>(passed_));
  }

  // Whether the next class, size >= 0, is taken.
  LOSSD_HOST_DEVICE bool Take(T size) {
    if (!(size < 1)) return true;  // contains one point, and passed_ does not change
    passed_ += size;
    if (!(passed_ >= 1)) return false;
    passed_ -= 1;
    return true;
  }

 private:
  T passed_;  // width since the last point, in [0, 1)
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DECISION_H_
