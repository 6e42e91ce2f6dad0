// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/checkpoint_lists.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/head/checkpoint.h"
#include "tests/support/temp_folder.h"

namespace lossd::metrics::checkpoint_lists_test {
namespace {

namespace fs = std::filesystem;

class CheckpointListsTest : public testing::Test {
 protected:
  void Save(uint64_t step) {
    const head::CheckpointSubject subject{
        .head = "lm", .config = {.hidden_size = 2, .vocab_size = 3}, .step = step};
    const auto zeros = [](kernels::TensorId, int64_t, int64_t, absl::Span<uint8_t> out) {
      std::fill(out.begin(), out.end(), uint8_t{0});
      return absl::OkStatus();
    };
    const auto saved = head::SaveCheckpoint(folder_.path(), "", subject, zeros);
    ASSERT_TRUE(saved.ok()) << saved.status();
    // Seconds apart.
    fs::last_write_time(
        folder_.File(absl::StrCat("lm/", saved->name, "/manifest.json")),
        fs::file_time_type::clock::now() - std::chrono::hours(1) + std::chrono::seconds(step));
  }
  // Waits until the list is as it should be, or some time has passed.
  head::NewestCheckpoints Await(CheckpointLists& lists, const std::string& head, size_t count) {
    for (int i = 0; i < 600; ++i) {
      const auto list = lists.Of(head);
      if (list.has_value() && list->ok() && (*list)->checkpoints.size() == count) return **list;
      absl::SleepFor(absl::Milliseconds(20));
    }
    ADD_FAILURE() << "there never were " << count;
    return {};
  }

  test::TempFolder folder_;
};

TEST_F(CheckpointListsTest, TheNewestAndHowManyMore) {
  for (uint64_t step = 1; step <= CheckpointLists::kShown + 3; ++step) Save(step);
  fs::create_directories(folder_.File("lm/no-checkpoint"));
  fs::create_directories(folder_.File("lm/.tmp-x-1"));
  CheckpointLists lists(folder_.path());
  const head::NewestCheckpoints newest = Await(lists, "lm", CheckpointLists::kShown);
  EXPECT_EQ(newest.checkpoints.front().name, absl::StrCat("lm/step-00000000", CheckpointLists::kShown + 3));
  EXPECT_EQ(newest.checkpoints.back().name, "lm/step-0000000004");
  EXPECT_EQ(newest.left_out, 3u);
  EXPECT_FALSE(newest.and_more);
  EXPECT_TRUE(Await(lists, "other", 0).checkpoints.empty());
}

// However many newer ones there are; and however many are damaged, the newest are listed.
TEST_F(CheckpointListsTest, DamagedOnesAreNotHidden) {
  for (uint64_t step = 1; step <= 6; ++step) Save(step);
  const auto names = [this] {
    std::string text;
    const auto newest = head::ListNewest(folder_.path(), "lm", 4, 100);
    for (const head::CheckpointInfo& info : newest->checkpoints) {
      text += info.status.ok() ? absl::StrCat(info.subject.step, " ") : "damaged ";
    }
    return absl::StrCat(text, "and ", newest->left_out);
  };
  EXPECT_EQ(names(), "6 5 4 3 and 2");
  test::WriteWholeFile(folder_.File("lm/step-0000000001/manifest.json"), "{}");  // read before as whole
  EXPECT_EQ(names(), "6 5 4 damaged and 2");
  for (const char* step : {"2", "3", "4"}) {
    test::WriteWholeFile(folder_.File(absl::StrCat("lm/step-000000000", step, "/manifest.json")), "{}");
  }
  EXPECT_EQ(names(), "6 5 damaged damaged and 2");
  test::WriteWholeFile(folder_.File("lm/step-0000000005/manifest.json"), "{}");
  EXPECT_EQ(names(), "6 damaged damaged damaged and 2");
}

TEST_F(CheckpointListsTest, FollowsWhatChanges) {
  CheckpointLists lists(folder_.path());
  EXPECT_TRUE(Await(lists, "lm", 0).checkpoints.empty());
  Save(1);
  EXPECT_EQ(Await(lists, "lm", 1).checkpoints[0].subject.step, 1u);
  fs::remove_all(folder_.File("lm"));
  EXPECT_TRUE(Await(lists, "lm", 0).checkpoints.empty());
}

TEST_F(CheckpointListsTest, WhatIsReadIsBounded) {
  for (int i = 0; i < 30; ++i) fs::create_directories(folder_.File(absl::StrCat("lm/x", i)));
  Save(1);
  const auto some = head::ListNewest(folder_.path(), "lm", 20, 10);
  ASSERT_TRUE(some.ok()) << some.status();
  EXPECT_TRUE(some->and_more);
  EXPECT_LE(some->checkpoints.size(), 1u);
  EXPECT_EQ(head::ListNewest(folder_.path(), "..", 20, 10).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(CheckpointListsTest, OfManyHeadsAndOfNoDirectory) {
  CheckpointLists none("");
  EXPECT_TRUE((*none.Of("lm"))->checkpoints.empty());
  CheckpointLists lists(folder_.path());
  for (size_t i = 0; i < CheckpointLists::kMostHeads + 50; ++i) lists.Of(absl::StrCat("head", i));
  EXPECT_TRUE(Await(lists, "head0", 0).checkpoints.empty());
}

}  // namespace
}  // namespace lossd::metrics::checkpoint_lists_test
