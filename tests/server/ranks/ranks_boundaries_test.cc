// SPDX-License-Identifier: Apache-2.0
// Faults between any two messages of the leader and its workers: a rank is killed, its connection is cut,
// closed or stands still, or a rank is asked to stop. Every time all ranks end as they should, the server
// starts again from its newest checkpoint, and has the state of a run that nobody disturbed after as many
// steps, bit for bit: no step is half applied, and no checkpoint half written. Every rank writes files of the
// checkpoints, and reads them, by itself.
//
// Environment:
//   LOSSD_RANK_FAULTS      so many faults of each group, at boundaries drawn from a seed, which is printed
//   LOSSD_RANK_BOUNDARIES  set: every fault at every boundary instead
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/faults/fault_proxy.h"
#include "tests/server/ranks/small_steps.h"
#include "tests/support/server_process.h"

namespace lossd::app::testing::ranks_boundaries_test {
namespace {

using test::Direction;
using test::Fault;
using test::FaultProxy;
using test::RankServer;
using test::RankServerOptions;

constexpr absl::Duration kLimit = absl::Minutes(3);  // for what a slow machine does

enum class Kind : int { kKillLeader, kKillWorker, kCut, kClose, kHold, kDrain };
constexpr int kKinds = 6;
const char* Name(Kind kind) {
  return std::array<const char*, kKinds>{
      "kill the leader", "kill a worker", "cut", "close", "hold", "drain"}[static_cast<size_t>(kind)];
}

// Where and what.
struct Place {
  Kind kind = Kind::kCut;
  Direction direction = Direction::kToServer;
  int64_t after = 0;
  int victim = 0;  // the rank that is killed or asked to stop
};

class Group {
 public:
  Group(int ranks, std::string split)
      : ranks_(ranks), split_(std::move(split)), server_(LOSSD_BINARY, Options()) {
    std::mt19937_64 rng(1);
    for (const size_t rows : {900, 300}) data_.push_back(MakeSmallRows(rows, rng));
    EXPECT_TRUE(client()->CreateHead(SmallHead()).ok());
    EXPECT_TRUE(client()->SaveCheckpoint("head").ok());
  }

  // Messages of the script in each direction.
  std::array<int64_t, 2> CountMessages() {
    const std::array<int64_t, 2> before = Passed();
    EXPECT_TRUE(Script().ok());
    const std::array<int64_t, 2> after = Passed();
    ++step_;
    return {after[0] - before[0], after[1] - before[1]};
  }

  // The script with a fault in it, the end of all ranks, and a new start.
  void Try(const Place& place) {
    SCOPED_TRACE(absl::StrCat(Name(place.kind), ", rank ", place.victim, ", after ", place.after,
                              place.direction == Direction::kToServer ? " messages to" : " messages from",
                              " the leader, step ", step_));
    proxy_.Arm(FaultAt(place));
    const absl::Status status = Script();
    const bool fired = proxy_.fired();
    if (!fired) {
      proxy_.Heal();
      EXPECT_TRUE(status.ok()) << status;
      ++step_;
      return;
    }
    ++fired_;
    EXPECT_EQ(server_.WaitForAll(kLimit), EndsAfter(place)) << server_.log(0) << status;
    proxy_.Heal();
    server_.Start();
    ASSERT_FALSE(server_.target().empty());
    ExpectNoLeftovers();
    const auto head = client()->DescribeHead("head");
    ASSERT_TRUE(head.ok()) << head.status();
    const uint64_t step = head->state().step();
    EXPECT_TRUE(step == step_ || step == step_ + 1) << step;
    EXPECT_EQ(Tensors(*client()), Image(step)) << "after " << step << " steps";
    step_ = step;
  }

  void Delay(absl::Duration most) { proxy_.Delay(most); }
  // The state is that of so many steps.
  void ExpectUndisturbed() { EXPECT_EQ(Tensors(*client()), Image(step_)); }
  int fired() const { return fired_; }
  int ranks() const { return ranks_; }

 private:
  RankServerOptions Options() {
    return {
        .ranks = ranks_,
        .flags = {"--deterministic", "--restore=latest", "--keep_checkpoints=2", "--rank_silence_timeout=4s",
                  "--checkpoint_shard_bytes=4KiB", absl::StrCat("--split=", split_)},
        .flags_of = [this](int rank) {
          if (rank != 0) return std::vector<std::string>{absl::StrCat("--leader=", proxy_.target())};
          const std::string leader = absl::StrCat("127.0.0.1:", test::FreePort());
          proxy_.SetServer(leader);
          return std::vector<std::string>{absl::StrCat("--leader=", leader)};
        }};
  }

  // The start has removed what a save had begun.
  void ExpectNoLeftovers() const {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(server_.checkpoint_folder())) {
      EXPECT_FALSE(absl::StartsWith(entry.path().filename().string(), ".tmp-")) << entry.path();
    }
  }
  std::unique_ptr<client::Client> client() const { return ConnectOnce(server_.target()); }
  std::array<int64_t, 2> Passed() const {
    return {proxy_.messages(Direction::kToServer), proxy_.messages(Direction::kToClient)};
  }

  Fault FaultAt(const Place& place) {
    Fault fault = {.direction = place.direction, .after = place.after, .action = Fault::Action::kNone};
    const auto signal = [this, victim = place.victim](int number) {
      return [this, victim, number] { server_.rank(victim).Signal(number); };
    };
    switch (place.kind) {
      case Kind::kKillLeader:
      case Kind::kKillWorker:
        fault.call = signal(SIGKILL);
        break;
      case Kind::kDrain:
        fault.call = signal(SIGTERM);
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
  std::vector<int> EndsAfter(const Place& place) const {
    std::vector<int> ends(static_cast<size_t>(ranks_), place.kind == Kind::kDrain ? 0 : 3);
    if (place.kind == Kind::kKillLeader || place.kind == Kind::kKillWorker) {
      ends[static_cast<size_t>(place.victim)] = -SIGKILL;
    }
    return ends;
  }

  // Everything that is asked of ranks: a head comes and goes, a step is computed, applied and saved, and rows
  // are read.
  absl::Status Script() const {
    const auto connected =
        client::Client::Connect({.target = server_.target(), .retry = {.max_attempts = 1}});
    if (!connected.ok()) return connected.status();
    client::Client& client = **connected;
    v1::CreateHeadRequest other = SmallHead();
    other.mutable_spec()->set_name("other");
    absl::Status status = client.CreateHead(other).status();
    if (status.ok()) status = Accumulate(client, data_, step_);
    if (status.ok()) status = client.GradNorm("head").status();
    if (status.ok()) status = client.ApplyStep(AdamStep(step_, data_.size())).status();
    if (status.ok()) status = client.SaveCheckpoint("head").status();
    if (status.ok()) status = client.ReadTensor("head", v1::PARAM_WEIGHT).status();
    if (status.ok()) status = client.DeleteHead("other");
    return status;
  }

  // What the head is after so many steps of a server whose ranks nobody disturbs.
  const std::vector<std::vector<float>>& Image(uint64_t steps) {
    if (undisturbed_ == nullptr) {
      undisturbed_ = std::make_unique<RankServer>(
          LOSSD_BINARY,
          RankServerOptions{.ranks = ranks_, .flags = {"--deterministic", absl::StrCat("--split=", split_)}});
      EXPECT_TRUE(ConnectOnce(undisturbed_->target())->CreateHead(SmallHead()).ok());
      images_[0] = Tensors(*ConnectOnce(undisturbed_->target()));
    }
    for (uint64_t step = images_.rbegin()->first; step < steps; ++step) {
      const auto client = ConnectOnce(undisturbed_->target());
      EXPECT_TRUE(Accumulate(*client, data_, step).ok());
      EXPECT_TRUE(client->ApplyStep(AdamStep(step, data_.size())).ok());
      images_[step + 1] = Tensors(*client);
    }
    return images_.at(steps);
  }

  const int ranks_;
  const std::string split_;
  FaultProxy proxy_{"127.0.0.1:1", 1};
  RankServer server_;
  std::vector<SmallRows> data_;
  uint64_t step_ = 0;
  int fired_ = 0;
  std::unique_ptr<RankServer> undisturbed_;
  std::map<uint64_t, std::vector<std::vector<float>>> images_;
};

void TryAll(Group& group, const std::array<int64_t, 2>& messages) {
  for (int kind = 0; kind < kKinds; ++kind) {
    for (const Direction direction : {Direction::kToServer, Direction::kToClient}) {
      for (int64_t after = 0; after < messages[static_cast<size_t>(direction)]; ++after) {
        const int victim = kind == 0 ? 0 : 1 + static_cast<int>(after) % (group.ranks() - 1);
        group.Try({static_cast<Kind>(kind), direction, after, victim});
      }
    }
  }
}

void FaultsBetweenMessages(int ranks, const std::string& split, int usual) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 rng(seed);
  Group group(ranks, split);
  const std::array<int64_t, 2> messages = group.CountMessages();
  ASSERT_GT(messages[0], 10);
  ASSERT_GT(messages[1], 10);
  if (std::getenv("LOSSD_RANK_BOUNDARIES") != nullptr) return TryAll(group, messages);
  const int times = Times(usual);
  const uint64_t first = rng();
  for (int i = 0; i < times && !::testing::Test::HasFailure(); ++i) {
    Place place;
    place.kind = static_cast<Kind>((first + static_cast<uint64_t>(i)) % kKinds);  // each in turn
    place.direction = rng() % 2 == 0 ? Direction::kToServer : Direction::kToClient;
    place.after =
        static_cast<int64_t>(rng() % static_cast<uint64_t>(messages[static_cast<size_t>(place.direction)]));
    if (place.kind != Kind::kKillLeader) {
      place.victim = 1 + static_cast<int>(rng() % static_cast<uint64_t>(ranks - 1));
    }
    group.Try(place);
  }
  EXPECT_GT(group.fired(), times / 2) << "so few of the faults have happened";
  group.ExpectUndisturbed();
}

TEST(RanksBoundariesTest, TwoRanks) { FaultsBetweenMessages(2, "rows", 9); }
TEST(RanksBoundariesTest, FourRanks) { FaultsBetweenMessages(4, "rows", 5); }
TEST(RanksBoundariesTest, TwoRanksByVocabulary) { FaultsBetweenMessages(2, "vocabulary", 9); }
TEST(RanksBoundariesTest, FourRanksByVocabulary) { FaultsBetweenMessages(4, "vocabulary", 5); }

// Messages that are late change nothing.
TEST(RanksBoundariesTest, SlowConnections) {
  for (const char* const split : {"rows", "vocabulary"}) {
    SCOPED_TRACE(split);
    Group group(3, split);
    group.Delay(absl::Milliseconds(2));
    for (int step = 0; step < 2; ++step) group.CountMessages();
    group.ExpectUndisturbed();
  }
}

}  // namespace
}  // namespace lossd::app::testing::ranks_boundaries_test
