// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/region_ranges.h"

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"

namespace lossd::rpc {

absl::StatusOr<std::shared_ptr<regions::Region>> ClaimRegion(regions::Regions* regions,
                                                             absl::string_view field, const std::string& id,
                                                             const std::string& identity) {
  std::shared_ptr<regions::Region> region = regions == nullptr ? nullptr : regions->Claim(id, identity);
  if (region != nullptr) return region;
  return errors::FieldError(field, "be a region of this client that is open", "another one",
                            absl::StatusCode::kUnavailable);
}

absl::StatusOr<absl::Span<uint8_t>> BytesOf(const regions::Region& region, absl::string_view field,
                                            const v1::RegionRange& range) {
  const absl::Span<uint8_t> memory = region.bytes();
  if (range.offset() % kRegionAlignment != 0) {
    return errors::FieldError(absl::StrCat(field, ".offset"),
                              absl::StrCat("be a multiple of ", kRegionAlignment), range.offset());
  }
  if (range.offset() >= memory.size()) {
    return errors::FieldError(absl::StrCat(field, ".offset"),
                              absl::StrCat("be below ", memory.size(), ", the size of the region"),
                              range.offset());
  }
  const uint64_t most = memory.size() - range.offset();
  if (range.bytes() == 0 || range.bytes() > most) {
    return errors::FieldError(absl::StrCat(field, ".bytes"),
                              absl::StrCat("be in [1, ", most, "] at offset ", range.offset()),
                              range.bytes());
  }
  return memory.subspan(range.offset(), range.bytes());
}

}  // namespace lossd::rpc
