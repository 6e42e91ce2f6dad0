// SPDX-License-Identifier: Apache-2.0
#include "client/cli/head_history.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "client/cli/describe.h"

namespace lossd::cli::head_history_test {
namespace {

v1::HeadDescription SomeHead() {
  v1::HeadDescription head;
  head.mutable_spec()->set_name("lm");
  head.mutable_state()->set_step(180);
  return head;
}

TEST(HeadHistoryTest, OneLine) {
  v1::HeadHistory history;
  EXPECT_EQ(HistoryText(history), "");
  history.set_applied_unix_seconds(1'700'000'000);
  EXPECT_EQ(HistoryText(history), "last step 2023-11-14 22:13:20Z");
  history.set_run("run-\n1");
  history.set_checkpoint("lm/best");
  history.set_checkpoint_step(1007);
  EXPECT_EQ(HistoryText(history).find('\n'), std::string::npos);
  history.set_run("run-1");
  EXPECT_EQ(HistoryText(history), "run run-1, last step 2023-11-14 22:13:20Z; saved as lm/best (step 1,007)");
  history.set_loaded(true);
  history.set_checkpoint_unix_seconds(1'700'000'060);
  history.set_open_run("run-1");
  EXPECT_EQ(
      HistoryText(history),
      "run run-1, last step 2023-11-14 22:13:20Z; loaded from lm/best (step 1,007), of 2023-11-14 22:14:20Z");
  history.set_open_run("run-2");
  EXPECT_TRUE(HistoryText(history).ends_with("; rows of the open step from run run-2"));
}

TEST(HeadHistoryTest, WhatIsLost) {
  v1::HeadDescription head = SomeHead();
  EXPECT_EQ(WhatIsLost(head), "head \"lm\" is at step 180: no checkpoint known");
  head.mutable_history()->set_checkpoint("lm/best");
  head.mutable_history()->set_checkpoint_step(179);
  EXPECT_EQ(WhatIsLost(head), "head \"lm\" is at step 180: 1 step since checkpoint lm/best");
  head.mutable_history()->set_checkpoint_step(180);
  EXPECT_EQ(StepsSinceSave(head), 0u);
  head.mutable_history()->set_checkpoint_step(200);  // the head went back
  EXPECT_EQ(WhatIsLost(head), "head \"lm\" is at step 180: no checkpoint known");
}

TEST(HeadHistoryTest, DescribeShowsIt) {
  v1::HeadDescription head = SomeHead();
  EXPECT_EQ(HeadText(head).find("\nhistory"), std::string::npos);
  EXPECT_EQ(ToJson(head)["history"]["run"], "");
  head.mutable_history()->set_run("run-1");
  EXPECT_NE(HeadText(head).find("history"), std::string::npos);
  EXPECT_NE(HeadText(head).find("run run-1\n"), std::string::npos);
  EXPECT_EQ(ToJson(head)["history"]["run"], "run-1");
}

}  // namespace
}  // namespace lossd::cli::head_history_test
