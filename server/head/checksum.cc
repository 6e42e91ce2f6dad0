// SPDX-License-Identifier: Apache-2.0
#include "server/head/checksum.h"

#include <xxhash.h>

#include "absl/strings/str_cat.h"

namespace lossd::head {

void Checksum::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

Checksum::Checksum() : state_(XXH3_createState()) { XXH3_64bits_reset(state_.get()); }

void Checksum::Update(absl::Span<const uint8_t> bytes) {
  XXH3_64bits_update(state_.get(), bytes.data(), bytes.size());
}

std::string Checksum::Digest() const {
  return absl::StrCat(absl::Hex(XXH3_64bits_digest(state_.get()), absl::kZeroPad16));
}

}  // namespace lossd::head
