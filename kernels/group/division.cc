// SPDX-License-Identifier: Apache-2.0
#include "kernels/group/division.h"

#include <algorithm>
#include <numeric>

namespace lossd::kernels {
namespace {

// By member, of the slices that have one.
std::vector<int64_t> RowsAtHome(absl::Span<const Slice> slices, int members, absl::Span<const int> homes) {
  std::vector<int64_t> rows(static_cast<size_t>(members), 0);
  for (size_t i = 0; i < homes.size(); ++i) {
    if (homes[i] >= 0) rows[static_cast<size_t>(homes[i])] += slices[i].rows;
  }
  return rows;
}

// Of a chunk that is not divided.
int SoleMember(absl::Span<const Slice> slices, int members, int first_member, absl::Span<const int> homes) {
  const std::vector<int64_t> rows = RowsAtHome(slices, members, homes);
  const auto most = std::max_element(rows.begin(), rows.end());
  return *most == 0 ? first_member : static_cast<int>(most - rows.begin());
}

// The member of each slice.
std::vector<int> MembersOf(absl::Span<const Slice> slices, int members, int first_member,
                           absl::Span<const int> homes) {
  std::vector<int> member_of(slices.size(), 0);
  std::vector<int64_t> rows = RowsAtHome(slices, members, homes);
  std::rotate(rows.begin(), rows.begin() + first_member, rows.end());  // of the members from first_member on
  std::vector<size_t> largest_first(slices.size());
  std::iota(largest_first.begin(), largest_first.end(), size_t{0});
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [&](size_t a, size_t b) { return slices[a].rows > slices[b].rows; });
  for (const size_t i : largest_first) {
    if (!homes.empty() && homes[i] >= 0) {
      member_of[i] = homes[i];
      continue;
    }
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

std::vector<ChunkPart> Divide(absl::Span<const Slice> slices, const DivisionLimits& limits, int first_member,
                              absl::Span<const int> homes) {
  if (slices.empty()) return {{.member = first_member}};
  const int64_t rows = std::accumulate(slices.begin(), slices.end(), int64_t{0},
                                       [](int64_t sum, const Slice& slice) { return sum + slice.rows; });
  std::vector<int> member_of;
  if (rows < limits.least_rows && rows <= limits.member_rows) {
    member_of.assign(slices.size(), SoleMember(slices, limits.members, first_member, homes));
  } else {
    member_of = MembersOf(slices, limits.members, first_member, homes);
  }
  std::vector<ChunkPart> parts;
  for (int member = 0; member < limits.members; ++member) {
    AddParts(slices, member_of, member, limits.member_rows, parts);
  }
  return parts;
}

}  // namespace lossd::kernels
