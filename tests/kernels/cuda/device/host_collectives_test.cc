// SPDX-License-Identifier: Apache-2.0
// Ranks of one process that exchange through the host, each with a stream and a thread: what all of them hold
// afterwards, and what becomes of an exchange that a rank stays away from. Once on a GPU, which all of them
// share, and once with the calls of CUDA played by functions here, which the linker gives to the code: device
// memory is that of the host then, and a stream does at once what it is given.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/cpu/gloo_link.h"
#include "kernels/cuda/device/collectives.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/cuda/device/thread_device.h"

namespace {

bool playing = false;

CUresult PlayWaitValue(CUstream, CUdeviceptr address, cuuint32_t value, unsigned) {
  const auto* const number = reinterpret_cast<const uint32_t*>(address);
  while (static_cast<int32_t>(__atomic_load_n(number, __ATOMIC_ACQUIRE) - value) < 0) {
    absl::SleepFor(absl::Microseconds(20));
  }
  return CUDA_SUCCESS;
}

CUresult PlayWriteValue(CUstream, CUdeviceptr address, cuuint32_t value, unsigned) {
  __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE);
  return CUDA_SUCCESS;
}

void* PlayedFunction(const std::string& name) {
  return name == "cuStreamWaitValue32" ? reinterpret_cast<void*>(&PlayWaitValue)
                                       : reinterpret_cast<void*>(&PlayWriteValue);
}

}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier): the linker makes these names.
extern "C" {
#define LOSSD_PLAY(name, parameters, arguments, played) \
  cudaError_t __real_##name parameters;                 \
  cudaError_t __wrap_##name parameters {                \
    if (!playing) return __real_##name arguments;       \
    played;                                             \
    return cudaSuccess;                                 \
  }
LOSSD_PLAY(cudaHostAlloc, (void** a, size_t b, unsigned c), (a, b, c), *a = std::malloc(b))
LOSSD_PLAY(cudaFreeHost, (void* a), (a), std::free(a))
LOSSD_PLAY(cudaMemcpyAsync, (void* a, const void* b, size_t c, cudaMemcpyKind d, cudaStream_t e),
           (a, b, c, d, e), std::memcpy(a, b, c))
LOSSD_PLAY(cudaStreamSynchronize, (cudaStream_t a), (a), )
LOSSD_PLAY(cudaGetDriverEntryPointByVersion,
           (const char* a, void** b, unsigned c, unsigned long long d, cudaDriverEntryPointQueryResult* e),
           (a, b, c, d, e), (*b = PlayedFunction(a), *e = cudaDriverEntryPointSuccess))
#undef LOSSD_PLAY

cudaError_t __real_cudaSetDevice(int device);
cudaError_t __wrap_cudaSetDevice(int device) {
  lossd::kernels::cuda::testing::device_of_thread = device;
  return playing ? cudaSuccess : __real_cudaSetDevice(device);
}
}
// NOLINTEND(bugprone-reserved-identifier)

namespace lossd::kernels::cuda::host_collectives_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Memory on the device, or what stands for it. Nothing is given back while streams of others wait: that might
// wait for them.
class Arena {
 public:
  Arena() {
    if (playing) {
      data_ = static_cast<uint8_t*>(std::malloc(kBytes));
    } else {
      EXPECT_EQ(cudaMalloc(&data_, kBytes), cudaSuccess);
    }
  }
  ~Arena() { playing ? std::free(data_) : static_cast<void>(cudaFree(data_)); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint8_t* Take(size_t bytes) {
    uint8_t* const taken = data_ + used_;
    used_ += (bytes + 255) / 256 * 256;
    EXPECT_LE(used_, kBytes);
    return taken;
  }
  void Clear() { used_ = 0; }

 private:
  static constexpr size_t kBytes = size_t{64} << 20;
  uint8_t* data_ = nullptr;
  size_t used_ = 0;
};

class DeviceFloats {
 public:
  DeviceFloats(Arena& arena, const std::vector<float>& values)
      : count_(values.size()), data_(arena.Take(Bytes())) {
    Copy(data_, values.data());
  }

  void* data() const { return data_; }
  std::vector<float> Read() const {
    std::vector<float> values(count_);
    Copy(values.data(), data_);
    return values;
  }

 private:
  size_t Bytes() const { return count_ * sizeof(float); }
  void Copy(void* to, const void* from) const {
    if (playing) {
      std::memcpy(to, from, Bytes());
    } else {
      EXPECT_EQ(cudaMemcpy(to, from, Bytes(), cudaMemcpyDefault), cudaSuccess);
      // It may return while the bytes are still on their way, and the streams of the ranks do not wait for
      // this one.
      EXPECT_EQ(cudaStreamSynchronize(cudaStreamLegacy), cudaSuccess);
    }
  }

  const size_t count_;
  void* const data_;
};

class HostCollectivesTest : public ::testing::TestWithParam<bool> {
 protected:
  struct Rank {
    std::unique_ptr<HostTransfers> transfers;
    cudaStream_t stream = nullptr;
    std::unique_ptr<HostCollectives> collectives;
    Arena arena;

    Collectives::Part Part(const DeviceFloats& floats) const { return {0, floats.data(), stream}; }
  };

  void SetUp() override {
    playing = GetParam();
    if (!HaveGloo()) GTEST_SKIP() << "a build without Gloo";
    if (!playing) LOSSD_SKIP_WITHOUT_GPU();
  }
  void TearDown() override {
    for (const auto& rank : ranks_) {
      if (rank->stream != nullptr) cudaStreamSynchronize(rank->stream);
    }
    for (const auto& rank : ranks_) rank->collectives.reset();
    for (const auto& rank : ranks_) {
      if (rank->stream != nullptr) cudaStreamDestroy(rank->stream);
    }
    ranks_.clear();
    playing = false;
  }

  void Start(int count, absl::Duration timeout = absl::Minutes(1)) {
    std::vector<std::string> addresses;
    for (int i = 0; i < count; ++i) {
      ranks_.push_back(std::make_unique<Rank>());
      Rank& rank = *ranks_.back();
      rank.transfers = CreateGlooTransfers({i, count}, "127.0.0.1", timeout).value();
      addresses.push_back(rank.transfers->Address().value());
      if (!playing) {
        ASSERT_EQ(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking), cudaSuccess);
      }
    }
    ForAll([&](Rank& rank) {
      EXPECT_TRUE(rank.transfers->Connect(addresses).ok());
      rank.collectives = HostCollectives::Create(0, rank.transfers.get()).value();
    });
  }

  void ForAll(const std::function<void(Rank&)>& run) {
    std::vector<std::thread> threads;
    for (const auto& rank : ranks_) rank->arena.Clear();
    for (const auto& rank : ranks_) threads.emplace_back([&run, &rank] { run(*rank); });
    for (std::thread& thread : threads) thread.join();
  }
  int count() const { return static_cast<int>(ranks_.size()); }
  static int IndexOf(const Rank& rank) { return rank.collectives->first_member(); }

  // Exact in fp32, and so are sums of them.
  static std::vector<float> Own(int rank, size_t n) {
    std::vector<float> values(n);
    for (size_t i = 0; i < n; ++i)
      values[i] = static_cast<float>((i * 7 + static_cast<size_t>(rank) * 131) % 1000);
    return values;
  }
  std::vector<float> SumOfOwn(size_t n) const {
    std::vector<float> sum(n);
    for (int rank = 0; rank < count(); ++rank) {
      const std::vector<float> own = Own(rank, n);
      for (size_t i = 0; i < n; ++i) sum[i] += own[i];
    }
    return sum;
  }
  static absl::Status Wait(Rank& rank, const DeviceFloats& floats) {
    return rank.collectives->Wait({rank.Part(floats)});
  }

  std::vector<std::unique_ptr<Rank>> ranks_;
};

// One float, many, and more than go in one piece.
constexpr size_t kPieceFloats = HostCollectives::kPieceBytes / sizeof(float);
constexpr size_t kSizes[] = {1, 1000, kPieceFloats, 2 * kPieceFloats + 3};

TEST_P(HostCollectivesTest, AllHaveTheSumOfAll) {
  Start(3);
  for (const size_t n : kSizes) {
    SCOPED_TRACE(n);
    ForAll([&](Rank& rank) {
      const DeviceFloats floats(rank.arena, Own(IndexOf(rank), n));
      EXPECT_TRUE(rank.collectives->SumOfAll(rank.Part(floats), static_cast<int64_t>(n)).ok());
      EXPECT_TRUE(Wait(rank, floats).ok());
      EXPECT_EQ(floats.Read(), SumOfOwn(n));
    });
  }
}

TEST_P(HostCollectivesTest, TheRootHasTheSumAndTheOthersKeepTheirs) {
  Start(3);
  for (const size_t n : kSizes) {
    for (int root = 0; root < count(); ++root) {
      SCOPED_TRACE(root);
      ForAll([&](Rank& rank) {
        const DeviceFloats floats(rank.arena, Own(IndexOf(rank), n));
        const auto sum = [&] {
          return rank.collectives->Sum({rank.Part(floats)}, static_cast<int64_t>(n), root);
        };
        EXPECT_TRUE(rank.collectives->Enqueue(sum).ok());
        EXPECT_TRUE(Wait(rank, floats).ok());
        EXPECT_EQ(floats.Read(), IndexOf(rank) == root ? SumOfOwn(n) : Own(IndexOf(rank), n));
      });
    }
  }
}

// Of every member's place at once.
TEST_P(HostCollectivesTest, ShardsAreSummedAndSpread) {
  Start(3);
  for (const size_t each : kSizes) {
    SCOPED_TRACE(each);
    const size_t n = each * static_cast<size_t>(count());
    ForAll([&](Rank& rank) {
      const DeviceFloats floats(rank.arena, Own(IndexOf(rank), n));
      const auto floats_each = static_cast<int64_t>(each);
      const auto sum = [&] { return rank.collectives->SumShards({rank.Part(floats)}, floats_each); };
      EXPECT_TRUE(rank.collectives->Enqueue(sum).ok());
      EXPECT_TRUE(Wait(rank, floats).ok());
      std::vector<float> want = Own(IndexOf(rank), n);
      const std::vector<float> all = SumOfOwn(n);
      const auto begin = static_cast<std::ptrdiff_t>(each) * IndexOf(rank);
      std::copy_n(all.begin() + begin, each, want.begin() + begin);
      EXPECT_EQ(floats.Read(), want);
      const auto spread = [&] {
        return rank.collectives->SpreadShards({rank.Part(floats)}, DType::kFloat32, floats_each);
      };
      EXPECT_TRUE(rank.collectives->Enqueue(spread).ok());
      EXPECT_TRUE(Wait(rank, floats).ok());
      EXPECT_EQ(floats.Read(), all);
    });
  }
}

TEST_P(HostCollectivesTest, AllHaveWhatTheRootSpreads) {
  Start(3);
  for (const size_t n : kSizes) {
    for (int root = 0; root < count(); ++root) {
      SCOPED_TRACE(root);
      ForAll([&](Rank& rank) {
        const DeviceFloats floats(rank.arena, Own(IndexOf(rank), n));
        const auto spread = [&] {
          // As twice as many of half the size.
          return rank.collectives->Spread({rank.Part(floats)}, DType::kBFloat16, static_cast<int64_t>(2 * n),
                                          root);
        };
        EXPECT_TRUE(rank.collectives->Enqueue(spread).ok());
        EXPECT_TRUE(Wait(rank, floats).ok());
        EXPECT_EQ(floats.Read(), Own(root, n));
      });
    }
  }
}

TEST_P(HostCollectivesTest, AllHaveWhatEachHad) {
  Start(3);
  for (const size_t n : kSizes) {
    SCOPED_TRACE(n);
    std::vector<float> want;
    for (int rank = 0; rank < count(); ++rank) {
      const std::vector<float> own = Own(rank, n);
      want.insert(want.end(), own.begin(), own.end());
    }
    ForAll([&](Rank& rank) {
      const DeviceFloats own(rank.arena, Own(IndexOf(rank), n)),
          all(rank.arena, std::vector<float>(3 * n, -1.0f));
      const auto bytes = static_cast<int64_t>(n * sizeof(float));
      EXPECT_TRUE(rank.collectives->Gather(rank.Part(all), own.data(), bytes).ok());
      EXPECT_TRUE(Wait(rank, all).ok());
      EXPECT_EQ(all.Read(), want);
    });
  }
}

// More than are enqueued at a time, one after the other without a wait: each is told from the others.
TEST_P(HostCollectivesTest, ExchangesFollowEachOther) {
  Start(2);
  constexpr size_t kTimes = 2 * HostCollectives::kMostQueued + 5;
  ForAll([&](Rank& rank) {
    const DeviceFloats floats(rank.arena, Own(IndexOf(rank), kTimes));
    for (size_t i = 0; i < kTimes; ++i) {
      const Collectives::Part part = {0, static_cast<float*>(floats.data()) + i, rank.stream};
      ASSERT_TRUE(rank.collectives->SumOfAll(part, 1).ok());
    }
    EXPECT_TRUE(Wait(rank, floats).ok());
    EXPECT_EQ(floats.Read(), SumOfOwn(kTimes));
  });
}

// The transfers' time limit ends it, with the name of the rank; what comes later does nothing, and streams go
// on.
TEST_P(HostCollectivesTest, ARankThatStaysAwayEndsTheExchange) {
  Start(2, absl::Seconds(1));
  Rank& rank = *ranks_[0];
  const DeviceFloats floats(rank.arena, {1.0f, 2.0f});
  const DeviceFloats all(rank.arena, std::vector<float>(4, 5.0f));
  // Enqueued before it is known.
  (void)rank.collectives->SumOfAll(rank.Part(floats), 2);
  (void)rank.collectives->Gather(rank.Part(all), floats.data(), 8);
  const absl::Status status = Wait(rank, floats);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("rank 0 could not"), HasSubstr("rank 1")));
  EXPECT_EQ(all.Read()[2], 0.0f) << "what has not come is zero";
  EXPECT_EQ(rank.collectives->failure(), status);
  EXPECT_EQ(rank.collectives->Enqueue([] { return absl::OkStatus(); }), status);
  (void)rank.collectives->SumOfAll(rank.Part(floats), 2);
  EXPECT_EQ(Wait(rank, floats), status);
}

TEST_P(HostCollectivesTest, AnAbortEndsAWaitWithItsReason) {
  Start(2, absl::Hours(1));
  Rank& rank = *ranks_[0];
  const DeviceFloats floats(rank.arena, {1.0f});
  const absl::Status reason = absl::UnavailableError("rank 1 is lost");
  std::thread other([&] {
    absl::SleepFor(absl::Milliseconds(20));
    EXPECT_EQ(rank.collectives->Abort(reason), reason);
  });
  (void)rank.collectives->SumOfAll(rank.Part(floats), 1);
  EXPECT_EQ(Wait(rank, floats), reason);
  other.join();
  EXPECT_EQ(rank.collectives->Abort(absl::UnavailableError("another")), reason);
}

// What carries the exchanges is aborted, as the link of a lost rank is.
TEST_P(HostCollectivesTest, ExchangesEndWithWhatCarriesThem) {
  Start(2, absl::Hours(1));
  Rank& rank = *ranks_[1];
  const DeviceFloats floats(rank.arena, {1.0f});
  std::thread other([&] {
    absl::SleepFor(absl::Milliseconds(20));
    rank.transfers->Abort(absl::UnavailableError("rank 0 is lost"));
  });
  (void)rank.collectives->SumOfAll(rank.Part(floats), 1);
  EXPECT_THAT(std::string(Wait(rank, floats).message()), HasSubstr("rank 0 is lost"));
  other.join();
}

std::string NameOf(const ::testing::TestParamInfo<bool>& played) {
  return played.param ? "Played" : "OnAGpu";
}

INSTANTIATE_TEST_SUITE_P(Cuda, HostCollectivesTest, ::testing::Values(true, false), NameOf);

}  // namespace
}  // namespace lossd::kernels::cuda::host_collectives_test
