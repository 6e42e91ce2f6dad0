// SPDX-License-Identifier: Apache-2.0
#include "kernels/gpu_sharing.h"

#include <cstdlib>

#include "gtest/gtest.h"

namespace lossd::kernels::gpu_sharing_test {
namespace {

constexpr char kPriority[] = "CUDA_MPS_CLIENT_PRIORITY";
constexpr char kShare[] = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

class GpuSharingTest : public ::testing::Test {
 protected:
  GpuSharingTest() { Clear(); }
  ~GpuSharingTest() override { Clear(); }
  static void Clear() {
    unsetenv(kPriority);
    unsetenv(kShare);
  }
};

TEST_F(GpuSharingTest, WithoutMpsProgramsTakeTurnsWhateverTheEnvironmentSays) {
  setenv(kPriority, "1", 1);
  EXPECT_EQ(GpuSharing(false), "time slices");
}

TEST_F(GpuSharingTest, UnderMpsItSaysPriorityAndShare) {
  EXPECT_EQ(GpuSharing(true), "MPS, client priority 0 (normal)");
  setenv(kPriority, "1", 1);
  EXPECT_EQ(GpuSharing(true), "MPS, client priority 1 (below normal)");
  setenv(kShare, "25", 1);
  EXPECT_EQ(GpuSharing(true), "MPS, client priority 1 (below normal), 25 % of the multiprocessors");
  for (const char* all : {"100", "0", "-3", "many", ""}) {
    setenv(kShare, all, 1);
    EXPECT_EQ(GpuSharing(true), "MPS, client priority 1 (below normal)") << all;
  }
}

}  // namespace
}  // namespace lossd::kernels::gpu_sharing_test
