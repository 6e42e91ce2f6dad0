// SPDX-License-Identifier: Apache-2.0
#include "kernels/group/division.h"

#include <algorithm>
#include <numeric>

namespace lossd::kernels {
namespace {

// The member of each slice.
std::vector<int> MembersOf(absl::Span<const Slice> slices, int members) {
  std::vector<int> member_of(slices.size(), 0);
  std::vector<int64_t> rows(static_cast<size_t>(members), 0);
  std::vector<size_t> free;
  for (size_t i = 0; i < slices.size(); ++i) {
    if (slices[i].retained_offset >= 0) {
      rows[0] += slices[i].rows;
    } else {
      free.push_back(i);
    }
  }
  std::stable_sort(free.begin(), free.end(),
                   [&](size_t a, size_t b) { return slices[a].rows > slices[b].rows; });
  for (const size_t i : free) {
    const auto least = std::min_element(rows.begin(), rows.end());
    *least += slices[i].rows;
    member_of[i] = static_cast<int>(least - rows.begin());
  }
  return member_of;
}

// The slices of one member, in order, cut wherever its chunks are full.
void AddParts(absl::Span<const Slice> slices, const std::vector<int>& member_of, int member,
              int64_t member_rows, std::vector<ChunkPart>& parts) {
  ChunkPart part{.member = member};
  for (size_t i = 0; i < slices.size(); ++i) {
    if (member_of[i] != member) continue;
    if (!part.slices.empty() && part.rows + slices[i].rows > member_rows) {
      parts.push_back(std::move(part));
      part = {.member = member};
    }
    part.slices.push_back(i);
    part.rows += slices[i].rows;
  }
  if (!part.slices.empty()) parts.push_back(std::move(part));
}

}  // namespace

std::vector<ChunkPart> Divide(absl::Span<const Slice> slices, const DivisionLimits& limits, int sole_member) {
  if (slices.empty()) return {{.member = sole_member}};
  const int64_t rows = std::accumulate(slices.begin(), slices.end(), int64_t{0},
                                       [](int64_t sum, const Slice& slice) { return sum + slice.rows; });
  const bool retained = std::any_of(slices.begin(), slices.end(),
                                    [](const Slice& slice) { return slice.retained_offset >= 0; });
  std::vector<int> member_of;
  if (rows < limits.least_rows && rows <= limits.member_rows) {
    member_of.assign(slices.size(), retained ? 0 : sole_member);
  } else {
    member_of = MembersOf(slices, limits.members);
  }
  std::vector<ChunkPart> parts;
  for (int member = 0; member < limits.members; ++member) {
    AddParts(slices, member_of, member, limits.member_rows, parts);
  }
  return parts;
}

}  // namespace lossd::kernels
