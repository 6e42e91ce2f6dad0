// SPDX-License-Identifier: Apache-2.0
// Trainers whose rows are on another GPU than the server's, servers of several GPUs, and the functions that
// the client takes from CUDA's driver (cuda_driver.h). All GPUs are played, as in cuda_ipc_test.cc; a device
// of the server that has no access to memory of another one ends when it uses it
// (tests/server/app/shared_device.cc).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/client.h"
#include "client/cpp/cuda_driver.h"
#include "proto/wire/region_packets.h"
#include "tests/client/cpp/cuda_ipc_fixture.h"
#include "tests/client/cpp/fake_cuda.h"

namespace lossd::client::testing::cuda_devices_test {
namespace {

namespace fake_cuda = test::fake_cuda;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::Pair;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

using CudaDevicesTest = CudaIpcTest;

// Each GPU writes what it has to the other one's memory.
TEST_F(CudaDevicesTest, RowsOfAnotherGpuArePushed) {
  const Computed wanted = Expected(*server_, problem_);
  const auto client = Connect(*server_);
  fake_cuda::TakeCopiedBetween();
  for (int i = 0; i < 2; ++i) {
    const Computed got = OnGpu(*client, problem_, 1);
    ExpectSame(got, wanted);
    EXPECT_THAT(fake_cuda::TakeCopiedBetween(),
                UnorderedElementsAre(Pair("1 to 0 by 1", got.result.sent_bytes),
                                     Pair("0 to 1 by 0", got.result.received_bytes)));
  }
  const int64_t asked = fake_cuda::Calls("cuMemSetAccess");
  ExpectSame(OnGpu(*client, problem_, 1), wanted);
  EXPECT_EQ(fake_cuda::Calls("cuMemSetAccess"), asked) << "the driver is asked once";
  ExpectSame(OnGpu(*client, problem_, 0), wanted);
  fake_cuda::TakeCopiedBetween();
  // Another region has other memory.
  const auto second = Connect(*server_);
  ExpectSame(OnGpu(*second, problem_, 1), wanted);
  EXPECT_EQ(fake_cuda::TakeCopiedBetween().count("1 to 0 by 1"), 1u);
}

TEST_F(CudaDevicesTest, WhereNothingConnectsThemTheServersGpuCopies) {
  const Computed wanted = Expected(*server_, problem_);
  for (const std::string what : {"", "cuMemSetAccess", "cuCtxEnablePeerAccess"}) {
    const auto client = Connect(*server_);
    if (what.empty()) fake_cuda::SetConnected(false);
    if (!what.empty()) fake_cuda::Fail(what, 1);
    fake_cuda::TakeCopiedBetween();
    const Computed got = OnGpu(*client, problem_, 1);
    fake_cuda::SetConnected(true);
    ExpectSame(got, wanted);
    auto between = fake_cuda::TakeCopiedBetween();
    EXPECT_EQ(between["1 to 0 by 0"] + between["1 to 0 by 0, by a detour"], got.result.sent_bytes) << what;
    EXPECT_EQ(between["0 to 1 by 0"] + between["0 to 1 by 0, by a detour"], got.result.received_bytes)
        << what;
  }
}

std::string Uuid(int device) { return absl::StrCat("GPU-00000000-0000-0000-0000-00000000000", device + 1); }

// Rows on any GPU of the server are copied on that GPU alone, and its devices take them from there.
TEST_F(CudaDevicesTest, RowsOnEachGpuOfTheServerTakeMemoryOfThatOne) {
  fake_cuda::SetDevices(4);
  for (const std::string split : {"rows", "vocabulary"}) {
    const auto server = StartServer({"--devices=0,1,2,3", absl::StrCat("--split=", split)});
    CreateHead(*server);
    const Computed wanted = Expected(*server, problem_);
    for (int device = 3; device >= 0; --device) {
      const auto client = ConnectBy(*server, "auto");
      EXPECT_EQ(client->GetServer()->region_device(), kUuid);
      EXPECT_THAT(client->GetServer()->region_devices(), ElementsAre(Uuid(0), Uuid(1), Uuid(2), Uuid(3)));
      fake_cuda::TakeCopied();
      fake_cuda::TakeCopiedBetween();
      const Computed got = OnGpu(*client, problem_, device);
      ExpectSame(got, wanted);
      EXPECT_EQ(client->transport().device.transport, "cuda_ipc");
      EXPECT_EQ(client->transport().device.reason,
                absl::StrCat("the server's GPU is of this host; 4 MiB of ", Uuid(device)));
      EXPECT_GT(got.result.sent_bytes, 0u);
      EXPECT_EQ(fake_cuda::TakeCopied()["device to device"],
                got.result.sent_bytes + got.result.received_bytes);
      EXPECT_TRUE(fake_cuda::TakeCopiedBetween().empty()) << "nothing crosses from one GPU to another";
      EXPECT_EQ(Imported(), 1) << "the client has no memory of the other GPUs";
    }
  }
}

TEST_F(CudaDevicesTest, AClientWithRowsOnSeveralGpusHasARegionOfEach) {
  const auto server = StartServer({"--devices=all", "--split=vocabulary"});
  CreateHead(*server);
  const Computed wanted = Expected(*server, problem_);
  {
    const auto client = ConnectBy(*server, "auto");
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        for (int j = 0; j < 3; ++j) ExpectSame(OnGpu(*client, problem_, i % 2), wanted);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(fake_cuda::TakeCopiedBetween().empty());
    EXPECT_EQ(Imported(), 2);
    EXPECT_EQ(client->transport().device.transport, "cuda_ipc");
    EXPECT_EQ(client->transport().device.reason,
              absl::StrCat("rows on ", Uuid(0), ": cuda_ipc, the server's GPU is of this host; 4 MiB of ",
                           Uuid(0), "; rows on ", Uuid(1),
                           ": cuda_ipc, the server's GPU is of this host; 4 MiB of ", Uuid(1)));
  }
  EXPECT_EQ(Imported(), 0);
}

TEST_F(CudaDevicesTest, RowsOnAGpuThatIsNotTheServersGoAsThoseOfTheHost) {
  fake_cuda::SetDevices(4);
  const auto server = StartServer({"--devices=1,2"});
  CreateHead(*server);
  const Computed wanted = Expected(*server, problem_);
  const auto client = ConnectBy(*server, "auto");
  EXPECT_EQ(client->transport().device.reason, "nothing was sent yet");
  for (const int device : {0, 3}) {
    fake_cuda::TakeCopied();
    ExpectSame(OnGpu(*client, problem_, device), wanted);
    EXPECT_THAT(fake_cuda::TakeCopied(), UnorderedElementsAre(Key("device to host"), Key("host to device")));
    EXPECT_EQ(client->transport().device.transport, "grpc") << "the played server has no memory of the host";
  }
  const std::string foreign = absl::StrCat(", and the server's GPUs are ", Uuid(1), ", ", Uuid(2));
  EXPECT_EQ(client->transport().device.reason,
            absl::StrCat("rows on ", Uuid(0), ": grpc, the rows are on ", Uuid(0), foreign, "; rows on ",
                         Uuid(3), ": grpc, the rows are on ", Uuid(3), foreign));
  EXPECT_EQ(Imported(), 0);
  // Some one way and some the other: both are said, and the whole is not called cuda_ipc.
  ExpectSame(OnGpu(*client, problem_, 2), wanted);
  EXPECT_EQ(client->transport().device.transport, "grpc");
  EXPECT_THAT(client->transport().device.reason,
              HasSubstr(absl::StrCat("rows on ", Uuid(2), ": cuda_ipc, the server's GPU is of this host")));
  EXPECT_EQ(Imported(), 1);
}

// With cuda_ipc they take memory of the nearest GPU of the server, and of another one if several are as near.
TEST_F(CudaDevicesTest, RowsOnAnotherGpuTakeMemoryOfTheNearest) {
  fake_cuda::SetDevices(4);
  const auto server = StartServer({"--devices=0,1"});
  CreateHead(*server);
  const Computed wanted = Expected(*server, problem_);
  const auto way = [&](int device) {
    const auto client = Connect(*server);
    fake_cuda::TakeCopiedBetween();
    ExpectSame(OnGpu(*client, problem_, device), wanted);
    std::vector<std::string> ways;
    for (const auto& [name, bytes] : fake_cuda::TakeCopiedBetween()) ways.push_back(name);
    return absl::StrJoin(ways, ", ");
  };
  EXPECT_EQ(way(2), "0 to 2 by 0, 2 to 0 by 2");
  EXPECT_EQ(way(3), "1 to 3 by 1, 3 to 1 by 3");
  fake_cuda::SetRank(2, 0, 1);
  fake_cuda::SetRank(3, 1, 1);
  EXPECT_EQ(way(2), "1 to 2 by 1, 2 to 1 by 2");
  EXPECT_EQ(way(3), "0 to 3 by 0, 3 to 0 by 3");
  fake_cuda::SetRank(2, 0, 0);
  fake_cuda::SetRank(3, 1, 0);
}

// Connecting tries memory of the GPU that the thread works on: no other GPU gets a context of this process.
TEST_F(CudaDevicesTest, ConnectingTriesMemoryOfTheThreadsGpu) {
  fake_cuda::SetDevices(4);
  const auto server = StartServer({"--devices=1,2"});
  CreateHead(*server);
  const auto reason = [&] { return Connect(*server)->transport().device.reason; };
  EXPECT_THAT(reason(), HasSubstr(absl::StrCat(" of ", Uuid(1)))) << "the first";
  fake_cuda::EnterDevice(2);
  EXPECT_THAT(reason(), HasSubstr(absl::StrCat(" of ", Uuid(2))));
  fake_cuda::LeaveDevice();
  fake_cuda::EnterDevice(3);
  EXPECT_THAT(reason(), HasSubstr(absl::StrCat(" of ", Uuid(1)))) << "that is not the server's";
  const auto named = Client::Connect({.target = server->target(), .transport = "cuda_ipc", .gpu = 2});
  EXPECT_THAT(named.value()->transport().device.reason, HasSubstr(absl::StrCat(" of ", Uuid(2))));
  fake_cuda::LeaveDevice();
  fake_cuda::SetDevices(1);
  EXPECT_EQ(TryConnect(*server).status().message(),
            absl::StrCat("no shared memory: the server's GPUs are ", Uuid(1), ", ", Uuid(2),
                         ", none of which this process sees"));
}

TEST_F(CudaDevicesTest, AServerThatIsRestartedGivesARegionOfTheSameGpu) {
  const auto server = StartServer({"--devices=all"});
  CreateHead(*server);
  const Computed wanted = Expected(*server, problem_);
  const auto client = ConnectBy(*server, "auto");
  ExpectSame(OnGpu(*client, problem_, 1), wanted);
  const std::string address = server->target();
  for (int i = 0; i < 2; ++i) {
    server->Kill();
    server->Start(address);
    CreateHead(*server);
    fake_cuda::TakeCopiedBetween();
    ExpectSame(OnGpu(*client, problem_, 1), wanted);
    ExpectSame(OnGpu(*client, problem_, 1), wanted);
    EXPECT_EQ(client->transport().device.transport, "cuda_ipc") << client->transport().device.reason;
    EXPECT_TRUE(fake_cuda::TakeCopiedBetween().empty());
  }
}

TEST_F(CudaDevicesTest, LimitsHoldForEachGpu) {
  const auto server = StartServer({"--devices=all", "--shared_device_memory_bytes=4MiB"});
  CreateHead(*server);
  const Computed wanted = Expected(*server, problem_);
  const auto client = ConnectBy(*server, "auto");
  for (const int device : {0, 1}) ExpectSame(OnGpu(*client, problem_, device), wanted);
  EXPECT_EQ(Imported(), 2) << client->transport().device.reason;
  const auto second = ConnectBy(*server, "auto");
  ExpectSame(OnGpu(*second, problem_, 1), wanted);
  EXPECT_EQ(second->transport().device.transport, "grpc");
  EXPECT_THAT(
      second->transport().device.reason,
      HasSubstr(absl::StrCat("--shared_device_memory_bytes has nothing left for this process on ", Uuid(1))));
}

// What a client of another version may ask for.
TEST_F(CudaDevicesTest, ARequestForARegionNamesAGpuOfTheServer) {
  const auto server = StartServer({"--devices=all"});
  const std::string socket = ConnectBy(*server, "grpc")->GetServer()->region_socket();
  const auto ask = [&](bool of_device, const std::string& device) -> std::string {
    v1::RegionRequest request;
    request.set_bytes(4096);
    request.set_of_device(of_device);
    request.set_device(device);
    const auto session = wire::ConnectRegionSocket(socket);
    EXPECT_TRUE(session.ok() && wire::SendRegionPacket(session->get(), request.SerializeAsString(), -1).ok());
    pollfd ready = {.fd = session->get(), .events = POLLIN};
    EXPECT_EQ(poll(&ready, 1, 60'000), 1);
    const auto packet = wire::ReceiveRegionPacket(session->get());
    EXPECT_TRUE(packet.ok()) << packet.status();
    const auto answer = wire::ParseRegionAnswer(packet->bytes);
    EXPECT_TRUE(answer.ok()) << answer.status();
    return answer->has_refused() ? answer->refused().reason() : answer->opened().device();
  };
  EXPECT_EQ(ask(true, ""), Uuid(0)) << "of a client that knows of one GPU alone";
  EXPECT_EQ(ask(true, Uuid(0)), Uuid(0));
  EXPECT_EQ(ask(true, Uuid(1)), Uuid(1));
  EXPECT_EQ(ask(true, Uuid(2)), absl::StrCat("device must be one of the server's GPUs, ", Uuid(0), ", ",
                                             Uuid(1), ", got ", Uuid(2)));
  EXPECT_EQ(ask(false, Uuid(1)), absl::StrCat("device must come with of_device, got ", Uuid(1)));
  EXPECT_THAT(ask(true, std::string(4000, 'x')), HasSubstr("device must be one of the server's GPUs"));
}

TEST_F(CudaDevicesTest, ADeterministicServerOfSeveralGpusGivesTheSameBits) {
  const auto server = StartServer({"--devices=all", "--deterministic"});
  CreateHead(*server);
  const Computed wanted = Expected(*server, problem_, 0);
  const Computed got = OnGpu(*Connect(*server), problem_, 0, 0);
  EXPECT_TRUE(got.gradient == wanted.gradient);
  EXPECT_EQ(got.loss, wanted.loss);
}

TEST_F(CudaDevicesTest, AServerWhoseGpusAreNotConnectedSaysSo) {
  const auto server = StartServer({"--devices=1,0"});
  CreateHead(*server);
  EXPECT_EQ(ConnectBy(*server, "auto")->GetServer()->region_device(), Uuid(1));
  const Computed wanted = Expected(*server, problem_);
  for (const int device : {1, 0}) {
    const auto client = ConnectBy(*server, "auto");
    ExpectSame(OnGpu(*client, problem_, device), wanted);
    EXPECT_EQ(client->transport().device.transport, "grpc");
    EXPECT_EQ(
        client->transport().device.reason,
        absl::StrCat("no shared memory: the server's GPU ", Uuid(1 - device), " does not reach memory of ",
                     Uuid(device), ": nothing connects these GPUs; tried again from time to time"));
  }
  EXPECT_EQ(TryConnect(*server).status().message(),
            absl::StrCat("no shared memory: the server's GPU ", Uuid(0), " does not reach memory of ",
                         Uuid(1), ": nothing connects these GPUs"));
}

// ---- Driver ----

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
}  // namespace lossd::client::testing::cuda_devices_test
