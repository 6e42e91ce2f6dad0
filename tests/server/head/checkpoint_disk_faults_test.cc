// SPDX-License-Identifier: Apache-2.0
// Checkpoints on a disk that fails or is looked at: every single operation of a save and of the pruning after
// it goes wrong once, in every way; and one checkpoint is removed while others look for it and read it.
#include <atomic>
#include <cerrno>
#include <iostream>
#include <map>
#include <thread>

#include "server/head/checkpoint_store.h"
#include "server/head/disk.h"
#include "tests/server/head/checkpoint_fixture.h"
#include "tests/server/head/faulty_disk.h"
#include "tests/support/effort.h"

namespace lossd::head::checkpoint_disk_faults_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

class CheckpointDiskFaultsTest : public CheckpointTest {
 protected:
  // Two automatic checkpoints, of steps 1 and 2, and a head at step 3.
  CheckpointDiskFaultsTest() {
    for (uint64_t step = 1; step <= 3; ++step) {
      subject_.step = step;
      heads_.emplace_back(new Head(RandomHead(subject_)));
    }
    for (uint64_t step = 1; step <= 2; ++step) {
      subject_.step = step;
      EXPECT_TRUE(Save(subject_, *heads_[step - 1], "", options_).ok());
    }
    subject_.step = 3;
    fs::rename(root_ + "/lm", before_.File("lm"));
  }

  void Restore() {
    fs::remove_all(root_ + "/lm");
    fs::copy(before_.File("lm"), root_ + "/lm", fs::copy_options::recursive);
  }

  // Saves step 3 and prunes, as the server does; what the save ended with.
  absl::Status SaveAndPrune(Disk* disk) {
    options_.disk = disk;
    const absl::Status saved = Save(subject_, *heads_[2], "", options_).status();
    if (saved.ok()) PruneCheckpoints(root_, "lm/step-0000000003", 1, disk).IgnoreError();
    return saved;
  }

  // After a restart: every checkpoint that is listed is whole, and there is one of `least_step` or later.
  void ExpectIntact(uint64_t least_step) {
    ASSERT_TRUE(PrepareCheckpointDirectory(root_).ok());
    EXPECT_THAT(FilesIn(root_ + "/lm"), Each(Not(HasSubstr(".tmp")))) << "leftovers stayed";
    const auto list = ListCheckpoints(root_, "lm");
    ASSERT_TRUE(list.ok()) << list.status();
    EXPECT_EQ(list->size(), FilesIn(root_ + "/lm").size());
    uint64_t latest = 0;
    for (const CheckpointInfo& info : *list) {
      ASSERT_TRUE(info.status.ok()) << info.status;
      latest = std::max(latest, info.subject.step);
      Head loaded("lm", std::make_unique<MemoryKernels>(subject_.config));
      int calls = 0;
      const absl::Status status = Load(info.name, loaded, &calls);
      ASSERT_TRUE(status.ok()) << info.name << ": " << status;
      ExpectSameButGradients(loaded, *heads_[info.subject.step - 1]);
    }
    EXPECT_GE(latest, least_step);
  }

  static constexpr int64_t kNever = 0;

  // Has the operations go wrong, one after the other: of saves of one file, and of several that are written
  // at the same time.
  void TryAll(Fault fault, int error_number) {
    for (const SaveOptions& options : {SaveOptions{.slice_bytes = 60}, Sharded()}) {
      options_ = options;
      TryAllOperations(fault, error_number);
      if (HasFailure()) break;
    }
  }

  void TryAllOperations(Fault fault, int error_number) {
    std::map<std::string, int> struck;
    int total = 0;
    for (int64_t at = 1;; ++at) {
      SCOPED_TRACE(absl::StrCat("operation ", at));
      Restore();
      FaultyDisk disk(fault, at, error_number, static_cast<uint32_t>(random_()));
      const absl::Status saved = SaveAndPrune(&disk);
      if (!disk.struck()) {
        EXPECT_TRUE(saved.ok()) << saved;
        break;
      }
      ++struck[disk.victim()];
      ++total;
      ExpectIntact(saved.ok() ? 3 : 2);
      if (fault == Fault::kError && error_number == ENOSPC && !saved.ok()) {
        EXPECT_EQ(saved.code(), absl::StatusCode::kResourceExhausted) << saved;
      }
      // The next attempt works: the step's checkpoint is there already, or is made now.
      FaultyDisk healthy(fault, kNever, 0, 0);
      const absl::Status again = SaveAndPrune(&healthy);
      EXPECT_TRUE(again.ok() || absl::IsAlreadyExists(again)) << again;
      ExpectIntact(3);
      if (HasFailure()) break;
    }
    std::cout << total << " faults:";
    for (const auto& [operation, count] : struck) std::cout << " " << count << " x " << operation << ";";
    std::cout << std::endl;
    for (const char* operation : {"create", "create folder", "write", "fsync", "fsync folder", "rename",
                                  "close", "remove", "remove folder"}) {
      EXPECT_GT(struck[operation], 0) << operation << " was never tried";
    }
  }

  test::TempFolder before_;
  CheckpointSubject subject_ = SomeSubject();
  SaveOptions options_{.slice_bytes = 60};
  std::vector<std::unique_ptr<Head>> heads_;
};

TEST_F(CheckpointDiskFaultsTest, DiskFull) { TryAll(Fault::kError, ENOSPC); }

TEST_F(CheckpointDiskFaultsTest, DiskError) { TryAll(Fault::kError, EIO); }

TEST_F(CheckpointDiskFaultsTest, ProcessKilled) { TryAll(Fault::kKill, 0); }

TEST_F(CheckpointDiskFaultsTest, PowerLost) {
  for (int64_t round = 0; round < test::Attempts(1, 5) && !HasFailure(); ++round)
    TryAll(Fault::kPowerLoss, 0);
}

// ---- Removal ----
// One checkpoint is removed: at once for those who look for it, and later for those who read it.

class CheckpointRemovalTest : public CheckpointTest {
 protected:
  void SaveNamed(absl::string_view name, const SaveOptions& options = {.slice_bytes = 60}) {
    const absl::Status status = Save(subject_, head_, name, options).status();
    ASSERT_TRUE(status.ok()) << status;
  }
  void ExpectRefused(absl::string_view checkpoint, absl::StatusCode code, absl::string_view what) {
    const absl::Status status = RemoveCheckpoint(root_, checkpoint).status();
    EXPECT_EQ(status.code(), code) << checkpoint << ": " << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(std::string(what)), Not(HasSubstr(root_))));
  }

  const CheckpointSubject subject_ = SomeSubject();
  Head head_ = RandomHead(subject_);
};

TEST_F(CheckpointRemovalTest, RemovesAllFilesAndSaysHowMuchTheyHad) {
  SaveNamed("one");
  SaveNamed("many", Sharded());
  SaveNamed("stays");
  for (const char* name : {"one", "many"}) {
    int64_t bytes = 0;
    const std::vector<CheckpointInfo> list = *ListCheckpoints(root_, "lm");
    for (const CheckpointInfo& info : list) {
      if (info.name == absl::StrCat("lm/", name)) bytes = info.bytes;
    }
    const auto removed = RemoveCheckpoint(root_, absl::StrCat("lm/", name));
    ASSERT_TRUE(removed.ok()) << removed.status();
    EXPECT_EQ(removed->bytes, bytes);
    EXPECT_GT(bytes, 0);
    EXPECT_EQ(removed->unremoved, "");
  }
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("stays"));
  ExpectRefused("lm/one", absl::StatusCode::kNotFound, "checkpoint lm/one");
  SaveNamed("one");
}

TEST_F(CheckpointRemovalTest, NothingElseIsRemoved) {
  SaveNamed("one");
  test::WriteWholeFile(root_ + "/outside", "");
  for (const char* name : {"", "lm", "/", "lm/", "/one", "lm/..", "../lm/one", "lm/../lm/one", "lm/one/x",
                           "lm//one", "./lm/one", "lm/.", "lm/.tmp-one-1", "/lm/one", "lm/one/", "lm\\one"}) {
    ExpectRefused(name, absl::StatusCode::kInvalidArgument, "must be 1 to 64 characters");
  }
  ExpectRefused(std::string("lm/on\0e", 7), absl::StatusCode::kInvalidArgument, "must be");
  ExpectRefused("lm/two", absl::StatusCode::kNotFound, "lm/two: there is none of this name");
  ExpectRefused("other/one", absl::StatusCode::kNotFound, "other/one");
  ExpectRefused("outside/one", absl::StatusCode::kNotFound, "outside/one");
  // A model of somebody's.
  fs::create_directories(root_ + "/lm/llama");
  test::WriteWholeFile(root_ + "/lm/llama/model.safetensors", "much");
  ExpectRefused("lm/llama", absl::StatusCode::kNotFound, "no manifest.json");
  test::WriteWholeFile(root_ + "/lm/llama/manifest.json", "{}");
  ExpectRefused("lm/llama", absl::StatusCode::kFailedPrecondition, "model.safetensors");
  EXPECT_THAT(FilesIn(root_ + "/lm/llama"), SizeIs(2));
  EXPECT_THAT(FilesIn(root_ + "/lm/one"), SizeIs(2));
}

TEST_F(CheckpointRemovalTest, LinksStay) {
  SaveNamed("one");
  test::TempFolder elsewhere;
  fs::copy(root_ + "/lm/one", elsewhere.File("one"), fs::copy_options::recursive);
  fs::create_directory_symlink(elsewhere.File("one"), root_ + "/lm/away");
  fs::create_directory_symlink("one", root_ + "/lm/same");
  fs::create_directory_symlink("lm", root_ + "/alias");
  fs::create_directory_symlink("loop", root_ + "/lm/loop");
  fs::create_directory_symlink("nothing", root_ + "/lm/dangling");
  for (const char* name : {"lm/away", "lm/same", "alias/one", "lm/loop", "lm/dangling"}) {
    ExpectRefused(name, absl::StatusCode::kInvalidArgument, "is a symbolic link");
  }
  EXPECT_THAT(FilesIn(root_ + "/lm"), SizeIs(5));
  // What a link within a checkpoint leads to stays.
  fs::create_symlink(elsewhere.File("one/manifest.json"), root_ + "/lm/one/note");
  ASSERT_TRUE(RemoveCheckpoint(root_, "lm/one").ok());
  EXPECT_TRUE(fs::exists(elsewhere.File("one/manifest.json")));
}

TEST_F(CheckpointRemovalTest, DamagedOnesGo) {
  SaveNamed("one", Sharded());
  test::WriteWholeFile(root_ + "/lm/one/manifest.json", "{");
  const auto removed = RemoveCheckpoint(root_, "lm/one");
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_GT(removed->bytes, 0);
  EXPECT_THAT(FilesIn(root_ + "/lm"), IsEmpty());
}

// The reader goes on, nobody else finds the checkpoint, and another one of its name may come.
TEST_F(CheckpointRemovalTest, ReadersKeepTheirFiles) {
  SaveNamed("one", Sharded());
  std::string unremoved;
  {
    auto reader = CheckpointReader::Open(root_, "lm/one");
    ASSERT_TRUE(reader.ok()) << reader.status();
    const auto removed = RemoveCheckpoint(root_, "lm/one");
    ASSERT_TRUE(removed.ok()) << removed.status();
    unremoved = removed->unremoved;
    EXPECT_TRUE(fs::exists(unremoved + "/manifest.json"));
    EXPECT_EQ(CheckpointReader::Open(root_, "lm/one").status().code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(*ListCheckpoints(root_, ""), IsEmpty());
    RemoveLeftovers(Disk::Real(), root_ + "/lm");
    EXPECT_FALSE(RemoveIfUnused(Disk::Real(), unremoved));
    Head other = RandomHead(subject_);
    ASSERT_TRUE(Save(subject_, other, "one").ok());
    Head loaded("lm", std::make_unique<MemoryKernels>(subject_.config));
    const absl::Status status = (*reader)->Load(
        [&](kernels::TensorId id, int64_t row, int64_t rows, absl::Span<const uint8_t> in) {
          return loaded.WriteRows(id, row, rows, kernels::DType::kFloat32, in);
        },
        {});
    ASSERT_TRUE(status.ok()) << status;
    ExpectSameButGradients(loaded, head_);
  }
  EXPECT_TRUE(RemoveIfUnused(Disk::Real(), unremoved));
  EXPECT_TRUE(RemoveIfUnused(Disk::Real(), unremoved)) << "it is gone already";
  EXPECT_THAT(FilesIn(root_ + "/lm"), ElementsAre("one"));
}

// A load finds the whole checkpoint or none of it, whenever it begins.
TEST_F(CheckpointRemovalTest, LoadsThatRaceARemovalAreWholeOrFindNothing) {
  std::atomic<bool> stop{false};
  std::atomic<int> loaded{0}, missed{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        Head head("lm", std::make_unique<MemoryKernels>(subject_.config));
        int calls = 0;
        const absl::Status status = Load("lm/one", head, &calls);
        if (status.ok()) {
          ExpectSameButGradients(head, head_);
          ++loaded;
        } else {
          EXPECT_TRUE(absl::IsNotFound(status)) << status;
          ++missed;
        }
      }
    });
  }
  for (int round = 0; round < 60 || ((loaded == 0 || missed == 0) && round < 3000); ++round) {
    SaveNamed("one", Sharded());
    const auto removed = RemoveCheckpoint(root_, "lm/one");
    EXPECT_TRUE(removed.ok()) << removed.status();
    if (HasFailure()) break;
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  RemoveLeftovers(Disk::Real(), root_ + "/lm");
  EXPECT_THAT(FilesIn(root_ + "/lm"), IsEmpty());
  EXPECT_GT(loaded, 0);
}

// Whatever operation goes wrong, the checkpoint is whole or gone, and a start cleans up.
TEST_F(CheckpointRemovalTest, EveryFaultLeavesItWholeOrGone) {
  SaveNamed("one", Sharded());
  test::TempFolder before;
  fs::rename(root_ + "/lm", before.File("lm"));
  for (const Fault fault : {Fault::kError, Fault::kKill, Fault::kPowerLoss}) {
    int struck = 0;
    for (int64_t at = 1;; ++at) {
      SCOPED_TRACE(absl::StrCat("fault ", static_cast<int>(fault), " at ", at));
      fs::remove_all(root_ + "/lm");
      fs::copy(before.File("lm"), root_ + "/lm", fs::copy_options::recursive);
      FaultyDisk disk(fault, at, EIO, static_cast<uint32_t>(random_()));
      const auto removed = RemoveCheckpoint(root_, "lm/one", &disk);
      if (!disk.struck()) {
        EXPECT_TRUE(removed.ok()) << removed.status();
        break;
      }
      ++struck;
      ASSERT_TRUE(PrepareCheckpointDirectory(root_).ok());
      const std::vector<std::string> left = FilesIn(root_ + "/lm");
      if (removed.ok() || left.empty()) {
        EXPECT_THAT(left, IsEmpty());
      } else {
        EXPECT_THAT(left, ElementsAre("one"));
        Head loaded("lm", std::make_unique<MemoryKernels>(subject_.config));
        int calls = 0;
        EXPECT_TRUE(Load("lm/one", loaded, &calls).ok());
        EXPECT_TRUE(RemoveCheckpoint(root_, "lm/one").ok());
      }
      if (fault == Fault::kError && !removed.ok()) {
        EXPECT_THAT(left, ElementsAre("one")) << "an error, and it is gone";
      }
      if (HasFailure()) return;
    }
    EXPECT_GE(struck, 5);
  }
}

}  // namespace
}  // namespace lossd::head::checkpoint_disk_faults_test
