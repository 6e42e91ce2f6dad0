// SPDX-License-Identifier: Apache-2.0
// How long something takes that was measured for some shapes only. Pure functions; thread-safe.
//
// What is said of a shape depends on what is known, and never goes further:
//   - the shape was measured: its time, in proportion to the rows;
//   - leaving out each measured shape in turn, the others predict its time per row and D V within 10 %: so
//   they
//     predict this shape too, with the worst of these errors to both sides;
//   - they do not: between the fastest and the slowest of them per row and D V;
//   - otherwise, too small microbatches and shapes far from all that were measured included: nothing.
#ifndef LOSSD_CLIENT_PLAN_RATES_H_
#define LOSSD_CLIENT_PLAN_RATES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/plan/measured.h"

namespace lossd::plan {

enum class Basis : uint8_t {
  kMeasured,
  kLikeShapes,  // predicted by other shapes, which predict each other
  kBetween,     // bounds
  kDataSheets,  // bounds of another card than the one that was measured
  kNone,        // not known
};
absl::string_view Name(Basis basis);  // "measured", "from other shapes", "between other shapes", "bounds by
                                      // data sheets", "not measured"

struct Estimate {
  Basis basis = Basis::kNone;
  double low_seconds = 0.0;
  double high_seconds = 0.0;
  std::vector<size_t> sources;  // indices of Measured::sources, ascending
  std::string why_none;         // why nothing is known

  bool known() const { return basis != Basis::kNone; }
  double middle_seconds() const { return (low_seconds + high_seconds) / 2.0; }
};

// Rows of a microbatch, at least, that its time is proportional to.
inline constexpr int64_t kLeastRows = 2048;
// What other shapes predict may be off by as much.
inline constexpr double kMostError = 0.10;
// A shape is near those that were measured if D and V are at most this factor outside of their range.
inline constexpr double kNearFactor = 2.0;

// Of `rows` rows of such a shape. rows, hidden and vocab > 0.
Estimate EstimateTime(absl::Span<const Timing> measured, int64_t hidden, int64_t vocab, int64_t rows);

// The same on a card that was not measured. What is not known stays so.
Estimate Bounded(Estimate estimate, const std::optional<CardBounds>& bounds);

// Those of a kind, to estimate with.
std::vector<Timing> TimingsOf(const Measured& measured, kernels::Logits logits, kernels::Gradients gradients,
                              absl::string_view data);
std::vector<Timing> TimingsOf(const Measured& measured, absl::string_view last_stage_method,
                              absl::string_view data);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_RATES_H_
