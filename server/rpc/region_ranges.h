// SPDX-License-Identifier: Apache-2.0
// What a call says of a region of shared memory: which one, and which part of it. Everything is checked here
// before any of the memory is used.
//
// Thread-safe.
#ifndef LOSSD_SERVER_RPC_REGION_RANGES_H_
#define LOSSD_SERVER_RPC_REGION_RANGES_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "lossd/v1/loss.pb.h"
#include "server/regions/regions.h"

namespace lossd::rpc {

inline constexpr uint64_t kRegionAlignment = 256;  // of ranges in a region

// The region that a caller of this identity names in `field`. UNAVAILABLE, which says nothing of regions of
// others, if it has no such region. `regions` null: the server shares no memory.
absl::StatusOr<std::shared_ptr<regions::Region>> ClaimRegion(regions::Regions* regions,
                                                             absl::string_view field, const std::string& id,
                                                             const std::string& identity);

// The memory of a part of the region that is named in `field`. INVALID_ARGUMENT, naming field and value, if
// the region has no such part.
absl::StatusOr<absl::Span<uint8_t>> BytesOf(const regions::Region& region, absl::string_view field,
                                            const v1::RegionRange& range);

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_REGION_RANGES_H_
