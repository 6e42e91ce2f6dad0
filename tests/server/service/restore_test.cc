// SPDX-License-Identifier: Apache-2.0
// --restore=latest: a server starts with every head as its newest checkpoint has it, or not at all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/server/service/heads_fixture.h"

namespace lossd::app::testing::restore_test {
namespace {

using ::testing::HasSubstr;

class RestoreTest : public HeadsTest {
 protected:
  // A server beside the fixture's, on the same folder of checkpoints.
  absl::StatusOr<std::unique_ptr<Server>> StartAgain(const std::string& restore = "latest") const {
    ServerOptions options = SmallServer();
    options.checkpoint_directory = server_.checkpoint_directory();
    options.restore = restore;
    return Server::Start(options);
  }
  void TrainAndSave(const std::string& head, uint64_t step, const std::string& name) {
    ASSERT_TRUE(Train(*client_, head, step, 1, rng_).ok());
    ASSERT_TRUE(Step(*client_, head, step).ok());
    ASSERT_TRUE(client_->SaveCheckpoint(head, name).ok());
  }
  // The largest file of a checkpoint, which has its tensors.
  std::filesystem::path TensorsOf(const std::string& checkpoint) const {
    std::filesystem::path largest;
    for (const auto& entry :
         std::filesystem::directory_iterator(server_.checkpoint_directory() + "/" + checkpoint)) {
      if (largest.empty() || entry.file_size() > std::filesystem::file_size(largest)) largest = entry.path();
    }
    return largest;
  }
};

TEST_F(RestoreTest, TheNewestOfEveryHead) {
  for (const char* head : {"first", "second"}) {
    ASSERT_TRUE(client_->CreateHead(Request(head)).ok());
    TrainAndSave(head, 0, "");
    TrainAndSave(head, 1, "a");  // before the other by name, after it in time
  }
  TrainAndSave("second", 2, "b");
  ASSERT_TRUE(Train(*client_, "first", 2, 1, rng_).ok());  // not saved: gradients of the open step
  ASSERT_TRUE(client_->CreateHead(Request("never-saved")).ok());

  const auto again = StartAgain();
  ASSERT_TRUE(again.ok()) << again.status();
  const auto client = TestClient::Connect((*again)->grpc_address());
  for (const auto& [head, step] : {std::pair{"first", 2u}, {"second", 3u}}) {
    const auto description = client->DescribeHead(head);
    ASSERT_TRUE(description.ok()) << description.status();
    EXPECT_EQ(description->state().step(), step);
    EXPECT_EQ(description->step_rows(), 0u);
    EXPECT_EQ(ReadAll(*client, head), ReadAll(*client_, head)) << head;
  }
  EXPECT_EQ(client->DescribeHead("never-saved").status().code(), absl::StatusCode::kNotFound);
  // Training goes on where it was.
  EXPECT_TRUE(Train(*client, "first", 2, 1, rng_).ok());
  EXPECT_TRUE(Step(*client, "first", 2).ok());
}

TEST_F(RestoreTest, NothingToRestore) {
  const auto again = StartAgain();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(TestClient::Connect((*again)->grpc_address())->DescribeHead("first").status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(RestoreTest, ADamagedCheckpointEndsTheStart) {
  ASSERT_TRUE(client_->CreateHead(Request("head")).ok());
  TrainAndSave("head", 0, "older");
  TrainAndSave("head", 1, "newer");
  std::fstream file(TensorsOf("head/newer"), std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-3, std::ios::end);
  file.put('\x5a');
  file.close();
  const absl::Status refused = StartAgain().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("cannot restore head/newer"));
  std::filesystem::remove_all(server_.checkpoint_directory() + "/head/newer");
  const auto again = StartAgain();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(TestClient::Connect((*again)->grpc_address())->DescribeHead("head")->state().step(), 1u);
}

TEST_F(RestoreTest, OtherValuesAreRefused) {
  const absl::Status refused = StartAgain("newest").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("restore"));
  EXPECT_THAT(refused.message(), HasSubstr("newest"));
}

}  // namespace
}  // namespace lossd::app::testing::restore_test
