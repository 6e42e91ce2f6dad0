// SPDX-License-Identifier: Apache-2.0
// Tests of checkpoint_store.h: one checkpoint in the directory, the store of all of them, and which
// checkpoint of a head is the newest.
#include "server/head/checkpoint_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "server/head/disk.h"
#include "server/head/manifest.h"
#include "tests/server/head/checkpoint_fixture.h"

namespace lossd::head::checkpoint_store_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;

// ---- Checkpoint directory ----
// A checkpoint among others in a directory: files that lead out of it, names that are taken, a limit.

class CheckpointDirectoryTest : public CheckpointTest {};

// Files of a checkpoint that are links out of the directory, a pipe, or a folder.
TEST_F(CheckpointDirectoryTest, FilesThatLeadOutside) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(Save(subject, head, "x").ok());
  const test::TempFolder outside;
  for (const char* name : {"manifest.json", "tensors.safetensors"}) {
    SCOPED_TRACE(name);
    const std::string path = root_ + "/lm/x/" + name;
    fs::copy(path, outside.File(name));
    fs::rename(path, path + ".kept");
    const auto code = [&] {
      const auto list = ListCheckpoints(root_, "lm");
      EXPECT_TRUE(list.ok());
      EXPECT_EQ(list->size(), 1u);
      const absl::Status opened = CheckpointReader::Open(root_, "lm/x").status();
      if (std::string(name) == "manifest.json") {
        EXPECT_EQ(list->front().status.code(), opened.code());
      }
      return opened.code();
    };
    for (const std::string& target :
         {outside.File(name), fs::relative(outside.File(name), root_ + "/lm/x").string()}) {
      fs::create_symlink(target, path);
      EXPECT_EQ(code(), absl::StatusCode::kInvalidArgument) << target;
      fs::remove(path);
    }
    ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
    EXPECT_EQ(code(), absl::StatusCode::kFailedPrecondition);
    fs::remove(path);
    fs::rename(path + ".kept", path);
    EXPECT_EQ(code(), absl::StatusCode::kOk);
  }
}

// A head that went back and was trained to the same step again: neither checkpoint is lost.
TEST_F(CheckpointDirectoryTest, AutomaticNamesOfAStepTrainedAgain) {
  CheckpointSubject subject = SomeSubject();
  subject.step = 7;
  Head first = RandomHead(subject);
  Head second = RandomHead(subject);
  EXPECT_EQ(Save(subject, first, "")->name, "step-0000000007");
  const std::string name = Save(subject, second, "")->name;
  EXPECT_THAT(name, MatchesRegex("step-0000000007-[0-9a-f]{16}"));
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("step-0000000007", name));
  for (Head* head : {&first, &second}) {
    const absl::Status again = Save(subject, *head, "").status();
    EXPECT_EQ(again.code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(std::string(again.message()), HasSubstr("holds the same"));
    Head loaded("lm", std::make_unique<MemoryKernels>(subject.config));
    int calls = 0;
    ASSERT_TRUE(Load(head == &first ? "lm/step-0000000007" : "lm/" + name, loaded, &calls).ok());
    ExpectSameButGradients(loaded, *head);
  }
  // The same bits, and another answer of the last step.
  subject.last_step.emplace().rows = 5;
  EXPECT_THAT(Save(subject, first, "")->name, MatchesRegex("step-0000000007-[0-9a-f]{16}"));
  EXPECT_EQ(FilesIn(root_ + "/lm").size(), 3u);
  // What a client named is not the server's, and neither is what cannot be read.
  subject.step = 8;
  ASSERT_TRUE(Save(subject, first, "step-0000000008").ok());
  EXPECT_THAT(Save(subject, second, "")->name, MatchesRegex("step-0000000008-.*"));
  fs::create_directory(root_ + "/lm/step-0000000009");
  test::WriteWholeFile(root_ + "/lm/step-0000000009/x", "");
  subject.step = 9;
  EXPECT_THAT(Save(subject, second, "")->name, MatchesRegex("step-0000000009-.*"));
}

TEST_F(CheckpointDirectoryTest, DirectoryWithALimit) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  SaveOptions options;
  test::WriteWholeFile(root_ + "/model.safetensors", std::string(5000, 'x'));
  fs::create_symlink("/proc/kcore", root_ + "/link");
  const int64_t bytes = Save(subject, head, "a", options)->bytes;
  ASSERT_EQ(*DirectoryBytes(root_), 5000 + bytes);
  options.limit_bytes = 2 * bytes + 4999;
  fs::create_directory(root_ + "/lm/.tmp-left-over");  // does not count
  test::WriteWholeFile(root_ + "/lm/.tmp-left-over/x", std::string(100'000, 'x'));
  EXPECT_TRUE(Save(subject, head, "b", options).ok()) << "the manifest is not planned";
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("a", "b"));
  const absl::Status full = Save(subject, head, "c", options).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  for (const int64_t figure : {options.limit_bytes, *DirectoryBytes(root_)}) {
    EXPECT_THAT(std::string(full.message()), HasSubstr(absl::StrCat(figure)));
  }
  EXPECT_THAT(std::string(full.message()), HasSubstr("checkpoint_limit_bytes"));
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("a", "b"));
  fs::remove_all(root_ + "/lm/a");
  EXPECT_TRUE(Save(subject, head, "c", options).ok());
}

// ---- Checkpoint store ----
// What is listed, what is pruned, what is cleaned up.

class CheckpointStoreTest : public CheckpointTest {
 protected:
  CheckpointStoreTest() {
    subject_.config = {.hidden_size = 2, .vocab_size = 3};
    subject_.step = 1;
  }

  void SaveStep(uint64_t step, absl::string_view name = "") {
    subject_.step = step;
    Head head = RandomHead(subject_);
    const absl::Status status = Save(subject_, head, name).status();
    ASSERT_TRUE(status.ok()) << status;
  }

  CheckpointSubject subject_ = SomeSubject();
};

TEST_F(CheckpointStoreTest, PreparingRemovesLeftoversOnly) {
  const CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  ASSERT_TRUE(PrepareCheckpointDirectory(root_ + "/new/deep").ok());
  ASSERT_TRUE(Save(subject, head, "x").ok());
  fs::create_directory(root_ + "/lm/.tmp-y-1");
  test::WriteWholeFile(root_ + "/lm/.tmp-y-1/tensors.safetensors", "half");
  // What a save that is under way holds.
  fs::create_directory(root_ + "/lm/.tmp-z-1");
  const int lock = open((root_ + "/lm/.tmp-z-1").c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(flock(lock, LOCK_EX), 0);
  ASSERT_TRUE(PrepareCheckpointDirectory(root_).ok());
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre(".tmp-z-1", "x"));
  close(lock);
  ASSERT_TRUE(PrepareCheckpointDirectory(root_).ok());
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("x"));
  test::WriteWholeFile(root_ + "/file", "");
  EXPECT_FALSE(PrepareCheckpointDirectory(root_ + "/file").ok());
}

TEST_F(CheckpointStoreTest, SavingRemovesLeftoversOfTheHead) {
  fs::create_directories(root_ + "/lm/.tmp-y-1");
  fs::create_directories(root_ + "/other/.tmp-y-1");
  SaveStep(1, "x");
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("x"));
  EXPECT_THAT(FilesIn(root_ + "/other"), ElementsAre(".tmp-y-1"));
}

TEST_F(CheckpointStoreTest, ListsNewestFirst) {
  EXPECT_THAT(*ListCheckpoints(root_, ""), IsEmpty());
  EXPECT_THAT(*ListCheckpoints(root_ + "/none", ""), IsEmpty());
  const absl::Time begin = absl::Now() - absl::Seconds(1);
  SaveStep(5);
  SaveStep(7, "best");
  subject_.last_step = AppliedStep{.grad_norm = 2.5, .microbatches = 4, .rows = 99};
  SaveStep(6);
  subject_.head = "another";
  SaveStep(1);
  fs::create_directory(root_ + "/lm/no-checkpoint");
  fs::create_directory(root_ + "/lm/damaged");
  test::WriteWholeFile(root_ + "/lm/damaged/manifest.json", "{}");

  const auto list = *ListCheckpoints(root_, "");
  std::vector<std::string> names;
  for (const CheckpointInfo& info : list) names.push_back(info.name);
  EXPECT_EQ(names.front(), "another/step-0000000001");
  EXPECT_EQ(names.back(), "lm/damaged");
  EXPECT_EQ(list.back().status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(list.back().status.message()), HasSubstr("lm/damaged"));
  EXPECT_EQ(names.size(), 5u);
  for (const CheckpointInfo& info : list) {
    if (!info.status.ok()) continue;
    EXPECT_EQ(info.automatic, info.name != "lm/best") << info.name;
    EXPECT_GE(info.saved_at, begin);
    EXPECT_LE(info.saved_at, absl::Now());
    const std::string folder = root_ + "/" + info.name;
    EXPECT_EQ(info.bytes,
              fs::file_size(folder + "/manifest.json") + fs::file_size(folder + "/tensors.safetensors"));
    if (info.name != "lm/step-0000000006") continue;
    EXPECT_EQ(info.subject.last_step, subject_.last_step);
  }
  EXPECT_EQ(ListCheckpoints(root_, "another")->size(), 1u);
  EXPECT_EQ(ListCheckpoints(root_, "..").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(CheckpointStoreTest, PrunesAutomaticOnesOnly) {
  for (uint64_t step = 1; step <= 5; ++step) SaveStep(step);
  SaveStep(2, "step-of-mine");
  SaveStep(3, "step-0000000033");  // looks automatic
  subject_.head = "other";
  SaveStep(1);
  EXPECT_THAT(*PruneCheckpoints(root_, "lm/step-0000000005", 3),
              ElementsAre("lm/step-0000000002", "lm/step-0000000001"));
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("step-0000000003", "step-0000000004", "step-0000000005",
                                                  "step-0000000033", "step-of-mine"));
  EXPECT_THAT(*PruneCheckpoints(root_, "lm/step-0000000005", 3), IsEmpty());
  EXPECT_THAT(*PruneCheckpoints(root_, "lm/step-0000000005", 1),
              ElementsAre("lm/step-0000000004", "lm/step-0000000003"));
  EXPECT_THAT(FilesIn(root_ + "/other"), ElementsAre("step-0000000001"));
}

// After a return to an earlier step, what was saved just now is worth more than later steps of before.
TEST_F(CheckpointStoreTest, NeverPrunesWhatWasJustSaved) {
  SaveStep(10);
  SaveStep(11);
  SaveStep(4);
  EXPECT_THAT(*PruneCheckpoints(root_, "lm/step-0000000004", 2), ElementsAre("lm/step-0000000010"));
  EXPECT_THAT(*PruneCheckpoints(root_, "lm/step-0000000004", 1), ElementsAre("lm/step-0000000011"));
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("step-0000000004"));
}

TEST_F(CheckpointStoreTest, NeverPrunesWhatIsBeingRead) {
  for (uint64_t step = 1; step <= 3; ++step) SaveStep(step);
  {
    const auto reader = CheckpointReader::Open(root_, "lm/step-0000000001");
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_THAT(*PruneCheckpoints(root_, "lm/step-0000000003", 1), ElementsAre("lm/step-0000000002"));
    Head loaded("lm", std::make_unique<MemoryKernels>(subject_.config));
    int calls = 0;
    EXPECT_TRUE(Load("lm/step-0000000001", loaded, &calls).ok());
  }
  EXPECT_THAT(*PruneCheckpoints(root_, "lm/step-0000000003", 1), ElementsAre("lm/step-0000000001"));
}

TEST_F(CheckpointStoreTest, DamagedOnesStay) {
  for (uint64_t step = 1; step <= 3; ++step) SaveStep(step);
  test::WriteWholeFile(root_ + "/lm/step-0000000001/manifest.json", "{");
  EXPECT_THAT(*PruneCheckpoints(root_, "lm/step-0000000003", 1), ElementsAre("lm/step-0000000002"));
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("step-0000000001", "step-0000000003"));
}

// ---- The newest checkpoint ----
// Which checkpoint of a head is the newest: the one that was saved last, whatever the clock said, whatever
// its step is, and whatever has been removed meanwhile.

using Json = nlohmann::ordered_json;

class CheckpointOrderTest : public CheckpointTest {
 protected:
  CheckpointOrderTest() { subject_.config = {.hidden_size = 2, .vocab_size = 3}; }
  ~CheckpointOrderTest() override { clocks::SetWallClockForTesting(absl::ZeroDuration()); }

  std::string SaveStep(uint64_t step, absl::string_view name = "") {
    subject_.step = step;
    Head head = RandomHead(subject_);
    const auto saved = Save(subject_, head, name);
    EXPECT_TRUE(saved.ok()) << saved.status();
    return saved.ok() ? saved->name : "";
  }
  std::vector<std::string> Names() {
    std::vector<std::string> names;
    const auto list = *ListCheckpoints(root_, "lm");
    for (const CheckpointInfo& info : list) names.push_back(info.name.substr(3));
    return names;
  }
  // Has a manifest say something else, with a checksum that fits.
  void Edit(const std::string& name, const std::function<void(Json&)>& edit) {
    const std::string path = root_ + "/lm/" + name + "/manifest.json";
    Json json = Json::parse(test::ReadWholeFile(path));
    json.erase("checksum");
    edit(json);
    const std::string text = json.dump();
    Checksum checksum;
    checksum.Update(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
    json["checksum"] = checksum.Digest();
    test::WriteWholeFile(path, json.dump(2));
  }
  // As a server that does not count saves writes it.
  void MakeOld(const std::string& name, absl::string_view saved_at) {
    Edit(name, [&](Json& json) {
      json.erase("save_number");
      json["saved_at"] = std::string(saved_at);
    });
  }

  CheckpointSubject subject_ = SomeSubject();
};

TEST_F(CheckpointOrderTest, AClockThatIsSetBackChangesNothing) {
  SaveStep(3);
  SaveStep(4);
  clocks::SetWallClockForTesting(-absl::Hours(1));
  SaveStep(5);
  SaveStep(6);
  EXPECT_THAT(Names(),
              ElementsAre("step-0000000006", "step-0000000005", "step-0000000004", "step-0000000003"));
  EXPECT_EQ(ListNewest(root_, "lm", 1, 100)->checkpoints[0].subject.step, 6u);
  EXPECT_THAT(*PruneCheckpoints(root_, "lm/step-0000000006", 2),
              ElementsAre("lm/step-0000000004", "lm/step-0000000003"));
}

// Within one second the times in manifests say nothing, and the step of a branch that was left is larger.
TEST_F(CheckpointOrderTest, AnAbandonedBranchIsNotTheNewest) {
  SaveStep(7);
  SaveStep(9);
  SaveStep(2);
  SaveStep(3);
  EXPECT_THAT(Names(),
              ElementsAre("step-0000000003", "step-0000000002", "step-0000000009", "step-0000000007"));
}

TEST_F(CheckpointOrderTest, TheNumberSurvivesTheRemovalOfAll) {
  SaveStep(1);
  SaveStep(2);
  const uint64_t last = ListCheckpoints(root_, "lm")->front().save_number;
  EXPECT_EQ(last, 2u);
  fs::remove_all(root_ + "/lm/step-0000000001");
  fs::remove_all(root_ + "/lm/step-0000000002");
  SaveStep(1);
  EXPECT_EQ(ListCheckpoints(root_, "lm")->front().save_number, last + 1);
}

// Somebody has removed what lay beside the checkpoints, or copied a checkpoint from elsewhere.
TEST_F(CheckpointOrderTest, ManifestsCountToo) {
  SaveStep(1);
  Edit("step-0000000001", [](Json& json) { json["save_number"] = 40; });
  for (const auto& entry : fs::directory_iterator(root_ + "/lm")) {
    if (entry.is_regular_file()) fs::remove(entry.path());
  }
  SaveStep(2, "mine");
  EXPECT_EQ(ListCheckpoints(root_, "lm")->front().save_number, 41u);
}

TEST_F(CheckpointOrderTest, TheNumbersDoNotEnd) {
  SaveStep(1);
  Edit("step-0000000001", [](Json& json) { json["save_number"] = uint64_t{1} << 53; });
  SaveStep(2);
  EXPECT_EQ(Names().size(), 2u);
  Edit("step-0000000001", [](Json& json) { json["save_number"] = (uint64_t{1} << 53) + 1; });
  const auto list = *ListCheckpoints(root_, "lm");
  EXPECT_EQ(list.back().status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(list.back().status.message()), HasSubstr("save_number is 9007199254740993"));
}

// Those that servers without numbers saved lie where their times say, and among themselves as ever.
TEST_F(CheckpointOrderTest, ManifestsWithoutANumber) {
  for (const char* name : {"a", "b", "c"}) SaveStep(1, name);
  MakeOld("a", "2025-01-01T00:00:01+00:00");
  MakeOld("b", "2025-01-01T00:00:03+00:00");
  MakeOld("c", "2025-01-01T00:00:02+00:00");
  EXPECT_THAT(Names(), ElementsAre("b", "c", "a"));
  SaveStep(1, "d");
  Edit("d", [](Json& json) { json["saved_at"] = "2025-01-01T00:00:02+00:00"; });
  EXPECT_THAT(Names(), ElementsAre("b", "c", "d", "a"));
  SaveStep(1, "e");  // now
  EXPECT_THAT(Names(), ElementsAre("e", "b", "c", "d", "a"));
  EXPECT_TRUE(CheckpointReader::Open(root_, "lm/a").ok());
}

TEST_F(CheckpointOrderTest, StepsBeyondAllCountingAreRefused) {
  SaveStep(1);
  Edit("step-0000000001", [](Json& json) { json["step"] = ~uint64_t{0}; });
  const absl::Status status = CheckpointReader::Open(root_, "lm/step-0000000001").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("step is 18446744073709551615, which is no whole number from 0 to 9007199254740992"));
}

// ---- What is known of manifests ----

class CheckpointInfosTest : public CheckpointOrderTest {
 protected:
  // As if its last change were some time ago.
  static void Settle() { clocks::SetWallClockForTesting(absl::Minutes(1)); }
};

TEST_F(CheckpointInfosTest, AManifestIsReadOnce) {
  for (uint64_t step = 1; step <= 5; ++step) SaveStep(step);
  Settle();
  ASSERT_EQ(ListCheckpoints(root_, "lm")->size(), 5u);
  const int64_t read = ManifestsReadForTesting();
  for (int i = 0; i < 10; ++i) EXPECT_EQ(ListCheckpoints(root_, "")->size(), 5u);
  EXPECT_EQ(ManifestsReadForTesting(), read);
}

TEST_F(CheckpointInfosTest, AChangeIsSeen) {
  SaveStep(1);
  Settle();
  EXPECT_EQ(ListCheckpoints(root_, "lm")->front().subject.step, 1u);
  Edit("step-0000000001", [](Json& json) { json["step"] = 2; });
  EXPECT_EQ(ListCheckpoints(root_, "lm")->front().subject.step, 2u);
  fs::remove_all(root_ + "/lm/step-0000000001");
  EXPECT_TRUE(ListCheckpoints(root_, "lm")->empty());
}

// What was written a moment ago may be written again without a trace in its times.
TEST_F(CheckpointInfosTest, WhatIsYoungIsReadAgain) {
  SaveStep(1);
  ListCheckpoints(root_, "lm").IgnoreError();
  const int64_t read = ManifestsReadForTesting();
  ListCheckpoints(root_, "lm").IgnoreError();
  EXPECT_EQ(ManifestsReadForTesting(), read + 1);
}

TEST_F(CheckpointInfosTest, ADamagedOneIsReadOnceToo) {
  SaveStep(1);
  test::WriteWholeFile(root_ + "/lm/step-0000000001/manifest.json", "{}");
  Settle();
  EXPECT_FALSE(ListCheckpoints(root_, "lm")->front().status.ok());
  const int64_t read = ManifestsReadForTesting();
  EXPECT_FALSE(ListCheckpoints(root_, "lm")->front().status.ok());
  EXPECT_EQ(ManifestsReadForTesting(), read);
}

// ---- Values that are not finite ----

TEST_F(CheckpointOrderTest, SaysHowManyValuesAreNotFinite) {
  subject_.step = 1;
  Head head = RandomHead(subject_);
  auto& weight =
      static_cast<MemoryKernels&>(head.kernels()).tensor({kernels::Param::kWeight, kernels::Role::kValue});
  for (const auto& [id, values] : static_cast<MemoryKernels&>(head.kernels()).tensors()) {
    auto& all = static_cast<MemoryKernels&>(head.kernels()).tensor({id.first, id.second});
    std::fill(all.begin(), all.end(), 1.0f);
  }
  EXPECT_EQ(Save(subject_, head, "finite")->not_finite, 0);
  weight[0] = std::numeric_limits<float>::infinity();
  weight[1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(Save(subject_, head, "not")->not_finite, 2);
}

}  // namespace
}  // namespace lossd::head::checkpoint_store_test
