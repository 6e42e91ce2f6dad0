// SPDX-License-Identifier: Apache-2.0
// Clients that are killed at any moment, that fork, and very many of them, with rows in shared memory (or of
// a GPU): others see nothing of it, and the server has what it had before they came.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "tests/faults/fault_proxy.h"
#include "tests/faults/faults_test.h"
#include "tests/faults/small_run.h"
#include "tests/support/effort.h"
#include "tests/support/process_holdings.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_folder.h"

namespace lossd::test::client_deaths_test {
namespace {

constexpr int64_t kRegionBytes = int64_t{1} << 20;
constexpr char kLittle[] = "--region_bytes=1048576";
constexpr absl::Duration kPatience = absl::Seconds(120);

int64_t Scaled(int64_t count) { return count * static_cast<int64_t>(Environment("LOSSD_FAULT_SCALE", 1)); }

class ClientDeathsTest : public testing::Test {
 protected:
  ClientDeathsTest() {
    std::cout << "LOSSD_TEST_SEED=" << seed_ << "\n";
    EXPECT_TRUE(observer_->CreateHead(SteadyClient::Head()).ok());
    // What the server makes with its first clients, and keeps.
    for (const int clients : {1, 3})
      EXPECT_EQ(RunToTheEnd({absl::StrCat("--clients=", clients), kLittle, "--calls=2"}), 0);
    before_ = SettledHoldingsOf(server_.pid(), *observer_);
    EXPECT_EQ(before_.mappings, 0);
  }
  ~ClientDeathsTest() override {
    stop_ = true;
    for (std::thread& thread : others_) thread.join();
  }

  int64_t Draw(int64_t most) { return std::uniform_int_distribution<int64_t>(0, most)(random_); }

  // From now on two clients compute all the time; they belong to what was before.
  void LetOthersCompute() {
    constexpr int kOthers = 2;
    std::atomic<int> computing = 0;
    for (int i = 0; i < kOthers; ++i) {
      others_.emplace_back([this, &computing] {
        auto client = SteadyClient::Connect(server_.target(), {512, 200}, kRegionBytes);
        absl::Status status = client.status();
        if (status.ok()) status = (*client)->Compute();
        ++computing;
        while (status.ok() && !stop_) {
          status = (*client)->Compute();
          if (status.ok()) ++computed_;
        }
        EXPECT_TRUE(status.ok()) << status;
      });
    }
    while (computing < kOthers) absl::SleepFor(absl::Milliseconds(1));
    before_ = HoldingsOf(server_.pid(), *observer_);
    touched_ = kOthers * kRegionBytes;
  }

  void Start(const std::vector<std::string>& flags, const std::string& target) {
    std::filesystem::remove(ready_);
    std::vector<std::string> command = {FAULT_PROCESS, "client", absl::StrCat("--server=", target),
                                        absl::StrCat("--ready=", ready_)};
    command.insert(command.end(), flags.begin(), flags.end());
    process_ = std::make_unique<ChildProcess>(std::move(command));
  }
  int RunToTheEnd(const std::vector<std::string>& flags) {
    Start(flags, server_.target());
    return process_->WaitFor(kPatience);
  }
  // What the process says when it is ready: the number of its child; -1 if it has ended before.
  pid_t AwaitReady() {
    pid_t child = -1;
    while (!std::filesystem::exists(ready_)) {
      if (!process_->Running()) return -1;
      absl::SleepFor(absl::Milliseconds(1));
    }
    std::ifstream(ready_) >> child;
    return child;
  }
  testing::AssertionResult NothingIsLeft() { return BackTo(before_, server_.pid(), *observer_, touched_); }
  // But for the connections of a child that has not ended.
  testing::AssertionResult NoMemoryIsLeft() {
    Holdings holdings = before_;
    holdings.descriptors += 100;
    return BackTo(holdings, server_.pid(), *observer_, touched_);
  }

  const uint64_t seed_ = Environment("LOSSD_TEST_SEED", std::random_device()());
  std::mt19937_64 random_{seed_};
  ServerProcess server_{LOSSD_BINARY};
  const std::unique_ptr<client::Client> observer_ =
      client::Client::Connect({.target = server_.target(), .channels = 1, .transport = "grpc"}).value();
  TempFolder folder_;
  const std::string ready_ = folder_.File("ready");
  std::unique_ptr<ChildProcess> process_;
  Holdings before_;
  int64_t touched_ = 0;
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> computed_ = 0;
  std::vector<std::thread> others_;
};

// While it connects, opens or enlarges its region, copies, waits, or between computations.
TEST_F(ClientDeathsTest, KilledAtAnyMoment) {
  LetOthersCompute();
  for (int64_t i = 0; i < Scaled(Attempts(8, 16)); ++i) {
    Start({"--rows=300,4096,16384"}, server_.target());
    if (i % 4 != 0) {
      ASSERT_EQ(AwaitReady(), 0);
      absl::SleepFor(absl::Microseconds(Draw(40'000)));
    } else {
      absl::SleepFor(absl::Microseconds(Draw(80'000)));
    }
    process_->Signal(SIGKILL);
    ASSERT_EQ(process_->WaitFor(kPatience), -SIGKILL);
    ASSERT_TRUE(NothingIsLeft()) << "death " << i;
  }
  EXPECT_GT(computed_, 0);
}

TEST_F(ClientDeathsTest, KilledBetweenAnyTwoMessages) {
  LetOthersCompute();
  FaultProxy proxy(server_.target(), seed_);
  int64_t deaths = 0;
  for (const Direction direction : {Direction::kToServer, Direction::kToClient}) {
    bool fired = true;
    const Places places(3);
    for (int64_t message = places.first; fired; message += places.stride) {
      proxy.Arm({.direction = direction, .after = message, .action = Fault::Action::kNone, .call = [this] {
                   process_->Signal(SIGKILL);
                 }});
      Start({"--rows=160", "--calls=2"}, proxy.target());
      const int end = process_->WaitFor(kPatience);
      fired = proxy.fired();
      ASSERT_THAT(end, testing::AnyOf(0, -SIGKILL)) << "message " << message;
      deaths += end == -SIGKILL ? 1 : 0;
      proxy.Heal();
      ASSERT_TRUE(NothingIsLeft()) << "killed after message " << message;
    }
  }
  std::cout << "tried: " << deaths << " deaths\n";
  EXPECT_GT(deaths, Attempts(3, 10));
  EXPECT_GT(computed_, 0);
}

// A child has what its parent had: the connection, the session and the memory.
TEST_F(ClientDeathsTest, ForksDuringACall) {
  LetOthersCompute();
  for (int64_t i = 0; i < Scaled(4); ++i) {
    const bool dies_in_a_call = i % 2 == 0;
    std::vector<std::string> flags = {"--forks", "--rows=512,2000"};
    if (!dies_in_a_call) flags.insert(flags.end(), {"--calls=4", "--dies"});
    Start(flags, server_.target());
    const pid_t child = AwaitReady();
    ASSERT_GT(child, 0) << "its results were wrong, or the fork broke it";
    if (dies_in_a_call) {
      absl::SleepFor(absl::Microseconds(Draw(20'000)));
      process_->Signal(SIGKILL);
    }
    ASSERT_EQ(process_->WaitFor(kPatience), -SIGKILL) << "its results were right until then";
    // A call that was under way stays as long as its connection does.
    if (!dies_in_a_call) {
      EXPECT_TRUE(NoMemoryIsLeft()) << "although the child is there";
    }
    ASSERT_EQ(kill(child, SIGKILL), 0) << "the child was there";
    ASSERT_TRUE(NothingIsLeft());
  }
  EXPECT_GT(computed_, 0);
}

TEST_F(ClientDeathsTest, HundredsOfClientsComputeAndDie) {
  constexpr int kTogether = 20;
  for (int64_t i = 0; i < Scaled(Attempts(10, 50)); ++i) {
    ASSERT_EQ(
        RunToTheEnd({absl::StrCat("--clients=", kTogether), "--calls=1", "--dies", "--rows=64", kLittle}),
        -SIGKILL);
  }
  ASSERT_TRUE(NothingIsLeft());
  EXPECT_EQ(RunToTheEnd({"--calls=2"}), 0) << "the next one finds a server";
  EXPECT_TRUE(NothingIsLeft());
}

}  // namespace
}  // namespace lossd::test::client_deaths_test
