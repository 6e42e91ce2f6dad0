// SPDX-License-Identifier: Apache-2.0
#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/engine/stream.h"

namespace lossd::engine::versions_test {
namespace {

using ::testing::HasSubstr;

TEST(HeadVersionsTest, NoTwoHeadsAndNoTwoVersionsHaveTheSameNumber) {
  VersionCounter counter;
  HeadVersions a(&counter), b(&counter);
  std::set<uint64_t> numbers;
  const auto see = [&](const HeadVersions& versions) {
    numbers.insert({versions.generation(), versions.weights(), versions.moments(), versions.accumulation()});
  };
  see(a), see(b);
  EXPECT_EQ(numbers.size(), 8u);
  a.NewGeneration("zeroed");  // and another accumulation
  b.NewWeights("applied");
  see(a), see(b);
  EXPECT_EQ(numbers.size(), 11u);
  EXPECT_FALSE(numbers.contains(0));
}

TEST(HeadVersionsTest, SaysWhatHasChanged) {
  VersionCounter counter;
  HeadVersions versions(&counter);
  const Binding binding{.step = 0,
                        .generation = versions.generation(),
                        .weights = versions.weights(),
                        .moments = versions.moments(),
                        .accumulation = versions.accumulation()};
  EXPECT_TRUE(versions.Check(binding).ok());
  versions.NewWeights("a checkpoint was loaded");
  EXPECT_EQ(versions.Check(binding).code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(versions.Check(binding).message()), HasSubstr("a checkpoint was loaded"));
  EXPECT_TRUE(versions.Check({.generation = binding.generation, .moments = binding.moments}).ok());
  versions.SetStep(1, "step 0 was applied");
  EXPECT_THAT(std::string(versions.Check(binding).message()), HasSubstr("step 0 was applied"));
}

TEST(HeadVersionsTest, AWriteIsAChangeAtItsFirstRowAndAtItsEnd) {
  VersionCounter counter;
  HeadVersions versions(&counter);
  const uint64_t before = versions.weights();
  const uint64_t write = versions.BeginWrite(Written::kValue);
  const uint64_t begun = versions.weights();
  EXPECT_GT(begun, before);
  EXPECT_TRUE(versions.values_being_written());
  versions.EndWrite(write, /*several=*/true);
  EXPECT_GT(versions.weights(), begun);
  EXPECT_FALSE(versions.being_written());
  const uint64_t ended = versions.weights();
  versions.EndWrite(write, /*several=*/true);
  EXPECT_EQ(versions.weights(), ended) << "it has ended";

  const uint64_t single = versions.BeginWrite(Written::kValue);
  const uint64_t written = versions.weights();
  versions.EndWrite(single, /*several=*/false);
  EXPECT_EQ(versions.weights(), written);
}

TEST(HeadVersionsTest, AMomentIsNoValue) {
  VersionCounter counter;
  HeadVersions versions(&counter);
  const uint64_t weights = versions.weights(), moments = versions.moments();
  const uint64_t write = versions.BeginWrite(Written::kMoment);
  EXPECT_TRUE(versions.being_written());
  EXPECT_FALSE(versions.values_being_written());
  EXPECT_EQ(versions.weights(), weights);
  EXPECT_GT(versions.moments(), moments);
  EXPECT_TRUE(versions.IsWriting(write));
  versions.EndWrites();
  EXPECT_FALSE(versions.IsWriting(write));
  EXPECT_FALSE(versions.being_written());
}

}  // namespace
}  // namespace lossd::engine::versions_test
