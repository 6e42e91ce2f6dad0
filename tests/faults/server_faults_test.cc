// SPDX-License-Identifier: Apache-2.0
// The server is killed between any two messages, at any time and while it saves, and goes on from its last
// checkpoint with a trainer that went back to the same step.
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/faults/faults_test.h"
#include "tests/support/effort.h"
#include "tests/support/temp_folder.h"

namespace lossd::test::server_faults_test {
namespace {

using client::Client;
using ::testing::AnyOf;

class ServerFaultsTest : public FaultsTest {
 protected:
  explicit ServerFaultsTest(const RunShape& shape = {}) : FaultsTest(shape) {
    EXPECT_TRUE(Save(*direct_).ok());
  }

  // Saves both sides' state at the step now open.
  absl::Status Save(Client& client) {
    const auto saved = client.SaveCheckpoint(shape_.head, absl::StrCat("save-", saves_++));
    if (!saved.ok()) return saved.status();
    checkpoint_ = saved->checkpoint();
    trainer_state_ = trainer_.Encode();
    return absl::OkStatus();
  }

  // Starts the server again after its death, from the last checkpoint; then others may reach it.
  void RestoreServer() {
    server_.Kill();
    server_.Start();
    direct_ = Client::Connect({.target = server_.target()}).value();
    const auto loaded = direct_->LoadCheckpoint(checkpoint_);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    proxy_.SetServer(server_.target());
    Count("kills of the server");
  }

  // What a trainer does that is told of a restart: it goes back to its own last checkpoint.
  void RestoreTrainer(Client& client) {
    trainer_.Decode(trainer_state_);
    client.AcknowledgeRestart(shape_.head);
  }

  // A client that soon gives up.
  std::unique_ptr<Client> ConnectImpatiently() {
    return Client::Connect({.target = proxy_.target(),
                            .wait_for_server = true,
                            .retry = {.max_attempts = 2, .initial_backoff = absl::Milliseconds(2)}})
        .value();
  }

  std::string checkpoint_;
  std::string trainer_state_;

 private:
  int saves_ = 0;
};

TEST_F(ServerFaultsTest, DiesBetweenAnyTwoMessages) {
  const auto client = ConnectImpatiently();
  for (int64_t round = 0; round < Scaled(1); ++round) {
    for (const Direction direction : {Direction::kToServer, Direction::kToClient}) {
      bool fired = true;
      const Places places(4);
      for (int64_t message = places.first; fired; message += places.stride) {
        proxy_.Arm({.direction = direction, .after = message, .call = [this] { server_.Signal(SIGKILL); }});
        absl::Status status = TrainStep(trainer_, *client);
        if (status.ok()) status = Save(*client);
        fired = proxy_.fired();
        ASSERT_THAT(status.code(), AnyOf(absl::StatusCode::kOk, absl::StatusCode::kUnavailable)) << status;
        ASSERT_TRUE(status.ok() || fired) << status;
        if (!fired) break;
        ASSERT_NO_FATAL_FAILURE(RestoreServer());
        RestoreTrainer(*client);
        const absl::Time deadline = absl::Now() + absl::Seconds(20);
        do {
          status = TrainStep(trainer_, *client);  // until the connections are back
        } while (absl::IsUnavailable(status) && absl::Now() < deadline);
        ASSERT_TRUE(status.ok()) << status;
        ASSERT_TRUE(Undisturbed()) << "killed after message " << message;
        ASSERT_TRUE(Save(*client).ok());
      }
    }
  }
}

// The server is back, with its head restored by someone else, before the trainer has noticed. Either the
// trainer learns it, and then nothing of the step has been accumulated; or nothing had been that it knew of.
TEST_F(ServerFaultsTest, IsReplacedBehindTheTrainersBack) {
  const auto client = Connect();
  for (int64_t round = 0; round < Scaled(1); ++round) {
    for (const Direction direction : {Direction::kToServer, Direction::kToClient}) {
      bool fired = true;
      const Places places(4);
      for (int64_t message = places.first; fired; message += places.stride) {
        proxy_.Arm({.direction = direction, .after = message, .call = [this] { RestoreServer(); }});
        absl::Status status = TrainStep(trainer_, *client);
        fired = proxy_.fired();
        ASSERT_FALSE(HasFatalFailure());
        const auto head = direct_->DescribeHead(shape_.head);
        ASSERT_TRUE(head.ok()) << head.status();
        if (!status.ok()) {
          ASSERT_EQ(status.code(), absl::StatusCode::kAborted) << status;
          EXPECT_TRUE(absl::StrContains(status.message(), "server restarted")) << status;
          ASSERT_EQ(head->step_rows(), 0) << "replaced after message " << message << ": " << status;
          Count("restarts told to the trainer");
        }
        if (head->state().step() != trainer_.step() || !status.ok()) {  // lost with or after the last answer
          RestoreTrainer(*client);
          status = TrainStep(trainer_, *client);
        }
        ASSERT_TRUE(status.ok()) << status;
        ASSERT_TRUE(Undisturbed()) << "replaced after message " << message;
        ASSERT_TRUE(Save(*direct_).ok());
      }
    }
  }
}

TEST_F(ServerFaultsTest, DiesAtAnyTime) {
  const auto client = ConnectImpatiently();
  for (int64_t kill = 0; kill < Scaled(15); ++kill) {
    const absl::Duration life = absl::Microseconds(Draw(60000));
    std::thread killer([this, life] {
      absl::SleepFor(life);
      server_.Signal(SIGKILL);
    });
    absl::Status status;
    while (status.ok()) {
      status = TrainStep(trainer_, *client, AnyTravel());
      if (status.ok() && Draw(1) == 0) status = Save(*client);
    }
    killer.join();
    ASSERT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    ASSERT_NO_FATAL_FAILURE(RestoreServer());
    RestoreTrainer(*client);
    ASSERT_TRUE(Undisturbed()) << "restored";
  }
}

class SavingFaultsTest : public ServerFaultsTest {
 protected:
  // 12 MiB of checkpoint: several slices of every tensor.
  SavingFaultsTest() : ServerFaultsTest({.hidden_size = 128, .vocab_size = 8191, .microbatch_rows = 64}) {}

  // Names of the checkpoints on the disk, complete or not.
  std::vector<std::string> Checkpoints() const {
    return NamesInHeadFolder(server_.checkpoint_folder() + "/" + shape_.head);
  }
};

TEST_F(SavingFaultsTest, DiesWhileSaving) {
  constexpr int kTimed = 3;
  absl::Duration saving = absl::InfiniteDuration();
  for (int i = 0; i < kTimed; ++i) {
    const absl::Time start = absl::Now();
    ASSERT_TRUE(Save(*direct_).ok());
    saving = std::min(saving, absl::Now() - start);
  }
  for (int64_t kill = 0; kill < Scaled(8); ++kill) {
    const absl::Status status = TrainStep(trainer_, *direct_);
    ASSERT_TRUE(status.ok()) << status;
    const std::string before = checkpoint_;
    std::thread killer([this, life = saving * 1.2 * (static_cast<double>(Draw(1000)) / 1000)] {
      absl::SleepFor(life);
      server_.Signal(SIGKILL);
    });
    const absl::Status saved = Save(*direct_);
    killer.join();
    Count("kills while saving", saved.ok() ? 0 : 1);
    const std::string name = absl::StrCat("save-", kill + kTimed + 1);
    const bool complete =
        std::filesystem::exists(absl::StrCat(server_.checkpoint_folder(), "/", shape_.head, "/", name));
    if (complete) {  // whether or not the answer came
      checkpoint_ = absl::StrCat(shape_.head, "/", name);
      trainer_state_ = trainer_.Encode();
      Count("checkpoints complete although killed", saved.ok() ? 0 : 1);
    }
    ASSERT_TRUE(complete || !saved.ok());
    ASSERT_NO_FATAL_FAILURE(RestoreServer());
    RestoreTrainer(*direct_);
    for (const std::string& left : Checkpoints()) EXPECT_FALSE(absl::StartsWith(left, ".")) << left;
    ASSERT_TRUE(Undisturbed()) << "restored from " << checkpoint_ << ", before it was " << before;
  }
}

}  // namespace
}  // namespace lossd::test::server_faults_test
