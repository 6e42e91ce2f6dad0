// SPDX-License-Identifier: Apache-2.0
// Every single operation of a save and of the pruning after it goes wrong once, in every way; then one of the
// checkpoints that were promised loads bit for bit, and nothing else is to be seen.
#include <cerrno>
#include <iostream>
#include <map>

#include "server/head/checkpoint_store.h"
#include "tests/server/head/checkpoint_fixture.h"
#include "tests/server/head/faulty_disk.h"
#include "tests/support/effort.h"

namespace lossd::head::checkpoint_disk_faults_test {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::Not;

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

}  // namespace
}  // namespace lossd::head::checkpoint_disk_faults_test
