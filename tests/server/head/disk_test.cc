// SPDX-License-Identifier: Apache-2.0
// Tests of disk.h: the removal of folders, the lock of a folder, names and paths, and a file
// system without locks.
#include "server/head/disk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "server/head/checkpoint_store.h"
#include "tests/server/head/checkpoint_fixture.h"
#include "tests/support/temp_folder.h"

namespace {
int g_lock_error = 0;  // what flock ends with; 0: it works
}  // namespace

// In place of the C library's, also for the other tests of this program.
extern "C" int flock(int file, int operation) noexcept {
  if (g_lock_error == 0) return static_cast<int>(syscall(SYS_flock, file, operation));
  errno = g_lock_error;
  return -1;
}

namespace lossd::head::disk_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// ---- Disk ----

TEST(DiskTest, SaysWhetherAFolderWasRemoved) {
  const test::TempFolder folder;
  Disk disk;
  const std::string path = folder.File("x");
  EXPECT_TRUE(disk.CreateFolder(path).ok());
  EXPECT_FALSE(disk.CreateFolder(path).ok());
  EXPECT_TRUE(disk.RemoveFolder(path).ok());
  EXPECT_EQ(disk.RemoveFolder(path).code(), absl::StatusCode::kNotFound);
}

// ---- Folder lock ----

using Kind = FolderLock::Kind;

TEST(FolderLockTest, ReadersShareWritersDoNot) {
  const test::TempFolder folder;
  {
    const auto reader = FolderLock::Try(folder.path(), Kind::kShared);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_TRUE(FolderLock::Try(folder.path(), Kind::kShared).ok());
    EXPECT_EQ(FolderLock::Try(folder.path(), Kind::kExclusive).status().code(),
              absl::StatusCode::kFailedPrecondition);
  }
  const auto writer = FolderLock::Try(folder.path(), Kind::kExclusive);
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_EQ(FolderLock::Try(folder.path(), Kind::kShared).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(FolderLockTest, NoFolder) {
  const test::TempFolder folder;
  EXPECT_EQ(FolderLock::Try(folder.File("none"), Kind::kShared).status().code(), absl::StatusCode::kNotFound);
  test::WriteWholeFile(folder.File("file"), "");
  EXPECT_FALSE(FolderLock::Try(folder.File("file"), Kind::kShared).ok());
  std::filesystem::create_directory_symlink(folder.path(), folder.File("link"));
  EXPECT_FALSE(FolderLock::Try(folder.File("link"), Kind::kShared).ok());
}

// Whoever waited for a folder that was taken away meanwhile is told so.
TEST(FolderLockTest, RenamedWhileWaiting) {
  const test::TempFolder folder;
  std::filesystem::create_directory(folder.File("a"));
  auto writer = FolderLock::Try(folder.File("a"), Kind::kExclusive);
  ASSERT_TRUE(writer.ok());
  absl::Status status;
  std::thread waiter([&] { status = FolderLock::Wait(folder.File("a"), Kind::kShared).status(); });
  absl::SleepFor(absl::Milliseconds(50));
  std::filesystem::rename(folder.File("a"), folder.File("b"));
  { const FolderLock released = *std::move(writer); }
  waiter.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_TRUE(FolderLock::Wait(folder.File("b"), Kind::kShared).ok());
}

// ---- Names and paths ----

TEST(ValidateNameTest, TakesTheAllowedOnly) {
  for (const std::string& good : {std::string("a"), std::string("Llama-3.1_8B"), std::string(64, 'x'),
                                  std::string("-"), std::string("a..b")}) {
    EXPECT_TRUE(ValidateName("name", good).ok()) << good;
  }
  for (const std::string& bad :
       {std::string(), std::string("."), std::string(".."), std::string(".a"), std::string(65, 'x'),
        std::string("a/b"), std::string("a b"), std::string("a\0b", 3), std::string("\xc3\xa9"),
        std::string("a\n"), std::string("/")}) {
    const absl::Status status = ValidateName("spec.name", bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("spec.name"));
  }
}

class ResolveBelowTest : public testing::Test {
 protected:
  ResolveBelowTest() {
    fs::create_directories(root_ + "/models/a");
    fs::create_directories(folder_.File("root-sibling"));
    test::WriteWholeFile(root_ + "/models/a/w", "x");
    test::WriteWholeFile(folder_.File("root-sibling/secret"), "x");
    fs::create_symlink("models/a/w", root_ + "/inside");
    fs::create_symlink("../root-sibling/secret", root_ + "/outside");
    fs::create_symlink("../../root-sibling", root_ + "/models/escape");
    fs::create_symlink("/etc", root_ + "/etc");
    fs::create_symlink("loop", root_ + "/loop");
  }

  absl::StatusCode Code(absl::string_view path) {
    const absl::StatusOr<std::string> resolved = ResolveBelow(root_, path);
    EXPECT_THAT(std::string(resolved.status().message()), Not(HasSubstr(folder_.path())));
    return resolved.status().code();
  }

  test::TempFolder folder_;
  const std::string root_ = folder_.File("root");
};

TEST_F(ResolveBelowTest, FollowsWhatStaysInside) {
  const std::string file = fs::canonical(root_ + "/models/a/w");
  for (const char* path : {"models/a/w", "./models//a/./w", "inside"}) {
    const absl::StatusOr<std::string> resolved = ResolveBelow(root_, path);
    ASSERT_TRUE(resolved.ok()) << resolved.status();
    EXPECT_EQ(*resolved, file);
  }
  EXPECT_EQ(ResolveBelow(root_ + "/", "inside").value(), file);
}

TEST_F(ResolveBelowTest, RefusesWhatLeadsOutside) {
  const std::string absolute = root_ + "/models/a/w";
  for (const std::string& path :
       {std::string(""), absolute, std::string("/etc/passwd"), std::string(".."),
        std::string("../root-sibling/secret"), std::string("models/../models/a/w"),
        std::string("models/a/.."), std::string("outside"), std::string("models/escape"),
        std::string("etc/passwd"), std::string("models/a/w\0.x", 14), std::string(".")}) {
    EXPECT_EQ(ResolveBelow(root_, path).status().code(), absl::StatusCode::kInvalidArgument) << path;
  }
  EXPECT_EQ(Code("models/escape/secret"), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Code("none"), absl::StatusCode::kNotFound);
  EXPECT_EQ(Code("loop"), absl::StatusCode::kInvalidArgument);
}

// The error says which link it is, where it leads in general, and what to do.
TEST_F(ResolveBelowTest, SaysWhichLinkLeadsAstray) {
  fs::create_symlink("nothing", root_ + "/models/dangling");
  fs::create_symlink("models/escape", root_ + "/indirect");
  fs::create_directory_symlink("models", root_ + "/m");
  fs::create_symlink("pong", root_ + "/ping");
  fs::create_symlink("ping", root_ + "/pong");
  const auto message = [this](absl::string_view path) {
    const absl::Status status = ResolveBelow(root_, path).status();
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr(folder_.path())));
    return absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
  };
  EXPECT_THAT(message("outside"),
              HasSubstr("INVALID_ARGUMENT: path 'outside' leads outside the server's directory: "
                        "it is a symbolic link; copy what it leads to into the directory"));
  EXPECT_THAT(message("outside"), HasSubstr("--checkpoint_dir"));
  EXPECT_THAT(message("models/escape/secret"),
              HasSubstr("outside the server's directory: 'models/escape' is a symbolic"));
  EXPECT_THAT(message("m/escape/secret"),
              HasSubstr("outside the server's directory: 'm/escape' is a symbolic link"));
  EXPECT_THAT(message("indirect/secret"),
              HasSubstr("outside the server's directory: 'indirect' is a symbolic link"));
  EXPECT_THAT(message("models/dangling"),
              HasSubstr("NOT_FOUND: path 'models/dangling' leads nowhere: it is a symbolic "
                        "link to something that is not there"));
  EXPECT_THAT(message("m/dangling/x"),
              HasSubstr("'m/dangling' is a symbolic link to something that is not there"));
  EXPECT_THAT(message("loop"),
              HasSubstr("INVALID_ARGUMENT: path 'loop' leads nowhere: it is a symbolic link in a loop"));
  EXPECT_THAT(message("ping/x"), HasSubstr("'ping' is a symbolic link in a loop of links"));
  EXPECT_THAT(message("models/none"), HasSubstr("NOT_FOUND: models/none: resolve: "));
  EXPECT_EQ(ResolveBelow(root_, "m/a/w").value(), fs::canonical(root_ + "/models/a/w"));
}

// What OpenBelow reads, or the code of its error.
class OpenBelowTest : public ResolveBelowTest {
 protected:
  std::string Content(absl::string_view path) {
    const auto file = OpenBelow(root_, path);
    if (!file.ok()) return absl::StatusCodeToString(file.status().code());
    std::string text(static_cast<size_t>((*file)->size()), '?');
    EXPECT_TRUE(
        (*file)->ReadAt(0, absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size())).ok());
    return text;
  }
};

TEST_F(OpenBelowTest, ReadsWhatIsInside) {
  for (const char* path : {"models/a/w", "./models//a/./w", "inside"}) EXPECT_EQ(Content(path), "x") << path;
}

TEST_F(OpenBelowTest, RefusesWhatLeadsOutside) {
  for (const char* path : {"outside", "models/escape/secret", "../root-sibling/secret", "/etc/passwd",
                           "etc/passwd", "models/../models/a/w", ""}) {
    EXPECT_EQ(Content(path), "INVALID_ARGUMENT") << path;
  }
}

TEST_F(OpenBelowTest, RefusesWhatIsNoRegularFile) {
  ASSERT_EQ(mkfifo((root_ + "/pipe").c_str(), 0600), 0);
  const int server = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{.sun_family = AF_UNIX};
  fs::current_path(root_);  // the path of a socket is short
  std::strcpy(address.sun_path, "socket");
  ASSERT_EQ(bind(server, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  for (const char* path : {"pipe", "socket", "models"})
    EXPECT_EQ(Content(path), "FAILED_PRECONDITION") << path;
  close(server);
  EXPECT_EQ(OpenBelow("/dev", "null").status().code(), absl::StatusCode::kFailedPrecondition);
}

// While a folder of the path is replaced by a link to the outside and back, what is read is never the secret.
TEST_F(OpenBelowTest, LinksMadeMeanwhile) {
  test::WriteWholeFile(folder_.File("root-sibling/w"), "secret");
  std::atomic<bool> stop{false};
  std::thread swapper([&] {
    while (!stop) {
      fs::rename(root_ + "/models/a", root_ + "/models/b");
      fs::create_directory_symlink("../../root-sibling", root_ + "/models/a");
      fs::remove(root_ + "/models/a");
      fs::rename(root_ + "/models/b", root_ + "/models/a");
    }
  });
  for (int i = 0; i < 20'000; ++i) ASSERT_NE(Content("models/a/w"), "secret");
  stop = true;
  swapper.join();
}

// ---- A file system without locks ----
// On a file system without locks (flock), no server removes what another one saves: leftovers stay, and
// nothing is saved that could not be protected.

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
}  // namespace lossd::head::disk_test
