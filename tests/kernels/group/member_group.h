// SPDX-License-Identifier: Apache-2.0
// MakeCpuGroup: a group of CPU backends for tests.
#ifndef LOSSD_TESTS_KERNELS_GROUP_MEMBER_GROUP_H_
#define LOSSD_TESTS_KERNELS_GROUP_MEMBER_GROUP_H_

#include <cstdint>
#include <memory>

#include "gtest/gtest.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/group/group_backend.h"

namespace lossd::kernels::testing {

// Each member has two threads. If the creation fails, fails the test and returns null.
inline std::unique_ptr<Backend> MakeCpuGroup(int members, int64_t least_rows,
                                             int64_t workspace_bytes = int64_t{4} << 20) {
  auto backends = CreateCpuMembers({.threads = 2 * members, .workspace_bytes = workspace_bytes}, members);
  EXPECT_TRUE(backends.ok()) << backends.status();
  if (!backends.ok()) return nullptr;
  auto group = CreateGroupBackend(
      *std::move(backends), MakeCpuReplicas,
      {.least_rows = least_rows, .members_share_memory = true, .join_classes = JoinCpuClasses});
  EXPECT_TRUE(group.ok()) << group.status();
  return group.ok() ? *std::move(group) : nullptr;
}

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_GROUP_MEMBER_GROUP_H_
