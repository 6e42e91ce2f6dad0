// SPDX-License-Identifier: Apache-2.0
// A server of several processes: its ranks come together, end together, and refuse what does not fit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/clocks/clock.h"
#include "tests/server/service/small_training.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_folder.h"

namespace lossd::app::testing::ranks_service_test {
namespace {

using test::CollectiveSeconds;
using test::RankServer;
using test::RankServerOptions;
using test::ValueOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kLimit = absl::Minutes(3);  // for what a slow machine does

TEST(RanksServiceTest, RanksMayHaveOtherNumbersOfThreads) {
  RankServer ranks(LOSSD_BINARY, {.ranks = 3, .flags_of = [](int rank) {
                                    return std::vector<std::string>{absl::StrCat("--threads=", rank + 1)};
                                  }});
  EXPECT_TRUE(Connect(ranks.target())->CreateHead(SmallHead()).ok());
}

// ---- Ends ----

TEST(RanksServiceTest, ASignalToAnyRankDrainsAll) {
  for (const int rank : {0, 1, 2}) {
    SCOPED_TRACE(rank);
    RankServer ranks(LOSSD_BINARY, {.ranks = 3});
    ranks.rank(rank).Signal(SIGTERM);
    EXPECT_THAT(ranks.WaitForAll(kLimit), Each(0));
  }
  RankServer ranks(LOSSD_BINARY, {.ranks = 3});
  for (const int rank : {2, 1, 0}) ranks.rank(rank).Signal(SIGTERM);
  EXPECT_THAT(ranks.WaitForAll(kLimit), Each(0)) << "as launchers do it";
}

TEST(RanksServiceTest, ARankThatIsKilledEndsAll) {
  for (const int rank : {0, 1, 2}) {
    SCOPED_TRACE(rank);
    RankServer ranks(LOSSD_BINARY, {.ranks = 3});
    ranks.rank(rank).Signal(SIGKILL);
    std::vector<int> want(3, 3);
    want[static_cast<size_t>(rank)] = -SIGKILL;
    EXPECT_EQ(ranks.WaitForAll(kLimit), want);
  }
}

TEST(RanksServiceTest, ARankThatHangsIsLost) {
  RankServer ranks(LOSSD_BINARY, {.ranks = 3, .flags = {"--rank_silence_timeout=4s"}});
  const auto client =
      client::Client::Connect({.target = ranks.target(), .retry = {.max_attempts = 1}}).value();
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  ranks.rank(1).Stop();
  const absl::Status status = client->GradNorm("head").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(ranks.rank(0).WaitFor(kLimit), 3);
  EXPECT_EQ(ranks.rank(2).WaitFor(kLimit), 3);
  ranks.rank(1).Signal(SIGCONT);
  EXPECT_EQ(ranks.rank(1).WaitFor(kLimit), 3);
}

TEST(RanksServiceTest, CallsThatWaitForTheirTurnHearOfALostRank) {
  RankServer ranks(LOSSD_BINARY, {.ranks = 2, .flags = {"--deterministic", "--drain_timeout=1h"}});
  const auto client =
      client::Client::Connect({.target = ranks.target(), .retry = {.max_attempts = 1}}).value();
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(1);
  const SmallRows data = MakeSmallRows(90, rng);
  std::vector<float> grads(data.hidden.size());
  client::ComputeOptions compute;
  compute.accumulate_gradients = true;
  compute.max_attempts = 1;
  // Microbatch 0 never comes.
  client::PendingLoss waiting =
      client->ComputeLossAsync(SmallMicrobatch(data, 0, 1), {.grad_hidden = grads.data()}, compute);
  while (client->GetServer()->open_streams() == 0) absl::SleepFor(absl::Milliseconds(5));
  ranks.rank(1).Signal(SIGKILL);
  const absl::Status status = waiting.Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the device is lost"));
  EXPECT_EQ(ranks.rank(0).WaitFor(kLimit), 3);
}

TEST(RanksServiceTest, ALeaderThatHangsIsLost) {
  RankServer ranks(LOSSD_BINARY, {.ranks = 2, .flags = {"--rank_silence_timeout=4s"}});
  ranks.rank(0).Stop();
  EXPECT_EQ(ranks.rank(1).WaitFor(kLimit), 3);
  ranks.rank(0).Signal(SIGCONT);
  EXPECT_EQ(ranks.rank(0).WaitFor(kLimit), 3);
}

// ---- Refusals ----

struct Ends {
  std::vector<int> statuses;
  std::string leader;
  std::string worker;
};

Ends EndsOf(RankServerOptions options) {
  options.await = false;
  RankServer ranks(LOSSD_BINARY, options);
  Ends ends;
  ends.statuses = ranks.WaitForAll(kLimit);
  ends.leader = ranks.log(0);
  ends.worker = ranks.log(1);
  return ends;
}

RankServerOptions WithFlagOfRank1(const std::string& flag) {
  return {.ranks = 2, .flags = {"--rank_timeout=60s"}, .flags_of = [flag](int rank) {
            return rank == 1 ? std::vector<std::string>{flag} : std::vector<std::string>();
          }};
}

TEST(RanksServiceTest, RanksThatDisagreeAreRefusedByName) {
  for (const auto& [flag, message] : std::vector<std::pair<std::string, std::string>>{
           {"--deterministic", "rank 1: deterministic must be what rank 0 has, false, got true"},
           {"--split=vocabulary", "rank 1: split must be what rank 0 has, any, got vocabulary"},
           {"--collectives=gloo", "rank 1: collectives must be what rank 0 has, auto, got gloo"},
           {"--slice_bytes=128KiB", "rank 1: slice_bytes must be what rank 0 has, 65536, got 131072"},
           {"--workspace_bytes=8MiB",
            "rank 1: workspace_bytes must be what rank 0 has, 4194304, got 8388608"},
           {"--memory_limit_bytes=1GiB",
            "rank 1: memory_limit_bytes must be what rank 0 has, 0, got 1073741824"},
           {"--collective_timeout=61s", "rank 1: collective_timeout must be what rank 0 has, 1m, got 1m1s"},
           {"--rank_silence_timeout=20s",
            "rank 1: rank_silence_timeout must be what rank 0 has, 30s, got 20s"},
           {"--ranks=3", "rank 1: ranks must be what rank 0 has, 2, got 3"}}) {
    SCOPED_TRACE(flag);
    const size_t value = message.find(" has, "), got = message.find(", got ");
    RankServerOptions options = WithFlagOfRank1(flag);
    options.await = false;
    RankServer ranks(LOSSD_BINARY, options);
    EXPECT_EQ(ranks.rank(1).WaitFor(kLimit), 2);
    EXPECT_TRUE(ranks.rank(0).Running()) << "another one may come";
    ranks.rank(0).Signal(SIGTERM);
    EXPECT_EQ(ranks.rank(0).WaitFor(kLimit), 0);
    EXPECT_THAT(ranks.log(0), HasSubstr(message));
    EXPECT_THAT(ranks.log(1),
                HasSubstr(absl::StrCat(message.substr(0, value), " has (its log says what that is)",
                                       message.substr(got))));
  }
}

TEST(RanksServiceTest, ARankThatNeverComesIsNamed) {
  RankServer late(LOSSD_BINARY, {.ranks = 3,
                                 .flags = {"--rank_timeout=2s"},
                                 .flags_of =
                                     [](int rank) {
                                       return rank == 2 ? std::vector<std::string>{"--leader=127.0.0.1:1"}
                                                        : std::vector<std::string>();
                                     },
                                 .await = false});
  EXPECT_EQ(late.WaitForAll(kLimit), (std::vector<int>{1, 1, 1}));
  const std::string message = "rank 2 of 3 has not come within 2s (--rank_timeout)";
  EXPECT_THAT(late.log(0), HasSubstr(message));
  EXPECT_THAT(late.log(1), HasSubstr(message));
  EXPECT_THAT(late.log(2),
              HasSubstr("rank 2 was not taken within 2s (--rank_timeout) by the leader at 127.0.0.1:1"));
}

TEST(RanksServiceTest, AHeadOfFewerClassesThanRanksIsRefusedAndLeavesNothing) {
  RankServer ranks(LOSSD_BINARY, {.ranks = 3});
  const auto client = Connect(ranks.target());
  v1::CreateHeadRequest by_vocabulary = SmallHead();
  by_vocabulary.mutable_spec()->set_split(v1::SPLIT_VOCABULARY);
  by_vocabulary.mutable_spec()->set_vocab_size(2);
  const absl::Status status = client->CreateHead(by_vocabulary).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("vocab_size must be at least 3"));
  by_vocabulary.mutable_spec()->set_replicas(3);
  EXPECT_THAT(
      std::string(client->CreateHead(by_vocabulary).status().message()),
      HasSubstr("spec.replicas must be 0 or 1 where a head lies on the devices of several processes"));
  const auto server = client->GetServer();
  ASSERT_TRUE(server.ok()) << server.status();
  for (const auto& rank : server->ranks()) EXPECT_EQ(rank.memory().weights(), 0u) << rank.rank();
  EXPECT_TRUE(client->CreateHead(SmallHead()).ok());
}

TEST(RanksServiceTest, CpusHaveNoNccl) {
  const Ends ends = EndsOf({.ranks = 2, .flags = {"--backend=cpu", "--collectives=nccl"}});
  EXPECT_EQ(ends.statuses, (std::vector<int>{2, 2}));
  EXPECT_THAT(ends.leader, HasSubstr("collectives must be auto or gloo on CPUs, got nccl"));
}

TEST(RanksServiceTest, OptionsThatCannotBeAreRefusedAtTheStart) {
  for (const auto& [flags, message] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--replicas=2"}, "replicas must be 1 with several ranks, got 2"},
           {{"--split=columns"}, "split must be any, rows or vocabulary, got columns"},
           {{"--collectives=mpi"}, "collectives must be auto, nccl or gloo, got mpi"},
           {{"--rank_timeout=0s"}, "rank_timeout must be positive"},
           {{"--rank_silence_timeout=-1s"}, "rank_silence_timeout must be positive"},
           {{"--collective_timeout=0s"}, "collective_timeout must be positive"},
           {{"--slice_bytes=256MiB", "--staging_bytes=1GiB"},
            "slice_bytes must be at most 128 MiB with several ranks"},
           {{"--leader=example.org:1"},
            "leader must be a loopback address unless the ranks' connections are"},
           {{"--rank_listen=0.0.0.0:1"},
            "leader must be a loopback address unless the ranks' connections are"},
           {{"--rank_secret_file=/nonexistent"}, "rank_secret_file must"},
           {{"--token_file=/nonexistent"},
            "rank_secret_file must be given where clients are asked who they are"},
           {{"--token_file=/nonexistent", "--insecure"},
            "rank_secret_file must be given where clients are asked"},
           {{"--rank_ca=/nonexistent"}, "rank_ca must be given together with tls_cert"}}) {
    SCOPED_TRACE(message);
    const Ends ends = EndsOf({.ranks = 2, .flags = flags});
    EXPECT_EQ(ends.statuses, (std::vector<int>{2, 2}));
    EXPECT_THAT(ends.leader, HasSubstr(message));
    EXPECT_THAT(ends.worker, HasSubstr(message));
  }
}

// ---- Admission ----

TEST(RanksServiceTest, ASecretAdmitsRanksOverTls) {
  const test::TestPki pki;
  const std::string secret = pki.Secret("secret", "0123456789abcdef\n");
  RankServer ranks(LOSSD_BINARY,
                   {.ranks = 2,
                    .flags = {absl::StrCat("--tls_cert=", pki.Certificate("server")),
                              absl::StrCat("--tls_key=", pki.Key("server")),
                              absl::StrCat("--rank_ca=", pki.Certificate("ca")),
                              absl::StrCat("--rank_secret_file=", secret), "--log_level=info"}});
  EXPECT_THAT(ranks.log(0), HasSubstr("rank is there"));
  ranks.rank(0).Signal(SIGTERM);
  EXPECT_THAT(ranks.WaitForAll(kLimit), Each(0));
}

TEST(RanksServiceTest, AnotherSecretIsRefused) {
  const test::TestPki pki;
  const std::string flag = absl::StrCat("--rank_secret_file=", pki.Secret("one", "0123456789abcdef"));
  const std::string other = absl::StrCat("--rank_secret_file=", pki.Secret("other", "0123456789abcdeX"));
  for (const std::string& of_worker : {other, std::string("--rank_secret_file=")}) {
    RankServerOptions options = WithFlagOfRank1(of_worker);
    options.flags = {flag, "--rank_timeout=3s"};
    const Ends ends = EndsOf(options);
    EXPECT_EQ(ends.statuses, (std::vector<int>{1, 2}));
    EXPECT_THAT(ends.leader, HasSubstr("rank 1 of 2 has not come"));
    EXPECT_THAT(ends.worker, HasSubstr("the secret of the ranks is missing or another one"));
    EXPECT_THAT(ends.worker, Not(HasSubstr("0123456789")));
  }
}

TEST(RanksServiceTest, ASecondProcessWithTheSameRankIsRefused) {
  RankServerOptions options;
  options.ranks = 3;
  // Whichever comes first stays, and waits for rank 2 with rank 0.
  options.flags_of = [](int rank) {
    if (rank == 0) return std::vector<std::string>{"--rank_timeout=1h"};
    return std::vector<std::string>{"--rank=1", "--rank_timeout=8s"};
  };
  options.await = false;
  RankServer ranks(LOSSD_BINARY, options);
  const absl::Time deadline = clocks::SteadyNow() + kLimit;
  while (ranks.rank(1).Running() && ranks.rank(2).Running() && clocks::SteadyNow() < deadline) {
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_NE(ranks.rank(1).Running(), ranks.rank(2).Running());
  EXPECT_THAT(ranks.log(1) + ranks.log(2), HasSubstr("there is a rank 1 already, on host"));
  ranks.rank(0).Signal(SIGKILL);
  EXPECT_EQ(ranks.WaitForAll(kLimit), (std::vector<int>{-SIGKILL, 1, 1}));
}

// ---- What is said of ranks ----

// Chunks alone: no request comes after them for a while.
TEST(RanksServiceTest, MemoryOfARankIsKnownAfterAChunk) {
  // Rows in messages need memory of the worker's.
  RankServer ranks(LOSSD_BINARY, {.ranks = 2, .flags = {"--rank_shared_memory=false"}});
  const auto client = Connect(ranks.target());
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(1);
  const SmallRows data = MakeSmallRows(100, rng);  // goes to one rank, each time to the next
  std::vector<float> grads(data.hidden.size());
  const absl::Time deadline = clocks::SteadyNow() + kLimit;
  while (client->GetServer()->ranks(1).memory().staging() == 0) {
    ASSERT_LT(clocks::SteadyNow(), deadline);
    ASSERT_TRUE(client->ComputeLoss(SmallMicrobatch(data, 0, 0), {.grad_hidden = grads.data()}).ok());
  }
}

TEST(RanksServiceTest, MetricsCountTheExchangesOfChunksByVocabulary) {
  RankServer ranks(LOSSD_BINARY, {.ranks = 2, .flags = {"--http=127.0.0.1:0", "--split=vocabulary"}});
  const auto client = Connect(ranks.target());
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(1);
  Trained trained;
  Train(*client, {MakeSmallRows(400, rng)}, 0, 1, rng, trained);
  const absl::Time deadline = clocks::SteadyNow() + kLimit;
  while (ValueOf(test::HttpGet(ranks.http(), "/metrics"), CollectiveSeconds(1, "hidden_gradients")) <= 0) {
    ASSERT_LT(clocks::SteadyNow(), deadline) << test::HttpGet(ranks.http(), "/metrics");
    absl::SleepFor(absl::Milliseconds(20));
  }
  const std::string metrics = test::HttpGet(ranks.http(), "/metrics");
  EXPECT_EQ(ValueOf(metrics, "lossd_rank_rows_total{rank=\"0\"}"),
            ValueOf(metrics, "lossd_rank_rows_total{rank=\"1\"}"));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_GT(ValueOf(metrics, absl::StrCat("lossd_rank_rows_total{rank=\"", rank, "\"}")), 0) << rank;
    EXPECT_GT(ValueOf(metrics, CollectiveSeconds(rank, "row_statistics")), 0) << rank;
    EXPECT_GT(ValueOf(metrics, CollectiveSeconds(rank, "hidden_gradients")), 0) << rank;
    EXPECT_EQ(ValueOf(metrics, CollectiveSeconds(rank, "sum_gradients")), 0) << rank;
    EXPECT_EQ(ValueOf(metrics, CollectiveSeconds(rank, "spread_values")), 0) << rank;
  }
}

TEST(RanksServiceTest, MetricsProbesAndGetServerShowAllRanks) {
  const int port = test::FreePort();
  RankServer ranks(LOSSD_BINARY, {.ranks = 2, .flags = {"--http=127.0.0.1:0"}, .flags_of = [port](int rank) {
                                    return rank == 1 ? std::vector<std::string>{absl::StrCat(
                                                           "--worker_http=127.0.0.1:", port)}
                                                     : std::vector<std::string>();
                                  }});
  const auto client = Connect(ranks.target());
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  const std::string metrics = test::HttpGet(ranks.http(), "/metrics");
  EXPECT_TRUE(absl::StrContains(metrics, "lossd_rank_up{rank=\"0\""));
  EXPECT_TRUE(absl::StrContains(metrics, "lossd_rank_up{rank=\"1\""));
  // Rounded up to 64 bytes; on a GPU more.
  const double weights = (kSmallHidden * kSmallVocab * 4 + 63) / 64 * 64;
  const double said = ValueOf(metrics, "lossd_rank_memory_bytes{rank=\"1\",kind=\"weights\"}");
  EXPECT_TRUE(said == weights || (test::RanksOnGpus() && said > weights)) << said;
  // With chunks comes what they take, and what workers did.
  std::mt19937_64 rng(1);
  Trained trained;
  Train(*client, {MakeSmallRows(1400, rng)}, 0, 1, rng, trained);
  const absl::Time deadline = clocks::SteadyNow() + kLimit;
  while (ValueOf(test::HttpGet(ranks.http(), "/metrics"), CollectiveSeconds(1, "spread_values")) <= 0) {
    ASSERT_LT(clocks::SteadyNow(), deadline) << test::HttpGet(ranks.http(), "/metrics");
    absl::SleepFor(absl::Milliseconds(20));
  }
  const std::string trained_metrics = test::HttpGet(ranks.http(), "/metrics");
  for (const char* const name : {"sent_bytes", "received_bytes"}) {
    EXPECT_GT(ValueOf(trained_metrics, absl::StrCat("lossd_rank_", name, "_total{rank=\"1\"}")), 0) << name;
    EXPECT_THAT(trained_metrics, Not(HasSubstr(absl::StrCat("lossd_rank_", name, "_total{rank=\"0\"}"))));
  }
  for (int rank = 0; rank < 2; ++rank) {
    for (const char* const name : {"rows", "chunks", "busy_seconds"}) {
      EXPECT_GT(ValueOf(trained_metrics, absl::StrCat("lossd_rank_", name, "_total{rank=\"", rank, "\"}")), 0)
          << name << " of rank " << rank;
    }
    EXPECT_GT(ValueOf(trained_metrics, CollectiveSeconds(rank, "sum_gradients")), 0) << rank;
    EXPECT_EQ(ValueOf(trained_metrics, CollectiveSeconds(rank, "row_statistics")), 0) << rank;
    EXPECT_EQ(ValueOf(trained_metrics, CollectiveSeconds(rank, "hidden_gradients")), 0) << rank;
  }
  const std::string probes = absl::StrCat("127.0.0.1:", port);
  EXPECT_EQ(test::HttpStatus(test::HttpGet(probes, "/livez")), 200);
  EXPECT_EQ(test::HttpStatus(test::HttpGet(probes, "/readyz")), 200);
  const auto server = client->GetServer();
  ASSERT_TRUE(server.ok()) << server.status();
  ASSERT_EQ(server->ranks_size(), 2);
  EXPECT_THAT(server->collectives(), AnyOf("gloo", "nccl")) << "LOSSD_RANK_FLAGS may say which";
  EXPECT_THAT(test::HttpGet(ranks.http(), "/"),
              HasSubstr(absl::StrCat("collectives ", server->collectives())));
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(server->ranks(rank).rank(), static_cast<uint32_t>(rank));
    EXPECT_FALSE(server->ranks(rank).lost());
    EXPECT_GE(server->ranks(rank).memory().weights(), kSmallHidden * kSmallVocab * 4);
    EXPECT_THAT(server->ranks(rank).device(), HasSubstr(test::RanksOnGpus() ? "cuda:" : "OpenBLAS"));
  }
}

}  // namespace
}  // namespace lossd::app::testing::ranks_service_test
