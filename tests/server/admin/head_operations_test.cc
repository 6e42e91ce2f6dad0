// SPDX-License-Identifier: Apache-2.0
// Tests of head_operations.h: the log of choices, and the history of a head.
#include "server/admin/head_operations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/log/log.h"
#include "tests/server/admin/checkpoints_fixture.h"

// ---- Choice log ----

namespace lossd::admin::choice_log_test {
namespace {

using ::testing::HasSubstr;

std::string Logged(log::LogLevel least) {
  log::Configure(least, log::LogFormat::kText);
  const kernels::Choice choices[] = {
      {.what = "loss", .choice = "after the logits product", .reason = "few rows"},
      {.what = "chunk", .choice = "up to 8 rows", .workspace_bytes = 4096}};
  ::testing::internal::CaptureStderr();
  LogChoices("head computes", "main", choices);
  return ::testing::internal::GetCapturedStderr();
}

TEST(ChoiceLogTest, HasAnEventForEachChoice) {
  const std::string text = Logged(log::LogLevel::kDebug);
  EXPECT_THAT(text, HasSubstr("DEBUG head computes head=main what=loss choice=\"after the logits product\" "
                              "reason=\"few rows\" workspace_bytes=0\n"));
  EXPECT_THAT(text, HasSubstr("what=chunk choice=\"up to 8 rows\" reason=\"\" workspace_bytes=4096\n"));
}

TEST(ChoiceLogTest, IsForDebuggingOnly) { EXPECT_EQ(Logged(log::LogLevel::kInfo), ""); }

}  // namespace
}  // namespace lossd::admin::choice_log_test

// ---- Head history ----
// What a head says of where its values come from, and what a call is told that names another step.

namespace lossd::admin {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class HeadHistoryTest : public CheckpointsTest {
 protected:
  HeadHistoryTest() { server_.CreateHead(); }

  Instance server_{directory_, 7, &disk_, 1 << 20};
};

TEST_F(HeadHistoryTest, AHeadKnowsItsRunAndItsCheckpoint) {
  const auto history = [](Instance& server, const std::string& head = "head") {
    v1::DescribeHeadRequest request;
    request.set_head(head);
    return server.operations().DescribeHead(request)->history();
  };
  EXPECT_EQ(history(server_).SerializeAsString(), "");
  ASSERT_TRUE(server_.Accumulate("head", 0).ok());
  v1::ApplyStepRequest request = Instance::StepRequest("head", 0);
  request.set_run("host:17");
  ASSERT_TRUE(server_.operations().ApplyStep(request).ok());
  EXPECT_EQ(history(server_).run(), "host:17");
  EXPECT_NEAR(static_cast<double>(history(server_).applied_unix_seconds()),
              static_cast<double>(absl::ToUnixSeconds(absl::Now())), 30.0);
  EXPECT_EQ(history(server_).checkpoint(), "");
  ASSERT_TRUE(server_.Save("first").ok());
  v1::HeadHistory saved = history(server_);
  EXPECT_EQ(saved.checkpoint(), "head/first");
  EXPECT_EQ(saved.checkpoint_step(), 1u);
  EXPECT_FALSE(saved.loaded());
  server_.Train("head", 1, 3);
  EXPECT_EQ(history(server_).run(), "") << "the trainer named none";
  EXPECT_EQ(history(server_).checkpoint(), "head/first");
  EXPECT_EQ(history(server_).checkpoint_step(), 1u);

  Instance other(directory_, 8, &disk_, 1 << 20);
  ASSERT_TRUE(other.Load("head/first", "copy").ok());
  v1::HeadHistory loaded = history(other, "copy");
  EXPECT_TRUE(loaded.loaded());
  loaded.set_loaded(false);
  EXPECT_EQ(loaded.SerializeAsString(), saved.SerializeAsString());
  v1::ListCheckpointsRequest list;
  EXPECT_EQ(other.operations().ListCheckpoints(list)->checkpoints(0).run(), "host:17");
}

// A save that ends after the head has got other values says nothing of these.
TEST_F(HeadHistoryTest, ASaveOfValuesThatAreGoneIsNotInTheHistory) {
  server_.Train("head", 0, 1);
  v1::ResetHeadRequest reset;
  reset.set_head("head");
  reset.set_scope(v1::RESET_SCOPE_ALL);
  reset.set_reset_id("a");
  disk_.CloseGate();
  absl::Notification read;
  Checkpoints::SaveCallbacks callbacks;
  callbacks.on_progress = [&](const v1::SaveProgress& progress) {
    if (progress.phase() == v1::SAVE_PHASE_WRITING && !read.HasBeenNotified()) read.Notify();
  };
  std::thread saver([&] { EXPECT_TRUE(server_.Save("late", callbacks).ok()); });
  read.WaitForNotification();
  EXPECT_TRUE(server_.operations().ResetHead(reset).ok());
  disk_.OpenGate();
  saver.join();
  EXPECT_EQ(server_.engine().Describe("head")->history.checkpoint, "");
}

TEST_F(HeadHistoryTest, ACallForAnotherStepIsToldWhoTrainsOrWhatWasLoaded) {
  v1::ApplyStepRequest request = Instance::StepRequest("head", 0);
  request.set_run("host:17");
  ASSERT_TRUE(server_.Accumulate("head", 0).ok());
  ASSERT_TRUE(server_.operations().ApplyStep(request).ok());
  ASSERT_TRUE(server_.Save("one").ok());
  server_.Train("head", 1, 2);
  const auto message = [&](uint64_t step, const std::string& run, Instance& server) {
    v1::ApplyStepRequest other = Instance::StepRequest("head", step);
    other.set_run(run);
    return std::string(server.operations().ApplyStep(other).status().message());
  };
  EXPECT_THAT(message(9, "host:18", server_), HasSubstr("step is not the open step, which is 2, got 9; "));
  EXPECT_THAT(message(9, "host:18", server_),
              HasSubstr("a program that names no run applied step 1 0 seconds ago"));
  request.set_step(2);
  ASSERT_TRUE(server_.Accumulate("head", 2).ok());
  ASSERT_TRUE(server_.operations().ApplyStep(request).ok());
  EXPECT_THAT(message(1, "host:18", server_),
              HasSubstr("another program trains this head: run host:17 applied step 2 0 seconds ago"));
  EXPECT_THAT(message(1, "host:17", server_), HasSubstr("this run, host:17, applied step 2"));
  Instance restored(directory_, 8, &disk_, 1 << 20);
  ASSERT_TRUE(restored.Load("head/one", "").ok());
  EXPECT_THAT(
      message(3, "host:17", restored),
      HasSubstr(
          "this head came back from a checkpoint: the server loaded head/one of step 1, saved 0 seconds "
          "ago, trained by run host:17"));
  EXPECT_THAT(message(3, "host:17", restored), Not(HasSubstr("another program")));
}

}  // namespace
}  // namespace lossd::admin
