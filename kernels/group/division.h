// SPDX-License-Identifier: Apache-2.0
// Which of several devices, or of several replicas that are devices themselves, computes which slices of a
// chunk. A pure function; thread-safe.
#ifndef LOSSD_KERNELS_GROUP_DIVISION_H_
#define LOSSD_KERNELS_GROUP_DIVISION_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/backend.h"

namespace lossd::kernels {

// Slices that one member computes as one chunk of its own.
struct ChunkPart {
  int member = 0;
  int64_t rows = 0;
  std::vector<size_t> slices;  // indices, ascending

  friend bool operator==(const ChunkPart&, const ChunkPart&) = default;
};

struct DivisionLimits {
  int members = 1;
  int64_t member_rows = 0;  // the most rows of a part; no slice has more
  // Chunks of fewer rows than this go to one member: each pass over the weight gradient costs a member the
  // same, however few rows it is for.
  int64_t least_rows = 0;
};

// Slices stay whole and in order. Each goes to the member that has the fewest rows so far, the largest slices
// first; so members differ by the rows of one slice at most. Of members that have as few, it is the first
// from `first_member` on; a chunk that is not divided is `first_member`'s. A member's slices become several
// parts if they have more rows than a chunk of its may. An empty chunk is one part without slices.
//
// `homes`: the member that each slice goes to whatever the others have, -1: none; or empty: where hidden
// states are makes no difference. A chunk that is not divided goes to the home of most of its rows.
std::vector<ChunkPart> Divide(absl::Span<const Slice> slices, const DivisionLimits& limits, int first_member,
                              absl::Span<const int> homes = {});

}  // namespace lossd::kernels

#endif  // LOSSD_KERNELS_GROUP_DIVISION_H_
