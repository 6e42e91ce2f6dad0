// SPDX-License-Identifier: Apache-2.0
// Rows on a GPU that a stream of the caller's still writes when the call begins. The GPU is played, as in
// cuda_ipc_test.cc: what a stream has been given is done when something waits for it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/client.h"
#include "tests/client/cpp/cuda_ipc_fixture.h"
#include "tests/client/cpp/fake_cuda.h"

namespace lossd::client::testing::cuda_stream_test {
namespace {

using ::testing::HasSubstr;

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

}  // namespace
}  // namespace lossd::client::testing::cuda_stream_test
