// SPDX-License-Identifier: Apache-2.0
#include "server/access/role.h"

#include <cstddef>

namespace lossd::access {
namespace {

constexpr Role kRoles[] = {Role::kReader, Role::kTrainer, Role::kAdmin};
constexpr absl::string_view kNames[] = {"reader", "trainer", "admin"};

}  // namespace

absl::string_view RoleName(Role role) { return kNames[static_cast<size_t>(role)]; }

std::optional<Role> ParseRole(absl::string_view name) {
  for (const Role role : kRoles) {
    if (name == RoleName(role)) return role;
  }
  return std::nullopt;
}

}  // namespace lossd::access
