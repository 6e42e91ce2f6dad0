// SPDX-License-Identifier: Apache-2.0
// Random hidden states and targets, the same for the same seed on every machine.
#ifndef LOSSD_CLIENT_CLI_RANDOM_ROWS_H_
#define LOSSD_CLIENT_CLI_RANDOM_ROWS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "lossd/v1/types.pb.h"

namespace lossd::cli {

struct HiddenRows {
  uint64_t rows = 0;         // N
  uint64_t hidden_size = 0;  // D
  v1::DType dtype = v1::DTYPE_BF16;
  std::vector<uint8_t> hidden;   // [N, D] of dtype
  std::vector<int32_t> targets;  // [N]
};

// Hidden states uniform with mean 0 and variance 1, targets uniform in [0, vocab_size). Thread-safe.
absl::StatusOr<HiddenRows> RandomRows(uint64_t rows, uint64_t hidden_size, uint64_t vocab_size,
                                      v1::DType dtype, uint64_t seed);

// RESOURCE_EXHAUSTED, naming `option`, if this machine has no memory for `rows` rows of hidden states, while
// they are made and then `copies` times (with their gradients, say).
absl::Status CheckRoom(absl::string_view option, uint64_t rows, uint64_t hidden_size, v1::DType dtype,
                       int copies);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_RANDOM_ROWS_H_
