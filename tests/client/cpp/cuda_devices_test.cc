// SPDX-License-Identifier: Apache-2.0
// Trainers whose rows are on another GPU than the server's, and servers of several GPUs. All are played, as
// in cuda_ipc_test.cc; a device of the server that has no access to memory of another one ends when it uses
// it (tests/server/app/shared_device.cc).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "tests/client/cpp/cuda_ipc_fixture.h"
#include "tests/client/cpp/fake_cuda.h"

namespace lossd::client::testing::cuda_devices_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Key;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

constexpr char kSecondUuid[] = "GPU-00000000-0000-0000-0000-000000000002";

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

TEST_F(CudaDevicesTest, AServerOfSeveralGpusSharesMemoryOfItsFirst) {
  for (const std::string split : {"rows", "vocabulary"}) {
    const auto server = StartServer({"--devices=all", absl::StrCat("--split=", split)});
    CreateHead(*server);
    const Computed wanted = Expected(*server, problem_);
    const auto client = ConnectBy(*server, "auto");
    EXPECT_EQ(client->GetServer()->region_device(), kUuid);
    fake_cuda::TakeCopied();
    const Computed got = OnGpu(*client, problem_);
    ExpectSame(got, wanted);
    EXPECT_EQ(client->transport().device.transport, "cuda_ipc") << client->transport().device.reason;
    EXPECT_GT(got.result.sent_bytes, 0u);
    EXPECT_EQ(fake_cuda::TakeCopied()["device to device"], got.result.sent_bytes + got.result.received_bytes);

    // Rows on its second GPU.
    ExpectSame(OnGpu(*client, problem_, 1), wanted);
    EXPECT_THAT(fake_cuda::TakeCopied(), UnorderedElementsAre(Key("device to host"), Key("host to device")))
        << "auto takes memory of the first GPU for rows there only";
    const auto asking = Connect(*server);
    fake_cuda::TakeCopiedBetween();
    const Computed pushed = OnGpu(*asking, problem_, 1);
    ExpectSame(pushed, wanted);
    EXPECT_THAT(fake_cuda::TakeCopiedBetween(),
                UnorderedElementsAre(Pair("1 to 0 by 1", pushed.result.sent_bytes),
                                     Pair("0 to 1 by 0", pushed.result.received_bytes)));
  }
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
  const auto client = ConnectBy(*server, "auto");
  EXPECT_EQ(client->GetServer()->region_device(), kSecondUuid);
  const Computed wanted = Expected(*server, problem_);
  ExpectSame(OnGpu(*client, problem_, 1), wanted);
  EXPECT_EQ(client->transport().device.transport, "grpc");
  EXPECT_THAT(client->transport().device.reason, HasSubstr("nothing connects these GPUs"));
  EXPECT_EQ(TryConnect(*server).status().message(), "no shared memory: nothing connects these GPUs");
}

}  // namespace
}  // namespace lossd::client::testing::cuda_devices_test
