// SPDX-License-Identifier: Apache-2.0
#include "client/plan/cards.h"

#include <utility>

#include "client/plan/plan.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::plan::cards_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Measured Rates() { return *ParseMeasured(BuiltinMeasured()); }

Request Llama() {
  Request request;
  request.model = {.name = "llama", .hidden = 4096, .vocab = 128'256};
  return request;
}

TEST(Cards, TheMeasuredOneStaysAsItIs) {
  const auto same = OnCard(Rates(), "h200");
  ASSERT_TRUE(same.ok()) << same.status();
  EXPECT_FALSE(same->bounds.has_value());
  EXPECT_EQ(same->devices.size(), Rates().devices.size());
}

TEST(Cards, TimesOfAnotherLieBetweenWhatArithmeticAndMemorySay) {
  const auto h100 = OnCard(Rates(), "h100-sxm");
  ASSERT_TRUE(h100.ok()) << h100.status();
  EXPECT_EQ(h100->bounds->measured_on, "NVIDIA H200");
  EXPECT_DOUBLE_EQ(h100->bounds->least, 1.0);
  EXPECT_DOUBLE_EQ(h100->bounds->most, 4.8 / 3.35);
  const auto here = MakePlan(Llama(), Rates());
  const auto there = MakePlan(Llama(), *h100);
  ASSERT_TRUE(here.ok() && there.ok());
  EXPECT_EQ(there->request.memory_bytes, 80'000'000'000);
  for (size_t i = 0; i < here->speeds.size(); ++i) {
    const Estimate& measured = here->speeds[i].microbatch;
    const Estimate& bounds = there->speeds[i].microbatch;
    ASSERT_TRUE(measured.known());
    EXPECT_EQ(Name(bounds.basis), "bounds by data sheets");
    EXPECT_DOUBLE_EQ(bounds.low_seconds, measured.low_seconds);
    EXPECT_DOUBLE_EQ(bounds.high_seconds, measured.high_seconds * 4.8 / 3.35);
    EXPECT_EQ(bounds.sources, measured.sources);
    EXPECT_LT(there->speeds[i].low_rows_per_second, here->speeds[i].low_rows_per_second);
  }
  for (const LastStage& stage : there->last_stage) EXPECT_EQ(stage.microbatch.basis, Basis::kDataSheets);
  EXPECT_NEAR(*there->update.seconds, *here->update.seconds * 4.8 / 3.35, 1e-9);
  for (const Link& link : there->links) EXPECT_NE(link.transport, "cuda_ipc");
}

TEST(Cards, WhatIsNotKnownStaysSo) {
  Request small = Llama(), several = Llama();
  small.microbatch = 128;
  several.gpus = 2;
  for (const Request& request : {small, several}) {
    const auto plan = MakePlan(request, *OnCard(Rates(), "h100-nvl"));
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (const ServerSpeed& speed : plan->speeds) EXPECT_FALSE(speed.microbatch.known());
  }
}

TEST(Cards, RefusesWhatNoSheetIsKnownOf) {
  EXPECT_THAT(OnCard(Rates(), "a100").status().message(),
              AllOf(HasSubstr("card must be one of h100-nvl, h100-sxm, h200"), HasSubstr("got a100")));
  Measured mine = Rates();
  mine.card.name = "of mine";
  EXPECT_THAT(OnCard(std::move(mine), "h100-sxm").status().message(), HasSubstr("of mine"));
}

}  // namespace
}  // namespace lossd::plan::cards_test
