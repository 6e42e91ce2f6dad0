// SPDX-License-Identifier: Apache-2.0
// Checkpoints whose files the ranks write and read themselves: what is in them, who takes part, and what
// becomes of a save that a rank cannot finish.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "proto/tensorfile/safetensors.h"
#include "tests/server/ranks/small_steps.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_folder.h"

namespace lossd::app::testing::ranks_shards_test {
namespace {

namespace fs = std::filesystem;

using test::RankServer;
using test::RankServerOptions;
using test::ServerProcess;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// So small that the small head has several files.
constexpr char kShardBytes[] = "--checkpoint_shard_bytes=4KiB";
constexpr char kSavedByItself[] = "checkpoints of a rank are saved";
constexpr char kLoadedByItself[] = "checkpoints of a rank are loaded";

struct Layout {
  int ranks = 2;
  const char* split = "rows";
};
const Layout kLayouts[] = {{2, "rows"}, {3, "rows"}, {2, "vocabulary"}, {4, "vocabulary"}};

// The bytes of every tensor of a checkpoint, put together from its files.
std::map<std::string, std::string> ContentOf(const fs::path& checkpoint) {
  std::ifstream file(checkpoint / "manifest.json");
  const auto manifest = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(manifest.is_object()) << checkpoint;
  std::map<std::string, std::string> content;
  for (const auto& shard : manifest.value("shards", nlohmann::json::array())) {
    auto input = formats::InputFile::Open(checkpoint / shard["file"].get<std::string>());
    EXPECT_TRUE(input.ok()) << input.status();
    const auto reader = formats::SafetensorsReader::Open(*std::move(input));
    EXPECT_TRUE(reader.ok()) << reader.status();
    for (const formats::SafetensorsInfo& info : (*reader)->tensors()) {
      std::string bytes(static_cast<size_t>(info.bytes), '\0');
      EXPECT_TRUE(
          (*reader)
              ->ReadRows(info, 0, info.rows(), {reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()})
              .ok());
      content[info.name] += bytes;
    }
  }
  return content;
}

// The number of temporary folders.
int Leftovers(const std::string& folder) {
  int leftovers = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(folder, error), end; entry != end; entry.increment(error)) {
    if (absl::StartsWith(entry->path().filename().string(), ".tmp-")) ++leftovers;
  }
  return leftovers;
}

// Which rank takes part in saves, or loads, by itself: lines of rank 0's log.
std::string Lines(RankServer& server, const std::string& what) {
  std::string lines;
  for (const absl::string_view line : absl::StrSplit(server.log(0), '\n')) {
    if (absl::StrContains(line, what)) absl::StrAppend(&lines, line, "\n");
  }
  return lines;
}

v1::CreateHeadRequest FullHead() {
  v1::CreateHeadRequest head = SmallHead();
  head.mutable_spec()->set_bias(true);
  head.mutable_spec()->set_norm(v1::NORM_LAYERNORM);
  head.mutable_spec()->set_class_weights(true);
  return head;
}

// Two steps of training, and a checkpoint.
void TrainAndSave(const std::string& target, uint64_t seed, const std::string& name) {
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = SomeData(rng);
  const auto client = ConnectOnce(target);
  ASSERT_TRUE(client->CreateHead(FullHead()).ok());
  std::mt19937_64 order(seed);
  Trained trained;
  Train(*client, data, 0, 2, order, trained);
  const auto saved = client->SaveCheckpoint("head", name);
  ASSERT_TRUE(saved.ok()) << saved.status();
}

std::vector<std::string> FlagsOf(const Layout& layout) {
  return {"--deterministic", kShardBytes, absl::StrCat("--split=", layout.split), "--log_level=info"};
}

// By the ranks, by rank 0 for all, and by one process with as many devices.
TEST(RanksShardsTest, WhoeverWritesItACheckpointHasTheSameTensors) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(absl::StrCat(layout.ranks, " by ", layout.split));
    RankServer themselves(LOSSD_BINARY, {.ranks = layout.ranks, .flags = FlagsOf(layout)});
    TrainAndSave(themselves.target(), seed, "a");
    const std::string lines = Lines(themselves, kSavedByItself);
    for (int rank = 1; rank < layout.ranks; ++rank) {
      EXPECT_THAT(lines, HasSubstr(absl::StrCat("rank=", rank, " how=\"by itself\"")));
    }
    EXPECT_THAT(lines, Not(HasSubstr("through rank 0")));

    const test::TempFolder other;
    RankServer through(LOSSD_BINARY,
                       {.ranks = layout.ranks, .flags = FlagsOf(layout), .flags_of = [&](int rank) {
                          std::vector<std::string> flags;
                          if (rank > 0) flags.push_back("--checkpoint_dir=" + other.File("other"));
                          return flags;
                        }});
    TrainAndSave(through.target(), seed, "a");
    EXPECT_THAT(Lines(through, kSavedByItself),
                AllOf(HasSubstr("through rank 0"), Not(HasSubstr("by itself"))));
    EXPECT_FALSE(fs::exists(other.File("other")));

    ServerProcess devices(LOSSD_BINARY, {absl::StrCat("--cpu_devices=", layout.ranks), "--deterministic",
                                         kShardBytes, absl::StrCat("--split=", layout.split)});
    TrainAndSave(devices.target(), seed, "a");

    const auto content = ContentOf(fs::path(themselves.checkpoint_folder()) / "head/a");
    EXPECT_EQ(content.size(), 13u) << "weight, bias, gain and shift with two moments each, and class weights";
    EXPECT_EQ(content, ContentOf(fs::path(through.checkpoint_folder()) / "head/a"));
    EXPECT_EQ(content, ContentOf(fs::path(devices.checkpoint_folder()) / "head/a"));
    EXPECT_EQ(Leftovers(themselves.checkpoint_folder()), 0);
  }
}

// Into 1 to 4 devices of one process and into ranks, both ways, and back: what is saved then is the same.
TEST(RanksShardsTest, LoadsIntoAnyNumberOfDevicesAndRanks) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  for (const Layout& layout : {Layout{3, "rows"}, Layout{2, "vocabulary"}}) {
    SCOPED_TRACE(absl::StrCat("from ", layout.ranks, " by ", layout.split));
    RankServer from(LOSSD_BINARY, {.ranks = layout.ranks, .flags = FlagsOf(layout)});
    TrainAndSave(from.target(), seed, "a");
    const std::string directory = absl::StrCat("--checkpoint_dir=", from.checkpoint_folder());
    const auto content = ContentOf(fs::path(from.checkpoint_folder()) / "head/a");
    const auto expect_same = [&](const std::string& target, const std::string& name) {
      const auto client = ConnectOnce(target);
      const auto loaded = client->LoadCheckpoint("head/a", "head");
      ASSERT_TRUE(loaded.ok()) << loaded.status();
      ASSERT_TRUE(client->SaveCheckpoint("head", name).ok());
      EXPECT_EQ(ContentOf(fs::path(from.checkpoint_folder()) / "head" / name), content);
      // Into a head that is there already.
      ASSERT_TRUE(client->LoadCheckpoint("head/a", "head").ok());
    };
    for (const char* const split : {"rows", "vocabulary"}) {
      for (int devices = 1; devices <= 4; ++devices) {
        SCOPED_TRACE(absl::StrCat("into ", devices, " devices by ", split));
        ServerProcess into(LOSSD_BINARY, {absl::StrCat("--cpu_devices=", devices), kShardBytes, directory,
                                          absl::StrCat("--split=", split)});
        expect_same(into.target(), absl::StrCat("devices-", devices, split));
      }
      for (int ranks = 2; ranks <= 4; ++ranks) {
        SCOPED_TRACE(absl::StrCat("into ", ranks, " ranks by ", split));
        std::vector<std::string> flags = FlagsOf({ranks, split});
        flags.push_back(directory);
        RankServer into(LOSSD_BINARY, {.ranks = ranks, .flags = flags});
        expect_same(into.target(), absl::StrCat("ranks-", ranks, split));
        EXPECT_THAT(Lines(into, kLoadedByItself),
                    AllOf(HasSubstr("by itself"), Not(HasSubstr("through rank 0"))));
      }
    }
    EXPECT_EQ(Leftovers(from.checkpoint_folder()), 0);
  }
}

// One worker sees the folder, one has a folder of its own, and one has a link to it.
TEST(RanksShardsTest, OnlyRanksThatSeeTheFolderTakePart) {
  const test::TempFolder other;
  for (const char* const split : {"rows", "vocabulary"}) {
    SCOPED_TRACE(split);
    const std::string linked = other.File(absl::StrCat("linked-", split));
    RankServer server(LOSSD_BINARY, {.ranks = 4, .flags = FlagsOf({4, split}), .flags_of = [&](int rank) {
                                       std::vector<std::string> flags;
                                       if (rank == 2)
                                         flags.push_back("--checkpoint_dir=" + other.File("empty"));
                                       if (rank == 3) flags.push_back("--checkpoint_dir=" + linked);
                                       return flags;
                                     }});
    fs::create_directories(other.File("empty"));
    fs::create_directories(linked);
    fs::create_directory_symlink(fs::path(server.checkpoint_folder()) / "head", fs::path(linked) / "head");
    TrainAndSave(server.target(), 7, "a");
    const auto before = Tensors(*ConnectOnce(server.target()));
    ASSERT_TRUE(ConnectOnce(server.target())->LoadCheckpoint("head/a", "copy").ok());
    ASSERT_TRUE(ConnectOnce(server.target())->LoadCheckpoint("head/a", "head").ok());
    EXPECT_EQ(Tensors(*ConnectOnce(server.target())), before);
    for (const char* const what : {kSavedByItself, kLoadedByItself}) {
      const std::string lines = Lines(server, what);
      EXPECT_THAT(lines, HasSubstr("rank=1 how=\"by itself\""));
      EXPECT_THAT(lines, HasSubstr("rank=2 how=\"through rank 0\""));
      EXPECT_THAT(lines, HasSubstr("rank=3 how=\"through rank 0\""));
      EXPECT_THAT(lines, HasSubstr("reason=\"")) << lines;
    }
    EXPECT_TRUE(fs::is_empty(other.File("empty")));
    ServerProcess one(LOSSD_BINARY, {absl::StrCat("--checkpoint_dir=", server.checkpoint_folder())});
    ASSERT_TRUE(ConnectOnce(one.target())->LoadCheckpoint("head/a", "head").ok());
    EXPECT_EQ(Tensors(*ConnectOnce(one.target())), before);
  }
}

// The files of all ranks go, and a load that is under way gets all of them.
TEST(RanksShardsTest, DeletionsBesideLoads) {
  for (const char* const split : {"rows", "vocabulary"}) {
    SCOPED_TRACE(split);
    RankServer server(LOSSD_BINARY, {.ranks = 3, .flags = FlagsOf({3, split})});
    TrainAndSave(server.target(), 7, "a");
    const auto client = ConnectOnce(server.target());
    const auto before = Tensors(*client);
    for (int round = 0; round < 6; ++round) {
      const std::string name = round == 0 ? "a" : absl::StrCat("again-", round);
      if (round > 0) {
        ASSERT_TRUE(client->SaveCheckpoint("head", name).ok());
      }
      absl::Status loaded;
      std::thread loader([&] {
        loaded = ConnectOnce(server.target())->LoadCheckpoint(absl::StrCat("head/", name), "head").status();
      });
      absl::SleepFor(absl::Milliseconds(2 * round));
      const auto deleted = client->DeleteCheckpoint(absl::StrCat("head/", name));
      loader.join();
      ASSERT_TRUE(deleted.ok()) << deleted.status();
      EXPECT_TRUE(loaded.ok() || absl::IsNotFound(loaded)) << loaded;
      EXPECT_EQ(Tensors(*client), before);
      EXPECT_THAT(test::NamesInHeadFolder(server.checkpoint_folder() + "/head"), IsEmpty());
    }
  }
}

// A worker whose disk is full: here it may not write files of more than a few bytes.
TEST(RanksShardsTest, AFullDiskAtAWorkerEndsTheSaveAndNothingElse) {
  for (const char* const split : {"rows", "vocabulary"}) {
    SCOPED_TRACE(split);
    RankServer server(
        LOSSD_BINARY,
        {.ranks = 2,
         .flags = FlagsOf({2, split}),
         .flags_of =
             [](int rank) {
               return std::vector<std::string>{absl::StrCat("--rank=", rank), "--ranks=2",
                                               "--leader=127.0.0.1"};
             },
         .environment = [](int, int) { return std::vector<std::string>{"--ignore-signal=XFSZ"}; }});
    TrainAndSave(server.target(), 5, "whole");
    const auto client = ConnectOnce(server.target());
    const auto content = ContentOf(fs::path(server.checkpoint_folder()) / "head/whole");
    rlimit before = {};
    const rlimit small = {.rlim_cur = 2048, .rlim_max = RLIM_INFINITY};
    ASSERT_EQ(prlimit(server.rank(1).pid(), RLIMIT_FSIZE, &small, &before), 0);
    const auto failed = client->SaveCheckpoint("head", "lost");
    EXPECT_FALSE(failed.ok());
    EXPECT_THAT(std::string(failed.status().message()), AllOf(HasSubstr("rank 1"), HasSubstr("tensors-")));
    EXPECT_FALSE(fs::exists(fs::path(server.checkpoint_folder()) / "head/lost"));
    EXPECT_EQ(Leftovers(server.checkpoint_folder()), 0);
    EXPECT_EQ(ContentOf(fs::path(server.checkpoint_folder()) / "head/whole"), content);
    ASSERT_EQ(prlimit(server.rank(1).pid(), RLIMIT_FSIZE, &before, nullptr), 0);
    const auto saved = client->SaveCheckpoint("head", "lost");
    ASSERT_TRUE(saved.ok()) << saved.status();
    EXPECT_EQ(ContentOf(fs::path(server.checkpoint_folder()) / "head/lost"), content);
  }
}

// At any moment: what is there afterwards is whole, and what was there before the save is there still.
TEST(RanksShardsTest, KilledAtAnyMomentOfASaveARankLeavesNoHalfCheckpoint) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  v1::CreateHeadRequest large = SmallHead();
  large.mutable_spec()->set_vocab_size(60'000);
  int finished = 0;
  for (const char* const split : {"rows", "vocabulary"}) {
    SCOPED_TRACE(split);
    RankServer server(LOSSD_BINARY,
                      {.ranks = 3,
                       .flags = {"--checkpoint_shard_bytes=1MiB", "--restore=latest", "--log_level=info",
                                 "--memory_limit_bytes=512MiB", absl::StrCat("--split=", split)}});
    ASSERT_TRUE(ConnectOnce(server.target())->CreateHead(large).ok());
    const auto tensors = Tensors(*ConnectOnce(server.target()));
    const absl::Time begin = clocks::SteadyNow();
    ASSERT_TRUE(ConnectOnce(server.target())->SaveCheckpoint("head", "whole").ok());
    const absl::Duration usual = clocks::SteadyNow() - begin;
    const auto content = ContentOf(fs::path(server.checkpoint_folder()) / "head/whole");
    for (int i = 0; i < Times(4); ++i) {
      const int victim = i % 3;
      const std::string name = absl::StrCat("next-", i);
      const auto client = ConnectOnce(server.target());
      std::thread save([&] {
        if (client->SaveCheckpoint("head", name).ok()) ++finished;
      });
      absl::SleepFor(usual * (static_cast<double>(rng() % 1000) / 1000));
      server.rank(victim).Signal(SIGKILL);
      save.join();
      EXPECT_EQ(server.WaitForAll(absl::Minutes(3))[static_cast<size_t>(victim)], -SIGKILL);
      server.Start();
      ASSERT_FALSE(server.target().empty());
      EXPECT_EQ(Leftovers(server.checkpoint_folder()), 0);
      EXPECT_EQ(Tensors(*ConnectOnce(server.target())), tensors) << "from the newest";
      const std::string head_folder = server.checkpoint_folder() + "/head";
      for (const std::string& left : test::NamesInHeadFolder(head_folder)) {
        EXPECT_EQ(ContentOf(fs::path(head_folder) / left), content) << left;
      }
      EXPECT_TRUE(fs::exists(fs::path(server.checkpoint_folder()) / "head/whole"));
    }
  }
  std::cout << finished << " saves were over before their kill, seed " << seed << "\n";
}

}  // namespace
}  // namespace lossd::app::testing::ranks_shards_test
