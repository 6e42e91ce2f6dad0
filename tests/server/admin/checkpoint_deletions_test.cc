// SPDX-License-Identifier: Apache-2.0
// DeleteCheckpoint beside loads and saves, and its repeats.
#include "kernels/errors/field_error.h"
#include "server/admin/checkpoints.h"
#include "tests/server/admin/checkpoints_fixture.h"
#include "tests/support/head_folder.h"

namespace lossd::admin::checkpoint_deletions_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

class CheckpointDeletionsTest : public CheckpointsTest {
 protected:
  CheckpointDeletionsTest() {
    server_.CreateHead();
    server_.Train("head", 0, 2);
  }

  absl::StatusOr<v1::DeleteCheckpointResponse> Delete(const std::string& checkpoint, const std::string& id) {
    v1::DeleteCheckpointRequest request;
    request.set_checkpoint(checkpoint);
    request.set_deletion_id(id);
    return server_.operations().DeleteCheckpoint(request);
  }
  std::vector<std::string> Listed() {
    std::vector<std::string> names;
    const v1::ListCheckpointsResponse list = *server_.operations().ListCheckpoints({});
    for (const auto& info : list.checkpoints()) names.push_back(info.checkpoint());
    return names;
  }
  std::vector<std::string> Files() { return test::NamesInHeadFolder(directory_ + "/head"); }

  Instance server_{directory_, 7, &disk_, 1 << 20};
};

TEST_F(CheckpointDeletionsTest, ARepeatIsAnsweredWithTheStoredResult) {
  const auto saved = server_.Save("one");
  ASSERT_TRUE(saved.ok()) << saved.status();
  const auto first = Delete("head/one", "a");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->bytes(), saved->bytes());
  EXPECT_FALSE(first->repeated_call());
  EXPECT_THAT(Listed(), IsEmpty());
  // Another checkpoint of that name stays.
  ASSERT_TRUE(server_.Save("one").ok());
  const auto repeat = Delete("head/one", "a");
  ASSERT_TRUE(repeat.ok()) << repeat.status();
  EXPECT_TRUE(repeat->repeated_call());
  EXPECT_EQ(repeat->bytes(), first->bytes());
  EXPECT_THAT(Listed(), testing::ElementsAre("head/one"));
  // The id stands for one checkpoint.
  const absl::Status other = Delete("head/two", "a").status();
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition) << other;
  EXPECT_THAT(std::string(other.message()),
              AllOf(HasSubstr("deletion_id"), HasSubstr("head/one"), HasSubstr("head/two")));
  EXPECT_FALSE(Delete("head/one", "b")->repeated_call());
  EXPECT_THAT(Listed(), IsEmpty());
  EXPECT_THAT(server_.metrics().RenderText(),
              HasSubstr("lossd_checkpoint_removals_total{cause=\"client\"} 2\n"));
}

TEST_F(CheckpointDeletionsTest, WhatIsRefusedIsNotRemembered) {
  EXPECT_EQ(Delete("head/one", "a").status().code(), absl::StatusCode::kNotFound);
  for (const std::string& id : {std::string(), std::string(65, 'x'), std::string("a\nb"), std::string("\x7f"),
                                std::string("\xc3"), std::string("a\0b", 3)}) {
    const absl::Status status = Delete("head/one", id).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(errors::GetFieldViolation(status)->field, "deletion_id");
  }
  EXPECT_EQ(errors::GetFieldViolation(Delete("../x", "a").status())->field, "checkpoint");
  ASSERT_TRUE(server_.Save("one").ok());
  EXPECT_FALSE(Delete("head/one", "a")->repeated_call());
  ASSERT_TRUE(server_.Save("two").ok());
  EXPECT_TRUE(Delete("head/two", std::string(63, 'x') + "\xc3\xa4").ok());
}

TEST_F(CheckpointDeletionsTest, RemembersTheLastThousand) {
  Checkpoints& checkpoints = server_.operations().checkpoints();
  ASSERT_TRUE(server_.Save("0").ok());
  const std::string folder = directory_ + "/head/";
  std::filesystem::copy(folder + "0", folder + "kept", std::filesystem::copy_options::recursive);
  for (size_t i = 0; i <= CheckpointDeletions::kMostRemembered; ++i) {
    std::filesystem::create_directory(folder + "x");
    std::filesystem::copy(folder + "kept/manifest.json", folder + "x/manifest.json");
    v1::DeleteCheckpointRequest request;
    request.set_checkpoint("head/x");
    request.set_deletion_id(absl::StrCat(i));
    const auto deleted = checkpoints.Delete(request);
    ASSERT_TRUE(deleted.ok()) << deleted.status();
  }
  EXPECT_EQ(Delete("head/x", "0").status().code(), absl::StatusCode::kNotFound) << "the oldest";
  EXPECT_TRUE(Delete("head/x", "1")->repeated_call());
  EXPECT_TRUE(Delete("head/x", absl::StrCat(CheckpointDeletions::kMostRemembered))->repeated_call());
}

TEST_F(CheckpointDeletionsTest, CallsAtTheSameTimeRemoveOnce) {
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(server_.Save("one").ok());
    std::atomic<int> first{0}, repeated{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        const auto deleted = Delete("head/one", absl::StrCat("same-", round));
        ASSERT_TRUE(deleted.ok()) << deleted.status();
        ++(deleted->repeated_call() ? repeated : first);
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(first, 1);
    EXPECT_EQ(repeated, 3);
  }
}

// The load gets what was saved; its files go when it has ended.
TEST_F(CheckpointDeletionsTest, ALoadUnderWayKeepsItsFiles) {
  ASSERT_TRUE(server_.Save("one").ok());
  const Weights saved = server_.Read("head");
  server_.Train("head", 2, 4);
  int loaded = 0;
  for (int round = 0; round < 10; ++round) {
    if (round > 0) {
      ASSERT_TRUE(server_.Load("head/kept", "").ok());
      ASSERT_TRUE(server_.Save("one").ok());
    } else {
      std::filesystem::copy(directory_ + "/head/one", directory_ + "/head/kept",
                            std::filesystem::copy_options::recursive);
    }
    absl::Status status;
    std::thread loader([&] { status = server_.Load("head/one", "copy").status(); });
    absl::SleepFor(absl::Microseconds(300 * round));
    const auto deleted = Delete("head/one", absl::StrCat("load-", round));
    loader.join();
    ASSERT_TRUE(deleted.ok()) << deleted.status();
    if (status.ok()) {
      EXPECT_EQ(server_.Read("copy"), saved);
      ++loaded;
    } else {
      EXPECT_TRUE(absl::IsNotFound(status)) << status;
    }
    EXPECT_THAT(Files(), testing::ElementsAre("kept")) << "files of a deleted checkpoint stayed";
  }
  EXPECT_GT(loaded, 0);
}

// Files that another process reads go with the next save at the latest.
TEST_F(CheckpointDeletionsTest, FilesThatStayedGoWithTheNextLoadOrSave) {
  ASSERT_TRUE(server_.Save("one").ok());
  ASSERT_TRUE(server_.Save("two").ok());
  {
    const auto reader = head::CheckpointReader::Open(directory_, "head/one");
    ASSERT_TRUE(reader.ok()) << reader.status();
    ASSERT_TRUE(Delete("head/one", "a").ok());
    EXPECT_THAT(Files(), SizeIs(2));
  }
  ASSERT_TRUE(server_.Load("head/two", "").ok());
  EXPECT_THAT(Files(), testing::ElementsAre("two"));
}

// There is no such checkpoint until the save has ended; the save is not disturbed.
TEST_F(CheckpointDeletionsTest, ASaveUnderWayIsNotRemovedHalfWay) {
  disk_.CloseGate();
  absl::StatusOr<v1::SaveCheckpointResponse> saved;
  std::atomic<bool> begun{false};
  std::thread saver(
      [&] { saved = server_.Save("one", {.on_progress = [&](const v1::SaveProgress&) { begun = true; }}); });
  while (!begun) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(Delete("head/one", "a").status().code(), absl::StatusCode::kNotFound);
  disk_.OpenGate();
  saver.join();
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_TRUE(server_.Load("head/one", "copy").ok());
  EXPECT_TRUE(Delete("head/one", "a").ok());
  EXPECT_THAT(Files(), IsEmpty());
}

}  // namespace
}  // namespace lossd::admin::checkpoint_deletions_test
