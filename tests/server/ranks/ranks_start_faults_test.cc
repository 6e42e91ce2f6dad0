// SPDX-License-Identifier: Apache-2.0
// Faults between any two messages of ranks that come together, and soon after one, where their collectives
// and their shared memory connect: a rank is killed, or stops for a while, or its connection is cut, closed
// or stands still. Every time either all ranks serve or all end, with a status that is not 0 and a reason
// that names who is missing; and a new start at the same addresses serves.
//
// Environment:
//   LOSSD_RANK_FAULTS      so many faults of each group, at boundaries drawn from a seed, which is printed
//   LOSSD_RANK_BOUNDARIES  set: every fault at every boundary instead
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "kernels/clocks/clock.h"
#include "tests/faults/fault_proxy.h"
#include "tests/server/ranks/small_steps.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_folder.h"

namespace lossd::app::testing::ranks_start_faults_test {
namespace {

using test::Direction;
using test::Fault;
using test::FaultProxy;
using test::RankServer;
using test::RankServerOptions;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr absl::Duration kLimit = absl::Minutes(3);  // for what a slow machine does
constexpr absl::Duration kSilence = absl::Seconds(2);

enum class Kind : int { kKill, kKillSoon, kPause, kStop, kCut, kClose, kHold };
constexpr int kKinds = 7;
const char* Name(Kind kind) {
  return std::array<const char*, kKinds>{
      "kill", "kill soon", "pause", "stop", "cut", "close", "hold"}[static_cast<size_t>(kind)];
}
bool IsOfRank(Kind kind) { return kind <= Kind::kStop; }
bool Kills(Kind kind) { return kind == Kind::kKill || kind == Kind::kKillSoon; }

struct Place {
  Kind kind = Kind::kKill;
  Direction direction = Direction::kToServer;
  int64_t after = 0;
  int victim = 0;       // the rank that is killed or stopped
  absl::Duration soon;  // how long after the boundary
};

class Group {
 public:
  Group(int ranks, std::string split) : ranks_(ranks), split_(std::move(split)) {}

  // Messages in each direction until the server serves.
  std::array<int64_t, 2> CountMessages() {
    const std::array<int64_t, 2> before = Passed();
    const std::unique_ptr<RankServer> ranks = Begin();
    ranks->AwaitServing();
    const std::array<int64_t, 2> after = Passed();
    ExpectServes(ranks);
    return {after[0] - before[0], after[1] - before[1]};
  }

  void Try(const Place& place) {
    SCOPED_TRACE(absl::StrCat(Name(place.kind), ", rank ", place.victim, ", ",
                              absl::FormatDuration(place.soon), " after ", place.after,
                              place.direction == Direction::kToServer ? " messages to" : " messages from",
                              " the leader"));
    absl::Notification begun;  // before, there may be no victim yet
    RankServer* server = nullptr;
    proxy_.Arm(FaultAt(place, begun, server));
    const std::unique_ptr<RankServer> ranks = Begin();
    server = ranks.get();
    begun.Notify();
    std::atomic<bool> over{false};
    std::thread later([&] { ActLater(place, *ranks, over); });
    const bool serves = ranks->AwaitServing();
    over = true;
    later.join();
    const bool fired = proxy_.fired();
    fired_ += fired ? 1 : 0;
    proxy_.Heal();
    if (!fired || (serves && !Kills(place.kind) && StaysUp(*ranks))) {
      ExpectServes(ranks);
    } else {
      ExpectEnds(place, *ranks);
    }
    ExpectNothingIsLeft();
    ExpectServes(Begin());  // at the same addresses
  }

  int fired() const { return fired_; }

 private:
  std::unique_ptr<RankServer> Begin() {
    proxy_.SetServer(leader_);
    return std::make_unique<RankServer>(
        LOSSD_BINARY,
        RankServerOptions{
            .ranks = ranks_,
            .flags = {absl::StrCat("--split=", split_), "--rank_timeout=4s", "--collective_timeout=4s",
                      absl::StrCat("--rank_silence_timeout=", absl::FormatDuration(kSilence))},
            .flags_of =
                [this](int rank) {
                  return std::vector<std::string>{
                      absl::StrCat("--leader=", rank == 0 ? leader_ : proxy_.target())};
                },
            .environment = nullptr,
            .await = false,
            .temporary = temporary_.path()});
  }
  std::array<int64_t, 2> Passed() const {
    return {proxy_.messages(Direction::kToServer), proxy_.messages(Direction::kToClient)};
  }

  Fault FaultAt(const Place& place, const absl::Notification& begun, RankServer* const& server) const {
    Fault fault = {.direction = place.direction, .after = place.after, .action = Fault::Action::kNone};
    switch (place.kind) {
      case Kind::kKill:
      case Kind::kPause:
      case Kind::kStop:
        fault.call = [&begun, &server, place] {
          begun.WaitForNotification();
          server->rank(place.victim).Signal(place.kind == Kind::kKill ? SIGKILL : SIGSTOP);
        };
        break;
      case Kind::kKillSoon:
        break;
      case Kind::kCut:
        fault.action = Fault::Action::kReset;
        break;
      case Kind::kClose:
        fault.action = Fault::Action::kClose;
        break;
      case Kind::kHold:
        fault.action = Fault::Action::kHold;
        break;
    }
    return fault;
  }

  // What follows once the fault has happened.
  void ActLater(const Place& place, RankServer& ranks, const std::atomic<bool>& over) const {
    if (!IsOfRank(place.kind) || place.kind == Kind::kKill) return;
    while (!proxy_.fired()) {
      if (over || !ranks.rank(0).Running()) return;
      absl::SleepFor(absl::Milliseconds(1));
    }
    // A pause is short; a stop is longer than the others wait.
    absl::SleepFor(place.kind == Kind::kStop ? 3 * kSilence : place.soon);
    ranks.rank(place.victim).Signal(place.kind == Kind::kKillSoon ? SIGKILL : SIGCONT);
  }

  // Whether no rank has ended or is about to: what was lost is noticed within the silence that is allowed.
  bool StaysUp(RankServer& ranks) const {
    const absl::Time deadline = clocks::SteadyNow() + 3 * kSilence;
    while (clocks::SteadyNow() < deadline) {
      for (int rank = 0; rank < ranks_; ++rank) {
        if (!ranks.rank(rank).Running()) return false;
      }
      absl::SleepFor(absl::Milliseconds(20));
    }
    return true;
  }

  void ExpectServes(const std::unique_ptr<RankServer>& ranks) const {
    if (!ranks->AwaitServing()) {
      for (int rank = 0; rank < ranks_; ++rank) ADD_FAILURE() << "rank " << rank << ": " << ranks->log(rank);
      return;
    }
    EXPECT_TRUE(ConnectOnce(ranks->target())->CreateHead(SmallHead()).ok());
    ranks->rank(0).Signal(SIGTERM);
    EXPECT_THAT(ranks->WaitForAll(kLimit), Each(0)) << ranks->log(0);
  }

  void ExpectEnds(const Place& place, RankServer& ranks) const {
    const std::vector<int> ends = ranks.WaitForAll(kLimit);
    for (int rank = 0; rank < ranks_; ++rank) {
      const int end = ends[static_cast<size_t>(rank)];
      if (Kills(place.kind) && rank == place.victim) {
        EXPECT_EQ(end, -SIGKILL);
        continue;
      }
      EXPECT_THAT(end, AnyOf(1, 3)) << "rank " << rank << ": " << ranks.log(rank);
      // A rank that was stopped itself has lost others.
      const bool names_victim = rank == 0 && IsOfRank(place.kind) && place.victim != 0;
      EXPECT_THAT(ranks.log(rank), HasSubstr(names_victim ? absl::StrCat("rank ", place.victim) : "rank "));
      if (rank == 0) continue;
      EXPECT_THAT(ranks.log(rank), AnyOf(HasSubstr("leader"), HasSubstr("is lost")));
    }
  }

  void ExpectNothingIsLeft() const {
    for (const auto& file : std::filesystem::directory_iterator(temporary_.path())) {
      ADD_FAILURE() << file.path() << " is left";
    }
  }

  const int ranks_;
  const std::string split_;
  const std::string leader_ = absl::StrCat("127.0.0.1:", test::FreePort());
  const test::TempFolder temporary_;
  FaultProxy proxy_{leader_, 1};
  int fired_ = 0;
};

void TryAll(Group& group, int ranks, const std::array<int64_t, 2>& messages) {
  for (int kind = 0; kind < kKinds; ++kind) {
    for (const Direction direction : {Direction::kToServer, Direction::kToClient}) {
      for (int64_t after = 0; after < messages[static_cast<size_t>(direction)]; ++after) {
        const int victims = IsOfRank(static_cast<Kind>(kind)) ? ranks : 1;
        for (int victim = 0; victim < victims; ++victim) {
          group.Try({static_cast<Kind>(kind), direction, after, victim, absl::Milliseconds(after % 7)});
        }
      }
    }
  }
}

void FaultsAtTheStart(int ranks, const std::string& split, int usual) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 rng(seed);
  Group group(ranks, split);
  const std::array<int64_t, 2> messages = group.CountMessages();
  std::cout << messages[0] << " messages to the leader, " << messages[1] << " from it\n";
  ASSERT_GE(messages[0], 3 * (ranks - 1));  // Hello, Prepared and the answer to Connect of each worker
  ASSERT_GE(messages[1], 2 * (ranks - 1));  // Prepare, Connect
  if (std::getenv("LOSSD_RANK_BOUNDARIES") != nullptr) return TryAll(group, ranks, messages);
  const int times = Times(usual);
  const uint64_t first = rng();
  for (int i = 0; i < times && !::testing::Test::HasFailure(); ++i) {
    Place place;
    place.kind = static_cast<Kind>((first + static_cast<uint64_t>(i)) % kKinds);  // each in turn
    place.direction = rng() % 2 == 0 ? Direction::kToServer : Direction::kToClient;
    place.after =
        static_cast<int64_t>(rng() % static_cast<uint64_t>(messages[static_cast<size_t>(place.direction)]));
    if (IsOfRank(place.kind)) place.victim = static_cast<int>(rng() % static_cast<uint64_t>(ranks));
    place.soon = absl::Microseconds(rng() % 20'000);
    group.Try(place);
  }
  EXPECT_GT(group.fired(), times / 2) << "so few of the faults have happened";
}

// A neighbour on this host takes all connections that it can get before the last rank has come.
TEST(RanksStartFaultsTest, IdleConnectionsKeepNoRankOut) {
  constexpr int kConnections = 1'100;
  RankServer ranks(LOSSD_BINARY, {.ranks = 2, .await = false, .late = 1, .open_files = 1'024});
  rlimit files = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  if (files.rlim_max < 2 * kConnections) GTEST_SKIP() << "this process may not open so many files";
  files.rlim_cur = std::max<rlim_t>(files.rlim_cur, 2 * kConnections);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &files), 0);
  std::vector<test::RawHttp> idle;
  const absl::Time limit = absl::Now() + kLimit;
  while (static_cast<int>(idle.size()) < kConnections) {
    test::RawHttp connection(absl::StrCat("127.0.0.1:", ranks.rank_port()));
    if (connection.connected()) {
      idle.push_back(std::move(connection));
    } else {
      ASSERT_LT(absl::Now(), limit) << idle.size() << " connections; " << ranks.log(0);
      absl::SleepFor(absl::Milliseconds(5));
    }
  }
  ranks.StartLate();
  EXPECT_TRUE(ranks.AwaitServing()) << ranks.log(0) << ranks.log(1);
  EXPECT_THAT(ranks.log(0), ::testing::Not(HasSubstr("Too many open files")));
}

TEST(RanksStartFaultsTest, TwoRanks) { FaultsAtTheStart(2, "any", 7); }
TEST(RanksStartFaultsTest, FourRanks) { FaultsAtTheStart(4, "vocabulary", 7); }

}  // namespace
}  // namespace lossd::app::testing::ranks_start_faults_test
