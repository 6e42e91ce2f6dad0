// SPDX-License-Identifier: Apache-2.0
// Checkpoints of a head whose life takes a turn: it goes back and is trained again, or it is deleted during a
// save.
#include "tests/server/admin/checkpoints_fixture.h"

namespace lossd::admin::checkpoint_history_test {
namespace {

using testing::HasSubstr;

// The head goes back to an earlier step and is trained to the same step in another way. Both checkpoints of
// that step are there, each with the weights that it had.
TEST_F(CheckpointsTest, AStepThatWasTrainedAgain) {
  Instance server(directory_, 7, &disk_, 1 << 20);
  server.CreateHead();
  const auto train = [&](uint64_t step, uint64_t history) {
    ASSERT_TRUE(server.Accumulate("head", step, history).ok());
    ASSERT_TRUE(server.Apply("head", step).ok());
  };
  train(0, 1);
  ASSERT_EQ(server.Save()->checkpoint(), "head/step-0000000001");
  train(1, 1);
  ASSERT_EQ(server.Save()->checkpoint(), "head/step-0000000002");
  const Weights first = server.Read("head");
  v1::LoadCheckpointRequest back;
  back.set_checkpoint("head/step-0000000001");
  ASSERT_TRUE(server.operations().LoadCheckpoint(back).ok());
  EXPECT_EQ(server.Save().status().code(), absl::StatusCode::kAlreadyExists) << "what was loaded";
  train(1, 2);
  const Weights second = server.Read("head");
  ASSERT_NE(first, second);
  const auto saved = server.Save();
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_THAT(saved->checkpoint(), testing::MatchesRegex("head/step-0000000002-[0-9a-f]{16}"));
  for (const auto& [checkpoint, weights] :
       {std::pair(std::string("head/step-0000000002"), first), std::pair(saved->checkpoint(), second)}) {
    back.set_checkpoint(checkpoint);
    ASSERT_TRUE(server.operations().LoadCheckpoint(back).ok());
    EXPECT_EQ(server.Read("head"), weights) << checkpoint;
  }
}

// A head that is deleted while its save waits for the disk leaves no series behind.
TEST_F(CheckpointsTest, MetricsOfAHeadThatIsDeletedDuringItsSave) {
  Instance server(directory_, 7, &disk_, 1 << 20);
  server.CreateHead();
  disk_.CloseGate();
  absl::Status saved;
  absl::Notification read;
  std::thread saver([&] {
    saved = server
                .Save("", {.on_progress =
                               [&](const v1::SaveProgress& progress) {
                                 if (progress.phase() == v1::SAVE_PHASE_WRITING && !read.HasBeenNotified())
                                   read.Notify();
                               }})
                .status();
  });
  read.WaitForNotification();
  v1::DeleteHeadRequest request;
  request.set_head("head");
  EXPECT_TRUE(server.operations().DeleteHead(request).ok());
  disk_.OpenGate();
  saver.join();
  EXPECT_TRUE(saved.ok()) << saved;
  EXPECT_THAT(server.metrics().RenderText(), testing::Not(HasSubstr("head=\"head\"")));
}

}  // namespace
}  // namespace lossd::admin::checkpoint_history_test
