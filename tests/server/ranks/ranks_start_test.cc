// SPDX-License-Identifier: Apache-2.0
// Tests of how ranks start: ranks that end before they serve, and the programs that launch ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/clocks/clock.h"
#include "tests/server/service/small_training.h"
#include "tests/support/fake_host.h"
#include "tests/support/server_process.h"

// ---- Ranks that end early ----
// Ranks that are stopped or killed before they serve: whoever was asked to stop ends at once, and says so,
// and the others end or wait for it to come again.

namespace lossd::app::testing::ranks_start_test {
namespace {

using test::RankServer;
using test::RankServerOptions;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr absl::Duration kLimit = absl::Minutes(3);  // for what a slow machine does

// The last rank looks for rank 0 where there is nothing.
RankServerOptions WithoutTheLastRank(int ranks) {
  return {.ranks = ranks,
          .flags = {"--rank_timeout=1h"},
          .flags_of =
              [ranks](int rank) {
                return rank == ranks - 1 ? std::vector<std::string>{"--leader=127.0.0.1:1"}
                                         : std::vector<std::string>();
              },
          .await = false};
}

void AwaitLog(const RankServer& ranks, int rank, const std::string& text) {
  const absl::Time deadline = clocks::SteadyNow() + kLimit;
  while (!absl::StrContains(ranks.log(rank), text)) {
    ASSERT_LT(clocks::SteadyNow(), deadline) << ranks.log(rank);
    absl::SleepFor(absl::Milliseconds(5));
  }
}

TEST(RanksStartTest, RankZeroThatWaitsEndsWithTheRanksThatAreThere) {
  for (const int signal : {SIGTERM, SIGINT}) {
    RankServer ranks(LOSSD_BINARY, WithoutTheLastRank(3));
    AwaitLog(ranks, 0, "rank is there");
    ranks.rank(0).Signal(signal);
    EXPECT_EQ(ranks.rank(0).WaitFor(kLimit), 0);
    EXPECT_EQ(ranks.rank(1).WaitFor(kLimit), 0);
    EXPECT_THAT(ranks.log(0), HasSubstr(std::string("stopped reason=") + strsignal(signal) +
                                        " while=\"waiting for the other ranks\""));
    EXPECT_THAT(ranks.log(1), HasSubstr("stopped"));
    EXPECT_TRUE(ranks.rank(2).Running());
  }
}

TEST(RanksStartTest, AWorkerThatWaitsForRankZeroEnds) {
  for (const int signal : {SIGTERM, SIGINT}) {
    RankServer ranks(LOSSD_BINARY, WithoutTheLastRank(2));
    AwaitLog(ranks, 1, "worker version=");
    ranks.rank(1).Signal(signal);
    EXPECT_EQ(ranks.rank(1).WaitFor(kLimit), 0) << ranks.log(1);
    EXPECT_THAT(ranks.log(1), HasSubstr(std::string("reason=") + strsignal(signal)));
    EXPECT_THAT(ranks.log(1), HasSubstr("stopped"));
    EXPECT_TRUE(ranks.rank(0).Running()) << "it may come again";
  }
}

TEST(RanksStartTest, AWorkerThatWaitsForOtherRanksEndsAndMayComeAgain) {
  RankServer ranks(LOSSD_BINARY, WithoutTheLastRank(3));
  AwaitLog(ranks, 0, "rank is there");
  ranks.rank(1).Signal(SIGTERM);
  EXPECT_EQ(ranks.rank(1).WaitFor(kLimit), 0) << ranks.log(1);
  EXPECT_TRUE(ranks.rank(0).Running());
  ranks.rank(0).Signal(SIGTERM);
  EXPECT_EQ(ranks.rank(0).WaitFor(kLimit), 0) << ranks.log(0);
}

TEST(RanksStartTest, ServiceManagersAreToldNothingBeforeAllRanksAreThere) {
  const test::FakeServiceManager manager;
  RankServer ranks(LOSSD_BINARY, WithoutTheLastRank(3));
  AwaitLog(ranks, 0, "rank is there");
  AwaitLog(ranks, 1, "worker version=");
  EXPECT_EQ(manager.Next(absl::Milliseconds(500)), std::nullopt);
}

TEST(RanksStartTest, ServiceManagersOfAllRanksHearThatTheyAreReadyAndEnd) {
  const test::FakeServiceManager manager(test::FakeServiceManager::Kind::kPath, absl::Milliseconds(200));
  RankServer ranks(LOSSD_BINARY, {.ranks = 2});
  const std::vector<std::string> ready = {manager.NextWith("READY=1\n"), manager.NextWith("READY=1\n")};
  EXPECT_THAT(ready, ::testing::UnorderedElementsAre(HasSubstr("STATUS=serving on " + ranks.target()),
                                                     HasSubstr("STATUS=computes as rank 1\n")));
  manager.NextWith("WATCHDOG=1\nSTATUS=computes as rank 1\n");
  ranks.rank(1).Signal(SIGTERM);
  EXPECT_THAT(manager.NextWith("STOPPING=1\n"), HasSubstr("STATUS=asking rank 0 to drain: Terminated\n"));
  manager.NextWith("STOPPING=1\nSTATUS=draining: ");
  EXPECT_EQ(ranks.WaitForAll(kLimit), (std::vector<int>{0, 0}));
}

// Whenever it comes, all end within a bound and with a reason.
TEST(RanksStartTest, ARankThatIsKilledWhileTheyComeTogetherEndsAll) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  for (int i = 0; i < 6; ++i) {
    RankServer ranks(LOSSD_BINARY,
                     {.ranks = 3, .flags = {"--rank_timeout=4s", "--restore=latest"}, .await = false});
    const int victim = static_cast<int>(rng() % 3);
    const absl::Duration after = absl::Microseconds(rng() % 250'000);
    SCOPED_TRACE(absl::StrCat("rank ", victim, " after ", absl::FormatDuration(after)));
    absl::SleepFor(after);
    ranks.rank(victim).Signal(SIGKILL);
    for (int rank = 0; rank < 3; ++rank) {
      const int end = ranks.rank(rank).WaitFor(kLimit);
      if (rank == victim) {
        EXPECT_EQ(end, -SIGKILL);
      } else {
        EXPECT_THAT(end, AnyOf(1, 3)) << "rank " << rank << ": " << ranks.log(rank);
        EXPECT_THAT(ranks.log(rank), AnyOf(HasSubstr("lost"), HasSubstr("has not come within"),
                                           HasSubstr("was not taken within"), HasSubstr("rank 0")));
      }
    }
  }
}

}  // namespace
}  // namespace lossd::app::testing::ranks_start_test

// ---- Launchers ----
// lossd as launchers start it: the environment that each sets says which rank a process is; and torchrun
// itself, which starts all ranks again when one has ended.

namespace lossd::app::testing::ranks_launchers_test {
namespace {

using test::RankServer;
using ::testing::Each;

constexpr absl::Duration kLimit = absl::Minutes(3);  // for what a slow machine does

struct Launcher {
  std::string name;
  std::function<std::vector<std::string>(int rank, int ranks)> environment;
  std::function<std::vector<std::string>(int ranks)> flags = [](int) { return std::vector<std::string>(); };
};

std::vector<Launcher> Launchers() {
  using absl::StrCat;
  return {
      {"torchrun",
       [](int rank, int ranks) -> std::vector<std::string> {
         return {StrCat("RANK=", rank), StrCat("WORLD_SIZE=", ranks), StrCat("LOCAL_RANK=", rank),
                 "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29500"};
       }},
      {"slurm",
       [](int rank, int ranks) -> std::vector<std::string> {
         return {StrCat("SLURM_PROCID=", rank), StrCat("SLURM_NTASKS=", ranks),
                 StrCat("SLURM_LOCALID=", rank), "SLURM_JOB_NODELIST=localhost"};
       }},
      {"lws",
       [](int rank, int ranks) -> std::vector<std::string> {
         return {StrCat("LWS_WORKER_INDEX=", rank), StrCat("LWS_GROUP_SIZE=", ranks),
                 "LWS_LEADER_ADDRESS=localhost"};
       }},
      {"jobset",
       [](int rank, int) -> std::vector<std::string> { return {StrCat("JOB_COMPLETION_INDEX=", rank)}; },
       [](int ranks) -> std::vector<std::string> {
         return {StrCat("--ranks=", ranks), "--leader=127.0.0.1"};
       }},
  };
}

TEST(RanksLaunchersTest, EachEnvironmentMakesOneServer) {
  std::mt19937_64 rng(1);
  const std::vector<SmallRows> data = {MakeSmallRows(700, rng), MakeSmallRows(90, rng)};
  for (const Launcher& launcher : Launchers()) {
    for (const int count : {2, 4}) {
      for (const std::string& named : {launcher.name, std::string("auto")}) {
        SCOPED_TRACE(::testing::Message()
                     << launcher.name << ", " << count << " ranks, --launcher=" << named);
        std::vector<std::string> flags = launcher.flags(count);
        flags.push_back(absl::StrCat("--launcher=", named));
        RankServer ranks(LOSSD_BINARY, {.ranks = count, .flags = flags, .environment = [&](int rank, int) {
                                          return launcher.environment(rank, count);
                                        }});
        const auto client = Connect(ranks.target());
        EXPECT_EQ(client->GetServer()->ranks_size(), count);
        ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
        Trained trained;
        Train(*client, data, 0, 1, rng, trained);
        ranks.rank(0).Signal(SIGTERM);
        EXPECT_THAT(ranks.WaitForAll(kLimit), Each(0));
      }
    }
  }
}

TEST(RanksLaunchersTest, EachStartsProcessesOfTwoDevices) {
  std::mt19937_64 rng(1);
  const std::vector<SmallRows> data = {MakeSmallRows(1400, rng), MakeSmallRows(90, rng)};
  for (const Launcher& launcher : Launchers()) {
    SCOPED_TRACE(launcher.name);
    std::vector<std::string> flags = launcher.flags(2);
    flags.push_back(absl::StrCat("--launcher=", launcher.name));
    flags.emplace_back("--cpu_devices=2");
    RankServer ranks(LOSSD_BINARY, {.ranks = 2, .flags = flags, .environment = [&](int rank, int) {
                                      return launcher.environment(rank, 2);
                                    }});
    const auto client = Connect(ranks.target());
    EXPECT_EQ(client->GetServer()->ranks_size(), 4);
    ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
    Trained trained;
    Train(*client, data, 0, 1, rng, trained);
    ranks.rank(1).Signal(SIGTERM);
    EXPECT_THAT(ranks.WaitForAll(kLimit), Each(0));
  }
}

// ---- torchrun ----

constexpr char kTorchrun[] = "/usr/bin/torchrun";  // runs deploy/torchrun.sh

class TorchrunServer {
 public:
  TorchrunServer() {
    std::filesystem::create_directory(Checkpoints());
    process_ = std::make_unique<test::ChildProcess>(
        std::vector<std::string>{"/usr/bin/env", absl::StrCat("TORCHRUN=", kTorchrun),
                                 absl::StrCat("LOSSD=", LOSSD_BINARY),
                                 absl::StrCat("MASTER_PORT=", test::FreePort()), LOSSD_TORCHRUN_EXAMPLE, "2",
                                 absl::StrCat("--rank_port=", test::FreePort()), "--listen=127.0.0.1:0",
                                 "--http=", absl::StrCat("--port_file=", PortFile()),
                                 absl::StrCat("--checkpoint_dir=", Checkpoints()), "--backend=cpu",
                                 "--threads=1", "--workspace_bytes=4MiB"},
        folder_.File("log"));
  }

  // Of the server once it serves, other than `before`; empty if that does not come.
  std::string AwaitTarget(const std::string& before = "") {
    const absl::Time deadline = clocks::SteadyNow() + kLimit;
    while (clocks::SteadyNow() < deadline && process_->Running()) {
      std::ifstream file(PortFile());
      const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
      if (json.is_object() && json["grpc"] != before) return json["grpc"];
      absl::SleepFor(absl::Milliseconds(20));
    }
    return "";
  }
  // The process with this rank; -1 if there is none.
  pid_t PidOf(int rank) const {
    const std::string wanted = absl::StrCat("RANK=", rank);
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      pid_t pid = 0;
      if (!absl::SimpleAtoi(entry.path().filename().string(), &pid) || ParentOf(pid) != process_->pid())
        continue;
      const std::string environment = Read(entry.path() / "environ");
      for (const absl::string_view variable : absl::StrSplit(environment, '\0')) {
        if (variable == wanted) return pid;
      }
    }
    return -1;
  }
  void Stop() {
    process_->Signal(SIGTERM);
    process_->WaitFor(kLimit);
  }
  std::string log() const { return test::ReadWholeFile(folder_.File("log")); }

 private:
  std::string PortFile() const { return folder_.File("ports.json"); }
  std::string Checkpoints() const { return folder_.File("checkpoints"); }
  static std::string Read(const std::filesystem::path& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  static pid_t ParentOf(pid_t pid) {
    // After the name, which may hold anything but ends with the last parenthesis: state, parent.
    const std::string stat = Read(absl::StrCat("/proc/", pid, "/stat"));
    const size_t name = stat.rfind(')');
    pid_t parent = -1;
    if (name == std::string::npos) return parent;
    const std::vector<std::string> fields = absl::StrSplit(stat.substr(name + 2), ' ');
    return fields.size() > 1 && absl::SimpleAtoi(fields[1], &parent) ? parent : -1;
  }

  test::TempFolder folder_;
  std::unique_ptr<test::ChildProcess> process_;
};

TEST(RanksLaunchersTest, TorchrunStartsAllRanksAgainAndTheyGoOnFromTheCheckpoint) {
  if (!std::filesystem::exists(kTorchrun)) GTEST_SKIP() << "no " << kTorchrun;
  TorchrunServer server;
  const std::string first = server.AwaitTarget();
  ASSERT_NE(first, "") << server.log();
  std::mt19937_64 rng(1);
  const std::vector<SmallRows> data = {MakeSmallRows(700, rng)};
  const auto client = Connect(first);
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  Trained trained;
  Train(*client, data, 0, 2, rng, trained);
  ASSERT_TRUE(client->SaveCheckpoint("head").ok());
  const pid_t worker = server.PidOf(1);
  ASSERT_GT(worker, 0);
  kill(worker, SIGKILL);
  const std::string second = server.AwaitTarget(first);
  ASSERT_NE(second, "") << server.log();
  EXPECT_EQ(Tensors(*Connect(second)), trained.tensors) << "bit for bit";
  server.Stop();
}

}  // namespace
}  // namespace lossd::app::testing::ranks_launchers_test
