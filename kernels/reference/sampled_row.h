// SPDX-License-Identifier: Apache-2.0
// The classes of one row that systematic sampling takes (docs/math.md, "Sampled gradients"), and those of
// which rounding decides whether it takes them. Pure functions; thread-safe.
#ifndef LOSSD_KERNELS_REFERENCE_SAMPLED_ROW_H_
#define LOSSD_KERNELS_REFERENCE_SAMPLED_ROW_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lossd::kernels::reference {

// Classes [begin, end) of a row, which are sampled with a number of their own.
struct SampledPart {
  size_t begin = 0;
  size_t end = 0;
  double omega = 0.0;
};

// The parts of a row whose classes lie on `parts` devices, divided by `shares` unless that is empty
// (ClassShardOf). row: its number in the microbatch.
std::vector<SampledPart> SampledPartsOf(size_t classes, int parts, absl::Span<const int32_t> shares,
                                        uint64_t seed, uint64_t row);

// [V]. sizes: a / tau of each class, 0 of the target. 1: taken.
std::vector<uint8_t> TakenClasses(const std::vector<double>& sizes, double omega);

// [V]. How much a computation whose sizes are off by up to `errors` [V] may differ in whether it takes a
// class, as the square of the difference: 0 where the decision is certain. Errors add up along the row: a
// class may be taken in another's place where a point is closer to the border between them than the errors of
// all classes before it. The squares of the two then are 1. From where the errors reach half the distance of
// the points on, nothing is known but the probabilities; squares are then what two independent draws differ
// by, and at least 1/4, so that a sum of them allows for a rare class.
std::vector<double> UndecidedClasses(const std::vector<double>& sizes, const std::vector<double>& errors,
                                     double omega);

// The same of a row in parts.
std::vector<uint8_t> TakenClasses(const std::vector<double>& sizes, const std::vector<SampledPart>& parts);
std::vector<double> UndecidedClasses(const std::vector<double>& sizes, const std::vector<double>& errors,
                                     const std::vector<SampledPart>& parts);

}  // namespace lossd::kernels::reference

#endif  // LOSSD_KERNELS_REFERENCE_SAMPLED_ROW_H_
