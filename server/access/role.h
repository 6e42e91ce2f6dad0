// SPDX-License-Identifier: Apache-2.0
// What a caller may do. Each role may do all that the one before may.
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_SERVER_ACCESS_ROLE_H_
#define LOSSD_SERVER_ACCESS_ROLE_H_

#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace lossd::access {

enum class Role : uint8_t {
  kReader,   // sees what the server is and has, and its metrics; no tensors
  kTrainer,  // computes losses, accumulates and applies gradients, reads tensors, saves checkpoints
  kAdmin,    // creates, overwrites, loads and deletes heads
};

// "reader", "trainer" or "admin".
absl::string_view RoleName(Role role);
// nullopt for any other text.
std::optional<Role> ParseRole(absl::string_view name);

}  // namespace lossd::access

#endif  // LOSSD_SERVER_ACCESS_ROLE_H_
