// SPDX-License-Identifier: Apache-2.0
#include "kernels/group/division.h"

#include <algorithm>
#include <numeric>

namespace lossd::kernels {
namespace {

// The member of each slice.
std::vector<int> MembersOf(absl::Span<const Slice> slices, int members, int first_member) {
  std::vector<int> member_of(slices.size(), 0);
  std::vector<int64_t> rows(static_cast<size_t>(members), 0);  // of the members from first_member on
  std::vector<size_t> largest_first(slices.size());
  std::iota(largest_first.begin(), largest_first.end(), size_t{0});
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [&](size_t a, size_t b) { return slices[a].rows > slices[b].rows; });
  for (const size_t i : largest_first) {
    const auto least = std::min_element(rows.begin(), rows.end());
    *least += slices[i].rows;
    member_of[i] = (first_member + static_cast<int>(least - rows.begin())) % members;
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

std::vector<ChunkPart> Divide(absl::Span<const Slice> slices, const DivisionLimits& limits,
                              int first_member) {
  if (slices.empty()) return {{.member = first_member}};
  const int64_t rows = std::accumulate(slices.begin(), slices.end(), int64_t{0},
                                       [](int64_t sum, const Slice& slice) { return sum + slice.rows; });
  std::vector<int> member_of;
  if (rows < limits.least_rows && rows <= limits.member_rows) {
    member_of.assign(slices.size(), first_member);
  } else {
    member_of = MembersOf(slices, limits.members, first_member);
  }
  std::vector<ChunkPart> parts;
  for (int member = 0; member < limits.members; ++member) {
    AddParts(slices, member_of, member, limits.member_rows, parts);
  }
  return parts;
}

}  // namespace lossd::kernels
