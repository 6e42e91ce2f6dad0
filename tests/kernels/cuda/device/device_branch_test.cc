// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/device/device_branch.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cuda/device/cuda_status.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/cuda/device/cluster_write.h"

namespace lossd::kernels::cuda::device_branch_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr size_t kBytes = 8;

// A stream, a flag and some bytes on the device that the branches write.
class DeviceBranchTest : public ::testing::Test {
 protected:
  void SetUp() override {
    LOSSD_SKIP_WITHOUT_GPU();
    int driver = 0;
    ASSERT_EQ(cudaDriverGetVersion(&driver), cudaSuccess);
    if (driver < kBranchDriverVersion) GTEST_SKIP() << "the driver is too old for branches";
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&flag_, sizeof(int32_t)), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&bytes_, kBytes), cudaSuccess);
    ASSERT_EQ(cudaMemset(bytes_, 0, kBytes), cudaSuccess);
  }
  void TearDown() override {
    cudaFree(flag_);
    cudaFree(bytes_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  // On the stream, so that the flag has its value only when the stream gets there.
  void SetFlag(bool set) {
    ASSERT_EQ(cudaMemsetAsync(flag_, set ? 1 : 0, sizeof(int32_t), stream_), cudaSuccess);
  }
  // A body: writes `value` to each of these places, an operation for each.
  auto Write(std::initializer_list<size_t> places, int value) {
    return [this, places = std::vector<size_t>(places), value]() -> absl::Status {
      for (size_t place : places) {
        LOSSD_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(bytes_ + place, value, 1, stream_), "cudaMemsetAsync");
      }
      return absl::OkStatus();
    };
  }
  std::vector<int> Bytes() {
    uint8_t bytes[kBytes] = {};
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(bytes, bytes_, kBytes, cudaMemcpyDefault), cudaSuccess);
    return {bytes, bytes + kBytes};
  }

  cudaStream_t stream_ = nullptr;
  int32_t* flag_ = nullptr;
  uint8_t* bytes_ = nullptr;
};

TEST_F(DeviceBranchTest, TheFlagChoosesWhenTheStreamGetsThere) {
  DeviceBranch branch;
  SetFlag(true);
  ASSERT_TRUE(branch.Enqueue(flag_, stream_, Write({0}, 1), Write({1}, 2)).ok());
  EXPECT_THAT(Bytes(), ElementsAre(1, 0, 0, 0, 0, 0, 0, 0));
  SetFlag(false);
  ASSERT_TRUE(branch.Enqueue(flag_, stream_, Write({2}, 3), Write({3}, 4)).ok());
  EXPECT_THAT(Bytes(), ElementsAre(1, 0, 0, 4, 0, 0, 0, 0));
}

TEST_F(DeviceBranchTest, BothFunctionsAreCalledOnce) {
  DeviceBranch branch;
  SetFlag(true);
  int set = 0, not_set = 0;
  const auto count = [](int& calls) {
    return [&calls] {
      ++calls;
      return absl::OkStatus();
    };
  };
  ASSERT_TRUE(branch.Enqueue(flag_, stream_, count(set), count(not_set)).ok());
  EXPECT_THAT(Bytes(), Each(0));
  EXPECT_EQ(set, 1);
  EXPECT_EQ(not_set, 1);
}

// Same operations, other places and values.
TEST_F(DeviceBranchTest, RepeatsDoWhatTheLastCallSaid) {
  DeviceBranch branch;
  std::vector<int> expected(kBytes, 0);
  for (int i = 1; i <= 40; ++i) {
    const size_t place = static_cast<size_t>(i) % kBytes;
    const bool set = i % 3 == 0;
    SetFlag(set);
    ASSERT_TRUE(branch.Enqueue(flag_, stream_, Write({place}, i), Write({place}, 100 + i)).ok());
    expected[place] = set ? i : 100 + i;
    ASSERT_EQ(Bytes(), expected) << "call " << i;
  }
}

// More operations, fewer, none, and the first number again.
TEST_F(DeviceBranchTest, OtherOperationsReplaceTheGraph) {
  DeviceBranch branch;
  const auto run = [&](bool set, const auto& if_set, const auto& if_not) {
    SetFlag(set);
    ASSERT_TRUE(branch.Enqueue(flag_, stream_, if_set, if_not).ok());
  };
  run(true, Write({0}, 1), Write({7}, 1));
  EXPECT_THAT(Bytes(), ElementsAre(1, 0, 0, 0, 0, 0, 0, 0));
  run(true, Write({1, 2, 3}, 2), Write({7}, 2));
  EXPECT_THAT(Bytes(), ElementsAre(1, 2, 2, 2, 0, 0, 0, 0));
  run(false, Write({4}, 3), Write({5, 6}, 3));
  EXPECT_THAT(Bytes(), ElementsAre(1, 2, 2, 2, 0, 3, 3, 0));
  run(true, Write({}, 4), Write({7}, 4));
  EXPECT_THAT(Bytes(), ElementsAre(1, 2, 2, 2, 0, 3, 3, 0));
  run(true, Write({0}, 5), Write({7}, 5));
  EXPECT_THAT(Bytes(), ElementsAre(5, 2, 2, 2, 0, 3, 3, 0));
}

// Kernels of other clusters, one after the other in the same branch: each writes `value` to so many bytes.
class DeviceBranchClusters : public DeviceBranchTest {
 protected:
  using LaunchWrite = absl::FunctionRef<cudaError_t(uint8_t value, unsigned blocks)>;

  void ExpectReplaced(std::initializer_list<unsigned> all_blocks, LaunchWrite launch) {
    int major = 0;
    ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
    if (major < 9) GTEST_SKIP() << "no clusters on this GPU";
    DeviceBranch branch;
    int value = 0;
    for (unsigned blocks : all_blocks) {
      ++value;
      ASSERT_EQ(cudaMemset(bytes_, 0, kBytes), cudaSuccess);
      SetFlag(value % 2 == 0);
      const auto write = [&] {
        return ToStatus(launch(static_cast<uint8_t>(value), blocks), "write kernel");
      };
      ASSERT_TRUE(branch.Enqueue(flag_, stream_, write, write).ok());
      std::vector<int> expected(kBytes, 0);
      std::fill_n(expected.begin(), blocks, value);
      EXPECT_EQ(Bytes(), expected) << blocks << " blocks";
    }
  }
};

// The same kernel in clusters of other sizes, and without: cuBLASLt does that when the number of rows
// changes.
TEST_F(DeviceBranchClusters, ChosenAtLaunch) {
  ExpectReplaced({4u, 1u, 8u, 2u, 1u, 1u, 4u}, [&](uint8_t value, unsigned blocks) {
    return LaunchClusterWrite(bytes_, value, blocks, stream_);
  });
}

// Clusters that a kernel was compiled for, here two blocks, after a kernel without and before.
TEST_F(DeviceBranchClusters, Compiled) {
  ExpectReplaced({2u, 1u, 2u, 2u, 4u, 2u, 1u, 1u}, [&](uint8_t value, unsigned blocks) {
    return blocks == 2 ? LaunchPairWrite(bytes_, value, stream_)
                       : LaunchClusterWrite(bytes_, value, blocks, stream_);
  });
}

TEST_F(DeviceBranchTest, AnErrorOfEitherFunctionEnqueuesNothing) {
  DeviceBranch branch;
  const auto fail = [] { return absl::InternalError("no"); };
  for (bool set : {true, false}) {
    SetFlag(set);
    EXPECT_EQ(branch.Enqueue(flag_, stream_, fail, Write({0}, 1)), absl::InternalError("no"));
    EXPECT_EQ(branch.Enqueue(flag_, stream_, Write({0}, 1), fail), absl::InternalError("no"));
    EXPECT_THAT(Bytes(), Each(0));
  }
  // The stream captures no longer, and the branch works.
  SetFlag(true);
  ASSERT_TRUE(branch.Enqueue(flag_, stream_, Write({0}, 9), Write({1}, 9)).ok());
  EXPECT_THAT(Bytes(), ElementsAre(9, 0, 0, 0, 0, 0, 0, 0));
}

TEST_F(DeviceBranchTest, OnTheHostOnlyTheChosenFunctionIsCalled) {
  const auto fail = [] { return absl::InternalError("not chosen"); };
  SetFlag(true);
  ASSERT_TRUE(BranchOnHost(flag_, stream_, Write({0}, 1), fail).ok());
  SetFlag(false);
  ASSERT_TRUE(BranchOnHost(flag_, stream_, fail, Write({1}, 2)).ok());
  EXPECT_THAT(Bytes(), ElementsAre(1, 2, 0, 0, 0, 0, 0, 0));
  EXPECT_EQ(BranchOnHost(flag_, stream_, Write({2}, 3), fail), absl::InternalError("not chosen"));
  EXPECT_THAT(Bytes(), ElementsAre(1, 2, 0, 0, 0, 0, 0, 0));
}

}  // namespace
}  // namespace lossd::kernels::cuda::device_branch_test
