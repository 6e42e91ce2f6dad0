// SPDX-License-Identifier: Apache-2.0
// Memory of the host that is registered with CUDA's driver for rows on GPUs, which are played (fake_cuda.h).
// Waiting for room is in slice_places_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/cpp/regions.h"
#include "tests/client/cpp/cuda_ipc_fixture.h"
#include "tests/client/cpp/fake_cuda.h"

namespace lossd::client::testing::shared_region_test {
namespace {

using ::testing::HasSubstr;

constexpr char kRegister[] = "cuMemHostRegister";
constexpr char kRefused[] =
    "; GPUs copy to it by a detour: cuMemHostRegister failed: an illegal memory access was encountered (700)";

int Pinned() {
  auto held = fake_cuda::Held();
  return held["pinned"];
}

// A server without a GPU, whose memory of the host the rows of GPUs go through.
class PinnedRegionTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = new test::ServerProcess(LOSSD_BINARY);
    CreateHead(*server_);
  }
  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }
  void SetUp() override {
    wanted_ = Expected(*server_, problem_);
    ASSERT_EQ(Pinned(), 0);
    calls_before_ = fake_cuda::Calls(kRegister);
  }

  int64_t Registrations() const { return fake_cuda::Calls(kRegister) - calls_before_; }

  std::shared_ptr<internal::SharedRegion> OpenRegion(uint64_t bytes) const {
    const auto description = ConnectBy(*server_, "grpc")->GetServer();
    EXPECT_TRUE(description.ok()) << description.status();
    auto region = internal::SharedRegion::Open(description->region_socket(), bytes, absl::Seconds(60));
    EXPECT_TRUE(region.ok()) << region.status();
    return *std::move(region);
  }

  static inline test::ServerProcess* server_ = nullptr;
  const Problem problem_;
  Computed wanted_;
  int64_t calls_before_ = 0;
};

TEST_F(PinnedRegionTest, IsRegisteredOnceWithTheFirstRowsOfAGpu) {
  {
    const auto client = ConnectBy(*server_, "shared_memory");
    std::vector<uint8_t> gradient = Garbage(problem_.hidden.size());
    ASSERT_TRUE(client
                    ->ComputeLoss(problem_.At(problem_.hidden.data(), Memory::kHost),
                                  {.grad_hidden = gradient.data()})
                    .ok());
    EXPECT_EQ(Registrations(), 0) << "rows of the host need nothing of the driver";
    for (const int device : {0, 1, 0}) {
      fake_cuda::TakeCopied();
      const Computed got = OnGpu(*client, problem_, device);
      ExpectSame(got, wanted_);
      auto copied = fake_cuda::TakeCopied();
      EXPECT_EQ(copied["device to pinned"], got.result.sent_bytes);
      EXPECT_EQ(copied["pinned to device"], got.result.received_bytes);
      EXPECT_EQ(Pinned(), 1);
    }
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] { ExpectSame(OnGpu(*client, problem_), wanted_); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(Registrations(), 1);
    EXPECT_EQ(client->transport().reason, "the server is on this host; 4 MiB");
  }
  EXPECT_EQ(Pinned(), 0) << "before the memory was unmapped";
}

TEST_F(PinnedRegionTest, GradientsOfRetainedRowsLieThereToo) {
  const auto client = ConnectBy(*server_, "shared_memory");
  const DeviceArray hidden(problem_.hidden), gradient(Garbage(problem_.hidden.size()));
  Microbatch microbatch = problem_.At(hidden.data(), Memory::kDevice);
  microbatch.step = 0;
  microbatch.id = 9;
  ASSERT_TRUE(client->ComputeLoss(microbatch, {}, {.reduction = v1::REDUCTION_NONE, .retain = true}).ok());
  const std::vector<float> ones(kRows, 1);
  fake_cuda::TakeCopied();
  const auto backward = client->Backward({.head = "lm",
                                          .step = 0,
                                          .id = 9,
                                          .hidden_size = kHidden,
                                          .hidden_dtype = v1::DTYPE_FP32,
                                          .memory = Memory::kDevice,
                                          .grad_loss = ones},
                                         gradient.data());
  ASSERT_TRUE(backward.ok()) << backward.status();
  auto copied = fake_cuda::TakeCopied();
  EXPECT_EQ(copied["pinned to device"], backward->received_bytes);
  EXPECT_EQ(copied["host to device"], 0u);
  EXPECT_EQ(Registrations(), 1);
  EXPECT_TRUE(client->ReleaseMicrobatch("lm", 9).value());
}

// As where a limit of the process forbids it.
TEST_F(PinnedRegionTest, ARegistrationThatFailsIsNotRepeated) {
  const auto client = ConnectBy(*server_, "shared_memory");
  fake_cuda::Fail(kRegister, 1);
  for (int i = 0; i < 3; ++i) {
    ExpectSame(OnGpu(*client, problem_), wanted_);
    EXPECT_EQ(Pinned(), 0);
  }
  EXPECT_EQ(Registrations(), 1);
  EXPECT_THAT(client->transport().reason, HasSubstr(kRefused));
}

TEST_F(PinnedRegionTest, ARegionAfterOneThatWasGivenUpIsRegisteredAnew) {
  test::ServerProcess server(LOSSD_BINARY);
  const std::string address = server.target();
  CreateHead(server);
  const auto client = ConnectBy(server, "shared_memory");
  OnGpu(*client, problem_);
  server.Kill();
  server.Start(address);
  CreateHead(server);
  ExpectSame(OnGpu(*client, problem_), wanted_);
  ExpectSame(OnGpu(*client, problem_), wanted_);
  EXPECT_EQ(Registrations(), 2);
  EXPECT_EQ(Pinned(), 1);
}

TEST_F(PinnedRegionTest, AForkLeavesItToItsParent) {
  auto region = OpenRegion(100 << 10);
  region->PinFor(1);
  region->PinFor(0);
  EXPECT_TRUE(region->pin_problem().ok()) << region->pin_problem();
  EXPECT_EQ(Registrations(), 1);
  const pid_t child = fork();
  if (child == 0) {
    region = nullptr;
    _exit(Pinned() == 1 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(Pinned(), 1);
  region = nullptr;
  EXPECT_EQ(Pinned(), 0);
}

TEST_F(PinnedRegionTest, SizesThatNoPageDivides) {
  const auto region = OpenRegion(5000);
  region->PinFor(0);
  EXPECT_TRUE(region->pin_problem().ok()) << region->pin_problem();
  EXPECT_EQ(Pinned(), 1);
}

TEST_F(CudaIpcTest, MemoryOfAGpuIsNotRegistered) {
  const int64_t before = fake_cuda::Calls(kRegister);
  OnGpu(*Connect(*server_), problem_);
  EXPECT_EQ(fake_cuda::Calls(kRegister), before);
}

}  // namespace
}  // namespace lossd::client::testing::shared_region_test
