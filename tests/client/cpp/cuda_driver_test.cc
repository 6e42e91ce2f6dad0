// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/cuda_driver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/client/cpp/fake_cuda.h"

namespace lossd::client::internal::cuda_driver_test {
namespace {

namespace fake_cuda = test::fake_cuda;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

constexpr uint64_t kBytes = 8192;

// Memory as another process exports it.
class Exported {
 public:
  Exported() : descriptor_(memfd_create("exported", MFD_CLOEXEC)) {
    EXPECT_EQ(ftruncate(descriptor_, kBytes), 0);
  }
  ~Exported() { close(descriptor_); }
  Exported(const Exported&) = delete;
  Exported& operator=(const Exported&) = delete;
  int descriptor() const { return descriptor_; }

 private:
  const int descriptor_;
};

// A driver without streams of its own from before.
std::unique_ptr<CudaDriver> LoadDriver() {
  auto driver = CudaDriver::Load("libcuda.so.1");
  EXPECT_TRUE(driver.ok()) << driver.status();
  return *std::move(driver);
}

std::vector<uint8_t> Numbers(uint8_t first) {
  std::vector<uint8_t> numbers(kBytes);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

TEST(CudaDriverTest, FindsGpusByTheirUuid) {
  const auto driver = LoadDriver();
  EXPECT_EQ(*driver->Find("GPU-00000000-0000-0000-0000-000000000001"), 0);
  EXPECT_EQ(*driver->Find("GPU-00000000-0000-0000-0000-000000000002"), 1);
  EXPECT_EQ(*driver->Find("GPU-00000000-0000-0000-0000-000000000003"), std::nullopt);
  EXPECT_EQ(*driver->Find(""), std::nullopt);
}

TEST(CudaDriverTest, CopiesBetweenGpusTheHostAndMemoryOfOtherProcesses) {
  const auto driver = LoadDriver();
  const auto held = fake_cuda::Held();
  const Exported exported;
  uint8_t* const region = driver->Import(exported.descriptor(), kBytes, 0).value();
  uint8_t* const first = driver->Allocate(kBytes, 0).value();
  uint8_t* const second = driver->Allocate(kBytes, 1).value();
  EXPECT_EQ(*driver->DeviceOf(region + 1), 0);
  EXPECT_EQ(*driver->DeviceOf(second + kBytes - 1), 1);
  const std::vector<uint8_t> given = Numbers(3);
  std::vector<uint8_t> got(kBytes);
  EXPECT_FALSE(driver->DeviceOf(got.data()).ok());
  EXPECT_TRUE(driver->Copy(second, given.data(), kBytes, 1).ok());
  EXPECT_TRUE(driver->Copy(region, second, kBytes, 0).ok());
  EXPECT_TRUE(driver->Copy(first, region, kBytes, 0).ok());
  EXPECT_TRUE(driver->FillZeros(first + 10, 5, 0).ok());
  EXPECT_TRUE(driver->Copy(got.data(), first, kBytes, 0).ok());
  EXPECT_TRUE(driver->Copy(nullptr, nullptr, 0, 0).ok());
  std::vector<uint8_t> wanted = given;
  std::fill_n(wanted.begin() + 10, 5, 0);
  EXPECT_EQ(got, wanted);
  EXPECT_EQ(fake_cuda::ContextDepth(), 0);
  driver->Unmap(region, kBytes, 0);
  driver->Free(first, 0);
  driver->Free(second, 1);
  // One stream for each GPU, which all copies took in turn.
  auto now = fake_cuda::Held();
  const auto of_before = [&held](const std::string& kind) {
    return held.count(kind) > 0 ? held.at(kind) : 0;
  };
  EXPECT_EQ(now["stream"], of_before("stream") + 2);
  EXPECT_EQ(now["event"], of_before("event") + 2);
  EXPECT_EQ(now.count("allocation") + now.count("mapping") + now.count("reservation") + now.count("handle"),
            0u);
}

TEST(CudaDriverTest, AnImportThatFailsLeavesNothing) {
  const auto driver = LoadDriver();
  const Exported exported;
  const auto held = fake_cuda::Held();
  for (const std::string function :
       {"cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemImportFromShareableHandle",
        "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    fake_cuda::Fail(function, 1);
    const absl::Status status = driver->Import(exported.descriptor(), kBytes, 1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << function;
    EXPECT_EQ(status.message(), function + " failed: an illegal memory access was encountered (700)");
    EXPECT_EQ(fake_cuda::Held(), held) << function;
    EXPECT_EQ(fake_cuda::ContextDepth(), 0) << function;
  }
  const absl::StatusOr<uint8_t*> region = driver->Import(exported.descriptor(), kBytes, 1);
  ASSERT_TRUE(region.ok()) << region.status();
  driver->Unmap(*region, kBytes, 1);
  EXPECT_EQ(fake_cuda::Held(), held);
  // More than there is.
  EXPECT_THAT(std::string(driver->Import(exported.descriptor(), 2 * kBytes, 1).status().message()),
              StartsWith("cuMemMap failed: invalid argument"));
  EXPECT_EQ(fake_cuda::Held(), held);
}

TEST(CudaDriverTest, ACopyThatFailsLeavesNothingAndTheNextOneWorks) {
  const auto driver = LoadDriver();
  uint8_t* const memory = driver->Allocate(kBytes, 0).value();
  const auto held = fake_cuda::Held();
  const std::vector<uint8_t> given = Numbers(5);
  std::vector<uint8_t> got(kBytes);
  for (const std::string function : {"cuStreamCreate", "cuEventCreate", "cuMemcpyAsync", "cuEventRecord",
                                     "cuEventSynchronize", "cuCtxPushCurrent"}) {
    fake_cuda::Fail(function, 1);
    const absl::Status status = driver->Copy(memory, given.data(), kBytes, 0);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << function;
    EXPECT_EQ(status.message(), function + " failed: an illegal memory access was encountered (700)");
    EXPECT_EQ(fake_cuda::Held(), held) << function;
    EXPECT_EQ(fake_cuda::ContextDepth(), 0) << function;
  }
  fake_cuda::Fail("cuMemsetD8Async", 1);
  EXPECT_THAT(std::string(driver->FillZeros(memory, kBytes, 0).message()),
              StartsWith("cuMemsetD8Async failed"));
  EXPECT_TRUE(driver->Copy(memory, given.data(), kBytes, 0).ok());
  EXPECT_TRUE(driver->Copy(got.data(), memory, kBytes, 0).ok());
  EXPECT_EQ(got, given);
  driver->Free(memory, 0);
}

TEST(CudaDriverTest, PinsMemoryOfTheHost) {
  const auto driver = LoadDriver();
  const uint64_t page = sysconf(_SC_PAGESIZE);
  auto* const memory = static_cast<uint8_t*>(
      mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(memory, MAP_FAILED);
  const auto pinned = [] {
    auto held = fake_cuda::Held();
    return held["pinned"];
  };
  for (const std::string function : {"cuCtxPushCurrent", "cuMemHostRegister"}) {
    fake_cuda::Fail(function, 1);
    EXPECT_EQ(driver->Pin(memory, page, 1).message(),
              function + " failed: an illegal memory access was encountered (700)");
    EXPECT_EQ(pinned(), 0) << function;
    EXPECT_EQ(fake_cuda::ContextDepth(), 0) << function;
  }
  EXPECT_TRUE(driver->Pin(memory, 2 * page - 100, 1).ok()) << "two pages";
  EXPECT_THAT(std::string(driver->Pin(memory + page, page, 0).message()),
              StartsWith("cuMemHostRegister failed"));
  EXPECT_TRUE(driver->Pin(memory + 2 * page, 1, 0).ok());
  EXPECT_EQ(pinned(), 2);
  uint8_t* const on_gpu = driver->Allocate(page, 0).value();
  fake_cuda::TakeCopied();
  EXPECT_TRUE(driver->Copy(on_gpu, memory + page, page, 0).ok());
  EXPECT_TRUE(driver->Copy(memory + 2 * page, on_gpu, page, 0).ok());
  auto copied = fake_cuda::TakeCopied();
  EXPECT_EQ(copied["pinned to device"], page);
  EXPECT_EQ(copied["device to pinned"], page);
  driver->Unpin(memory, 1);
  driver->Unpin(memory + 2 * page, 0);
  EXPECT_EQ(pinned(), 0);
  EXPECT_EQ(fake_cuda::ContextDepth(), 0);
  driver->Free(on_gpu, 0);
  munmap(memory, 3 * page);
}

TEST(CudaDriverTest, ManyThreadsCopyAtOnce) {
  const auto driver = LoadDriver();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&driver, i] {
      const std::vector<uint8_t> given = Numbers(static_cast<uint8_t>(i));
      uint8_t* const memory = driver->Allocate(kBytes, i % 2).value();
      for (int repeat = 0; repeat < 50; ++repeat) {
        std::vector<uint8_t> got(kBytes);
        EXPECT_TRUE(driver->Copy(memory, given.data(), kBytes, i % 2).ok());
        EXPECT_TRUE(driver->Copy(got.data(), memory, kBytes, i % 2).ok());
        EXPECT_EQ(got, given);
      }
      driver->Free(memory, i % 2);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CudaDriverTest, SaysWhyThereIsNone) {
  EXPECT_THAT(
      std::string(CudaDriver::Load("libnowhere.so.1").status().message()),
      AllOf(StartsWith("no CUDA driver: libnowhere.so.1"), HasSubstr("cannot open shared object file")));
  EXPECT_EQ(CudaDriver::Load("libnowhere.so.1").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(CudaDriver::Load("libm.so.6").status().message(), "no CUDA driver: libm.so.6 lacks cuInit");
  fake_cuda::Fail("cuInit", 1);
  EXPECT_THAT(std::string(CudaDriver::Load("libcuda.so.1").status().message()), StartsWith("cuInit failed"));
}

}  // namespace
}  // namespace lossd::client::internal::cuda_driver_test
