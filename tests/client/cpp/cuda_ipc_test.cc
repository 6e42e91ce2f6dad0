// SPDX-License-Identifier: Apache-2.0
// Rows of a GPU through memory of the server's GPU: the same results as in messages, whatever ends when, also
// by lossctl bench; rows that a stream of the caller's still writes; and memory of the host that is
// registered with CUDA's driver. The GPU is played on both sides (fake_cuda.h,
// tests/server/app/shared_device.cc): whoever follows an address of it ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/regions.h"
#include "proto/wire/region_packets.h"
#include "tests/client/cpp/cuda_ipc_fixture.h"
#include "tests/client/cpp/fake_cuda.h"
#include "tests/support/temp_folder.h"

namespace lossd::client::testing::cuda_ipc_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::UnorderedElementsAre;

TEST_F(CudaIpcTest, ResultsAreThoseOfMessages) {
  const Computed wanted = Expected(*server_, problem_);
  for (const int64_t bytes : {1 << 20, 16 << 10, 2 << 10}) {
    const auto client = Connect(*server_, bytes);
    fake_cuda::TakeCopied();
    const Computed got = OnGpu(*client, problem_);
    ExpectSame(got, wanted);
    EXPECT_EQ(client->transport().device.transport, "cuda_ipc");
    EXPECT_EQ(client->transport().device.reason,
              absl::StrCat("the server's GPU is of this host; ", bytes >> 20, " MiB of ", kUuid));
    EXPECT_GT(got.result.sent_bytes, 0u);
    EXPECT_EQ(got.result.sent_bytes, got.result.received_bytes);
    auto copied = fake_cuda::TakeCopied();
    if (bytes >= 16 << 10) {  // in a smaller one some slices go in messages
      EXPECT_EQ(copied["device to device"], got.result.sent_bytes + got.result.received_bytes);
      // DeviceArray's own
      EXPECT_EQ(copied["host to device"], 2 * problem_.hidden.size());
      EXPECT_EQ(copied["device to host"], problem_.hidden.size());
    }
  }
}

TEST_F(CudaIpcTest, ADeterministicServerGivesTheSameBitsOfEveryType) {
  const auto server = StartServer({"--deterministic"});
  CreateHead(*server);
  uint64_t id = 0;
  for (const v1::DType dtype : {v1::DTYPE_FP32, v1::DTYPE_BF16, v1::DTYPE_FP16}) {
    const Problem problem(dtype);
    const Computed wanted = Expected(*server, problem, id);
    for (const int64_t bytes : {1 << 20, 8 << 10}) {
      const Computed got = OnGpu(*Connect(*server, bytes), problem, 0, id);
      EXPECT_TRUE(got.gradient == wanted.gradient) << v1::DType_Name(dtype);
      EXPECT_EQ(got.loss, wanted.loss);
    }
    ++id;
  }
}

TEST_F(CudaIpcTest, GradientsOfRetainedRows) {
  std::mt19937 random(6);
  std::vector<float> weights(kRows);
  for (float& weight : weights) weight = std::normal_distribution<float>()(random);
  const auto run = [&](Client& client, const void* hidden, void* gradient, Memory memory) {
    Microbatch microbatch = problem_.At(hidden, memory);
    microbatch.step = 0;
    microbatch.id = 9;
    const auto forward = client.ComputeLoss(
        microbatch, {}, {.reduction = v1::REDUCTION_NONE, .retain = true, .slice_bytes = kSlice});
    ASSERT_TRUE(forward.ok()) << forward.status();
    const auto backward = client.Backward({.head = "lm",
                                           .step = 0,
                                           .id = 9,
                                           .hidden_size = kHidden,
                                           .hidden_dtype = v1::DTYPE_FP32,
                                           .memory = memory,
                                           .grad_loss = weights},
                                          gradient);
    ASSERT_TRUE(backward.ok()) << backward.status();
    EXPECT_TRUE(client.ReleaseMicrobatch("lm", 9).value());
  };
  std::vector<uint8_t> wanted = Garbage(problem_.hidden.size());
  run(*ConnectBy(*server_, "grpc"), problem_.hidden.data(), wanted.data(), Memory::kHost);
  const DeviceArray hidden(problem_.hidden);
  for (const int64_t bytes : {1 << 20, 8 << 10}) {
    const DeviceArray gradient(Garbage(problem_.hidden.size()));
    run(*Connect(*server_, bytes), hidden.data(), gradient.data(), Memory::kDevice);
    ExpectNear(Floats(gradient.Read()), Floats(wanted));
  }
}

TEST_F(CudaIpcTest, ManyComputationsShareALittleRegion) {
  const Computed wanted = Expected(*server_, problem_);
  const auto client = Connect(*server_, 16 << 10);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] { ExpectSame(OnGpu(*client, problem_), wanted); });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CudaIpcTest, RowsOfTheHostTakeMemoryOfTheHost) {
  const auto client = Connect(*server_);
  std::vector<uint8_t> gradient = Garbage(problem_.hidden.size());
  const auto result = client->ComputeLoss(problem_.At(problem_.hidden.data(), Memory::kHost),
                                          {.grad_hidden = gradient.data()});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(client->transport().transport, "grpc") << "this backend takes no memory of the host";
  EXPECT_THAT(fake_cuda::TakeCopied(), IsEmpty());
}

TEST_F(CudaIpcTest, RowsOfAnotherGpuAreCopiedToTheServers) {
  const Computed wanted = Expected(*server_, problem_);
  const auto client = Connect(*server_);
  fake_cuda::TakeCopied();
  const Computed got = OnGpu(*client, problem_, 1);
  ExpectSame(got, wanted);
  EXPECT_EQ(fake_cuda::TakeCopied()["device to device"], got.result.sent_bytes + got.result.received_bytes);
}

TEST_F(CudaIpcTest, AutoTakesItForRowsOfTheServersGpu) {
  const Computed wanted = Expected(*server_, problem_);
  const auto client = ConnectBy(*server_, "auto");
  EXPECT_EQ(client->transport().device.reason, "nothing was sent yet");
  fake_cuda::TakeCopied();
  ExpectSame(OnGpu(*client, problem_, 1), wanted);
  EXPECT_THAT(fake_cuda::TakeCopied(), UnorderedElementsAre(Key("device to host"), Key("host to device")));
  EXPECT_EQ(Imported(), 0);
  const Computed got = OnGpu(*client, problem_);
  ExpectSame(got, wanted);
  EXPECT_EQ(fake_cuda::TakeCopied()["device to device"], got.result.sent_bytes + got.result.received_bytes);
  // Of rows of both GPUs, the choice is that of those which go worse.
  EXPECT_EQ(client->transport().device.transport, "grpc");
  const std::string reason = absl::StrCat("the server's GPU is of this host; 4 MiB of ", kUuid);
  EXPECT_THAT(client->transport().device.reason,
              HasSubstr(absl::StrCat("rows on ", kUuid, ": cuda_ipc, ", reason, "; rows on ")));
  const auto of_server = ConnectBy(*server_, "auto");
  ExpectSame(OnGpu(*of_server, problem_), wanted);
  EXPECT_EQ(of_server->transport().device.transport, "cuda_ipc");
  EXPECT_EQ(of_server->transport().device.reason, reason);
  const auto failing = ConnectBy(*server_, "auto");
  fake_cuda::Fail("cuMemMap", 1);
  ExpectSame(OnGpu(*failing, problem_), wanted);
  EXPECT_EQ(failing->transport().device.transport, "grpc");
  EXPECT_THAT(failing->transport().device.reason, HasSubstr("cuMemMap failed"));
}

// Larger than messages may be, and the slices of a call are equal.
TEST_F(CudaIpcTest, ASliceIsAsLargeAsTheMemoryAllows) {
  const auto server = StartServer({"--slice_bytes=1KiB", "--staging_bytes=1MiB"});
  CreateHead(*server);
  Problem problem;
  for (uint64_t i = 0; i < kRows; ++i) problem.targets[i] = static_cast<int32_t>(i % kClasses);
  const Computed wanted = Expected(*server, problem);
  const DeviceArray hidden(problem.hidden);
  const std::pair<int64_t, uint64_t> sizes[] = {{256 << 10, 1}, {64 << 10, 2}, {16 << 10, 8}};
  for (const auto& [bytes, slices] : sizes) {  // a quarter of it holds 682, 170, 42 rows
    const auto client = Connect(*server, bytes);
    const DeviceArray gradient(Garbage(problem.hidden.size()));
    fake_cuda::TakeCopied();
    const auto result =
        client->ComputeLoss(problem.At(hidden.data(), Memory::kDevice), {.grad_hidden = gradient.data()});
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(fake_cuda::Copies(), 2 * slices);
    EXPECT_EQ(fake_cuda::TakeCopied()["device to device"], 2 * problem.hidden.size());
    ExpectNear(Floats(gradient.Read()), Floats(wanted.gradient));
  }
}

// Where other calls have all of the memory, slices go in messages that are small enough.
TEST_F(CudaIpcTest, ASliceThatFindsNoRoomIsCutForMessages) {
  const auto server = StartServer({"--slice_bytes=1KiB", "--staging_bytes=1MiB"});
  CreateHead(*server);
  const Computed wanted = Expected(*server, problem_);
  const auto client = Connect(*server, 4 << 10);
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&] {
      const DeviceArray hidden(problem_.hidden), gradient(Garbage(problem_.hidden.size()));
      const auto result =
          client->ComputeLoss(problem_.At(hidden.data(), Memory::kDevice), {.grad_hidden = gradient.data()});
      ASSERT_TRUE(result.ok()) << result.status();
      ExpectNear(Floats(gradient.Read()), Floats(wanted.gradient));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CudaIpcTest, ConnectSaysWhyThereIsNone) {
  fake_cuda::SetDevices(0);
  absl::Status status = TryConnect(*server_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(status.message(), absl::StrCat("no shared memory: the server's GPU is ", kUuid,
                                           ", which this process does not see"));
  fake_cuda::SetDevices(2);
  fake_cuda::Fail("cuMemSetAccess", 1);
  status = TryConnect(*server_).status();
  EXPECT_EQ(status.message(),
            "no shared memory: cuMemSetAccess failed: an illegal memory access was encountered (700)");
  const auto without = StartServer({"--shared_device_memory_bytes=0"});
  EXPECT_EQ(TryConnect(*without).status().message(), "no CUDA IPC: the server shares no memory of a GPU");
  const auto little = StartServer({"--shared_device_memory_bytes=2MiB"});
  std::vector<std::unique_ptr<Client>> clients;
  status = absl::OkStatus();
  for (int i = 0; i < 3 && status.ok(); ++i) {
    auto client = TryConnect(*little);
    status = client.status();
    if (client.ok()) clients.push_back(*std::move(client));
  }
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("--shared_device_memory_bytes has nothing left for this process"));
}

TEST_F(CudaIpcTest, WithOtherTransportsRowsAreCopiedToTheHost) {
  const test::ServerProcess server(LOSSD_BINARY);
  CreateHead(server);
  const Computed wanted = Expected(server, problem_);
  for (const std::string transport : {"grpc", "shared_memory", "auto"}) {
    const auto client = ConnectBy(server, transport);
    fake_cuda::TakeCopied();
    ExpectSame(OnGpu(*client, problem_), wanted);
    auto copied = fake_cuda::TakeCopied();
    const bool in_region = transport != "grpc";
    EXPECT_EQ(copied["device to pinned"] > 0, in_region) << "what the driver has registered";
    EXPECT_EQ(copied["pinned to device"] > 0, in_region);
    EXPECT_EQ(copied["device to host"] > problem_.hidden.size(), !in_region) << "more than DeviceArray's own";
    EXPECT_EQ(copied["device to device"], 0u);
    const TransportChoice choice = client->transport();
    EXPECT_EQ(choice.transport, transport == "auto" ? "shared_memory" : transport) << choice.reason;
    EXPECT_EQ(choice.device.transport, choice.transport);
    EXPECT_EQ(choice.device.reason, transport == "auto" ? "the server shares no memory of a GPU"
                                                        : absl::StrCat("the transport is ", transport));
  }
}

TEST_F(CudaIpcTest, AServerThatIsRestartedGivesAnotherRegion) {
  const auto server = StartServer();
  const std::string address = server->target();
  CreateHead(*server);
  const auto client = Connect(*server);
  const Computed wanted = OnGpu(*client, problem_);
  server->Kill();
  server->Start(address);
  CreateHead(*server);
  ExpectSame(OnGpu(*client, problem_), wanted);
  ExpectSame(OnGpu(*client, problem_), wanted);
  EXPECT_EQ(client->transport().device.transport, "cuda_ipc") << client->transport().device.reason;
  EXPECT_EQ(Imported(), 1);
}

// Once: the rows are sent again. Always: the call says so.
TEST_F(CudaIpcTest, CopiesThatFail) {
  const Computed wanted = Expected(*server_, problem_);
  for (const std::string copy : {"copy to region", "copy from region"}) {
    const auto client = Connect(*server_);
    fake_cuda::Fail(copy, 1);
    const Computed got = OnGpu(*client, problem_);
    ExpectSame(got, wanted);
    EXPECT_GE(got.result.repeats, 1);
    EXPECT_EQ(Imported(), 1) << "the region of the attempt that failed was given up";
    EXPECT_EQ(client->transport().device.transport, "cuda_ipc");

    fake_cuda::Fail(copy, std::numeric_limits<int64_t>::max());
    const auto failing =
        Client::Connect({.target = server_->target(),
                         .retry = {.max_attempts = 2, .initial_backoff = absl::Milliseconds(1)},
                         .transport = "cuda_ipc",
                         .shared_memory_bytes = 1 << 20});
    ASSERT_TRUE(failing.ok()) << failing.status();
    const absl::Status status = TryOnGpu(**failing, problem_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(status.message(),
              "cuMemcpyAsync failed: an illegal memory access was encountered (700); tried 2 times");
    fake_cuda::Fail(copy, 0);
    ExpectSame(OnGpu(**failing, problem_), wanted);
  }
}

// Those between a GPU and messages, and zeros for rows that are not sent.
TEST_F(CudaIpcTest, WorkThatFailsWithoutARegion) {
  const Computed wanted = Expected(*server_, problem_);
  const auto client = ConnectBy(*server_, "grpc");
  const DeviceArray hidden(problem_.hidden), gradient(Garbage(problem_.hidden.size()));
  const auto compute = [&] {
    return client->ComputeLoss(problem_.At(hidden.data(), Memory::kDevice), {.grad_hidden = gradient.data()},
                               {.slice_bytes = kSlice, .max_attempts = 1});
  };
  for (const std::string function : {"cuMemcpyAsync", "cuMemsetD8Async"}) {
    fake_cuda::Fail(function, 1);
    EXPECT_EQ(compute().status().message(),
              function + " failed: an illegal memory access was encountered (700)");
  }
  ASSERT_TRUE(compute().ok());
  ExpectNear(Floats(gradient.Read()), Floats(wanted.gradient));
}

TEST_F(CudaIpcTest, NothingStaysWhenClientsGo) {
  const auto descriptors = [] {
    const auto folder = std::filesystem::directory_iterator("/proc/self/fd");
    return std::distance(begin(folder), end(folder));
  };
  OnGpu(*Connect(*server_), problem_);
  const auto held = fake_cuda::Held();
  const auto before = descriptors();
  for (int i = 0; i < 20; ++i) {
    const auto client = Connect(*server_);
    OnGpu(*client, problem_);
    EXPECT_EQ(Imported(), 1);
  }
  EXPECT_EQ(Imported(), 0);
  EXPECT_EQ(fake_cuda::Held().count("allocation"), held.count("allocation"));
  EXPECT_LE(descriptors(), before + 8);
}

TEST_F(CudaIpcTest, MemoryThatIsNoGpusIsRefused) {
  const auto client = Connect(*server_);
  const DeviceArray hidden(problem_.hidden), elsewhere(problem_.hidden, 1);
  std::vector<uint8_t> on_host = problem_.hidden;
  const auto refusal = [&](const void* rows, void* gradient) {
    const auto result = client->ComputeLoss(problem_.At(rows, Memory::kDevice), {.grad_hidden = gradient});
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << result.status();
    const auto detail = ErrorDetailOf(result.status());
    return absl::StrCat(detail.has_value() ? detail->field() : "", ": ", result.status().message());
  };
  EXPECT_EQ(
      refusal(on_host.data(), nullptr),
      "microbatch.hidden: microbatch.hidden is not memory of a GPU: cuPointerGetAttribute failed: invalid "
      "argument (1)");
  EXPECT_THAT(refusal(hidden.data(), on_host.data()),
              HasSubstr("outputs.grad_hidden is not memory of a GPU"));
  EXPECT_EQ(refusal(hidden.data(), elsewhere.data()),
            "outputs.grad_hidden: outputs.grad_hidden is on GPU 1; microbatch.hidden is on GPU 0");
  const std::vector<float> ones(kRows, 1);
  const auto backward = client->Backward(
      {.head = "lm", .hidden_size = kHidden, .memory = Memory::kDevice, .grad_loss = ones}, on_host.data());
  EXPECT_THAT(std::string(backward.status().message()), HasSubstr("grad_hidden is not memory of a GPU"));
}

// A server of an earlier version gives memory of the host, whatever was asked for.
TEST_F(CudaIpcTest, AServerThatKnowsNoSuchRegions) {
  const test::TempFolder folder;
  const std::string path = folder.File("regions");
  sockaddr_un address = {.sun_family = AF_UNIX};
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const wire::OwnedDescriptor listener(socket(AF_UNIX, SOCK_SEQPACKET, 0));
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  std::thread server([&listener] {
    const wire::OwnedDescriptor session(accept(listener.get(), nullptr, nullptr));
    char packet[wire::kMaxRegionPacket];
    const ssize_t bytes = recv(session.get(), packet, sizeof(packet), 0);
    const auto request = wire::ParseRegionRequest({packet, static_cast<size_t>(std::max<ssize_t>(bytes, 0))});
    EXPECT_TRUE(request.ok() && request->of_device());
    const wire::OwnedDescriptor memory(memfd_create("region", MFD_CLOEXEC));
    EXPECT_EQ(ftruncate(memory.get(), 4096), 0);
    v1::RegionAnswer answer;
    answer.mutable_opened()->set_id(std::string(wire::kRegionIdBytes, 'x'));
    answer.mutable_opened()->set_bytes(4096);
    EXPECT_TRUE(wire::SendRegionPacket(session.get(), answer.SerializeAsString(), memory.get()).ok());
  });
  const auto region = internal::SharedRegion::Open(path, 4096, absl::Seconds(60), kUuid);
  server.join();
  EXPECT_EQ(region.status().message(),
            absl::StrCat("no shared memory: the server gives memory of the host, not of ", kUuid));
}

// ---- Streams of the caller ----
// Rows on a GPU that a stream of the caller's still writes when the call begins. The GPU is played, as in
// cuda_ipc_test.cc: what a stream has been given is done when something waits for it.

class CallersStream {
 public:
  CallersStream() : stream_(fake_cuda::NewStream()) {}
  ~CallersStream() { fake_cuda::EndStream(stream_); }
  CallersStream(const CallersStream&) = delete;
  CallersStream& operator=(const CallersStream&) = delete;
  void* get() const { return stream_; }

 private:
  void* const stream_;
};

class CudaStreamTest : public CudaIpcTest {
 protected:
  // With hidden states that a stream writes, and a gradient that it uses, when the call begins. `failing`: a
  // function of the driver that fails once in the call.
  absl::StatusOr<Computed> TryAfterStream(Client& client, int device = 0,
                                          const std::string& failing = "") const {
    const DeviceArray hidden(Garbage(problem_.hidden.size()), device),
        gradient(Garbage(problem_.hidden.size()), device);
    const CallersStream stream;
    fake_cuda::Give(stream.get(), hidden.data(), problem_.hidden.data(), problem_.hidden.size());
    fake_cuda::Give(stream.get(), gradient.data(), nullptr, problem_.hidden.size());
    Microbatch microbatch = problem_.At(hidden.data(), Memory::kDevice);
    microbatch.stream = stream.get();
    Computed computed;
    if (!failing.empty()) fake_cuda::Fail(failing, 1);
    PendingLoss pending = client.ComputeLossAsync(
        microbatch, {.grad_hidden = gradient.data(), .row_loss = absl::MakeSpan(computed.loss)},
        {.streams = 2, .slice_bytes = kSlice});
    fake_cuda::Give(stream.get(), hidden.data(), nullptr, problem_.hidden.size());  // of what comes after it
    const auto result = pending.Wait();
    EXPECT_LE(fake_cuda::Pending(stream.get()), result.ok() ? 1u : 3u);
    if (!result.ok()) return result.status();
    EXPECT_EQ(fake_cuda::Pending(stream.get()), 1u) << "what is given later is not waited for";
    computed.gradient = gradient.Read();
    computed.result = *result;
    return computed;
  }
  void ExpectAfterStream(Client& client, const Computed& wanted, int device = 0) const {
    const auto got = TryAfterStream(client, device);
    ASSERT_TRUE(got.ok()) << got.status();
    ExpectSame(*got, wanted);
  }
};

TEST_F(CudaStreamTest, CopiesWaitForTheStreamOfTheCaller) {
  const Computed wanted = Expected(*server_, problem_);
  for (const int64_t bytes : {1 << 20, 2 << 10}) {  // in a smaller one some slices go in messages
    const auto client = Connect(*server_, bytes);
    for (const int device : {0, 1}) ExpectAfterStream(*client, wanted, device);
  }
}

TEST_F(CudaStreamTest, CopiesThroughTheHostWaitAsWell) {
  const test::ServerProcess server(LOSSD_BINARY);
  CreateHead(server);
  const Computed wanted = Expected(server, problem_);
  for (const std::string transport : {"grpc", "shared_memory"})
    ExpectAfterStream(*ConnectBy(server, transport), wanted);
}

TEST_F(CudaStreamTest, GradientsOfRetainedRowsWait) {
  const std::vector<float> ones(kRows, 1.0f);
  const DeviceArray hidden(problem_.hidden);
  for (const std::string transport : {"cuda_ipc", "grpc"}) {
    const auto client = ConnectBy(*server_, transport);
    Microbatch microbatch = problem_.At(hidden.data(), Memory::kDevice);
    microbatch.step = 0;
    microbatch.id = 9;
    ASSERT_TRUE(client->ComputeLoss(microbatch, {}, {.reduction = v1::REDUCTION_NONE, .retain = true}).ok());
    const auto backward = [&](const DeviceArray& gradient, std::optional<void*> stream) {
      const auto result = client->Backward({.head = "lm",
                                            .step = 0,
                                            .id = 9,
                                            .hidden_size = kHidden,
                                            .hidden_dtype = v1::DTYPE_FP32,
                                            .memory = Memory::kDevice,
                                            .stream = stream,
                                            .grad_loss = ones},
                                           gradient.data());
      EXPECT_TRUE(result.ok()) << result.status();
    };
    const DeviceArray wanted(Garbage(problem_.hidden.size())), got(Garbage(problem_.hidden.size()));
    backward(wanted, std::nullopt);
    const CallersStream stream;
    fake_cuda::Give(stream.get(), got.data(), problem_.hidden.data(), problem_.hidden.size());
    backward(got, stream.get());
    EXPECT_EQ(fake_cuda::Pending(stream.get()), 0u);
    ExpectNear(Floats(got.Read()), Floats(wanted.Read()));
    EXPECT_TRUE(client->ReleaseMicrobatch("lm", 9).value());
  }
}

TEST_F(CudaStreamTest, WhatFailsIsToldAndLeavesNothing) {
  const auto client = Client::Connect({.target = server_->target(),
                                       .retry = {.max_attempts = 1},
                                       .transport = "cuda_ipc",
                                       .shared_memory_bytes = 1 << 20});
  ASSERT_TRUE(client.ok()) << client.status();
  const Computed wanted = Expected(*server_, problem_);
  ExpectAfterStream(**client, wanted);
  const int events = fake_cuda::Held()["event"], streams = fake_cuda::Held()["stream"];
  for (const std::string function : {"cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"}) {
    const absl::Status status = TryAfterStream(**client, 0, function).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << function;
    EXPECT_THAT(std::string(status.message()), HasSubstr(function + " failed"));
    EXPECT_LE(fake_cuda::Held()["event"], events) << function;
    EXPECT_LE(fake_cuda::Held()["stream"], streams) << function;
    fake_cuda::Fail(function, 0);
  }
  ExpectAfterStream(**client, wanted);
  EXPECT_EQ(fake_cuda::ContextDepth(), 0);
}

TEST_F(CudaStreamTest, AStreamIsOfRowsOnAGpu) {
  const auto client = ConnectBy(*server_, "grpc");
  Microbatch microbatch = problem_.At(problem_.hidden.data(), Memory::kHost);
  microbatch.stream = nullptr;
  const absl::Status status = client->ComputeLoss(microbatch, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ErrorDetailOf(status)->field(), "microbatch.stream") << status;
  const std::vector<float> ones(kRows, 1.0f);
  const absl::Status backward =
      client->Backward({.head = "lm", .hidden_size = kHidden, .stream = nullptr, .grad_loss = ones}, nullptr)
          .status();
  EXPECT_EQ(ErrorDetailOf(backward)->field(), "gradients.stream") << backward;
}

// ---- Memory of the host ----
// Memory of the host that is registered with CUDA's driver for rows on GPUs, which are played (fake_cuda.h).
// Waiting for room is in server_process_test.cc.

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

// ---- lossctl bench ----
// lossctl bench with its rows on a GPU that is played (fake_cuda.h).

class BenchCudaIpcTest : public CudaIpcTest {
 protected:
  // What `lossctl ARGUMENTS` prints on both streams, which finds the driver in `driver`.
  std::string Run(const std::string& driver, const std::string& arguments, int exit_code) {
    const std::string out = folder_.File("out");
    // At the end of some runs LeakSanitizer itself crashes while it reads the memory of threads; why is not
    // known. Other tests look for lossctl's leaks.
    const std::string command =
        absl::StrCat("ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 LD_LIBRARY_PATH=", driver,
                     ":$LD_LIBRARY_PATH LOSSD_SERVER=", server_->target(), " " LOSSCTL_PATH " ", arguments,
                     " >", out, " 2>&1");
    const int status = std::system(command.c_str());
    const std::string text = test::ReadWholeFile(out);
    EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, exit_code) << arguments << ": " << text;
    return text;
  }

  test::TempFolder folder_;
};

TEST_F(BenchCudaIpcTest, RowsAreOnTheServersGpu) {
  for (const std::string what : {"all", "dx", "loss"}) {
    const std::string text = Run(
        FAKE_CUDA_FOLDER,
        absl::StrCat("--json bench lm --transport cuda_ipc --rows 50 --microbatches 6 --in-flight 3 --what ",
                     what),
        0);
    const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(json.is_object()) << text;
    EXPECT_EQ(json["transport"], "cuda_ipc");
    EXPECT_EQ(json["transport_reason"], absl::StrCat("the server's GPU is of this host; 4 MiB of ", kUuid));
    EXPECT_EQ(json["rows"], 300);
    EXPECT_GT(json["sent_bytes_per_second"], 0);
    EXPECT_EQ(json["received_bytes_per_second"] > 0, what != "loss");
  }
  EXPECT_THAT(Run(FAKE_CUDA_FOLDER,
                  "bench lm --transport cuda_ipc --rows 5 --microbatches 1 --shared-memory-bytes 1MiB", 0),
              HasSubstr(absl::StrCat("cuda_ipc (the server's GPU is of this host; 1 MiB of ", kUuid, ")")));
}

TEST_F(BenchCudaIpcTest, RowsAreOnAnotherGpu) {
  for (const int gpu : {0, 1}) {
    const auto json = nlohmann::json::parse(
        Run(FAKE_CUDA_FOLDER,
            absl::StrCat("--json bench lm --transport cuda_ipc --rows 50 --microbatches 3 --gpu ", gpu), 0),
        nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(json.is_object());
    EXPECT_EQ(json["transport"], "cuda_ipc");
    EXPECT_EQ(json["gpu"], gpu);
    EXPECT_EQ(json["rows"], 150);
    EXPECT_GT(json["received_bytes_per_second"], 0);
  }
}

// With every transport: what it makes of rows that are on that GPU.
TEST_F(BenchCudaIpcTest, RowsAreOnAGpuWithOtherTransports) {
  const auto bench = [&](const std::string& arguments) {
    const auto json = nlohmann::json::parse(
        Run(FAKE_CUDA_FOLDER, absl::StrCat("--json bench lm --rows 50 --microbatches 3 ", arguments), 0),
        nullptr,
        /*allow_exceptions=*/false);
    EXPECT_TRUE(json.is_object());
    EXPECT_EQ(json["rows"], 150);
    return json;
  };
  const auto same = bench("--gpu 0");
  EXPECT_EQ(same["transport"], "cuda_ipc") << same;
  EXPECT_EQ(same["gpu"], 0);
  const auto another = bench("--gpu 1 --transport auto");
  EXPECT_EQ(another["transport"], "grpc") << another;
  EXPECT_EQ(another["gpu"], 1);
  EXPECT_THAT(another["transport_reason"].get<std::string>(), HasSubstr("and the server's GPU is "));
  const auto messages = bench("--gpu 0 --transport grpc");
  EXPECT_EQ(messages["transport"], "grpc");
  EXPECT_EQ(messages["transport_reason"], "the transport is grpc");
  EXPECT_TRUE(bench("")["gpu"].is_null());
}

TEST_F(BenchCudaIpcTest, RefusesGpusThatAreNotThere) {
  EXPECT_THAT(Run(FAKE_CUDA_FOLDER, "bench lm --transport cuda_ipc --microbatches 1 --gpu 2", 4),
              HasSubstr("--gpu must be below the number of GPUs that are visible, 2, got 2"));
  EXPECT_THAT(Run(FAKE_CUDA_FOLDER, "bench lm --transport grpc --microbatches 1 --gpu 2", 4),
              HasSubstr("--gpu must be below the number of GPUs that are visible, 2, got 2"));
  Run(FAKE_CUDA_FOLDER, "bench lm --transport cuda_ipc --microbatches 1 --gpu -1", 2);
}

TEST_F(BenchCudaIpcTest, SaysWhyThereIsNoDriver) {
  std::ofstream(folder_.File("libcuda.so.1"));  // empty
  EXPECT_THAT(
      Run(folder_.path(), "bench lm --transport cuda_ipc --microbatches 1", 3),
      AllOf(HasSubstr("no shared memory: no CUDA driver: "), HasSubstr("libcuda.so.1: file too short")));
}

}  // namespace
}  // namespace lossd::client::testing::cuda_ipc_test
