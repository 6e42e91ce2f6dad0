// SPDX-License-Identifier: Apache-2.0
// On a file system without locks (flock), no server removes what another one saves: leftovers stay, and
// nothing is saved that could not be protected.
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "server/head/checkpoint_store.h"
#include "server/head/disk.h"
#include "tests/server/head/checkpoint_fixture.h"

namespace {
int g_lock_error = 0;  // what flock ends with; 0: it works
}  // namespace

// In place of the C library's, also for the other tests of this program.
extern "C" int flock(int file, int operation) noexcept {
  if (g_lock_error == 0) return static_cast<int>(syscall(SYS_flock, file, operation));
  errno = g_lock_error;
  return -1;
}

namespace lossd::head::no_locks_test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class NoLocksTest : public CheckpointTest {
 protected:
  ~NoLocksTest() override { g_lock_error = 0; }
};

TEST_F(NoLocksTest, NobodyGetsALock) {
  for (const int error : {ENOLCK, ENOSYS, EOPNOTSUPP, EINVAL}) {
    g_lock_error = error;
    for (const auto kind : {FolderLock::Kind::kShared, FolderLock::Kind::kExclusive}) {
      EXPECT_EQ(FolderLock::Try(root_, kind).status().code(), absl::StatusCode::kUnimplemented) << error;
      EXPECT_EQ(FolderLock::Wait(root_, kind).status().code(), absl::StatusCode::kUnimplemented) << error;
    }
  }
}

// The running save of another server looks like a leftover.
TEST_F(NoLocksTest, AnotherServersSaveStays) {
  g_lock_error = ENOLCK;
  fs::create_directories(root_ + "/lm/.tmp-x-01234567");
  test::WriteWholeFile(root_ + "/lm/.tmp-x-01234567/tensors.safetensors", "half");
  ASSERT_TRUE(PrepareCheckpointDirectory(root_).ok());
  RemoveLeftovers(Disk::Real(), root_ + "/lm");
  EXPECT_THAT(FilesIn(root_ + "/lm/.tmp-x-01234567"), ElementsAre("tensors.safetensors"));
}

TEST_F(NoLocksTest, SavesAndPrunesAreRefused) {
  CheckpointSubject subject = SomeSubject();
  Head head = RandomHead(subject);
  for (subject.step = 1; subject.step <= 3; ++subject.step) ASSERT_TRUE(Save(subject, head, "").ok());
  g_lock_error = ENOSYS;
  const absl::Status status = Save(subject, head, "").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("has no locks"), HasSubstr("another server")));
  EXPECT_FALSE(PruneCheckpoints(root_, "lm/step-0000000003", 1).ok());
  EXPECT_EQ(RemoveCheckpoint(root_, "lm/step-0000000003").status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(FilesIn(root_ + "/lm").size(), 3u);
  Head loaded("lm", std::make_unique<MemoryKernels>(subject.config));
  int calls = 0;
  EXPECT_TRUE(Load("lm/step-0000000003", loaded, &calls).ok()) << "reading removes nothing";
}

}  // namespace
}  // namespace lossd::head::no_locks_test
