// SPDX-License-Identifier: Apache-2.0
// Whether the gradients of a chunk are exact, filtered or sampled, where the options of the chunk leave that
// open (Decision), and the random numbers of sampled gradients (SampleOf, SystematicSampler). All backends
// share both, so that they decide alike and sample the same classes.
//
// All functions are pure and thread-safe. SampleOf and SystematicSampler also compile as device code.
#ifndef LOSSD_KERNELS_DECISION_H_
#define LOSSD_KERNELS_DECISION_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "kernels/backend.h"
#include "kernels/head_config.h"

namespace lossd::kernels {

// What a chunk has decided. A device writes it next to its results.
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
// Of a head that has none (Logits::kNone).
Choice NoLogitsChoice();
// The threshold of sampled gradients: what was asked for, or a larger one for want of room.
Choice ThresholdChoice(float asked, float taken);

// A bijection of 64-bit numbers whose outputs for neighbouring inputs have nothing in common (the finalizer
// of splitmix64).
constexpr uint64_t MixBits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// omega of a row, a multiple of 2^-24 in [0, 1): the random number of its sampled gradient (docs/math.md,
// "Sampled gradients"). seed: of the microbatch; row: its number in the microbatch. So omega does not depend
// on the chunk, the slice or the time in which the row is computed. Where the classes of a row lie on several
// devices, each part of them has a number of its own; first_class: of the part.
constexpr float SampleOf(uint64_t seed, uint64_t row, uint64_t first_class = 0) {
  uint64_t bits = MixBits(MixBits(seed) + (row + 1) * 0x9e3779b97f4a7c15u);
  if (first_class != 0) bits = MixBits(bits + first_class * 0xd1342543de82ef95u);
  return static_cast<float>(bits >> 40) * 0x1p-24f;
}

// Systematic sampling. Put the classes of a row side by side in their order, each as wide as its size, at
// most 1, and take those that one of the points omega, omega + 1, omega + 2, ... falls on. A class is taken
// with probability min(size, 1); sizes are in units of the threshold. T: float or double.
// Thread-compatible.
template <typename T>
class SystematicSampler {
 public:
  // begin: the width of all classes before the first.
  LOSSD_HOST_DEVICE SystematicSampler(T omega, T begin = 0) : passed_(begin + 1 - omega) {
    passed_ -= static_cast<T>(static_cast<int64_t>(passed_));
  }

  // Whether the next class, size >= 0, is taken.
  LOSSD_HOST_DEVICE bool Take(T size) {
    if (!(size < 1)) return true;  // has one point, and the next class is as far from the last one
    passed_ += size;
    if (!(passed_ >= 1)) return false;
    passed_ -= 1;
    return true;
  }

 private:
  T passed_;  // since the last point, in [0, 1)
};

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_DECISION_H_
