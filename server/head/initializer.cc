// SPDX-License-Identifier: Apache-2.0
#include "server/head/initializer.h"

#include <cmath>
#include <cstddef>

namespace lossd::head {
namespace {

constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15u;

// SplitMix64's output function: a bijection of 64 bits.
uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Where the counter of a parameter starts. Mixed twice, so that neither neighbouring seeds nor
// neighbouring parameters give counters that run into each other.
uint64_t StreamStart(uint64_t seed, kernels::Param param) {
  return Mix(Mix(seed + kGoldenGamma) + (static_cast<uint64_t>(param) + 1) * kGoldenGamma);
}

}  // namespace

float KaimingBound(int64_t hidden_size) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(hidden_size)));
}

void FillUniform(uint64_t seed, kernels::Param param, int64_t first_element, float bound,
                 absl::Span<float> out) {
  const uint64_t start = StreamStart(seed, param);
  for (size_t i = 0; i < out.size(); ++i) {
    const uint64_t counter = static_cast<uint64_t>(first_element) + i + 1;
    const auto bits = static_cast<int64_t>(Mix(start + counter * kGoldenGamma) >> 40);
    // An odd number in (-2^24, 2^24). The product below is exact in double, so the only rounding is the
    // one to float, which is the same everywhere.
    const auto odd = static_cast<double>(2 * bits + 1 - (int64_t{1} << 24));
    out[i] = static_cast<float>(odd * 0x1p-24 * static_cast<double>(bound));
  }
}

}  // namespace lossd::head
