// SPDX-License-Identifier: Apache-2.0
// For tests of CUDA IPC: a server whose GPU is simulated, rows on the GPUs of fake_cuda.h, and the results
// that are expected for them.
//
// Thread-compatible.
#ifndef LOSSD_TESTS_CLIENT_CPP_CUDA_IPC_FIXTURE_H_
#define LOSSD_TESTS_CLIENT_CPP_CUDA_IPC_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/client.h"
#include "client/cpp/cuda_driver.h"
#include "tests/client/cpp/fake_cuda.h"
#include "tests/support/server_process.h"

namespace lossd::client::testing {

namespace fake_cuda = test::fake_cuda;
using internal::CudaDriver;

inline constexpr uint64_t kRows = 300, kHidden = 24, kClasses = 97;
inline constexpr uint64_t kSlice = 7 * kHidden * sizeof(float);
inline constexpr char kUuid[] = "GPU-00000000-0000-0000-0000-000000000001";

inline CudaDriver& Driver() { return *CudaDriver::Get().value(); }

// A copy of bytes in memory of a GPU.
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<uint8_t>& bytes, int device = 0)
      : device_(device), bytes_(bytes.size()), data_(Driver().Allocate(bytes_, device).value()) {
    EXPECT_TRUE(Driver().Copy(data_, bytes.data(), bytes_, device_).ok());
  }
  ~DeviceArray() { Driver().Free(data_, device_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  uint8_t* data() const { return data_; }
  std::vector<uint8_t> Read() const {
    std::vector<uint8_t> bytes(bytes_);
    EXPECT_TRUE(Driver().Copy(bytes.data(), data_, bytes_, device_).ok());
    return bytes;
  }

 private:
  const int device_;
  const uint64_t bytes_;
  uint8_t* const data_;
};

inline std::vector<uint8_t> Bytes(const std::vector<float>& values) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
  return {bytes, bytes + values.size() * sizeof(float)};
}

inline std::vector<float> Floats(const std::vector<uint8_t>& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// The initial bytes of memory for gradients. A test fails if one of them is not overwritten.
inline std::vector<uint8_t> Garbage(uint64_t bytes) { return std::vector<uint8_t>(bytes, 0xff); }

// A microbatch in which some rows are ignored, and a run of ignored rows is in no slice.
struct Problem {
  explicit Problem(v1::DType of = v1::DTYPE_FP32) : dtype(of) {
    std::mt19937 random(5);
    std::vector<float> values(kRows * kHidden);
    for (float& value : values) value = std::normal_distribution<float>()(random);
    hidden = Bytes(values);
    if (dtype != v1::DTYPE_FP32) {
      hidden.resize(kRows * kHidden * 2);
      for (size_t i = 0; i < values.size(); ++i) {
        const auto bits = static_cast<uint16_t>(0x3800 + random() % 0x400);  // smaller than 1 in both formats
        std::memcpy(&hidden[2 * i], &bits, 2);
      }
    }
    for (uint64_t i = 0; i < kRows; ++i) {
      const bool ignored = i % 10 == 0 || (i >= 40 && i < 80);
      targets.push_back(ignored ? -100 : static_cast<int32_t>(random() % kClasses));
    }
  }
  Microbatch At(const void* rows, Memory memory) const {
    return {.head = "lm",
            .hidden_size = kHidden,
            .hidden_dtype = dtype,
            .hidden = rows,
            .memory = memory,
            .targets = targets};
  }

  v1::DType dtype;
  std::vector<uint8_t> hidden;
  std::vector<int32_t> targets;
};

struct Computed {
  std::vector<uint8_t> gradient;
  std::vector<float> loss = std::vector<float>(kRows);
  LossResult result;
};

// Starts a server that shares memory of its GPUs but no memory of the host. So a client that cannot use the
// GPUs' memory sends its rows in messages.
inline std::unique_ptr<test::ServerProcess> StartServer(std::vector<std::string> flags = {}) {
  flags.insert(flags.begin(), {"--backend=cuda", "--shared_memory_bytes=0"});
  return std::make_unique<test::ServerProcess>(LOSSD_WITH_SHARED_DEVICE, flags);
}

inline absl::StatusOr<std::unique_ptr<Client>> TryConnect(const test::ServerProcess& server,
                                                          int64_t bytes = 1 << 20) {
  return Client::Connect({.target = server.target(), .transport = "cuda_ipc", .shared_memory_bytes = bytes});
}

inline std::unique_ptr<Client> Connect(const test::ServerProcess& server, int64_t bytes = 1 << 20) {
  auto client = TryConnect(server, bytes);
  EXPECT_TRUE(client.ok()) << client.status();
  return client.ok() ? *std::move(client) : nullptr;
}

inline std::unique_ptr<Client> ConnectBy(const test::ServerProcess& server, const std::string& transport) {
  auto client = Client::Connect({.target = server.target(), .transport = transport});
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

inline void CreateHead(const test::ServerProcess& server) {
  v1::CreateHeadRequest request;
  request.mutable_spec()->set_name("lm");
  request.mutable_spec()->set_hidden_size(kHidden);
  request.mutable_spec()->set_vocab_size(kClasses);
  request.mutable_kaiming_uniform()->set_seed(7);
  const auto created = ConnectBy(server, "grpc")->CreateHead(request);
  ASSERT_TRUE(created.ok()) << created.status();
}

// The results for rows in host memory, which are sent in messages.
inline Computed Expected(const test::ServerProcess& server, const Problem& problem,
                         std::optional<uint64_t> id = {}) {
  Computed computed;
  computed.gradient = Garbage(problem.hidden.size());
  Microbatch microbatch = problem.At(problem.hidden.data(), Memory::kHost);
  ComputeOptions options{.accumulate_gradients = id.has_value(), .streams = 2, .slice_bytes = kSlice};
  if (id.has_value()) microbatch.step = 0, microbatch.id = *id;
  const auto result =
      ConnectBy(server, "grpc")
          ->ComputeLoss(microbatch,
                        {.grad_hidden = computed.gradient.data(), .row_loss = absl::MakeSpan(computed.loss)},
                        options);
  EXPECT_TRUE(result.ok()) << result.status();
  return computed;
}

inline absl::StatusOr<Computed> TryOnGpu(Client& client, const Problem& problem, int device = 0,
                                         std::optional<uint64_t> id = {}) {
  const DeviceArray hidden(problem.hidden, device), gradient(Garbage(problem.hidden.size()), device);
  Computed computed;
  Microbatch microbatch = problem.At(hidden.data(), Memory::kDevice);
  ComputeOptions options{.accumulate_gradients = id.has_value(), .streams = 2, .slice_bytes = kSlice};
  if (id.has_value()) microbatch.step = 0, microbatch.id = *id;
  const auto result = client.ComputeLoss(
      microbatch, {.grad_hidden = gradient.data(), .row_loss = absl::MakeSpan(computed.loss)}, options);
  if (!result.ok()) return result.status();
  computed.gradient = gradient.Read();
  computed.result = *result;
  return computed;
}

inline Computed OnGpu(Client& client, const Problem& problem, int device = 0,
                      std::optional<uint64_t> id = {}) {
  auto computed = TryOnGpu(client, problem, device, id);
  EXPECT_TRUE(computed.ok()) << computed.status();
  return computed.ok() ? *std::move(computed) : Computed();
}

inline void ExpectNear(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-5) << i;
}

inline void ExpectSame(const Computed& got, const Computed& want) {
  ExpectNear(Floats(got.gradient), Floats(want.gradient));
  ExpectNear(got.loss, want.loss);
}

// The number of GPU memory regions that the client has imported.
inline int Imported() {
  auto held = fake_cuda::Held();
  EXPECT_EQ(held["mapping"], held["reservation"]);
  EXPECT_EQ(held["handle"], 0);
  return held["mapping"];
}

class CudaIpcTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = StartServer().release();
    CreateHead(*server_);
  }
  static void TearDownTestSuite() {
    delete server_;
    server_ = nullptr;
  }
  void SetUp() override {
    fake_cuda::SetDevices(2);
    EXPECT_EQ(Imported(), 0);
    fake_cuda::TakeCopied();
  }
  void TearDown() override { EXPECT_EQ(Imported(), 0) << "a region stays mapped"; }

  inline static test::ServerProcess* server_ = nullptr;
  const Problem problem_;
};

}  // namespace lossd::client::testing

#endif  // LOSSD_TESTS_CLIENT_CPP_CUDA_IPC_FIXTURE_H_
