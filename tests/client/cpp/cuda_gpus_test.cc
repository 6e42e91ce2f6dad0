// SPDX-License-Identifier: Apache-2.0
// Rows on each GPU of a server of all GPUs of the machine, which are real: losses and gradients are those of rows
// that travel in messages, and rows take memory of the GPU that they are on. cuda_devices_test.cc has the same with
// GPUs that are played, and all that real ones do not show.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/cuda_driver.h"
#include "tests/support/server_process.h"

namespace lossd::client::testing::cuda_gpus_test {
namespace {

using internal::CudaDriver;

constexpr uint64_t kRows = 2048, kHidden = 512, kClasses = 4096;

int Gpus() {
  const auto driver = CudaDriver::Get();
  if (!driver.ok()) return 0;
  return (*driver)->Count().value_or(0);
}

struct Computed {
  std::vector<float> gradient = std::vector<float>(kRows * kHidden);
  std::vector<float> loss = std::vector<float>(kRows);
  std::string transport;
  std::string reason;
};

class Rows {
 public:
  Rows() : hidden_(kRows * kHidden) {
    std::mt19937 random(3);
    for (float& value : hidden_) value = std::normal_distribution<float>()(random);
    for (uint64_t i = 0; i < kRows; ++i) targets_.push_back(static_cast<int32_t>(random() % kClasses));
  }

  // `gpu`: that has the rows and their gradient; nullopt: the host.
  Computed Compute(Client& client, std::optional<int> gpu) const {
    Computed computed;
    std::unique_ptr<OnGpu> hidden, gradient;
    if (gpu.has_value()) {
      hidden = std::make_unique<OnGpu>(hidden_, *gpu);
      gradient = std::make_unique<OnGpu>(std::vector<float>(hidden_.size(), NAN), *gpu);
    }
    const Microbatch microbatch{.head = "lm",
                                .hidden_size = kHidden,
                                .hidden_dtype = v1::DTYPE_FP32,
                                .hidden = gpu.has_value() ? hidden->data() : static_cast<const void*>(hidden_.data()),
                                .memory = gpu.has_value() ? Memory::kDevice : Memory::kHost,
                                .targets = targets_};
    const auto result = client.ComputeLoss(
        microbatch,
        {.grad_hidden = gpu.has_value() ? gradient->data() : static_cast<void*>(computed.gradient.data()),
         .row_loss = absl::MakeSpan(computed.loss)},
        {});
    EXPECT_TRUE(result.ok()) << result.status();
    if (gpu.has_value()) computed.gradient = gradient->Read();
    computed.transport = client.transport().device.transport;
    computed.reason = client.transport().device.reason;
    return computed;
  }

 private:
  class OnGpu {
   public:
    OnGpu(const std::vector<float>& values, int gpu)
        : driver_(*CudaDriver::Get()),
          gpu_(gpu),
          count_(values.size()),
          data_(driver_->Allocate(count_ * sizeof(float), gpu).value()) {
      EXPECT_TRUE(driver_->Copy(data_, values.data(), count_ * sizeof(float), gpu_).ok());
    }
    ~OnGpu() { driver_->Free(data_, gpu_); }
    OnGpu(const OnGpu&) = delete;
    OnGpu& operator=(const OnGpu&) = delete;

    uint8_t* data() const { return data_; }
    std::vector<float> Read() const {
      std::vector<float> values(count_);
      EXPECT_TRUE(driver_->Copy(values.data(), data_, count_ * sizeof(float), gpu_).ok());
      return values;
    }

   private:
    CudaDriver* const driver_;
    const int gpu_;
    const size_t count_;
    uint8_t* const data_;
  };

  std::vector<float> hidden_;
  std::vector<int32_t> targets_;
};

// The norm of the difference, as a share of that of what is wanted; not a number if either is not.
double Distance(const std::vector<float>& got, const std::vector<float>& wanted) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - wanted[i], 2);
    norm += std::pow(static_cast<double>(wanted[i]), 2);
  }
  return std::sqrt(difference / norm);
}

class CudaGpusTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (Gpus() == 0) GTEST_SKIP() << "no GPU";
    server_ = std::make_unique<test::ServerProcess>(
        LOSSD_BINARY, std::vector<std::string>{"--backend=cuda", "--devices=all", "--staging_bytes=64MiB",
                                               "--slice_bytes=1MiB", "--workspace_bytes=256MiB"});
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("lm");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(kClasses);
    request.mutable_spec()->set_compute_dtype(v1::DTYPE_FP32);
    request.mutable_spec()->set_split(absl::string_view(GetParam()) == "rows" ? v1::SPLIT_ROWS
                                                                              : v1::SPLIT_VOCABULARY);
    request.mutable_kaiming_uniform()->set_seed(7);
    const auto created = ConnectBy("grpc")->CreateHead(request);
    ASSERT_TRUE(created.ok()) << created.status();
  }
  std::unique_ptr<Client> ConnectBy(const std::string& transport) const {
    auto client = Client::Connect({.target = server_->target(), .transport = transport});
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }
  std::string UuidOf(int gpu) const { return (*CudaDriver::Get())->UuidOf(gpu).value(); }

  std::unique_ptr<test::ServerProcess> server_;
  const Rows rows_;
};

void ExpectSame(const Computed& got, const Computed& wanted) {
  // fp32 by TF32 or by sums in another order, but far from what other rows would give.
  EXPECT_LT(Distance(got.loss, wanted.loss), 1e-3);
  EXPECT_LT(Distance(got.gradient, wanted.gradient), 1e-2);
}

TEST_P(CudaGpusTest, RowsTakeMemoryOfTheGpuThatTheyAreOn) {
  const Computed wanted = rows_.Compute(*ConnectBy("grpc"), std::nullopt);
  ExpectSame(rows_.Compute(*ConnectBy("grpc"), 0), wanted);
  ExpectSame(rows_.Compute(*ConnectBy("auto"), std::nullopt), wanted);
  for (int gpu = 0; gpu < Gpus(); ++gpu) {
    const auto client = ConnectBy("auto");
    for (int i = 0; i < 3; ++i) {
      const Computed got = rows_.Compute(*client, gpu);
      ExpectSame(got, wanted);
      EXPECT_EQ(got.transport, "cuda_ipc") << got.reason;
      EXPECT_THAT(got.reason, ::testing::EndsWith(absl::StrCat(" of ", UuidOf(gpu))));
    }
  }
}

TEST_P(CudaGpusTest, OneClientHasRowsOnAllGpusAtOnce) {
  const Computed wanted = rows_.Compute(*ConnectBy("grpc"), std::nullopt);
  const auto client = ConnectBy("auto");
  std::vector<std::thread> threads;
  for (int gpu = 0; gpu < Gpus(); ++gpu) {
    threads.emplace_back([&, gpu] {
      for (int i = 0; i < 10; ++i) ExpectSame(rows_.Compute(*client, gpu), wanted);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(client->transport().device.transport, "cuda_ipc") << client->transport().device.reason;
}

INSTANTIATE_TEST_SUITE_P(Splits, CudaGpusTest, ::testing::Values("rows", "vocabulary"),
                         [](const auto& split) { return std::string(split.param); });

}  // namespace
}  // namespace lossd::client::testing::cuda_gpus_test
