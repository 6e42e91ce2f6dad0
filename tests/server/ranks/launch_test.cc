// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/ranks/start.h"

namespace lossd::ranks::launch_test {
namespace {

using ::testing::HasSubstr;

struct Case {
  std::string what;
  LaunchFlags flags;
  Environment environment;
  int rank = 0;
  int ranks = 1;
  int local_rank = -1;  // -1: unknown
  std::string leader;
};

TEST(LaunchTest, SaysWhoThisProcessIs) {
  const Environment torchrun = {{"RANK", "3"},
                                {"WORLD_SIZE", "4"},
                                {"LOCAL_RANK", "1"},
                                {"MASTER_ADDR", "10.0.0.7"},
                                {"MASTER_PORT", "29500"}};
  const Environment slurm = {{"SLURM_PROCID", "2"},
                             {"SLURM_NTASKS", "8"},
                             {"SLURM_LOCALID", "2"},
                             {"SLURM_JOB_NODELIST", "gpu[03-05,9],login"}};
  Environment both = slurm;
  both.insert(torchrun.begin(), torchrun.end());
  Environment step = slurm;
  step["SLURM_STEP_NUM_TASKS"] = "4";
  step["SLURM_STEP_NODELIST"] = "gpu05";
  const Environment lws = {
      {"LWS_LEADER_ADDRESS", "lossd-0.lossd.default"}, {"LWS_GROUP_SIZE", "2"}, {"LWS_WORKER_INDEX", "0"}};
  const std::vector<Case> cases = {
      {"nothing", {}, {}, 0, 1, -1, ""},
      {"variables that nobody asks for", {}, both, 0, 1, -1, ""},
      {"auto finds nothing", {.launcher = "auto"}, {}, 0, 1, -1, ""},
      {"flags alone", {.rank = 1, .ranks = 2, .leader = "a:9"}, {}, 1, 2, -1, "a:9"},
      {"a host without a port", {.rank = 1, .ranks = 2, .leader = "a"}, {}, 1, 2, -1, "a:7072"},
      {"an IPv6 address", {.rank = 1, .ranks = 2, .leader = "[fe80::1]"}, {}, 1, 2, -1, "[fe80::1]:7072"},
      {"torchrun", {.launcher = "torchrun"}, torchrun, 3, 4, 1, "10.0.0.7:7072"},
      {"torchrun, another port", {.launcher = "auto", .port = 9}, torchrun, 3, 4, 1, "10.0.0.7:9"},
      {"torchrun and a leader", {.launcher = "torchrun", .leader = "b:5"}, torchrun, 3, 4, 1, "b:5"},
      {"a flag that agrees", {.launcher = "torchrun", .rank = 3}, torchrun, 3, 4, 1, "10.0.0.7:7072"},
      {"torchrun inside Slurm", {.launcher = "auto"}, both, 3, 4, 1, "10.0.0.7:7072"},
      {"Slurm", {.launcher = "slurm"}, slurm, 2, 8, 2, "gpu03:7072"},
      {"Slurm, although torchrun is there", {.launcher = "slurm"}, both, 2, 8, 2, "gpu03:7072"},
      {"a step of a job", {.launcher = "auto"}, step, 2, 4, 2, "gpu05:7072"},
      {"LeaderWorkerSet", {.launcher = "auto"}, lws, 0, 2, -1, "lossd-0.lossd.default:7072"},
      {"JobSet",
       {.launcher = "jobset", .ranks = 3, .leader = "j-0-0.j"},
       {{"JOB_COMPLETION_INDEX", "1"}},
       1,
       3,
       -1,
       "j-0-0.j:7072"},
      {"one rank has no leader",
       {.launcher = "slurm"},
       {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_JOB_NODELIST", "a"}},
       0,
       1,
       -1,
       ""},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    const auto launch = ReadLaunch(c.flags, c.environment);
    ASSERT_TRUE(launch.ok()) << launch.status();
    EXPECT_EQ(launch->rank, c.rank);
    EXPECT_EQ(launch->ranks, c.ranks);
    EXPECT_EQ(launch->local_rank.value_or(-1), c.local_rank);
    EXPECT_EQ(launch->leader, c.leader);
  }
}

TEST(LaunchTest, RefusesWhatIsMissingOrContradictsItself) {
  struct Refusal {
    LaunchFlags flags;
    Environment environment;
    std::string message;
  };
  const Environment torchrun = {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}};
  const auto with = [](Environment environment, const std::string& name, const std::string& value) {
    environment[name] = value;
    return environment;
  };
  Environment slurm_and_lws = {{"SLURM_PROCID", "1"}, {"LWS_WORKER_INDEX", "1"}};
  const std::vector<Refusal> refusals = {
      {{.launcher = "mpirun"}, {}, "launcher must be none, auto, torchrun, slurm, lws or jobset, got mpirun"},
      {{.launcher = "auto"}, slurm_and_lws, "launcher must say which of slurm and lws is meant, got auto"},
      {{.rank = 1}, {}, "ranks must be given: how many processes there are, got nothing"},
      {{.ranks = 2}, {}, "rank must be given: which of the processes this is, got nothing"},
      {{.rank = 0, .ranks = 2}, {}, "leader must be given: where rank 0 is reached, host:port, got nothing"},
      {{.rank = 0, .ranks = 0}, {}, "ranks must be in [1, 1024], got 0"},
      {{.rank = 2, .ranks = 2, .leader = "a"}, {}, "rank must be in [0, 2), by ranks, got 2"},
      {{.rank = -1, .ranks = 2, .leader = "a"}, {}, "rank must be in [0, 2), by ranks, got -1"},
      {{.launcher = "torchrun"}, {}, "ranks must be given, or WORLD_SIZE be set, as torchrun does"},
      {{.launcher = "torchrun"},
       with(torchrun, "RANK", "one"),
       "RANK must be a whole number in [0, 1023], got one"},
      {{.launcher = "torchrun"},
       with(torchrun, "RANK", ""),
       "RANK must be a whole number in [0, 1023], got "},
      {{.launcher = "torchrun"}, with(torchrun, "RANK", "2"), "RANK must be in [0, 2), by WORLD_SIZE, got 2"},
      {{.launcher = "torchrun"},
       with(torchrun, "WORLD_SIZE", "0"),
       "WORLD_SIZE must be a whole number in [1, 1024], got 0"},
      {{.launcher = "torchrun"}, with(torchrun, "LOCAL_RANK", "-1"), "LOCAL_RANK must be a whole number"},
      {{.launcher = "torchrun", .rank = 0}, torchrun, "rank must agree with RANK, 1, got 0"},
      {{.launcher = "torchrun", .ranks = 3}, torchrun, "ranks must agree with WORLD_SIZE, 2, got 3"},
      {{.launcher = "slurm"},
       {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_NODELIST", "a[1"}},
       "SLURM_JOB_NODELIST must name the host of the first rank, got a[1"},
      {{.launcher = "jobset", .ranks = 2}, {{"JOB_COMPLETION_INDEX", "1"}}, "leader must be given: where"},
  };
  for (const Refusal& refusal : refusals) {
    const auto launch = ReadLaunch(refusal.flags, refusal.environment);
    EXPECT_EQ(launch.status().code(), absl::StatusCode::kInvalidArgument) << refusal.message;
    EXPECT_THAT(std::string(launch.status().message()), HasSubstr(refusal.message));
  }
}

TEST(LaunchTest, FirstHostOfANodeList) {
  EXPECT_EQ(FirstHost("gpu1"), "gpu1");
  EXPECT_EQ(FirstHost("gpu1,gpu2"), "gpu1");
  EXPECT_EQ(FirstHost("gpu[007-012]"), "gpu007");
  EXPECT_EQ(FirstHost("gpu[7,9-12]-ib.cluster,x"), "gpu7-ib.cluster");
  EXPECT_EQ(FirstHost("rack[1-2]n[3-4]"), "rack1n3");
  EXPECT_EQ(FirstHost("gpu[1"), "");
  EXPECT_EQ(FirstHost(""), "");
}

}  // namespace
}  // namespace lossd::ranks::launch_test
