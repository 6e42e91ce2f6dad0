// SPDX-License-Identifier: Apache-2.0
// The checksum of checkpoints: XXH3, 64 bits, without a seed. It finds corruption, not tampering.
// Thread-compatible.
#ifndef LOSSD_SERVER_HEAD_CHECKSUM_H_
#define LOSSD_SERVER_HEAD_CHECKSUM_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/types/span.h"

struct XXH3_state_s;

namespace lossd::head {

class Checksum {
 public:
  Checksum();

  void Update(absl::Span<const uint8_t> bytes);
  // Of all bytes so far, as 16 lower-case hexadecimal digits.
  std::string Digest() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace lossd::head

#endif  // LOSSD_SERVER_HEAD_CHECKSUM_H_
