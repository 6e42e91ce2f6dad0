// SPDX-License-Identifier: Apache-2.0
#include "server/regions/regions.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/backend.h"
#include "kernels/cpu/cpu_backend.h"
#include "tests/server/app/forwarding_backend.h"

namespace lossd::regions::regions_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kMebibyte = int64_t{1} << 20;
constexpr char kHost[] = "";  // its device

class RegionsTest : public ::testing::Test {
 protected:
  void Start(int64_t limit = 0) {
    auto backend = kernels::CreateCpuBackend({.threads = 1, .memory_limit_bytes = limit});
    ASSERT_TRUE(backend.ok()) << backend.status();
    backend_ = *std::move(backend);
    regions_ = std::make_unique<Regions>(backend_.get(), RegionLimits{.host_bytes = 16 * kMebibyte}, 0.5);
  }
  int64_t Staging() const { return backend_->memory().current[kernels::MemoryKind::kStaging]; }

  std::unique_ptr<kernels::Backend> backend_;
  std::unique_ptr<Regions> regions_;
};

TEST_F(RegionsTest, BelongToTheFirstWhoNamesThem) {
  Start();
  const auto region = regions_->Create("a", kHost, kMebibyte);
  ASSERT_TRUE(region.ok()) << region.status();
  EXPECT_EQ((*region)->id().size(), 16u);
  EXPECT_EQ(regions_->Claim((*region)->id(), "trainer"), *region);
  EXPECT_EQ(regions_->Claim((*region)->id(), "trainer"), *region);
  EXPECT_EQ(regions_->Claim((*region)->id(), "another"), nullptr);
  EXPECT_EQ(regions_->Claim((*region)->id(), ""), nullptr);
  for (const std::string& id : {std::string(), std::string(16, '\0'), (*region)->id() + "x"}) {
    EXPECT_EQ(regions_->Claim(id, "trainer"), nullptr);
  }
  regions_->Forget((*region)->id());
  EXPECT_EQ(regions_->Claim((*region)->id(), "trainer"), nullptr);
  EXPECT_NE((*regions_->Create("a", kHost, kMebibyte))->id(), (*region)->id());
}

TEST_F(RegionsTest, StayAsLongAsTheyAreUsedAndCountUntilThen) {
  Start();
  const int64_t before = Staging();
  auto region = *regions_->Create("a", kHost, kMebibyte);
  auto use = regions_->Claim(region->id(), "");
  regions_->Forget(region->id());
  region.reset();
  use->bytes().back() = 1;
  EXPECT_EQ(regions_->used_bytes(), kMebibyte);
  EXPECT_EQ(Staging() - before, kMebibyte);
  use.reset();
  EXPECT_EQ(regions_->used_bytes(), 0);
  EXPECT_EQ(Staging(), before);
}

TEST_F(RegionsTest, EachHolderHasItsShare) {
  Start();
  const auto first = regions_->Create("greedy", kHost, 1000 * kMebibyte);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ((*first)->bytes().size(), static_cast<size_t>(8 * kMebibyte)) << "a half, the first time as well";
  EXPECT_TRUE(regions_->Create("modest", kHost, 2 * kMebibyte).ok());
  regions_->Forget((*first)->id());
}

TEST_F(RegionsTest, AreBoundedInAllAndPerHolder) {
  Start();
  std::vector<std::shared_ptr<Region>> held;
  while (true) {
    auto region = regions_->Create("greedy", kHost, 2 * kMebibyte);
    if (!region.ok()) {
      EXPECT_EQ(region.status().code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(std::string(region.status().message()), HasSubstr("--shared_memory_bytes"));
      break;
    }
    held.push_back(*std::move(region));
    ASSERT_LE(held.size(), 16u);
  }
  EXPECT_LE(regions_->used_bytes(), 8 * kMebibyte);
  EXPECT_TRUE(regions_->Create("modest", kHost, 2 * kMebibyte).ok());
}

TEST_F(RegionsTest, RespectTheMemoryLimit) {
  Start(4 * kMebibyte);
  const auto region = regions_->Create("a", kHost, 8 * kMebibyte);
  EXPECT_EQ(region.status().code(), absl::StatusCode::kResourceExhausted) << region.status();
  EXPECT_EQ(regions_->used_bytes(), 0);
  EXPECT_TRUE(regions_->Create("a", kHost, kMebibyte).ok());
}

// A backend with devices, whose memory is the host's here.
class SharingBackend final : public kernels::ForwardingBackend {
 public:
  SharingBackend(std::unique_ptr<kernels::Backend> backend, std::vector<std::string> devices)
      : kernels::ForwardingBackend(std::move(backend)), devices_(std::move(devices)) {}

  std::vector<std::string> SharingDevices() const override { return devices_; }
  absl::StatusOr<std::unique_ptr<kernels::SharedDeviceMemory>> ShareDeviceMemory(absl::string_view device,
                                                                                 int64_t bytes) override {
    ++asked;
    if (device == apart) return absl::UnimplementedError("nothing connects them");
    return std::make_unique<Memory>(bytes);
  }
  absl::Status ReachDeviceMemory(absl::Span<uint8_t>) override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> AdoptStaging(
      absl::Span<uint8_t> memory, const kernels::AdoptOptions& options) override {
    return backend()->AdoptStaging(memory, options);
  }

  std::string apart;  // a device that shares none after all
  int asked = 0;

 private:
  class Memory final : public kernels::SharedDeviceMemory {
   public:
    explicit Memory(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {}
    absl::Span<uint8_t> bytes() const override { return absl::MakeSpan(bytes_); }
    int descriptor() const override { return -1; }
    absl::Status CopyToHost(absl::Span<const uint8_t>, uint8_t*) const override { return absl::OkStatus(); }
    absl::Status CopyFromHost(const uint8_t*, absl::Span<uint8_t>) const override { return absl::OkStatus(); }

   private:
    mutable std::vector<uint8_t> bytes_;
  };

  const std::vector<std::string> devices_;
};

class DeviceRegionsTest : public ::testing::Test {
 protected:
  DeviceRegionsTest()
      : backend_(*kernels::CreateCpuBackend({.threads = 1}), {"GPU-a", "GPU-b"}),
        regions_(&backend_, {.host_bytes = 2 * kMebibyte, .device_bytes = 4 * kMebibyte}, 0.5) {}

  SharingBackend backend_;
  Regions regions_;
};

TEST_F(DeviceRegionsTest, AreOfTheDeviceThatIsAskedFor) {
  EXPECT_EQ(regions_.devices(), (std::vector<std::string>{"GPU-a", "GPU-b"}));
  for (const std::string device : {"GPU-b", "GPU-a"}) {
    const auto region = regions_.Create("client", device, kMebibyte);
    ASSERT_TRUE(region.ok()) << region.status();
    EXPECT_EQ((*region)->memory().device(), device);
    EXPECT_EQ(regions_.Claim((*region)->id(), "trainer"), *region);
  }
  for (const std::string device : {"GPU-c", "GPU-", "gpu-a"}) {
    const absl::Status refused = regions_.Create("client", device, kMebibyte).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(refused.message(),
              absl::StrCat("device must be one of the server's GPUs, GPU-a, GPU-b, got ", device));
  }
  EXPECT_EQ(backend_.asked, 2);
}

TEST_F(DeviceRegionsTest, LimitsAndSharesHoldForEachDevice) {
  // All that a process may have of a device, with its first region, too.
  const auto share = regions_.Create("greedy", "GPU-a", 64 * kMebibyte);
  ASSERT_TRUE(share.ok()) << share.status();
  EXPECT_EQ((*share)->bytes().size(), static_cast<size_t>(2 * kMebibyte));
  EXPECT_THAT(std::string(regions_.Create("greedy", "GPU-a", kMebibyte).status().message()),
              HasSubstr("--shared_device_memory_bytes has nothing left for this process on GPU-a"));
  const auto rest = regions_.Create("modest", "GPU-a", 2 * kMebibyte);
  ASSERT_TRUE(rest.ok()) << rest.status();
  const auto other = regions_.Create("greedy", "GPU-b", 2 * kMebibyte);
  ASSERT_TRUE(other.ok()) << "its share of the other device is its own: " << other.status();
  EXPECT_THAT(std::string(regions_.Create("greedy", "GPU-b", 2 * kMebibyte).status().message()),
              HasSubstr("has nothing left for this process on GPU-b"));
  EXPECT_TRUE(regions_.Create("modest", "GPU-b", kMebibyte).ok());
  const auto of_host = regions_.Create("greedy", "", kMebibyte);
  EXPECT_TRUE(of_host.ok()) << "nor does memory of the host count there: " << of_host.status();

  std::vector<std::string> uses;
  for (const RegionUse& use : regions_.Uses()) {
    uses.push_back(absl::StrCat(use.device, " ", use.used_bytes >> 20, " of ", use.limit_bytes >> 20));
  }
  EXPECT_THAT(uses, ElementsAre(" 1 of 2", "GPU-a 4 of 4", "GPU-b 3 of 4"));
  EXPECT_EQ(regions_.used_bytes(), 8 * kMebibyte);
}

TEST_F(DeviceRegionsTest, ADeviceThatSharesNoneTakesNothingOfItsLimit) {
  backend_.apart = "GPU-b";
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(regions_.Create("client", "GPU-b", 4 * kMebibyte).status(),
              absl::UnimplementedError("nothing connects them"));
  }
  EXPECT_EQ(regions_.used_bytes(), 0);
  EXPECT_TRUE(regions_.Create("client", "GPU-a", kMebibyte).ok());
}

}  // namespace
}  // namespace lossd::regions::regions_test
