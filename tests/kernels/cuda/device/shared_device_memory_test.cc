// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU that other programs can map (kernels/cuda/device/shared_device_memory.h): of each GPU of
// the machine, reached by the others. Prints how fast each reads and writes memory of another one.
#include "kernels/cuda/device/shared_device_memory.h"

#include <cuda_runtime_api.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/group/group_backend.h"

namespace lossd::kernels::cuda::shared_device_memory_test {
namespace {

constexpr int64_t kBytes = int64_t{64} << 20;

int Gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::unique_ptr<Backend> Open(int device) {
  auto backend = CreateCudaBackend({.device = device});
  EXPECT_TRUE(backend.ok()) << backend.status();
  return backend.ok() ? *std::move(backend) : nullptr;
}

// Memory of one GPU, by CUDA's runtime. Calls make this GPU the current one, which calls of the server's
// memory change.
class Buffer {
 public:
  explicit Buffer(int device) : device_(device) {
    EXPECT_EQ(cudaSetDevice(device_), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&data_, kBytes), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~Buffer() {
    cudaStreamDestroy(stream_);
    cudaFree(data_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(data_); }
  // Waits until all of it has this value.
  void Fill(uint8_t value) const {
    EXPECT_EQ(cudaSetDevice(device_), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, value, kBytes), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  // A copy as a head makes it, by this GPU; in GB/s, of the fastest of several.
  double Copy(void* to, const void* from) const {
    EXPECT_EQ(cudaSetDevice(device_), cudaSuccess);
    double fastest = 0;
    for (int i = 0; i < 8; ++i) {
      cudaEvent_t begin = nullptr, end = nullptr;
      EXPECT_EQ(cudaEventCreate(&begin), cudaSuccess);
      EXPECT_EQ(cudaEventCreate(&end), cudaSuccess);
      EXPECT_EQ(cudaEventRecord(begin, stream_), cudaSuccess);
      EXPECT_EQ(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, stream_), cudaSuccess);
      EXPECT_EQ(cudaEventRecord(end, stream_), cudaSuccess);
      EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      float milliseconds = 0;
      EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaSuccess);
      if (milliseconds > 0) fastest = std::max(fastest, static_cast<double>(kBytes) / milliseconds / 1e6);
      cudaEventDestroy(begin);
      cudaEventDestroy(end);
    }
    return fastest;
  }

 private:
  const int device_;
  void* data_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

TEST(SharedDeviceMemoryTest, IsOfTheGpuThatIsAskedForAndBeginsWithZeros) {
  if (Gpus() == 0) GTEST_SKIP() << "no GPU";
  const auto backend = Open(Gpus() - 1);
  ASSERT_NE(backend, nullptr);
  ASSERT_EQ(backend->SharingDevices(), backend->info().uuids);
  const std::string device = backend->SharingDevices().front();
  const int64_t before = backend->memory().current[MemoryKind::kSlots];
  auto memory = backend->ShareDeviceMemory(device, 1000);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_GE((*memory)->bytes().size(), 1000u);
  EXPECT_GE((*memory)->descriptor(), 0);
  cudaPointerAttributes attributes = {};
  ASSERT_EQ(cudaPointerGetAttributes(&attributes, (*memory)->bytes().data()), cudaSuccess);
  EXPECT_EQ(attributes.device, Gpus() - 1);
  std::vector<uint8_t> got((*memory)->bytes().size(), 1);
  ASSERT_TRUE((*memory)->CopyToHost((*memory)->bytes(), got.data()).ok());
  EXPECT_THAT(got, ::testing::Each(0));
  EXPECT_EQ(backend->memory().current[MemoryKind::kSlots] - before, static_cast<int64_t>(got.size()));
  memory->reset();
  EXPECT_EQ(backend->memory().current[MemoryKind::kSlots], before);
  for (const std::string other : {"", "GPU-00000000-0000-0000-0000-000000000001"}) {
    EXPECT_EQ(backend->ShareDeviceMemory(other, 1000).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

// As for a server of several GPUs, by the group that its devices are.
TEST(SharedDeviceMemoryTest, OfEachGpuOfAGroupIsReachedByTheOthers) {
  if (Gpus() < 2) GTEST_SKIP() << "one GPU";
  std::vector<std::unique_ptr<Backend>> members;
  for (int device = 0; device < Gpus(); ++device) {
    members.push_back(Open(device));
    ASSERT_NE(members.back(), nullptr);
  }
  const auto group =
      CreateGroupBackend(std::move(members),
                         [](absl::Span<HeadKernels* const>) -> absl::StatusOr<std::unique_ptr<Replicas>> {
                           return absl::UnimplementedError("this test makes no head");
                         },
                         {});
  ASSERT_TRUE(group.ok()) << group.status();
  const std::vector<std::string> devices = (*group)->SharingDevices();
  ASSERT_EQ(static_cast<int>(devices.size()), Gpus());
  for (int owner = 0; owner < Gpus(); ++owner) {
    auto memory = (*group)->ShareDeviceMemory(devices[static_cast<size_t>(owner)], kBytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    uint8_t* const shared = (*memory)->bytes().data();
    for (int device = 0; device < Gpus(); ++device) {
      const Buffer buffer(device);
      const auto value = static_cast<uint8_t>(1 + owner * Gpus() + device);
      buffer.Fill(value);
      const double writes = buffer.Copy(shared, buffer.data());
      std::vector<uint8_t> got(1000);
      ASSERT_TRUE((*memory)->CopyToHost({shared + kBytes - 1000, 1000}, got.data()).ok());
      EXPECT_THAT(got, ::testing::Each(value));
      buffer.Fill(0);
      const double reads = buffer.Copy(buffer.data(), shared);
      ASSERT_EQ(cudaMemcpy(got.data(), buffer.data() + kBytes - 1000, 1000, cudaMemcpyDeviceToHost),
                cudaSuccess);
      EXPECT_THAT(got, ::testing::Each(value));
      std::printf("GPU %d: memory of GPU %d, reads %.0f GB/s, writes %.0f GB/s\n", device, owner, reads,
                  writes);
    }
  }
}

}  // namespace
}  // namespace lossd::kernels::cuda::shared_device_memory_test
