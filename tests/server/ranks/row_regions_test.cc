// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/row_regions.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"

namespace lossd::ranks::row_regions_test {
namespace {

constexpr size_t kBytes = 4096;

class RowRegionsTest : public ::testing::Test {
 protected:
  static wire::OwnedDescriptor AnyDescriptor() {
    return wire::OwnedDescriptor(open("/dev/null", O_RDONLY | O_CLOEXEC));
  }
  uint64_t Add() { return regions_.Add(absl::MakeSpan(memory_), AnyDescriptor()); }
  // Tells worker `rank` all that there is, and has it map what it hears of.
  void TellAll(int rank, bool mapped = true) {
    while (const auto news = regions_.NextNews(rank)) {
      regions_.Told(rank, *news);
      if (news->message.bytes() > 0) {
        EXPECT_TRUE(regions_.OnAnswer(rank, news->message.region(), mapped));
      }
    }
  }
  uint8_t* at(size_t offset) { return memory_.data() + offset; }

  int news_ = 0;
  RowRegions regions_{3, [this] { ++news_; }};
  std::vector<uint8_t> memory_ = std::vector<uint8_t>(kBytes);
};

TEST_F(RowRegionsTest, RowsHaveAPlaceOnceAWorkerHasMappedThem) {
  ASSERT_TRUE(regions_.Enter(1));
  const uint64_t region = Add();
  EXPECT_EQ(news_, 1);
  EXPECT_FALSE(regions_.Find(1, at(0), 1).has_value()) << "it has not heard of it";
  const auto news = regions_.NextNews(1);
  ASSERT_TRUE(news.has_value());
  EXPECT_EQ(news->message.region(), region);
  EXPECT_EQ(news->message.bytes(), kBytes);
  EXPECT_TRUE(news->descriptor != nullptr && *news->descriptor);
  regions_.Told(1, *news);
  EXPECT_FALSE(regions_.Find(1, at(0), 1).has_value()) << "it has not answered";
  EXPECT_TRUE(regions_.OnAnswer(1, region, true));
  const auto place = regions_.Find(1, at(100), 50);
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->region(), region);
  EXPECT_EQ(place->offset(), 100u);
  EXPECT_FALSE(regions_.Find(2, at(100), 50).has_value()) << "another worker, which is not here";
}

TEST_F(RowRegionsTest, BytesLieInOneRegionOrHaveNoPlace) {
  ASSERT_TRUE(regions_.Enter(1));
  Add();
  TellAll(1);
  EXPECT_TRUE(regions_.Find(1, at(0), kBytes).has_value());
  EXPECT_TRUE(regions_.Find(1, at(kBytes - 1), 1).has_value());
  EXPECT_TRUE(regions_.Find(1, at(0) + kBytes, 0).has_value());
  EXPECT_FALSE(regions_.Find(1, at(0), kBytes + 1).has_value());
  EXPECT_FALSE(regions_.Find(1, at(1), kBytes).has_value());
  EXPECT_FALSE(regions_.Find(1, at(0) - 1, 1).has_value());
  EXPECT_FALSE(regions_.Find(1, at(0) + kBytes + 1, 0).has_value());
  EXPECT_FALSE(regions_.Find(1, at(1), std::numeric_limits<size_t>::max()).has_value());
  EXPECT_FALSE(regions_.Find(1, nullptr, 1).has_value());
}

TEST_F(RowRegionsTest, AWorkerThatRefusesGetsMessages) {
  ASSERT_TRUE(regions_.Enter(1));
  ASSERT_TRUE(regions_.Enter(2));
  Add();
  TellAll(1, /*mapped=*/false);
  TellAll(2);
  EXPECT_FALSE(regions_.Find(1, at(0), 1).has_value());
  EXPECT_TRUE(regions_.Find(2, at(0), 1).has_value());
}

TEST_F(RowRegionsTest, AWorkerThatComesLaterHearsOfWhatThereIs) {
  Add();
  EXPECT_FALSE(regions_.NextNews(1).has_value());
  EXPECT_FALSE(regions_.AnyHere());
  ASSERT_TRUE(regions_.Enter(1));
  EXPECT_TRUE(regions_.AnyHere());
  TellAll(1);
  EXPECT_TRUE(regions_.Find(1, at(0), 1).has_value());
}

TEST_F(RowRegionsTest, AWorkerComesOnceAndHasNothingOnceItHasGone) {
  ASSERT_TRUE(regions_.Enter(1));
  EXPECT_FALSE(regions_.Enter(1));
  Add();
  TellAll(1);
  regions_.Leave(1);
  EXPECT_FALSE(regions_.Find(1, at(0), 1).has_value());
  EXPECT_FALSE(regions_.Enter(1));
  EXPECT_FALSE(regions_.AnyHere());
}

TEST_F(RowRegionsTest, WhatIsRemovedHasNoPlaceAndItsWorkersHearSo) {
  ASSERT_TRUE(regions_.Enter(1));
  const uint64_t region = Add();
  TellAll(1);
  regions_.Remove(region);
  EXPECT_FALSE(regions_.Find(1, at(0), 1).has_value());
  const auto news = regions_.NextNews(1);
  ASSERT_TRUE(news.has_value());
  EXPECT_EQ(news->message.region(), region);
  EXPECT_EQ(news->message.bytes(), 0u);
  EXPECT_EQ(news->descriptor, nullptr);
  regions_.Told(1, *news);
  EXPECT_FALSE(regions_.NextNews(1).has_value());
  EXPECT_NE(Add(), region) << "ids are not used again";
}

TEST_F(RowRegionsTest, WhatIsRemovedUnheardIsNeverHeardOf) {
  ASSERT_TRUE(regions_.Enter(1));
  regions_.Remove(Add());
  EXPECT_FALSE(regions_.NextNews(1).has_value());
  regions_.Remove(7);
}

// While the worker is told of a region, which takes place without the table's lock.
TEST_F(RowRegionsTest, WhatIsRemovedWhileAWorkerIsToldIsForgotten) {
  ASSERT_TRUE(regions_.Enter(1));
  const uint64_t region = Add();
  const auto news = regions_.NextNews(1);
  regions_.Remove(region);
  regions_.Told(1, *news);
  EXPECT_TRUE(regions_.OnAnswer(1, region, true));
  EXPECT_FALSE(regions_.Find(1, at(0), 1).has_value());
  const auto gone = regions_.NextNews(1);
  ASSERT_TRUE(gone.has_value());
  EXPECT_EQ(gone->message.region(), region);
  EXPECT_EQ(gone->message.bytes(), 0u);
}

TEST_F(RowRegionsTest, AnAnswerToNothingIsNone) {
  ASSERT_TRUE(regions_.Enter(1));
  const uint64_t region = Add();
  EXPECT_FALSE(regions_.OnAnswer(1, region, true)) << "it was not told";
  TellAll(1);
  EXPECT_FALSE(regions_.OnAnswer(1, region, false)) << "it has answered";
  EXPECT_FALSE(regions_.OnAnswer(1, region + 1, true));
  EXPECT_FALSE(regions_.OnAnswer(1, 0, true));
}

TEST_F(RowRegionsTest, AllIsBounded) {
  ASSERT_TRUE(regions_.Enter(1));
  std::vector<uint8_t> memory(RowRegions::kMost + 1);
  std::vector<uint64_t> ids;
  for (uint8_t& byte : memory) ids.push_back(regions_.Add({&byte, 1}, AnyDescriptor()));
  EXPECT_EQ(ids.back(), 0u);
  EXPECT_NE(ids[ids.size() - 2], 0u);
  // The worker takes nothing more: news of it stay as many as there can be regions.
  for (int round = 0; round < 5; ++round) {
    for (uint64_t id : ids) regions_.Remove(id);
    ids.clear();
    for (uint8_t& byte : memory) ids.push_back(regions_.Add({&byte, 1}, AnyDescriptor()));
  }
  size_t count = 0;
  for (; const auto news = regions_.NextNews(1); ++count) regions_.Told(1, *news);
  EXPECT_EQ(count, RowRegions::kMost);
  EXPECT_EQ(regions_.Add({}, AnyDescriptor()), 0u);
}

TEST_F(RowRegionsTest, OneMemoryIsOneRegion) {
  const uint64_t region = Add();
  EXPECT_EQ(Add(), 0u);
  regions_.Remove(region);
  EXPECT_NE(Add(), 0u);
}

TEST_F(RowRegionsTest, WaitsForThoseThatAreHere) {
  regions_.AwaitAnswers(Add(), absl::InfiniteDuration());  // nobody is
  ASSERT_TRUE(regions_.Enter(1));
  TellAll(1);
  std::vector<uint8_t> more(kBytes);
  const uint64_t region = regions_.Add(absl::MakeSpan(more), AnyDescriptor());
  const absl::Time begin = clocks::SteadyNow();
  regions_.AwaitAnswers(region, absl::Milliseconds(20));
  EXPECT_GE(clocks::SteadyNow() - begin, absl::Milliseconds(20));
  TellAll(1, /*mapped=*/false);
  regions_.AwaitAnswers(region, absl::InfiniteDuration());
}

}  // namespace
}  // namespace lossd::ranks::row_regions_test
