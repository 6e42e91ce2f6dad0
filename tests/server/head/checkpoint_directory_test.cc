// SPDX-License-Identifier: Apache-2.0
// A checkpoint among others in a directory: files that lead out of it, names that are taken, a limit.
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "server/head/checkpoint_store.h"
#include "server/head/disk_limit.h"
#include "tests/server/head/checkpoint_fixture.h"

namespace lossd::head::checkpoint_directory_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::MatchesRegex;

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

}  // namespace
}  // namespace lossd::head::checkpoint_directory_test
