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

#include "kernels/cpu/cpu_backend.h"

namespace lossd::regions::regions_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMebibyte = int64_t{1} << 20;
constexpr Regions::Kind kHost = Regions::Kind::kHost;

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

}  // namespace
}  // namespace lossd::regions::regions_test
