// SPDX-License-Identifier: Apache-2.0
// Soft targets: a row has K classes with a weight each in the place of its one target, for example the k most
// probable classes of a teacher with their probabilities. docs/math.md has the formulas under "Soft targets".
//
// Of one row, q_v is the weight of class v (0 unless the row names v; weights of a class that is named more
// than once add up), s the sum of all weights, r the rest and T the probability of all classes that the row
// does not name. Its loss is
//   -sum q_v log p_v - r log T
// and the derivative with respect to the logit of class v is
//   (s + r) p_v - q_v         of a class that the row names,
//   (s + r - r / T) p_v       of another one.
//
// Plain data and stateless functions; thread-safe.
#ifndef LOSSD_KERNELS_SOFT_TARGETS_H_
#define LOSSD_KERNELS_SOFT_TARGETS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace lossd::kernels {

// What becomes of the probability that the weights of a row leave over. The values are those of
// lossd.v1.Rest.
enum class Rest : uint8_t {
  kNoTargets,     // rows have one target each, and no weights
  kNone,          // the weights count as they are; r is 0
  kRenormalized,  // the weights are divided by their sum; r is 0
  kOneClass,      // r = 1 - s is the weight of all other classes together
};
inline constexpr Rest kLastRest = Rest::kOneClass;
absl::string_view Name(Rest rest);  // "no_targets", "none", "renormalized", "one_class"

// K at most; K is at most V besides.
inline constexpr int32_t kMostSoftTargets = 256;
// Entries of a row that name no class; their weight is 0.
inline constexpr int32_t kNoClass = -1;
// kOneClass: a rest below it counts as 0: it is what rounding leaves of weights whose sum is 1.
inline constexpr double kLeastRest = 0x1p-20;

// The soft targets of one row.
struct SoftRow {
  struct Entry {
    int32_t place = 0;
    float weight = 0.0f;
  };
  std::vector<Entry> entries;  // each class once, the smallest first; classes of weight 0 too
  double total = 0.0;          // s + r; with kRenormalized 1
  double rest = 0.0;           // r
  double sum = 0.0;            // s, of the weights as they were given
};

// The soft targets of a row with these classes and weights, [K] each, which Check has taken. Replaces `row`,
// whose memory it uses again.
void MakeSoftRow(Rest rest, absl::Span<const int32_t> classes, absl::Span<const float> weights, SoftRow& row);

// errors::CheckSoftTargets with the sum that `rest` takes, and INVALID_ARGUMENT, naming
// "<prefix>target_count", unless `count` is in [1, min(V, kMostSoftTargets)].
absl::Status CheckSoftTargets(absl::string_view prefix, Rest rest, int64_t vocab_size, int64_t count,
                              absl::Span<const int32_t> classes, absl::Span<const float> weights,
                              absl::Span<const int32_t> targets, int32_t ignored);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_SOFT_TARGETS_H_
