// SPDX-License-Identifier: Apache-2.0
// Soft targets: instead of one target, a row has K classes with a weight each, for example the K most
// probable classes of a teacher with their probabilities. docs/math.md has the formulas under "Soft targets".
//
// For one row, let
// - q_v be the weight of class v: 0 if the row does not name v; the sum of its weights if the row names v
//   several times,
// - s the sum of all weights,
// - r the rest (Rest),
// - T the total probability of all classes that the row does not name.
//
// The loss of the row is
//   -sum q_v log p_v - r log T
// and its derivative with respect to the logit of class v is
//   (s + r) p_v - q_v         of a class that the row names,
//   (s + r - r / T) p_v       of any other class.
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

// How r is defined: what becomes of the probability that the weights of a row leave over. The values are
// those of lossd.v1.Rest.
enum class Rest : uint8_t {
  kNoTargets,     // rows have one target each, and no weights
  kNone,          // the weights count as they are; r is 0
  kRenormalized,  // the weights are divided by their sum; r is 0
  kOneClass,      // r = 1 - s is the weight of all other classes together
};
inline constexpr Rest kLastRest = Rest::kOneClass;
absl::string_view Name(Rest rest);  // "no_targets", "none", "renormalized", "one_class"

// The largest K; K is also at most V.
inline constexpr int32_t kMostSoftTargets = 256;
// Stands for "no class" among the given classes of a row; its weight is 0. MakeSoftRow drops it.
inline constexpr int32_t kNoClass = -1;
// With kOneClass, a rest below this counts as 0, because it comes from rounding of weights whose sum is 1.
inline constexpr double kLeastRest = 0x1p-20;

// The soft targets of one row.
struct SoftRow {
  struct Entry {
    int32_t place = 0;  // the class
    float weight = 0.0f;
  };
  std::vector<Entry> entries;  // each class once, in ascending order, also with weight 0
  double total = 0.0;          // s + r; 1 with kRenormalized
  double rest = 0.0;           // r
  double sum = 0.0;            // s, the sum of the given weights
};

// Makes the soft targets of a row from these classes and weights, [K] each, which have passed
// CheckSoftTargets. Replaces the content of `row` and reuses its memory.
void MakeSoftRow(Rest rest, absl::Span<const int32_t> classes, absl::Span<const float> weights, SoftRow& row);

// Checks `count`, and checks classes and weights with errors::CheckSoftTargets, where `rest` says which rule
// the sum must obey. INVALID_ARGUMENT names "<prefix>target_count" unless `count` is in [1, min(V,
// kMostSoftTargets)].
absl::Status CheckSoftTargets(absl::string_view prefix, Rest rest, int64_t vocab_size, int64_t count,
                              absl::Span<const int32_t> classes, absl::Span<const float> weights,
                              absl::Span<const int32_t> targets, int32_t ignored);

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_SOFT_TARGETS_H_
