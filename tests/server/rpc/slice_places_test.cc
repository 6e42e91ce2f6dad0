// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/slice_places.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu_backend.h"

namespace lossd::rpc::slice_places_test {
namespace {

using engine::RowRange;

constexpr int64_t kRegionBytes = int64_t{64} << 10;
constexpr int64_t kRowBytes = 1024;

class ServerSlicePlacesTest : public ::testing::Test {
 protected:
  ServerSlicePlacesTest() {
    auto region = regions_.Create("holder", /*device=*/"", kRegionBytes);
    EXPECT_TRUE(region.ok()) << region.status();
    region_ = *std::move(region);
    std::fill(region_->bytes().begin(), region_->bytes().end(), kUntouched);
    places_.Use(region_);
  }

  absl::StatusOr<engine::IncomingSlice> Take(RowRange rows, int64_t offset, int64_t bytes) {
    v1::SliceHeader header;
    header.mutable_in_region()->set_offset(static_cast<uint64_t>(offset));
    header.mutable_in_region()->set_bytes(static_cast<uint64_t>(bytes));
    return places_.Take(header, rows, wire::PayloadView());
  }
  absl::StatusOr<engine::IncomingSlice> TakeFromMessage(RowRange rows) {
    return places_.Take(v1::SliceHeader(), rows, wire::PayloadView());
  }
  // Whether the gradients, which the engine has elsewhere, come to the region.
  bool AnswerIsInRegion(RowRange rows) {
    gradients_.assign(static_cast<size_t>(rows.size() * kRowBytes), kGradient);
    engine::SliceOutput output{.rows = rows};
    output.grad_bytes = rows.size() * kRowBytes;
    output.grad_hidden = engine::StagingBuffer(gradients_.data(), output.grad_bytes, [] {});
    v1::ComputeLossResponse response;
    const auto payload = wire::Decode(places_.Answer(std::move(output)), &response);
    EXPECT_TRUE(payload.ok()) << payload.status();
    EXPECT_EQ(payload->size(), response.slice().in_region() ? 0u : gradients_.size());
    return response.slice().in_region();
  }
  // Whether the region has gradients there, and nowhere else.
  void ExpectGradientsAt(int64_t offset, int64_t bytes) const {
    const absl::Span<const uint8_t> all = region_->bytes();
    for (int64_t i = 0; i < kRegionBytes; ++i) {
      const bool inside = i >= offset && i < offset + bytes;
      ASSERT_EQ(all[static_cast<size_t>(i)], inside ? kGradient : kUntouched) << "byte " << i;
    }
  }

  static constexpr uint8_t kUntouched = 0xa5, kGradient = 7;
  const std::unique_ptr<kernels::Backend> backend_ = kernels::CreateCpuBackend({.threads = 1}).value();
  regions::Regions regions_{backend_.get(), {.host_bytes = kRegionBytes}, 1.0};
  std::shared_ptr<regions::Region> region_;
  SlicePlaces places_;
  std::vector<uint8_t> gradients_;  // as long as answers refer to them
};

TEST_F(ServerSlicePlacesTest, GradientsLieWhereTheHiddenStatesWere) {
  ASSERT_TRUE(Take({0, 4}, 512, 4 * kRowBytes).ok());
  ASSERT_TRUE(TakeFromMessage({4, 6}).ok());
  EXPECT_TRUE(AnswerIsInRegion({0, 4}));
  ExpectGradientsAt(512, 4 * kRowBytes);
  EXPECT_FALSE(AnswerIsInRegion({4, 6}));
  ExpectGradientsAt(512, 4 * kRowBytes);
}

// The engine refuses the second one, but the first one's gradients may still be on their way here.
TEST_F(ServerSlicePlacesTest, ASliceThatRepeatsRowsMovesNoGradients) {
  ASSERT_TRUE(Take({0, 4}, 512, 4 * kRowBytes).ok());
  Take({0, 1}, kRegionBytes / 2, 256).IgnoreError();
  EXPECT_TRUE(AnswerIsInRegion({0, 4}));
  ExpectGradientsAt(512, 4 * kRowBytes);
}

TEST_F(ServerSlicePlacesTest, ASliceThatRepeatsRowsOfAMessageHasTheirGradientsWrittenNowhereBehindIt) {
  ASSERT_TRUE(TakeFromMessage({0, 4}).ok());
  Take({0, 1}, kRegionBytes / 2, 256).IgnoreError();
  EXPECT_FALSE(AnswerIsInRegion({0, 4}));
  ExpectGradientsAt(0, 0);
}

}  // namespace
}  // namespace lossd::rpc::slice_places_test
