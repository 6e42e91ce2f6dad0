// SPDX-License-Identifier: Apache-2.0
#include "server/engine/fair_share.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace lossd::engine::fair_share_test {
namespace {

using Answer = FairShare::Answer;

int64_t TakeAll(FairShare& shares, const std::string& holder) {
  int64_t taken = 0;
  while (shares.Take(holder, 1) == Answer::kYes) ++taken;
  return taken;
}

TEST(FairShareTest, EachGreedyHolderLeavesSomethingForTheNext) {
  FairShare shares(256, 0.5);
  EXPECT_EQ(TakeAll(shares, "a"), 128);
  EXPECT_EQ(TakeAll(shares, "b"), 64);
  EXPECT_EQ(TakeAll(shares, "c"), 32);
  EXPECT_EQ(shares.Check("a", 1), Answer::kOverShare);
  EXPECT_EQ(shares.used(), 224);
}

TEST(FairShareTest, WhoTakesNothingIsNoHolder) {
  FairShare shares(10, 0.5);
  EXPECT_EQ(shares.Take("a", 0), Answer::kYes);
  EXPECT_EQ(shares.holders(), 0);
}

TEST(FairShareTest, WhoHasNothingMayTakeAnyFreeAmount) {
  FairShare shares(10, 0.5);
  EXPECT_EQ(shares.Take("a", 9), Answer::kYes);
  EXPECT_EQ(shares.Check("a", 1), Answer::kOverShare);
  EXPECT_EQ(shares.Check("b", 2), Answer::kFull);
  EXPECT_EQ(shares.Take("b", 1), Answer::kYes);
  EXPECT_EQ(shares.Check("c", 1), Answer::kFull);
}

TEST(FairShareTest, WhatIsGivenBackCanBeTakenAgain) {
  FairShare shares(8, 0.5);
  EXPECT_EQ(TakeAll(shares, "a"), 4);
  shares.Give("a", 4);
  EXPECT_EQ(shares.used(), 0);
  EXPECT_EQ(shares.holders(), 0);
  EXPECT_EQ(TakeAll(shares, "b"), 4);
}

TEST(FairShareTest, WithoutARuleOneMayTakeAll) {
  FairShare shares(8, 1.0);
  EXPECT_EQ(TakeAll(shares, "a"), 8);
  FairShare anonymous(8, 0.5);
  EXPECT_EQ(TakeAll(anonymous, ""), 8);
}

TEST(FairShareTest, RemembersOnlyHoldersThatHaveSomething) {
  FairShare shares(1000, 0.5);
  for (int i = 0; i < 1000; ++i) {
    const std::string name = absl::StrCat("peer ", i);
    ASSERT_EQ(shares.Take(name, 3), Answer::kYes);
    ASSERT_EQ(shares.Take(name, 0), Answer::kYes);
    shares.Give(name, 3);
  }
  EXPECT_EQ(shares.holders(), 0);
}

}  // namespace
}  // namespace lossd::engine::fair_share_test
